"""embed: x[t] = scale * table[ids[t]], gathered from the packed table. Moves: T * D weights."""

import numpy as np

from ..blocks import KINDS
from ..fp8 import BLOCK, NUMBERS, SCALE_ROWS
from .jit import jit
from .lanes import head_bytes, piece_bytes, planes_of, word_bits
from .scalar import F, load, rounded
from .vector import f32_from_bits


@jit
def _run(ids, table, scale, x):
    for t in range(x.shape[0]):
        tile, lane = ids[t] // 16, ids[t] % 16
        for d in range(x.shape[1]):
            x[t, d] = rounded(F(scale) * load(table[tile, d, lane]), x)


@jit
def _half(record, at, lane):
    """The f16 of a lane in a row of 16 from byte `at` on. A subnormal one is exact too."""
    bits = np.uint32(record[at + 2 * lane]) | np.uint32(record[at + 2 * lane + 1]) << np.uint32(8)
    size = f32_from_bits((bits & np.uint32(0x7FFF)) << np.uint32(13)) * F(2.0**112)
    return -size if bits >> np.uint32(15) else size


@jit
def _code(record, at, k, lane, planes, size):
    """The code of input k of a piece whose planes, of words of `size` bits, begin at byte `at`."""
    found, below = 0, 0
    for bits in planes:
        place = at + 2 * size * (bits * k // size) + size // 8 * lane + bits * k % size // 8
        found |= ((record[place] >> (bits * k % 8)) & ((1 << bits) - 1)) << below
        at, below = at + 64 * bits, below + bits
    return found


@jit
def _run_blocks(ids, table, planes, size, head, piece, groups, offset, scale, x):
    """table: u8 (tiles, blocks, bytes). groups: scales of a piece, 0 where the block has the only one."""
    in_block = (table.shape[2] - head) // piece
    for t in range(x.shape[0]):
        tile, lane = ids[t] // 16, ids[t] % 16
        for d in range(x.shape[1]):
            k, part = d % 32, d // 32 % in_block
            record, at = table[tile, d // 32 // in_block], head + part * piece
            by, low = _half(record, 0, lane), _half(record, 32, lane) if head > 32 else F(0.0)
            if groups:
                by *= F(np.int8(record[at + k * groups // 32 * 16 + lane]))
            code = _code(record, at + 16 * groups, k, lane, planes, size)
            x[t, d] = rounded(F(scale) * (by * F(code - offset) + low), x)


@jit
def _run_fp8(ids, codes, scales, numbers, scale, x):
    """codes: u8 (tiles, blocks, 128, 16). scales: f32 (tiles, blocks, 2). numbers: f32 of every byte."""
    for t in range(x.shape[0]):
        tile, lane = ids[t] // 16, ids[t] % 16
        for d in range(x.shape[1]):
            block = d // BLOCK
            value = numbers[codes[tile, block, d % BLOCK, lane]] * scales[tile, block, lane // SCALE_ROWS]
            x[t, d] = rounded(F(scale) * value, x)


def embed(backend, ids, table, scale, x):
    if table.dtype == "fp8":
        return _run_fp8, (ids, table.data["codes"], table.data["halves"], NUMBERS, scale, x)
    kind = KINDS.get(table.dtype)
    if kind is None:
        return _run, (ids, table.data, scale, x)
    records = table.data.view(np.uint8).reshape(*table.data.shape, -1)
    groups = 32 // kind.group * kind.has_scales
    places = planes_of(kind), word_bits(kind), head_bytes(kind), piece_bytes(kind)
    return _run_blocks, (ids, records, *places, groups, kind.offset, scale, x)
