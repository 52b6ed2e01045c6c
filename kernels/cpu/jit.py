"""`jit`: numba.njit with our disk cache, and without it where no folder can be written (field report: "no locator")."""

import hashlib
import os
from pathlib import Path

# GNU OpenMP's threads spin this often before they sleep. Its default burns whole time slices when other programs
# want the cores. Measured on 2 cores, a plain round: 5.7 ms alone with either, under load 22 ms against 150.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numba
import numpy as np

HERE = Path(__file__).resolve().parent


def _cache_folder():
    """Folder for compiled kernels, keyed by all sources here (Numba looks at one file only); None if unwritable."""
    text = b"".join(p.read_bytes() for p in sorted(HERE.glob("*.py")))
    key = hashlib.sha256(text + numba.__version__.encode() + np.__version__.encode()).hexdigest()[:16]
    root = os.environ.get("MINIDFLASH_CACHE")
    try:
        root = (
            Path(root)
            if root
            else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidflash"
        )
        folder = root / "numba" / key
        folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None


CACHE_FOLDER = _cache_folder()


def jit(function=None, *, parallel=False):
    """Compile for the CPU: no GIL, no fast-math, cached on disk where possible."""
    if function is None:
        return lambda f: jit(f, parallel=parallel)
    kept = numba.config.CACHE_DIR
    if CACHE_FOLDER:
        numba.config.CACHE_DIR = str(CACHE_FOLDER)  # read while decorating; other code's setting is put back
    try:
        return numba.njit(parallel=parallel, cache=CACHE_FOLDER is not None, nogil=True, error_model="numpy")(
            function
        )
    finally:
        numba.config.CACHE_DIR = kept
