"""Weights become f32 in registers: 16 rows' numbers of one input, however they are kept.

Plain weights are [tile][K][16]. Others are [tile][block] of records (`PACKED`), a tile's 16 rows side by side
in each; a record has what its kind has in the file, in another order. A source gives `step` inputs at a time;
where it `has_tail`, those behind the last whole step one by one.
"""

import numpy as np
from llvmlite import ir
from numba import types

from ..blocks import KINDS
from ..fp8 import BLOCK, SCALE_ROWS
from ..weight import E2M1
from .vector import (
    F32,
    I32,
    LANES,
    NO_VECTOR,
    VB,
    VF,
    VH,
    VI,
    _fma,
    _load,
    _number,
    _prefetch,
)

PIECE = 32  # inputs that one step widens
HALVES = ir.VectorType(ir.HalfType(), LANES)


def planes_of(kind):
    """Bits of the planes that codes are cut into: whole codes, or nibbles and what is above them."""
    return {8: (8,), 4: (4,), 6: (4, 2)}[kind.bits]


def head_bytes(kind):
    """Bytes of a record before its pieces: f16 of 16 rows each."""
    return LANES * 2 * (1 + kind.has_low)


def piece_bytes(kind):
    """Bytes of PIECE inputs of 16 rows: scales of groups, then one plane after the other.

    A plane of b bits is u32 [b][16]: input k lies in word k % b, from bit b (k // b) on. So inputs in order
    take turns among the words, and a mask serves b of them.
    """
    return LANES * (PIECE // kind.group * kind.has_scales + 4 * kind.bits)


PACKED = {
    name: np.dtype([(name, "u1", (head_bytes(kind) + kind.values // PIECE * piece_bytes(kind),))])
    for name, kind in KINDS.items()
}
PACKED["mxfp4"] = np.dtype([("words", "<u4", (4, LANES)), ("scales", "u1", (LANES,))])
# Of 128 inputs: the scales of the tile's first and last 8 rows, then the codes of 16 rows, input by input.
PACKED["fp8"] = np.dtype([("halves", "<f4", (LANES // SCALE_ROWS,)), ("codes", "u1", (BLOCK, LANES))])
_NAMES = {packed.names[0]: name for name, packed in PACKED.items()}


def _each(value, kind=VI):
    return ir.Constant(kind, [value] * LANES)


def kind_of(array):
    """Name of what an array of this Numba type keeps: a key of BITS, or None: no weights."""
    if isinstance(array.dtype, types.Record):
        return _NAMES[next(iter(array.dtype.fields))]
    return {types.float32: "f32", types.uint16: "bf16"}.get(array.dtype)


def source_of(kind, is_wide):
    """What widens weights of a kind. is_wide: one instruction permutes 16 f32."""
    if kind in KINDS:
        return Linear(KINDS[kind])
    if kind == "fp8":
        return Fp8()
    return Fp4(is_wide) if kind == "mxfp4" else Plain(kind == "bf16")


class Plain:
    """f32 and bf16: an input is one load."""

    step, has_tail = 1, False

    def __init__(self, is_bf16):
        self.is_bf16 = is_bf16

    def open(self, builder, tile, k, stride):
        """Reader of what step k of the tile at `tile` has: a function of the input's number in the step.

        tile: i8*. stride: bytes from one step to the next, of plain weights alone.
        """
        place = builder.gep(tile, [builder.mul(k, stride)])
        _prefetch(builder, place)
        return lambda _: _load(builder, self.is_bf16, place, True)


def _at(builder, record, offset, kind):
    """16 values of 16 rows at a byte of a record. offset: a number, or one of the program."""
    offset = _number(offset) if isinstance(offset, int) else offset
    return builder.load(builder.bitcast(builder.gep(record, [offset]), kind.as_pointer()), align=1)


class Fp4:
    """MXFP4: a lane's word has 8 inputs, the first in its lowest bits."""

    step, has_tail, in_word = PIECE, False, 8

    def __init__(self, is_wide):
        self.is_wide = is_wide

    def open(self, builder, tile, k, stride):
        record = builder.gep(tile, [builder.mul(k, _number(PACKED["mxfp4"].itemsize))])
        ask(builder, record, PACKED["mxfp4"].itemsize)
        scale = self.scale(builder, _at(builder, record, 4 * 4 * LANES, VB))

        def value(j):
            word = _at(builder, record, 4 * LANES * (j // self.in_word), VI)
            return builder.fmul(self.nibble(builder, word, j % self.in_word), scale)

        return value

    def nibble(self, builder, words, feature):
        """The e2m1 values of one input of 16 rows."""
        shifted = builder.lshr(words, _each(4 * feature))
        if self.is_wide:
            return _look_up(builder, E2M1, builder.and_(shifted, _each(15)))
        size = builder.bitcast(_look_up(builder, E2M1[:8], builder.and_(shifted, _each(7))), VI)
        sign = builder.shl(builder.and_(shifted, _each(8)), _each(28))
        return builder.bitcast(builder.or_(size, sign), VF)

    def scale(self, builder, scales):
        """2^(s - 127) of 16 bytes: s is the exponent's field; 2^-127 is half the smallest normal number."""
        bits = builder.shl(builder.zext(scales, VI), _each(23))
        smallest = _each(1 << 22)
        return builder.bitcast(builder.select(builder.icmp_unsigned("<", bits, smallest), smallest, bits), VF)


def _look_up(builder, table, indices):
    """table[indices] lane by lane, in a form that LLVM makes one permutation of."""
    table, found = ir.Constant(ir.VectorType(F32, len(table)), [float(v) for v in table]), NO_VECTOR
    for i in range(LANES):
        lane = ir.Constant(I32, i)
        value = builder.extract_element(table, builder.extract_element(indices, lane))
        found = builder.insert_element(found, value, lane)
    return found


def ask(builder, record, size):
    """Ask for as many bytes as a step reads, further on."""
    for at in range(0, size, 64):
        _prefetch(builder, builder.gep(record, [_number(at)]))


class Fp8:
    """FP8: a byte an input. Sign, exponent and mantissa where an f32 has them are a number too small by
    2^120, subnormal or not, and a scale larger by as much makes it right: f32(e4m3 * scale), rounded once.
    """

    step, has_tail, size = 32, True, PACKED["fp8"].itemsize

    def open(self, builder, tile, k, stride):
        return self.at(builder, tile, builder.mul(k, _number(self.step)), self.step)

    def at(self, builder, tile, first, count=1):
        """Reader of `count` inputs of a block, from input `first` on."""
        record = builder.gep(tile, [builder.mul(builder.sdiv(first, _number(BLOCK)), _number(self.size))])
        row = builder.mul(builder.srem(first, _number(BLOCK)), _number(LANES))
        place = builder.gep(record, [builder.add(row, _number(self.size - BLOCK * LANES))])
        ask(builder, place, count * LANES)
        scale = self.scale(builder, record)

        def value(j):
            wide = builder.sext(_at(builder, place, LANES * j, VB), VI)
            bits = builder.and_(builder.shl(wide, _each(20)), _each(0x87F00000))
            return builder.fmul(builder.bitcast(bits, VF), scale)

        return value

    def scale(self, builder, record):
        """2^120 times the scale of each of 16 rows."""
        pair = _at(builder, record, 0, ir.VectorType(F32, LANES // SCALE_ROWS))
        which = ir.Constant(VI, [lane // SCALE_ROWS for lane in range(LANES)])
        each = builder.shuffle_vector(pair, ir.Constant(pair.type, ir.Undefined), which)
        return builder.fmul(each, _each(2.0**120, VF))


class Linear:
    """Kinds of kernels/blocks.py: code * scale + low, by one fused multiply-add a plane, which is exact, or
    rounds once where blocks have an m.

    A code is not shifted down: masked where it stands it is too large by a power of two, and a scale that is
    too small by as much makes it right. Only the topmost one is shifted, since a word that is negative would
    become a negative number.
    """

    step, has_tail = PIECE, False

    def __init__(self, kind):
        self.kind, self.pieces = kind, kind.values // PIECE

    def open(self, builder, tile, k, stride):
        kind, pieces = self.kind, _number(self.pieces)
        size = _number(PACKED[kind.name].itemsize)
        block = builder.gep(tile, [builder.mul(builder.sdiv(k, pieces), size)])
        at = builder.mul(builder.srem(k, pieces), _number(piece_bytes(kind)))
        piece = builder.gep(block, [builder.add(at, _number(head_bytes(kind)))])
        ask(
            builder, block if self.pieces == 1 else piece, piece_bytes(kind) + head_bytes(kind) // self.pieces
        )
        fma = _fma(builder, True)

        def half(index):
            bits = _at(builder, block, 2 * LANES * index, VH)
            return builder.fpext(builder.bitcast(bits, HALVES), VF)

        d, scales, lows = half(0), [], []
        for group in range(PIECE // kind.group):
            scale = d
            if kind.has_scales:
                whole = builder.sext(_at(builder, piece, LANES * group, VB), VI)
                scale = builder.fmul(d, builder.sitofp(whole, VF))
            scales.append(scale)
            lows.append(half(1) if kind.has_low else builder.fmul(scale, _each(-float(kind.offset), VF)))

        known = {(group, 0): scale for group, scale in enumerate(scales)}

        def scaled(group, power):
            if (group, power) not in known:
                known[group, power] = builder.fmul(scales[group], _each(2.0**power, VF))
            return known[group, power]

        def value(j):
            found, offset, below = lows[j // kind.group], LANES * len(scales) * kind.has_scales, 0
            for bits in planes_of(kind):
                word, place = _at(builder, piece, offset + 4 * LANES * (j % bits), VI), bits * (j // bits)
                if place + bits == 32:
                    code, power = builder.lshr(word, _each(place)), below
                else:
                    code, power = builder.and_(word, _each(((1 << bits) - 1) << place)), below - place
                by = scaled(j // kind.group, power)
                found = builder.call(fma, [builder.sitofp(code, VF), by, found])
                offset, below = offset + 4 * LANES * bits, below + bits
            return found

        return value
