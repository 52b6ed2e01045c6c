"""GGUF reader: metadata, and tensors of plain numbers and of the kinds of blocks in kernels/blocks.py.

Layout: magic, version, counts; key-value pairs; tensor infos (dimensions innermost first); aligned data.
"""

import math
import mmap
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short

import numpy as np
from minidflash.kernels.blocks import KINDS, widened
from minidflash.weights.safetensors_io import regular_size

from minidflash.errors import UserError

SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9
MAX_VALUES = 4_000_000  # the largest vocabulary known, Gemma's, takes 1,301,338
MAX_DIMENSIONS = 4  # ggml's own bound
# ggml's number -> its name for a type; what is not a plain type and not one of blocks.py is refused
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
         "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}  # fmt: skip
READ = [*PLAIN, *(name.upper() for name in KINDS)]


@dataclass(frozen=True)
class GgufTensor:
    """One tensor, mapped. shape: (out, in), outermost first. dtype: one of READ.

    interleaved: heads whose rows are in pairs (2j, 2j + 1) for rotation; `array` has them (j, j + K/2).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    map: mmap.mmap = field(repr=False)
    interleaved: int = 0

    @property
    def kind(self):
        """Of blocks.py, or None: plain numbers."""
        return KINDS.get(self.dtype.lower())

    @property
    def array(self):
        """As stored: numbers (bf16 as its bits) of this shape, or blocks (rows, cols / values). Views where
        rows stay where they are."""
        raw = np.frombuffer(self.map, np.uint8, self.nbytes, self.start)
        found = raw.view(self.kind.block).reshape(*self.shape[:-1], -1) if self.kind else raw.view(
            PLAIN[self.dtype]
        ).reshape(self.shape)  # fmt: skip
        return half_split(found, self.interleaved) if self.interleaved else found

    def widened(self):
        """f32 [shape], a copy."""
        found = self.array
        if self.kind:
            return widened(self.kind, found.reshape(-1, found.shape[-1])).reshape(self.shape)
        if self.dtype == "BF16":
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found.astype(np.float32)

    def drop(self):
        """As of a Tensor of safetensors_io.py."""
        first = self.start - self.start % mmap.PAGESIZE
        if self.nbytes and hasattr(self.map, "madvise"):
            self.map.madvise(mmap.MADV_DONTNEED, first, self.start + self.nbytes - first)


def half_split(rows, heads):
    """q or k rows from GGUF's interleaved rotary order, pairs (2j, 2j+1), to half-split, pairs (j, j + K/2).

    rows: (H*K, ...), numbers or blocks. Returns the same shape. Source: golden README, models.md 0.
    """
    parts = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return parts.swapaxes(1, 2).reshape(rows.shape)


class _Cursor:
    """A place in the mapped file; reading past the end is the user's torn file, not an IndexError."""

    def __init__(self, path, mapped):
        self.path, self.map, self.at, self.values = path, mapped, 0, 0

    def promised(self, count, least):
        """A count from the file, checked before a loop or an allocation trusts it.
        least: bytes each one needs."""
        self.values += count
        if count * least > len(self.map) - self.at:
            raise UserError(f"{self.path} is cut off at byte {len(self.map)}", hint="fetch the file again")
        if self.values > MAX_VALUES:
            raise UserError(f"{self.path} holds {self.values} values, at most {MAX_VALUES} are read")
        return count

    def take(self, count):
        if count > len(self.map) - self.at:
            raise UserError(f"{self.path} is cut off at byte {len(self.map)}", hint="fetch the file again")
        self.at += count
        return self.map[self.at - count : self.at]

    def unpack(self, form):
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self):
        return self.take(self.unpack("<Q")).decode("utf-8", errors="surrogateescape")

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.unpack("<I"), self.unpack("<Q")
            if inner in SCALARS:
                size = struct.calcsize(SCALARS[inner])
                return np.frombuffer(self.take(self.promised(count, size) * size), SCALARS[inner]).tolist()
            if inner == STRING:
                return [self.string() for _ in range(self.promised(count, 8))]
            kind = inner
        if kind not in SCALARS:
            raise UserError(f"{self.path}: metadata of type {kind} is not read")
        return self.unpack(SCALARS[kind])


def read_gguf(path):
    """(metadata, name -> GgufTensor) of a GGUF file.

    Errors: UserError for another format or version, a torn file, a tensor type that is not read.
    Source: the GGUF file description of ggml; the `gguf` package is the tests' oracle.
    """
    path = Path(path)
    try:
        regular_size(path)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    cursor = _Cursor(path, mapped)
    if cursor.take(4) != b"GGUF":
        raise UserError(f"{path} is no GGUF file")
    version = cursor.unpack("<I")
    if version not in (2, 3):
        raise UserError(f"{path}: GGUF version {version}, need 2 or 3, little-endian")
    tensor_count, pair_count = cursor.unpack("<Q"), cursor.unpack("<Q")
    metadata = {}
    for _ in range(cursor.promised(pair_count, 13)):  # a key's length, a type, a value
        key = cursor.string()
        if key in metadata:
            raise UserError(f"{path}: key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.unpack("<I"))
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or align < 1 or align & (align - 1):
        raise UserError(f"{path}: general.alignment is {short(align)}, need a power of two")
    infos = [_info(cursor) for _ in range(cursor.promised(tensor_count, 32))]
    data = -(-cursor.at // align) * align
    tensors = {}
    for name, shape, number, offset in infos:
        kind = TYPES.get(number, f"of ggml type {number}")
        if kind not in READ:
            hint = "take a file of Q8_0, Q4_0 or Q4_1, or a bf16 checkpoint"
            raise UserError(f"{path}: tensor {name} is {kind}, need one of {', '.join(READ)}", hint)
        block = KINDS.get(kind.lower())
        values, size = (block.values, block.block.itemsize) if block else (1, PLAIN[kind].itemsize)
        if shape[-1] % values:
            raise UserError(f"{path}: tensor {name} {list(shape)} is not whole {kind} blocks of {values}")
        nbytes = math.prod(shape) // values * size
        if data + offset + nbytes > len(mapped):
            raise UserError(f"{path} is cut off in tensor {name}", hint="fetch the file again")
        if name in tensors:
            raise UserError(f"{path}: tensor {name} is there twice")
        if offset % align:
            raise UserError(f"{path}: tensor {name} begins at {offset}, need a multiple of {align}")
        tensors[name] = GgufTensor(name, kind, shape, data + offset, nbytes, mapped)
    for before, tensor in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.start)):
        if tensor.start < before.start + before.nbytes:
            raise UserError(f"{path}: tensor {tensor.name} overlaps {before.name}")
    return metadata, tensors


def _info(cursor):
    """(name, shape outermost first, ggml type, offset) of the next tensor."""
    name, dimensions = cursor.string(), cursor.unpack("<I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise UserError(
            f"{cursor.path}: tensor {name} has {dimensions} dimensions, need 1 to {MAX_DIMENSIONS}"
        )
    shape = tuple(cursor.unpack("<Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.unpack("<I"), cursor.unpack("<Q")
