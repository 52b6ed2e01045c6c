"""What the backends on host memory share: NumPy arrays, and replay as a list of calls.
Also the oracle backend."""

import itertools
import time

import numpy as np

from . import fp8, oracle
from .blocks import KINDS, widened
from .ops import storage
from .table import ROWS
from .weight import BITS, Weight


class HostBackend:
    """Arrays in host memory. activations: "f32" or "bf16".
    key_cut: attention takes keys in pieces of so many."""

    key_cut = 1

    def __init__(self, activations):
        self.activations = activations

    def array(self, shape, kind):
        """A zeroed buffer. kind: "A", "f32" or "i32".

        The system gives memory when it is written first. Scratch, which is f32, is taken at once: a process
        must not grow when a wider round runs for the first time, hours later. Caches grow with texts.
        """
        found = aligned_zeros(
            shape, storage(self.activations) if kind == "A" else {"f32": "f4", "i32": "i4"}[kind]
        )
        if kind == "f32":
            found.fill(0)
        return found

    def upload(self, buffer, values):
        """Copy host values into a buffer of ours."""
        buffer[...] = values

    def copy(self, source, target):
        """Copy rows between buffers of ours, behind all that was launched before. Equal shapes and types; of
        either one may be a part, as long as what lies in one of its rows is contiguous."""
        target[...] = source

    def download(self, buffer):
        """Host copy of a buffer."""
        return buffer.copy()

    lost_by_fork = None  # what a forked process would need of its parent's, see fork.py
    rounds_ahead = 0  # a program has run when `start` returns
    buckets = ()  # contexts with programs of their own

    def start(self, program, *buffers):
        """Run a program; returns a function that gives (its seconds, host copies of the buffers...)."""
        since = time.perf_counter()
        program.launch()
        seconds = time.perf_counter() - since
        copies = [self.download(buffer) for buffer in buffers]
        return lambda: (seconds, *copies)

    def clock(self):
        """What a timed program looks at, see Ops.program."""
        return HostClock()

    def compile(self, calls, bucket=None):
        """A program that replays checked calls in order."""
        return Replay(self.in_order, calls)

    def in_order(self, calls):
        """Run a program's calls."""
        for _, function, args in calls:
            function(*args)


def aligned_zeros(shape, dtype):
    """Zeros that start on a cache line: a vector of 16 floats then never straddles two."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    room = np.zeros(count * dtype.itemsize + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + count * dtype.itemsize].view(dtype).reshape(shape)


def between(stages, seconds):
    """{stage: seconds} of marks in order. seconds: from one to the next."""
    return {stage: max(0.0, length) for stage, length in zip(stages, seconds, strict=False)}


class HostClock:
    """When stages of a program began, by perf_counter."""

    def __init__(self):
        self._begun = {}

    def look(self, stage):
        self._begun[stage] = time.perf_counter()

    def read(self):
        """{stage: seconds} of the last launch, in its order."""
        begun = list(self._begun.values())
        return between(self._begun, (after - at for at, after in itertools.pairwise(begun)))


class Replay:
    """The host's graph: a list of calls and what runs them."""

    def __init__(self, run, calls):
        self.run, self.calls = run, calls

    def launch(self):
        self.run(self.calls)


class OracleBackend(HostBackend):
    """float64 row by row; slow, the truth for tests. Weights are kept as float64."""

    name = "oracle"

    def work_size(self, rows, cols, outputs):
        """The oracle needs no workspace."""
        return 1

    def weight(self, parts, role="", experts=0):
        """Plain `Weight` from checkpoint tensors stacked along rows, of so many experts (0: a matrix),
        expert by expert."""
        data = np.concatenate([oracle.real(widen(p)).reshape(p.shape[0], -1) for p in parts])
        kind = parts[0].dtype.lower()
        kind = kind if kind in BITS else "f32"
        for part in parts:
            part.drop()
        data = data.reshape(experts, -1, data.shape[1]) if experts else data
        return Weight(data.shape, kind, "plain", (data,))

    def __getattr__(self, name):
        if name not in ROWS:
            raise AttributeError(name)
        row, function = ROWS[name], getattr(oracle, name)
        if row.fills_outputs:
            return function

        def call(*args):
            n = len(row.inputs)
            result = function(*args[:n])
            if row.outputs:
                oracle.store(result, args[n])

        return call


def widen(tensor):
    """The array of a checkpoint tensor in a type the kernels know: bf16 bits or f32 (F16 and MXFP4 widen
    exactly, FP8 and the kinds of blocks.py to what they stand for)."""
    if tensor.dtype == "FP8":
        return fp8.widened(tensor.array, tensor.scales)
    if tensor.dtype == "MXFP4":
        return oracle.mxfp4(tensor.array, tensor.scales)
    if tensor.dtype.lower() in KINDS:
        return widened(KINDS[tensor.dtype.lower()], tensor.array)
    if tensor.dtype == "F16":
        return tensor.array.astype(np.float32)
    return tensor.array
