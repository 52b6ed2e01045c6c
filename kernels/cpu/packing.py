"""Weights from the order of a file to packed ones: as lanes.py reads them."""

import numba
import numpy as np

from .jit import jit
from .lanes import head_bytes, piece_bytes, planes_of, word_bits
from .vector import LANES

AT_ONCE = 1 << 22  # numbers whose codes lie in memory at once


@jit(parallel=True)
def pack(weight, out):
    """Plain (N, K) -> packed [N/16][K][16]; rows past N are zero. out is zeroed by the caller."""
    rows, cols = weight.shape
    for tile in numba.prange((rows + 15) // 16):
        for lane in range(min(16, rows - tile * 16)):
            for k in range(cols):
                out[tile, k, lane] = weight[tile * 16 + lane, k]


@jit
def _put(record, at, lane, size, value):
    """A whole number of `size` bytes to the lane's place in a row of 16 from byte `at` on."""
    for i in range(size):
        record[at + size * lane + i] = np.uint8((value >> np.uint32(8 * i)) & np.uint32(255))


@jit(parallel=True)
def _pack_rows(halves, scales, codes, first, planes, size, head, piece, out):
    """Rows from `first` on. halves: u16 (rows, blocks, ...). scales: u8 (rows, groups), or none of them.
    codes: u8 (rows, cols). out: u8 (tiles, blocks, bytes)."""
    rows, blocks, fields = halves.shape
    in_block = codes.shape[1] // blocks // 32
    groups = scales.shape[1] // (blocks * in_block)
    for tile in numba.prange(first // 16, (first + rows + 15) // 16):
        for lane in range(16):
            n = tile * 16 + lane - first
            if n < 0 or n >= rows:
                continue
            for block in range(blocks):
                record = out[tile, block]
                for field in range(fields):
                    _put(record, 32 * field, lane, 2, np.uint32(halves[n, block, field]))
                for part in range(in_block):
                    at, k = head + part * piece, (block * in_block + part) * 32
                    for group in range(groups):
                        scale = scales[n, (block * in_block + part) * groups + group]
                        _put(record, at, lane, 1, np.uint32(scale))
                        at += 16
                    below = 0
                    for bits in planes:
                        for w in range(32 * bits // size):
                            word = np.uint32(0)
                            for slot in range(size // bits):
                                code = (codes[n, k + w * size // bits + slot] >> below) & ((1 << bits) - 1)
                                word |= np.uint32(code) << np.uint32(slot * bits)
                            _put(record, at + 2 * size * w, lane, size // 8, word)
                        at += 64 * bits
                        below += bits


def pack_scales(scales, is_paired, out):
    """FP8's scales f32 (E, rows/8, blocks) to out (E, tiles, blocks, 2): of a tile's first and last 8 rows.
    is_paired: tiles are of gate and up rows in turn."""
    (experts, groups, blocks), halves = scales.shape, 1 + is_paired
    tiles = out.shape[1] // halves
    whole = np.zeros((experts, halves, 2 * tiles, blocks), np.float32)
    whole[:, :, : groups // halves] = scales.reshape(experts, halves, -1, blocks)
    out[...] = whole.reshape(experts, halves, tiles, 2, blocks).transpose(0, 2, 1, 4, 3).reshape(out.shape)


def pack_blocks(kind, blocks, first, out):
    """Blocks (rows, cols / values) of a kind of kernels/blocks.py to rows `first`... of records
    (tiles, blocks), zeroed by the caller; some rows at a time."""
    step = max(LANES, AT_ONCE // (blocks.shape[1] * kind.values) // LANES * LANES)
    raw = out.view(np.uint8).reshape(*out.shape, -1)
    for at in range(0, len(blocks), step):
        some = blocks[at : at + step]
        halves = np.stack([some[name].view(np.uint16) for name in ("d", "m")[: 1 + kind.has_low]], axis=-1)
        codes = np.ascontiguousarray(kind.codes(some)).reshape(len(some), -1)
        scales = np.zeros((len(some), 0), np.uint8)
        if kind.has_scales:
            scales = np.ascontiguousarray(some["scale"]).view(np.uint8).reshape(len(some), -1)
        places = planes_of(kind), word_bits(kind), head_bytes(kind), piece_bytes(kind)
        _pack_rows(np.ascontiguousarray(halves), scales, codes, first + at, *places, raw)
