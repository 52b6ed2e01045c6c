"""Kinds of blocks that weights are kept in: what the bytes of a file say, and the f32 numbers they stand for.

Every kind here is linear: a number is code * scale + low, codes unsigned whole numbers, a scale for each
`group` of them. Source: models.md 11; the `gguf` package dequantises the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Kind:
    """One kind of blocks.

    block: dtype of a block in the file. values: numbers of a block. bits: of a code. group: numbers that
    share a scale. offset: what a code is too large by (0 where blocks have a low end `m` of their own).
    codes: blocks (...) -> u8 (..., values), in the order of a row.
    """

    name: str
    block: np.dtype
    values: int
    bits: int
    group: int
    offset: int
    codes: Callable

    @property
    def stored_bits(self):
        """Of a number, its share of what a block holds once included."""
        return 8 * self.block.itemsize / self.values

    @property
    def has_low(self):
        return "m" in self.block.names

    @property
    def has_scales(self):
        """Whether a group has a whole number that the block's d is multiplied by."""
        return "scale" in self.block.names


def _nibbles(q):
    """Low nibbles of all bytes, then the high ones."""
    return np.concatenate([q & 15, q >> 4], axis=-1)


def _six_bits(blocks):
    """Halves of 128: 64 bytes have low nibbles and then high ones, 32 bytes the pairs above them, 4 x 32."""
    low = blocks["low"].reshape(*blocks.shape, 2, 64)
    high = blocks["high"].reshape(*blocks.shape, 2, 1, 32) >> np.uint8([0, 2, 4, 6])[:, None] & 3
    codes = _nibbles(low).reshape(*high.shape) | high << 4
    return codes.reshape(*blocks.shape, 256)


_D, _NIBBLES = ("d", "<f2"), ("q", "u1", 16)
KINDS = {
    kind.name: kind
    for kind in (
        Kind("q8_0", np.dtype([_D, ("q", "i1", 32)]), 32, 8, 32, 128, lambda b: b["q"].view(np.uint8) ^ 128),
        Kind("q4_0", np.dtype([_D, _NIBBLES]), 32, 4, 32, 8, lambda b: _nibbles(b["q"])),
        Kind("q4_1", np.dtype([_D, ("m", "<f2"), _NIBBLES]), 32, 4, 32, 0, lambda b: _nibbles(b["q"])),
        Kind("q6_k", np.dtype([("low", "u1", 128), ("high", "u1", 64), ("scale", "i1", 16), _D]),
             256, 6, 16, 32, _six_bits),
    )
}  # fmt: skip


def widened(kind, blocks):
    """f32 (rows, cols) of blocks (rows, cols / values): exact but for the sum with `m`, which rounds once."""
    d = blocks["d"].astype(np.float32)[..., None]
    scale = d * blocks["scale"].astype(np.float32) if kind.has_scales else d
    codes = kind.codes(blocks).reshape(*scale.shape, kind.group).astype(np.float32)
    found = scale[..., None] * (codes - np.float32(kind.offset))
    if kind.has_low:
        found += blocks["m"].astype(np.float32)[..., None, None]
    return found.reshape(len(blocks), -1)
