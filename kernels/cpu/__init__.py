"""The Numba backend: one file a row of the table (the integer rows share control.py), f32 sums.

Kernels of one process run one at a time (`_LOCK`): Numba's default threading layer aborts when two Python
threads enter it at once, and two engines on the same cores would not gain anyway.
"""

import threading
from importlib import import_module

import numba
import numpy as np

from minidflash.errors import UserError

from ..blocks import KINDS
from ..fork import started
from ..fp8 import BLOCK, joined_scales
from ..host import HostBackend, widen
from ..table import ROWS
from ..weight import EXPERT_PAIRS, TILE, Weight
from . import sample
from .arena import Arena
from .attend import CHUNK
from .experts import SCRATCH
from .experts import pack as pack_experts
from .lanes import PACKED
from .packing import pack, pack_blocks, pack_scales
from .program import Program

_LOCK = threading.Lock()
_FILES = {
    "stage": "control", "stage_context": "control", "accept": "control", "propose": "sample",
    "reject": "sample", "widen": "control",
}  # fmt: skip


def function_of(name):
    """The function of kernels/cpu that computes a row."""
    return getattr(import_module(f".{_FILES.get(name, name)}", __package__), name)


def _locked(function, backend):
    """What runs a row. function: gives the compiled kernel and its arguments, or nothing where there is
    nothing to do."""

    def call(*args):
        if found := function(backend, *args):
            kernel, values = found
            with _LOCK:
                kernel(*values)

    return call


def start_threads():
    """Let Numba start its threads. Returns (how many, what of them a fork loses or None).

    Errors: UserError, code 3, where Numba's settings cannot be honoured here or a fork has lost the threads.
    """
    try:
        count = numba.get_num_threads()
    except ValueError as error:
        name, value = "NUMBA_THREADING_LAYER", numba.config.THREADING_LAYER
        raise UserError(
            f"{name} is {value!r}, and Numba cannot start its threads so: {str(error).splitlines()[0]}",
            f"unset {name}, or set it to workqueue or omp",
            code=3,
        ) from None
    if numba.threading_layer() != "omp":
        return count, None
    from numba.np.ufunc import omppool

    if omppool.openmp_vendor != "GNU":
        return count, None
    return count, started("threads of GNU OpenMP")


class NumbaBackend(HostBackend):
    """CPU kernels. threads: cores to use, default what Numba found."""

    name = "numba"
    key_cut = CHUNK

    def __init__(self, activations, threads=None):
        super().__init__(activations)
        count, self.lost_by_fork = start_threads()
        self.threads = threads or count
        self._arena = Arena()
        self.none_f, self.none_i = np.zeros(0, np.float32), np.zeros(0, np.int32)
        self.none_pairs = np.zeros((0, 2), np.float32)
        self.none_f2 = np.zeros((0, 0), np.float32)
        self.none_a = np.zeros((0, 0), self.array(0, "A").dtype)
        self.ones = np.ones(CHUNK, np.float32)
        self._own = {name: _locked(function_of(name), self) for name in ROWS}
        vars(self).update(self._own)

    def compile(self, calls, bucket=None):
        """A program that runs the kernels of checked calls in order, without Python between them."""
        steps = []
        for name, function, args in calls:
            is_own = function is self._own.get(name)  # others are Python's, as a clock's look
            steps.append(function_of(name)(self, *args) if is_own else (function, args))
        return Program(filter(None, steps), _LOCK)

    # An absent argument is an empty array, so that a kernel is compiled for one set of types only.
    def f(self, value):
        return self.none_f if value is None else value

    def f2(self, value):
        return self.none_f2 if value is None else value

    def i(self, value):
        return self.none_i if value is None else value

    def a2(self, value):
        return self.none_a if value is None else value

    def weight(self, parts, role="", experts=0):
        """Packed `Weight` [rows/16][cols][16] from checkpoint tensors stacked along rows, read once.

        experts: how many have as many of the rows each (0: one matrix); then as experts.py has it.
        """
        if all(part.dtype == "FP8" for part in parts):
            return self._fp8_weight(parts, role == EXPERT_PAIRS, experts)
        if experts:
            return self._expert_weight(parts, role == EXPERT_PAIRS, experts)
        cols, kinds = parts[0].shape[1], tuple({part.dtype.lower() for part in parts})
        if kinds[0] in KINDS and len(kinds) == 1:
            return self._block_weight(parts, KINDS[kinds[0]], cols)
        arrays = [widen(p).reshape(p.shape[0], -1) for p in parts]
        rows = sum(len(a) for a in arrays)
        dtype = np.uint16 if all(a.dtype == np.uint16 for a in arrays) else np.float32
        data = self._arena.zeros((-(-rows // TILE), cols, TILE), dtype)
        if any(len(a) % TILE for a in arrays[:-1]) or len({a.dtype for a in arrays}) > 1:
            arrays = [np.concatenate([_as(a, dtype) for a in arrays])]
        first = 0
        with _LOCK:
            for a in arrays:
                pack(a, data[first // TILE : -(-(first + len(a)) // TILE)])
                first += len(a)
        for part in parts:
            part.drop()
        return Weight((rows, cols), "bf16" if dtype == np.uint16 else "f32", "packed", (data,))

    def _block_weight(self, parts, kind, cols):
        """Records (rows/16, blocks), in as many bits as the file has."""
        rows, first = sum(part.shape[0] for part in parts), 0
        data = self._arena.zeros((-(-rows // TILE), cols // kind.values), PACKED[kind.name])
        with _LOCK:
            for part in parts:
                pack_blocks(kind, part.array, first, data)
                first += part.shape[0]
                part.drop()
        return Weight((rows, cols), kind.name, "packed", (data,))

    def _fp8_weight(self, parts, is_paired, experts):
        """Records (rows/16, blocks), or of each expert, in as many bits as BITS says."""
        rows, cols = sum(part.shape[0] for part in parts) // max(1, experts), parts[0].shape[1]
        tiles = 2 * -(-(rows // 2) // TILE) if is_paired else -(-rows // TILE)
        data, row = self._arena.zeros((max(1, experts), tiles, -(-cols // BLOCK)), PACKED["fp8"]), 0
        scales = joined_scales(parts)
        pack_scales(scales.reshape(len(data), -1, scales.shape[1]), is_paired, data["halves"])
        with _LOCK:
            for part in parts:
                pack_experts(part.array, row, rows, is_paired, data["codes"])
                row += part.shape[0]
                part.drop()
        if not experts:
            return Weight((rows, cols), "fp8", "packed", (data[0],))
        return Weight((experts, rows, cols), "fp8", "packed pairs" if is_paired else "packed", (data,))

    def _expert_weight(self, parts, is_paired, experts):
        """As experts.py has it, one part after the other: some are computed when they are asked for."""
        rows, cols = sum(part.shape[0] for part in parts) // experts, parts[0].shape[1]
        tiles = 2 * -(-(rows // 2) // TILE) if is_paired else -(-rows // TILE)
        kind = {("MXFP4",): "mxfp4", ("BF16",): "bf16"}.get(tuple({part.dtype for part in parts}), "f32")
        if kind == "mxfp4":
            data = self._arena.zeros((experts, tiles, cols // 32), PACKED[kind])
            places = data["words"], data["scales"][..., None, :]
        else:
            data = self._arena.zeros(
                (experts, tiles, cols, TILE), {"bf16": np.uint16, "f32": np.float32}[kind]
            )
            places = (data[..., None, :],)
        at = 0
        with _LOCK:
            for part in parts:
                arrays = (_words(part.array), part.scales) if kind == "mxfp4" else (widen(part),)
                for array, out in zip(arrays, places, strict=True):
                    pack_experts(_as(array, out.dtype), at, rows, is_paired, out)
                at += part.shape[0]
        for part in parts:
            part.drop()
        return Weight((experts, rows, cols), kind, "packed pairs" if is_paired else "packed", (data,))

    def work_size(self, rows, cols, outputs):
        """Workspace elements (f32) for a kernel of `rows` token rows, `cols` inputs, `outputs` outputs."""
        whole = -(-rows // 16) * 16
        share = max(CHUNK + 2 * cols, sample.scratch(outputs) + 4 * TILE, SCRATCH)
        return whole * (cols + outputs + 4 * TILE) + self.threads * share


def _words(blocks):
    """MXFP4 blocks u8 (rows, cols/32, 16) as u32 (rows, cols/8), 8 features each."""
    return np.ascontiguousarray(blocks).reshape(len(blocks), -1).view(np.uint32)


def _as(array, dtype):
    if array.dtype == dtype:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)
