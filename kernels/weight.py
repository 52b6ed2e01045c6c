"""`Weight`: one matrix of a checkpoint, or one for each expert, as a backend keeps it;
and what a weight may be."""

from dataclasses import dataclass, replace
from math import prod

from .blocks import KINDS
from .fp8 import BLOCK, SCALE_ROWS

TILE = 16  # rows are packed in groups of 16; a slice of a packed weight starts on such a group
MATRIX, PAIRS, TABLE, VECTOR = "matrix", "pairs", "table", "vector"
EXPERTS, EXPERT_PAIRS = "experts", "expert pairs"
# What a weight is for, which decides how a backend lays it out. PAIRS: gate rows, then as many up rows, used
# in pairs. TABLE: rows are also looked up one by one. EXPERTS and EXPERT_PAIRS:
# a matrix, or pairs, for each expert. VECTOR: f32, no Weight.
ROLES = MATRIX, PAIRS, TABLE, EXPERTS, EXPERT_PAIRS, VECTOR
E2M1 = tuple(
    sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)  # of a nibble
BITS = {"f32": 32, "bf16": 16, "mxfp4": 4.25}  # a number, its share of a block's scale included
BITS["fp8"] = 8 + 32 / (SCALE_ROWS * BLOCK)
BITS |= {name: kind.stored_bits for name, kind in KINDS.items()}


def stored_bytes(shape, dtype):
    """Bytes of a weight of this shape as it is kept: what plan, `info`, roofline and report count."""
    return int(prod(shape) * BITS[dtype]) // 8


@dataclass(frozen=True)
class Weight:
    """y = x @ W.T for W: (rows, cols), rows = output features; (experts, rows, cols)
    where each expert has its own.

    dtype: a key of BITS, as stored. layout: "plain" (shape as it is) or "packed" ([rows/16][cols][16] on the
    CPU; fragment order on a GPU), "packed pairs" where gate and up rows take turns. parts: the backend's
    arrays; of mxfp4 the blocks, then their scales; of plain fp8 codes u8 (..., rows, cols), then scales f32
    (..., ceil(rows/8), ceil(cols/128)). has_large_scales: of packed mxfp4 on a GPU, whether a
    block's scale is 4 or more.
    """

    shape: tuple
    dtype: str
    layout: str
    parts: tuple
    has_large_scales: bool = False

    @property
    def rows(self):
        return self.shape[-2]

    @property
    def cols(self):
        return self.shape[-1]

    @property
    def data(self):
        """The first of the parts, of most weights the only one."""
        return self.parts[0]

    @property
    def nbytes(self):
        """What a pass over all of it reads."""
        return stored_bytes(self.shape, self.dtype)

    def slice(self, first, count):
        """Rows first .. first+count-1 of a matrix as a view. Errors: ValueError when a packed slice cuts a
        group of 16, or one of plain fp8 rows that share a scale."""
        shape, end = (count, self.cols), first + count
        if self.layout == "plain" and self.dtype == "fp8":
            if first % SCALE_ROWS or (count % SCALE_ROWS and end != self.rows):
                raise ValueError(f"rows {first}..{end} cut {SCALE_ROWS} rows that share a scale")
            codes, scales = self.parts
            shared = scales[first // SCALE_ROWS : -(-end // SCALE_ROWS)]
            return replace(self, shape=shape, parts=(codes[first:end], shared))
        if self.layout == "plain":
            return replace(self, shape=shape, parts=tuple(part[first:end] for part in self.parts))
        if first % TILE or (count % TILE and end != self.rows):
            raise ValueError(f"rows {first}..{end} cut a group of {TILE} of a packed weight")
        return replace(
            self, shape=shape, parts=tuple(part[first // TILE : -(-end // TILE)] for part in self.parts)
        )
