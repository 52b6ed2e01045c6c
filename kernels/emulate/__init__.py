"""The .cu kernels on a machine without a GPU: EmulatedDevice has the interface of launch.CudaDevice.

A kernel's source is built unchanged by the host compiler; every CUDA thread is a fiber. Meant to find what is
wrong with a kernel, so it is strict where a GPU is lenient:
  shared memory starts as NaN bits (`garbage`), and becomes NaN bits when its block ends;
  cp.async and bulk copies land only at the wait that makes them visible, their target is NaN bits until then;
  with dependent=True, what the launch before wrote is NaN bits until griddep_wait, and is restored there; so
  is what those before it wrote, where it let its successor start before its own wait; of arrays named `early`
  that is what changed, of others the whole;
  a wgmma happens at the wait that covers it, its sums are NaN bits until then;
  barriers reached from two places, meetings of lanes in different operations, and deadlocks are errors that
  name the kernel, block, thread and what each thread waits for;
  blocks beyond what the device holds at once start when others end: one that is waited for may never start;
  seed=N shuffles the order of blocks, warps and lanes; seed=None takes them in ascending order.
Arithmetic is the host's, without contraction; mma_bf16 is one fma a k, ascending: the same bits on every run.

Misaligned or out-of-bounds accesses of arrays of known size, overflows and wild pointers are errors too. For
accesses just past a buffer there is ASan: it must be loaded before Python's own libraries, so it takes a new
process, `subprocess.run([sys.executable, ...], env=emulate.sanitizer_environment())`, which sets
MINIDFLASH_SANITIZE=1 and LD_PRELOAD; then every kernel is built with ASan and UBSan and every NumPy buffer
has guard zones. A report ends that process.
With MINIDFLASH_RACES=1 kernels are built with hooks at every access, and two accesses of a byte of shared
memory that nothing orders are an error that names both places (races.cpp). It takes a clock a thread: for
small launches. Not emulated: a loop that polls plain memory, ended after EmulatedDevice.patience (use
load_acquire, which lets other threads run); tcgen05; kernels whose signature a macro writes.
"""

import ctypes
import threading

import numpy as np

from ...errors import UserError
from .. import source
from . import build
from .build import sanitizer_environment

__all__ = ["EmulatedDevice", "EmulatedFunction", "EmulationError", "sanitizer_environment"]

_THREADS_PER_SM = 2048
_SHARED_PER_SM = 233472  # H100: 228 KB, of which each block costs 1 KB more than it asks for
_lock = threading.Lock()  # the runtime holds one launch at a time


class EmulationError(RuntimeError):
    """A kernel did what would hang, trap or be undefined on a GPU; the message says which thread, where."""


class _Span(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class _Request(ctypes.Structure):  # scheduler.h has the same
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("resident", ctypes.c_uint64),
        ("seed", ctypes.c_int64),
        ("patience", ctypes.c_double),
        ("poisoned", ctypes.POINTER(_Span)),
        ("poisoned_count", ctypes.c_uint64),
        ("garbage", ctypes.c_int),
        ("has_waited", ctypes.c_int),
        ("has_let_start", ctypes.c_int),
        ("error", ctypes.c_char * 2048),
    ]


def _hidden(array, old, early):
    """[(address, bytes)] of an array that a predecessor wrote: all of it,
    or what changed where `early` names it."""
    at = array.ctypes.data
    if old is None or not any(np.shares_memory(array, other) for other in early):
        return [(at, array.nbytes)]
    size = array.itemsize
    now, before = (a.reshape(-1).view(f"u{size}") for a in (array, old))
    changed = np.flatnonzero(now != before)
    runs = np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1) if len(changed) else []
    return [(at + size * int(run[0]), size * len(run)) for run in runs]


class EmulatedFunction:
    """One kernel of a built .cu: its name, parameters and static shared memory in bytes.

    The whole file's kernels share one layout, so `shared` may be more than this kernel's own.
    """

    def __init__(self, name, parameters, library, path):
        self.name = name
        self.parameters = parameters
        self.path = path
        self.entry = ctypes.cast(getattr(library, f"emulate_call_{name}"), ctypes.c_void_p)
        end, begin = ctypes.c_ulong(), ctypes.c_ulong()
        with _lock:
            library.emulate_shared_layout(ctypes.byref(end), ctypes.byref(begin))
        self.shared = end.value
        self.dynamic_begin = begin.value


class EmulatedDevice:
    """A device whose threads are fibers; arguments are NumPy arrays and scalars.

    seed: None for ascending order, or an int that shuffles blocks, warps and lanes, anew at every launch.
    sms: multiprocessors; with 2048 threads and 228 KB each they bound the blocks that run at once.
    Errors: UserError, code 3, where there is no g++.
    """

    def __init__(self, seed=None, sms=4):
        self.arch = "emulated"
        self.sms = sms
        self.shared_limit = 232448
        self.seed = seed
        # Every byte of shared memory at a block's start: NaN as floats;
        # as integers -1, or large where races are looked for.
        self.garbage = 0x3F if build.finds_races() else 0xFF
        self.patience = 10.0  # seconds of processor time that one thread may run without waiting for another
        self._functions = {}
        self._launches = 0
        # (array, its copy of before) that an earlier launch wrote and no wait has covered yet
        self._written = []
        self._runtime = build.runtime()

    def function(self, file, name, defines=None):
        """A kernel of a .cu, built if need be.

        file: a name in kernels/cuda or a path. name: the kernel. defines: {macro: value}, for -D.
        Errors: UserError for a missing file or kernel; RuntimeError with g++'s words where it does not build.
        """
        defines = {key: str(value) for key, value in (defines or {}).items()}
        key = (str(file), name, tuple(sorted(defines.items())))
        if key not in self._functions:
            path = source.find(file)
            parameters = source.parameters(path.read_text(encoding="utf-8"), name)
            library, built = build.kernels(path, defines)
            self._functions[key] = EmulatedFunction(name, parameters, library, built)
        return self._functions[key]

    def launch(self, function, grid, block, shared, args, cluster=1, dependent=False, early=()):
        """Run a kernel to its end.

        args: arrays for pointers, numbers for scalars. The others: as launch.py.
        Errors: UserError for limits of the device, TypeError for arguments, EmulationError for the kernel.
        """
        if block > 1024:
            raise UserError(f"kernel {function.name}: {block} threads a block, the limit is 1024")
        source.check_shared(function.name, function.shared, shared, self.shared_limit)
        written = []

        def address(parameter, array):
            if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
                raise TypeError(f"{function.name}: {parameter.name} must be a contiguous NumPy array")
            if not parameter.is_const:
                if not array.flags.writeable:
                    raise TypeError(f"{function.name}: {parameter.name} is written, the array is read-only")
                written.append(array)
            return array.ctypes.data

        packed = source.pack(function.name, function.parameters, args, address)
        before = self._written if dependent else []
        hidden = [span for array, old in before for span in _hidden(array, old, early)]
        spans = (_Span * max(len(hidden), 1))(*hidden)
        old = [array.copy() if dependent else None for array in written]
        pointers = (ctypes.c_void_p * max(len(packed), 1))(*(ctypes.addressof(value) for value in packed))
        request = _Request(
            entry=function.entry,
            arguments=pointers,
            name=function.name.encode(),
            grid=source.grid_of(function.name, grid, cluster),
            block=(block, 1, 1),
            cluster=(cluster, 1, 1),
            shared_bytes=(function.dynamic_begin if shared else function.shared) + shared,
            resident=self.holds(function, block, shared),
            seed=-1 if self.seed is None else self.seed + self._launches,
            patience=self.patience,
            poisoned=spans,
            poisoned_count=len(hidden),
            garbage=self.garbage,
        )
        self._launches += 1
        with _lock:
            failed = self._runtime.emulate_launch(ctypes.byref(request))
        # What came before a kernel that never waits, or that lets the next one start before its own wait, is
        # not covered by it: the next must not read that either.
        is_open = not request.has_waited or request.has_let_start
        self._written = (before if is_open else []) + list(zip(written, old, strict=True))
        if failed:
            self._written = []
            raise EmulationError(build.where(request.error.decode(errors="replace"), function.path))

    def holds(self, function, threads, shared, cluster=1):
        """How many blocks of such a launch run at once."""
        room = _SHARED_PER_SM // (function.shared + shared + 1024)
        return (
            max(1, min(32, _THREADS_PER_SM // (-(-threads // 32) * 32), room)) * self.sms // cluster * cluster
        )

    def synchronize(self):
        """All that was launched has ended: a dependent launch need not wait for it."""
        self._written = []
