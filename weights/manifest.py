"""What a converted checkpoint is when it is whole: names, sizes, times and checksums in a file beside the
others.

Owner, names, sizes, times and the contents of small files are looked at before each use. The weights are
hashed in full only when their time is another one, as in a copy; what a backend reads of them is summed
meanwhile by a thread.
"""

import hashlib
import json
import mmap
import tempfile
import threading
from pathlib import Path

import numpy as np
from minidflash.kernels.diskcache import not_private

from minidflash.errors import UserError

MANIFEST = "minidflash.json"
SMALL = 16 << 20  # bytes: hashed before each use; SmolLM2's tokenizer has 1.8 MB, 2 ms
PIECE = 1 << 17  # words of 8 bytes that give one sum


def describe(folder, weights):
    """Write the manifest of a folder just made, and take its files from everybody else.
    weights: names to be summed."""
    for path in folder.iterdir():
        path.chmod(0o644)
    files = {path.name: _entry(path) for path in sorted(folder.iterdir())}
    sums = {}
    for name in weights:
        with (folder / name).open("rb") as file:
            sums[name] = content_sum(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    _write(folder, {"files": files, "sums": sums})


def _entry(path):
    found = path.stat()
    return {"bytes": found.st_size, "time": found.st_mtime_ns, "sha256": sha256(path)}


def _write(folder, manifest):
    """In one step, beside the folder: a file that is left over there makes nothing look damaged."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as work:
        made = Path(work) / MANIFEST
        made.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        made.chmod(0o644)
        made.replace(folder / MANIFEST)


def sha256(path):
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_sum(data):
    """Hexadecimal checksum of a buffer at the speed of memory: sha256 over sums of its pieces as whole
    numbers.

    data: mapped or in memory, any length. Any change within one word,
    a lost page or a moved piece changes it.
    """
    words = np.frombuffer(data, "<u8", len(data) // 8)
    whole = len(words) // PIECE * PIECE
    # One call for all pieces: a thread that does it holds no lock of the interpreter.
    sums = np.append(words[:whole].reshape(-1, PIECE).sum(1), words[whole:].sum())
    return hashlib.sha256(sums.tobytes() + data[8 * len(words) :]).hexdigest()


def damage(folder):
    """What is wrong with a described folder, in words, or None: it is as it was written.

    Errors: UserError, code 3, where somebody else could have changed it.
    """
    try:
        _check_private(folder, folder)  # first: it may not even be readable
        for path in folder.iterdir():
            _check_private(path, folder)
        return _difference(folder)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _check_private(path, folder):
    if found := not_private(path, folder):
        raise UserError(f"the default target is not taken from there: {found[0]}", found[1], code=3)


def _difference(folder):
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        known = {name: (e["bytes"], e["time"], e["sha256"]) for name, e in manifest["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} is not readable"
    found = {path.name for path in folder.iterdir()} - {MANIFEST}
    if found != known.keys():
        name = min(found ^ known.keys())
        return f"{name} " + ("is missing" if name in known else "does not belong there")
    is_copy = False
    for name, (size, time, digest) in known.items():
        now = (folder / name).stat()
        if now.st_size != size:
            return f"{name} has {now.st_size} bytes, {size} were written"
        is_other = now.st_mtime_ns != time
        if (is_other or size <= SMALL) and sha256(folder / name) != digest:
            return f"{name} has other contents than were written"
        manifest["files"][name]["time"] = now.st_mtime_ns
        is_copy |= is_other
    if is_copy:
        try:
            _write(folder, manifest)
        except OSError:  # read-only: hashed again next time
            pass
    return None


def start_check(checkpoint):
    """Begin to sum the weights of an opened checkpoint that has a manifest, while others read them too.

    Returns a function that waits for the sum. Its errors: UserError where the file is not what was written.
    """
    path = checkpoint.files[0][0]
    wanted = json.loads((checkpoint.folder / MANIFEST).read_bytes()).get("sums", {}).get(path.name)
    mapped = next(iter(checkpoint.tensors.values())).map
    found = []
    thread = threading.Thread(target=lambda: found.append(content_sum(mapped)), daemon=True)
    thread.start()

    def check():
        thread.join()
        if hasattr(mapped, "madvise"):  # the pages that the thread touched last
            mapped.madvise(mmap.MADV_DONTNEED)
        if found != [wanted]:
            hint = f"delete {checkpoint.folder}: it is made anew by the next run"
            raise UserError(f"{path} is damaged: its contents are not what was written", hint)

    return check
