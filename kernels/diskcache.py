"""The user's cache folder: where it lies, whom it may belong to, and sealed files of what is built from
source.

A cache is only a cache: what cannot be read, is damaged or may come from somebody else is built again, and
what cannot be written is not kept. Compiled code runs as the user,
so nothing is taken from where others can write.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
from pathlib import Path

_SEAL = hashlib.sha256().digest_size
_said = False


def cache_folder():
    """Where everything is kept: MINIDFLASH_CACHE, else minidflash/ in XDG_CACHE_HOME or ~/.cache.

    Returns a Path, which need not exist, or None where no home folder is known:
    never a folder that is shared.
    """
    try:
        if os.environ.get("MINIDFLASH_CACHE"):
            return Path(os.environ["MINIDFLASH_CACHE"]).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "minidflash"
    except RuntimeError:  # pathlib finds no home folder
        return None


def folder(kind):
    """The folder for one kind of built thing, made if need be, or None: then the caller works uncached.

    kind: a short name: "cubin", "emulate", "numba/KEY". Errors: none. A folder from the cache folder down
    that is not the user's alone is not used, which is said once; one that cannot be written is not used
    either.
    """
    place = cache_folder()
    if place is None:
        return None
    path = place / kind
    levels = [place, *(place / part for part in reversed(Path(kind).parents[:-1])), path]
    try:
        for level in levels:
            level.mkdir(0o700, parents=True, exist_ok=True)
            if found := not_private(level):
                say_once(f"{found[0]}, so compiled code is not kept there", found[1])
                return None
        return path if os.access(path, os.W_OK | os.X_OK) else None
    except OSError:
        return None


def not_private(path, whole=None):
    """Why others may have put things into a folder or file, and what to type: two strings;
    None where they cannot.

    whole: the folder that the remedy is for, default path. The user and the superuser may own it, nobody else
    may write it. Errors: OSError. Systems without owners: None.
    """
    if not hasattr(os, "geteuid"):
        return None
    found, own = os.stat(path), "set MINIDFLASH_CACHE to a folder of your own"
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {found.st_uid})", own
    if found.st_mode & 0o022:
        mend = f"chmod -R go-w '{whole or path}' if its contents are yours, or {own}"
        return f"{path} can be written by others", mend
    return None


def say_once(what, remedy):
    """One line on stderr, the first time in a process: a cache that does not work is worth no more."""
    global _said
    if not _said and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            print(f"minidflash: {what}: {remedy}", file=sys.stderr, flush=True)
    _said = True


def digest(*parts):
    """A file name for what these strings and bytes determine; their borders count."""
    state = hashlib.sha256(b"sealed")  # files of older versions, which carry no checksum, have other names
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:40]


def _seal(path, data):
    return hashlib.sha256(path.name.encode() + b"\0" + data).digest()


def load(path):
    """The bytes that `store` put under this name, or None where they are not there whole and unchanged."""
    try:
        if not_private(path):
            return None
        found = path.read_bytes()
    except OSError:
        return None
    data = found[:-_SEAL]
    return data if found[-_SEAL:] == _seal(path, data) else None


def store(path, data):
    """Write bytes and their seal under their final name in one step,
    so that no other process reads half of them.

    The seal comes last: loaders of shared libraries do not look behind the end of one. Returns True, or False
    where the disk refuses, which is said once: a cache is never a reason to fail.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.write(_seal(path, data))
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        say_once(
            f"cannot keep compiled code in {path.parent} ({error.strerror or error}), going on without",
            "free some space there, or set MINIDFLASH_CACHE",
        )
        return False
    return True
