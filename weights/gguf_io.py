"""GGUF reader for the default target: metadata, and tensors of F32, F16, BF16, Q8_0 and Q4_1 widened to f32.

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
# ggml's number -> name, values a block, bytes a block
KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 8: ("Q8_0", 32, 34), 3: ("Q4_1", 32, 20),
    26: ("I32", 1, 4), 27: ("I64", 1, 8),
}  # fmt: skip
PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. shape: (out, in), outermost first. kind: of KINDS.

    dtype, array and drop() as a Tensor of safetensors_io has them: what is in blocks is widened to F32.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    map: mmap.mmap = field(repr=False)

    @property
    def dtype(self):
        return self.kind if self.kind in PLAIN else "F32"

    @property
    def array(self):
        if self.kind not in PLAIN:
            return self.widened()
        raw = np.frombuffer(self.map, np.uint8, self.nbytes, self.start)
        return raw.view(PLAIN[self.kind]).reshape(self.shape)

    def drop(self):
        """Nothing: pages stay."""

    def widened(self):
        """f32 [shape], a copy. Q8_0: d * q. Q4_1: d * q + m, low nibbles are the first half of the 32."""
        raw = np.frombuffer(self.map, np.uint8, self.nbytes, self.start)
        if self.kind in ("F32", "F16"):
            flat = raw.view("<f4" if self.kind == "F32" else "<f2").astype(np.float32)
        elif self.kind == "BF16":
            flat = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif self.kind == "Q8_0":
            blocks = raw.reshape(-1, 34)
            flat = _halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)
        else:
            blocks = raw.reshape(-1, 20)
            nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
            flat = _halves(blocks, 0) * nibbles.astype(np.float32) + _halves(blocks, 2)
        return flat.reshape(self.shape)


def _halves(blocks, at):
    """The f16 at byte `at` of every block, as f32 [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


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
        if number not in KINDS:
            kinds = ", ".join(kind for kind, _, _ in KINDS.values())
            raise UserError(f"{path}: tensor {name} has ggml type {number}, need one of {kinds}")
        kind, values, size = KINDS[number]
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
