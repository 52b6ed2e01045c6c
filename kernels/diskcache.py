"""The user's cache folder for things built from source: cubins, emulated kernels, Numba's code."""

import hashlib
import os
import tempfile
from pathlib import Path


def folder(kind):
    """The folder for one kind of built thing, made if need be, or None where nothing can be written.

    kind: a short name: "cubin", "emulate", "numba/KEY". Returns a Path or None: then the caller works uncached.
    Errors: none. MINIDFLASH_CACHE moves it, then XDG_CACHE_HOME; a machine without a home has no cache.
    """
    try:
        root = os.environ.get("MINIDFLASH_CACHE")
        if not root:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            root = Path(base) / "minidflash"
        path = Path(root) / kind
        path.mkdir(parents=True, exist_ok=True)
        return path if os.access(path, os.W_OK | os.X_OK) else None
    except (OSError, RuntimeError):  # RuntimeError: pathlib finds no home folder
        return None


def digest(*parts):
    """A file name for what these strings and bytes determine; their borders count."""
    state = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:40]


def store(path, data):
    """Write bytes under their final name in one step, so that no other process reads half of them.

    Returns True, or False where the disk refuses: a cache is never a reason to fail.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError:
        return False
    return True
