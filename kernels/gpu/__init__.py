"""The backends over .cu kernels: `emulate` on NumPy arrays here, `cuda` on CuPy arrays in cuda.py.
One class over both devices.

A row asks the fast variants first (fast.py) and is launched by plain.py otherwise;
`variants` says which ran last.
"""

import os
from functools import partial

import numpy as np

from ..host import HostBackend, widen
from ..table import ROWS
from ..weight import Weight

# f32 at the start of every workspace: u32 counters, zero when allocated, left at zero by kernels.
COUNTERS = 4096
HAS_WGMMA = "sm_90a", "emulated"  # arches

from . import fast, fp8, plain, prefill, wide  # they read COUNTERS
from .attend_fast import LEAF

FAMILIES = {"wide": wide, "fast": fast}  # asked in this order, before plain


class GpuBackend:
    """Rows of the table as launches on a device of launch.py or emulate.

    activations: "f32" or "bf16". device: CudaDevice or EmulatedDevice. A subclass has `array`, `upload`,
    `download`, `empty`, `load` and `compile`.
    """

    counters = COUNTERS
    dependent = False  # whether a kernel may start while the one before it ends
    key_cut = LEAF  # of attend_fast.cu; the plain kernel takes keys one by one
    prefill_frame = None  # of prefill.cuh; None: the card's
    wide = True  # whether many rows run as wide passes (wide.py); the bits are the same

    def __init__(self, activations, device):
        self.activations, self.device, self.sms = activations, device, device.sms
        self.variants = {}  # row -> "wide", "fast" or "plain", as it ran last
        self.prepared = None  # a list: launches are kept there, their kernels compiled and loaded, not run
        self.bucket = None  # keys behind which no row of the launch sees; None: it may
        self.following = []  # in a program: (row, function, args) of the calls behind the one that runs
        self.laid = self.ready = None  # what a call has laid for the next one (wide.py), which finds it ready
        for row in ROWS:
            setattr(self, row, partial(self._run, row))

    def _run(self, row, *args):
        self.ready, self.laid = self.laid, None
        took = next((name for name, family in FAMILIES.items() if family.take(self, row, args)), "plain")
        if took == "plain":
            getattr(plain, row)(self, *args)
        self.variants[row] = took
        if self.ready is not None:
            raise RuntimeError(f"{row}: rows were laid for it, and it does not read them")

    def launch(self, file, kernel, grid, block, shared, args, defines=None, **how):
        """One launch; arguments as the device's, defines: {macro: value}. While preparing, nothing runs."""
        function = self.device.function(file, kernel, defines)
        launch = partial(self.device.launch, function, grid, block, shared, args, **how)
        if self.prepared is None:
            launch()
        else:
            self.prepared.append(launch)

    def in_order(self, calls):
        """Run a program's calls; each may look at those behind it."""
        try:
            for i, (_, function, args) in enumerate(calls):
                self.following = calls[i + 1 :]
                function(*args)
        finally:
            self.following, self.laid = [], None

    def for_prefill(self):
        """This backend with the variants for many token rows in front."""
        return prefill.Prefill(self)

    def work_size(self, rows, cols, outputs):
        """Workspace elements (f32) for a kernel of `rows` token rows, `cols` inputs, `outputs` outputs."""
        need = plain.work_size(rows, cols, outputs), fast.work_size(self, rows, cols, outputs)
        need += prefill.work_size(rows, cols, outputs), wide.work_size(rows, cols, outputs, self.sms)
        return COUNTERS + max(need)

    def weight(self, parts, role="", experts=0):
        """`Weight` from checkpoint tensors stacked along rows: packed where fast kernels read it, else plain.

        role: of weight.ROLES, or "" for a plain one. experts: how many the rows belong to, expert by expert;
        0: a matrix.
        Errors: UserError when memory runs out.
        """
        kind, is_packed = stored_type(parts), self.activations == "bf16" or parts[0].dtype == "FP8"
        found = fast.pack(self, parts, role, experts) if is_packed and kind is not np.float32 else None
        if found is None:
            found = self._plain(parts, kind, experts)
        for part in parts:
            part.drop()
        return found

    def _plain(self, parts, kind, experts):
        (rows, cols), data = matrix_shape(parts), self.load(parts, kind)
        shape = (experts, rows // experts, cols) if experts else (rows, cols)
        if kind is np.uint8:
            return Weight(shape, "mxfp4", "plain", blocks_and_scales(data, rows, cols))
        return Weight(shape, "bf16" if kind is np.uint16 else "f32", "plain", (data.reshape(shape),))

    def raw(self, parts):
        """(rows, cols) u16 on the device: BF16 tensors stacked, for a kernel that packs them. See fast.py."""
        return self.load(parts, np.uint16)


def stored_type(parts):
    """In which type stacked tensors are kept: u16, as bf16 bits, f32, or u8, MXFP4's and FP8's bytes."""
    kinds = {part.dtype for part in parts}
    known = {("BF16",): np.uint16, ("MXFP4",): np.uint8, ("FP8",): np.uint8}
    return known.get(tuple(kinds), np.float32)


def matrix_shape(parts):
    """(rows, cols) of tensors stacked along rows."""
    return sum(part.shape[0] for part in parts), int(np.prod(parts[0].shape[1:]))


def stored_shape(parts, dtype):
    """Of the array that holds stacked tensors: (rows, cols), or all bytes in a row."""
    rows, cols = matrix_shape(parts)
    if dtype is not np.uint8:
        return rows, cols
    if parts[0].dtype == "FP8":
        return (4 * fp8.scale_count(rows, cols) + rows * cols,)
    return (rows * (cols // 2 + cols // 32),)


def blocks_and_scales(data, rows, cols):
    """The two parts of stored MXFP4 tensors: (rows, cols/32 * 16), (rows, cols/32)."""
    end = rows * cols // 2
    return data[:end].reshape(rows, -1), data[end:].reshape(rows, -1)


def host_arrays(parts, dtype):
    """Contiguous host arrays that lie one behind the other in `stored_shape`:
    of MXFP4 all blocks, then all scales; of FP8 the scales, which want to be aligned, come first."""
    if dtype is not np.uint8:
        return [as_stored(part, dtype) for part in parts]
    numbers, scales = [part.array for part in parts], [part.scales for part in parts]
    arrays = scales + numbers if parts[0].dtype == "FP8" else numbers + scales
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]


def as_stored(part, dtype):
    """A checkpoint tensor as a contiguous (rows, cols) host array of u16 (bf16 bits) or f32;
    a view where it can be."""
    array = widen(part)
    if array.dtype != dtype:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array).reshape(len(array), -1)


class EmulateBackend(GpuBackend, HostBackend):
    """The CUDA kernels on this processor; slow, made to find mistakes.

    seed: shuffles the order of blocks, warps and lanes; default MINIDFLASH_SEED, else ascending order. sms:
    multiprocessors of the emulated card. Errors: UserError, code 3, where there is no g++.
    """

    name = "emulate"

    def __init__(self, activations, seed=None, sms=4):
        from ..emulate import EmulatedDevice

        if seed is None and os.environ.get("MINIDFLASH_SEED"):
            seed = int(os.environ["MINIDFLASH_SEED"])
        GpuBackend.__init__(self, activations, EmulatedDevice(seed, sms))

    def empty(self, shape, dtype):
        """A device array whose contents do not matter yet."""
        return np.empty(shape, dtype)

    def upload(self, buffer, values):
        """Copy host values into a buffer of ours; as on a GPU, behind all that was launched before."""
        self.device.synchronize()
        super().upload(buffer, values)

    def copy(self, source, target):
        """As HostBackend's; a GPU's stream has an order."""
        self.device.synchronize()
        super().copy(source, target)

    def load(self, parts, dtype):
        """Device array of tensors stacked along rows, as `stored_shape` says."""
        return np.concatenate(host_arrays(parts, dtype)).reshape(stored_shape(parts, dtype))
