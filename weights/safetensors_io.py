"""Our own safetensors reader: header, mmap, shards; bf16 stays bits, and no byte is copied.

A file is 8 bytes of header length, a JSON header (name -> dtype, shape, data_offsets after the header), raw
little-endian data. Every byte of the data must belong to exactly one tensor, else the file is refused.
"""

import json
import math
import mmap
import os
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short  # of values from the file, which may be as long as they like

import numpy as np

from minidflash.encoding import decoded
from minidflash.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER = 100_000_000  # bytes, the format's own bound; no JSON file of a checkpoint comes near it either
MAX_MARKS = 2_000_000  # commas and colons, of 220,000 tensors; Kimi K2, of 384 experts a layer, has 140,000
DTYPES = {
    "BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8", "BOOL": "?", "U8": "u1", "I8": "i1",
    "U16": "<u2",
    "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8", "F8_E4M3": "u1", "F8_E5M2": "u1",
}  # fmt: skip
AGAIN = "the download may be incomplete: fetch the checkpoint again"


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file. dtype: the file's own word (BF16, F32 ...). start: its first byte in the file.

    map, file: the file mapped, and its descriptor, which closes with the map.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    map: mmap.mmap = field(repr=False)
    file: int = field(repr=False)

    @property
    def nbytes(self):
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def array(self):
        """Read-only view on the mapped file, `shape`; BF16 and F8 as bits.
        A copy only if the file misaligns it."""
        kind = np.dtype(DTYPES[self.dtype])
        flat = np.frombuffer(self.map, kind, math.prod(self.shape), self.start)
        return (flat if self.start % kind.itemsize == 0 else flat.copy()).reshape(self.shape)

    def read_into(self, buffer, first):
        """Fill buffer with the bytes from byte `first` of the tensor on, without the map; any thread may.

        A page that is mapped costs a fault, and one that the file has lost since ends the process.
        Errors: UserError.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.file, [buffer[done:]], self.start + first + done)
            except OSError as error:
                raise UserError(f"cannot read {self.path}: {error.strerror or error}") from None
            if count == 0:
                raise UserError(
                    f"{self.path} was cut off while it was read, in tensor {self.name}", hint=AGAIN
                )
            done += count

    def drop(self):
        """Tell the system that these pages are not needed for now, so that a load does not hold the file
        twice."""
        first = self.start - self.start % mmap.PAGESIZE
        if self.nbytes and hasattr(self.map, "madvise"):
            self.map.madvise(mmap.MADV_DONTNEED, first, self.start + self.nbytes - first)


class Tensors(Mapping):
    """Checkpoint name -> Tensor, over one file or all shards of an index."""

    def __init__(self, tensors):
        self._tensors = tensors

    def __getitem__(self, name):
        return self._tensors[name]

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self):
        return len(self._tensors)


def regular_size(path):
    """Bytes of a regular file. Errors: OSError; UserError for a pipe or a device, which may never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is no regular file")
    return status.st_size


def read_bytes(path, most=MAX_HEADER):
    """All bytes of a regular file that is never large. Errors: UserError naming it."""
    try:
        size = regular_size(path)
        if size > most:
            raise UserError(f"{path} has {size} bytes, at most {most} are read")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def read_json(path, what=None):
    """The JSON object in a file. Errors: UserError naming it: unreadable, not JSON, no object,
    a key twice."""
    what = f"{what or path.name} ({path})"
    return parse_object(decoded(read_bytes(path), what), what)


def parse_object(text, what):
    """The object in JSON text, str or bytes, in time and memory bounded before they are spent.

    Errors: UserError for anything else, for a key that is there twice, for more values than a checkpoint has.
    """

    def unique(pairs):
        found = dict(pairs)
        if len(found) != len(pairs):
            seen = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise UserError(f"{what}: key {twice!r} is there twice")
        return found

    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        marks = text.count(",") + text.count(":")
        if marks > MAX_MARKS:
            raise UserError(f"{what} holds {marks} names and values, at most {MAX_MARKS} are read")
        found = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} is not valid JSON: {str(error)[:100]}", hint=AGAIN) from None
    if not isinstance(found, dict):
        raise UserError(f"{what} holds a {type(found).__name__}, need an object")
    return found


def read_file(path):
    """All tensors of one safetensors file, name -> Tensor.

    Errors: UserError naming file and tensor for anything but a complete, gapless file. Source: models.md 0.1.
    """
    path = Path(path)
    try:
        size = regular_size(path)
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":  # a Git LFS pointer begins so
                raise UserError(f"{path} is a Git LFS pointer, not the weights", hint="git lfs pull")
            if size < 8 or length > size - 8:
                raise UserError(
                    f"{path} is cut off: {size} bytes, its header alone needs {8 + length}", hint=AGAIN
                )
            if length > MAX_HEADER:
                raise UserError(f"{path}: header of {length} bytes, at most {MAX_HEADER} are allowed")
            header = parse_object(file.read(length), f"{path}: header")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            descriptor = os.dup(file.fileno())
            weakref.finalize(mapped, os.close, descriptor)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    if not isinstance(header.pop("__metadata__", {}), dict):
        raise UserError(f"{path}: __metadata__ is no object")
    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(path, name, entry)
        spans.append((begin, end, name))
        tensors[name] = Tensor(name, dtype, shape, path, 8 + length + begin, mapped, descriptor)
    end_before, before = 0, "the header"
    for begin, end, name in sorted(spans):
        if begin != end_before:
            what = "overlaps" if begin < end_before else f"leaves {begin - end_before} unused bytes after"
            raise UserError(f"{path}: tensor {name} {what} {before}")
        end_before, before = end, name
    data = size - 8 - length
    if data < end_before:
        raise UserError(f"{path} is cut off: {data} bytes of tensors, need {end_before}", hint=AGAIN)
    if data > end_before:
        raise UserError(f"{path}: {data - end_before} bytes after the last tensor {before} belong to none")
    return tensors


def _entry(path, name, entry):
    """dtype, shape, begin, end of one header entry, checked against each other."""
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise UserError(f"{where}: header entry needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{where}: dtype {short(dtype)} is unknown, need one of {', '.join(DTYPES)}")
    for label, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
            raise UserError(f"{where}: {label} {short(numbers)} is not a list of whole numbers")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(f"{where}: data_offsets {short(offsets)} are not [begin, end]")
    if len(shape) > 32:
        raise UserError(f"{where}: {len(shape)} dimensions")
    if math.prod(n or 1 for n in shape) >= 2**62:
        raise UserError(f"{where}: shape {short(shape)} is larger than any memory")
    need = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if need != offsets[1] - offsets[0]:
        raise UserError(
            f"{where}: {dtype} {short(shape)} needs {need} bytes, data_offsets give {offsets[1] - offsets[0]}"
        )
    return dtype, tuple(shape), *offsets


def weight_names(folder):
    """Names of the weight files that a folder is meant to hold: what its index names, else the single one."""
    folder = Path(folder)
    place = read_json(folder / INDEX).get("weight_map") if (folder / INDEX).is_file() else None
    return sorted(set(map(str, place.values()))) if isinstance(place, dict) and place else [SINGLE]


def open_tensors(folder):
    """Tensors of a checkpoint folder, and its weight files as [(path, bytes)].

    The index decides which files are read (F47); without one it is model.safetensors alone.
    Errors: UserError naming files that are missing, torn or at odds with the index (F45, F46).
    """
    folder = Path(folder)
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            others = sorted(
                p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf", ".pt")
            )
            found = f"it has {', '.join(others[:3])}" if others else "it has no weight files"
            hint = f"{found}; an interrupted download leaves such a folder"
            raise UserError(f"no weights found in {folder}: need {SINGLE} or {INDEX}", hint=hint)
        tensors = read_file(folder / SINGLE)
        return Tensors(tensors), [(folder / SINGLE, (folder / SINGLE).stat().st_size)]
    place = read_json(folder / INDEX).get("weight_map")
    if not isinstance(place, dict) or not place:
        raise UserError(f"{folder / INDEX}: weight_map is missing or empty")
    for name, shard in place.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise UserError(
                f"{folder / INDEX}: tensor {name} is in {shard!r}, need a file name in this folder"
            )
    shards = sorted(set(place.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        what = f"{len(missing)} of {len(shards)} weight files are missing in {folder}: "
        raise UserError(what + ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else ""), hint=AGAIN)
    tensors = {}
    for shard in shards:
        for name, tensor in read_file(folder / shard).items():
            if place.get(name, shard) != shard or name in tensors:
                other = place.get(name) or tensors[name].path.name
                raise UserError(f"tensor {name} is in {shard} and, says {INDEX}, in {other}")
            tensors[name] = tensor
    absent = [name for name in place if name not in tensors]
    if absent:
        raise UserError(
            f"tensor {absent[0]} is not in {place[absent[0]]}, where {INDEX} puts it ({folder})", hint=AGAIN
        )
    return Tensors(tensors), [(folder / shard, (folder / shard).stat().st_size) for shard in shards]
