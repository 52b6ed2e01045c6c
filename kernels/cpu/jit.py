"""`jit`: numba.njit with a disk cache of ours, and without it where no folder can be trusted or written."""

import os
import pickle
import sys
from pathlib import Path

# GNU OpenMP's threads spin this often before they sleep. Its default burns whole time slices when other
# programs want the cores. Measured on 2 cores, a plain round: 5.7 ms alone with either,
# under load 22 ms against 150.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from .. import diskcache

HERE = Path(__file__).resolve().parent
TARGET = cpu_target.target_context.codegen().magic_tuple()  # triple, processor, features


def _cache_folder():
    """Folder for compiled kernels, keyed by all sources here and who compiles them; None if unusable."""
    sources = [p.read_bytes() for p in sorted(HERE.glob("*.py"))]
    versions = numba.__version__, np.__version__, sys.implementation.cache_tag
    return diskcache.folder(f"numba/{diskcache.digest(*versions, *sources)[:16]}")


CACHE_FOLDER = _cache_folder()


class KernelCache(NullCache):
    """What a dispatcher of Numba asks for compiled code: one sealed file a kernel and signature.

    In place of Numba's own cache, which ends the run at a file that it cannot read or write (F96, F97).
    """

    def __init__(self, function):
        module, line = function.__module__.rpartition(".")[2], function.__code__.co_firstlineno
        self._name = f"{module}.{function.__qualname__}-{line}"

    def _path(self, signature, codegen):
        return CACHE_FOLDER / f"{self._name}-{diskcache.digest(signature, codegen.magic_tuple())}.nbc"

    def load_overload(self, signature, target):
        """The compiled kernel, or None: then it is compiled, and kept anew."""
        from .dot import provide_for

        try:
            provide_for(signature)
            target.refresh()  # Numba's own registrations, which rebuilding needs
            data = diskcache.load(self._path(signature, target.codegen()))
            return data and CompileResult._rebuild(target, *pickle.loads(data))
        except Exception:  # noqa: BLE001 whatever it is, a compiler is at hand
            return None

    def save_overload(self, signature, compiled):
        """Keep a compiled kernel, if it holds no addresses of this process and the disk takes it."""
        if not compiled.library.has_dynamic_globals:
            diskcache.store(self._path(signature, compiled.codegen), dumps(compiled._reduce()))


def jit(function=None, *, parallel=False):
    """Compile for the CPU: no GIL, no fast-math, cached on disk where possible.

    A number of prange, and a 0, go to what is called as np.int64: for uint64 and for a literal it would be
    compiled again. Expressions and assignments of arrays are loops: what Numba says where shapes differ takes
    seconds to compile. Nobody asks for a function that C could call: that is a tenth of the time.
    """
    if function is None:
        return lambda f: jit(f, parallel=parallel)
    options = {"parallel": parallel, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    compiled = numba.njit(**options)(function)
    if CACHE_FOLDER:
        compiled._cache = KernelCache(function)
    return compiled
