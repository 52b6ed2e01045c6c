"""Weights become f32 in registers: 16 rows' numbers of one input, however they are kept.

Plain weights are [tile][K][16]. Others are [tile][block] of records (`PACKED`), a tile's 16 rows side by side
in each; a record has what its kind has in the file, in another order. A source gives `step` inputs at a time,
in so many `turns` of a loop; where it `has_tail`, those behind the last whole step one by one.
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


def word_bits(kind):
    """Of what planes are made of. Measured with AVX2, one row: nibbles in words are 10 to 20 % faster than in
    bytes, whose conversions are one instruction more; other codes are slower in words, by their masks."""
    return 32 if kind.bits == 4 else 8


def head_bytes(kind):
    """Bytes of a record before its pieces: f16 of 16 rows each."""
    return LANES * 2 * (1 + kind.has_low)


def piece_bytes(kind):
    """Bytes of PIECE inputs of 16 rows: scales of groups, then one plane after the other.

    A plane is words of 16 rows side by side, u32 [4][16] of nibbles, else u8 [b][4][16] of b bits: a word has
    inputs in order, the first in its lowest bits. So a loop over the words holds one in a register, not all.
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

    step, turns, has_tail = 1, 1, False

    def __init__(self, is_bf16):
        self.is_bf16 = is_bf16

    def open(self, builder, tile, k, stride, ahead):
        """What step k of the tile at `tile` has: a function of the turn, which gives one of the input in it.

        tile: i8*. stride: bytes from one step to the next, of plain weights alone. ahead: bytes from what is
        read to what is asked for.
        """
        place = builder.gep(tile, [builder.mul(k, stride)])
        _prefetch(builder, place, ahead)
        return lambda _: lambda _: _load(builder, self.is_bf16, place, True)


def _at(builder, record, offset, kind):
    """16 values of 16 rows at a byte of a record. offset: a number, or one of the program."""
    offset = _number(offset) if isinstance(offset, int) else offset
    return builder.load(builder.bitcast(builder.gep(record, [offset]), kind.as_pointer()), align=1)


class Fp4:
    """MXFP4: a lane's word has 8 inputs, the first in its lowest bits."""

    step, turns, has_tail, in_word = PIECE, 1, False, 8

    def __init__(self, is_wide):
        self.is_wide = is_wide

    def open(self, builder, tile, k, stride, ahead):
        record = builder.gep(tile, [builder.mul(k, _number(PACKED["mxfp4"].itemsize))])
        ask(builder, record, PACKED["mxfp4"].itemsize, ahead)
        scale = self.scale(builder, _at(builder, record, 4 * 4 * LANES, VB))

        def value(j):
            word = _at(builder, record, 4 * LANES * (j // self.in_word), VI)
            return builder.fmul(self.nibble(builder, word, j % self.in_word), scale)

        return lambda _: value

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


def ask(builder, record, size, ahead):
    """Ask for as many bytes as a step reads, further on."""
    for at in range(0, size, 64):
        _prefetch(builder, builder.gep(record, [_number(at)]), ahead)


class Fp8:
    """FP8: a byte an input. Sign, exponent and mantissa where an f32 has them are a number too small by
    2^120, subnormal or not, and a scale larger by as much makes it right: f32(e4m3 * scale), rounded once.
    """

    step, turns, has_tail, size = 32, 1, True, PACKED["fp8"].itemsize

    def open(self, builder, tile, k, stride, ahead):
        value = self.at(builder, tile, builder.mul(k, _number(self.step)), ahead, self.step)
        return lambda _: value

    def at(self, builder, tile, first, ahead, count=1):
        """Reader of `count` inputs of a block, from input `first` on."""
        record = builder.gep(tile, [builder.mul(builder.sdiv(first, _number(BLOCK)), _number(self.size))])
        row = builder.mul(builder.srem(first, _number(BLOCK)), _number(LANES))
        place = builder.gep(record, [builder.add(row, _number(self.size - BLOCK * LANES))])
        ask(builder, place, count * LANES, ahead)
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
    become a negative number. A turn is a word of nibbles, or a group.
    """

    step, has_tail = PIECE, False

    def __init__(self, kind):
        self.kind, self.pieces, self.word = kind, kind.values // PIECE, word_bits(kind)
        self.turns = kind.bits if self.word == 32 else PIECE // kind.group

    def _places(self, j):
        """Where input j of a turn is, plane by plane: (its bits, byte where its words begin in the turn, bits
        below it there, whether it is shifted down, power of two that makes it right)."""
        below = 0
        for bits in planes_of(self.kind):
            place = bits * j % self.word
            is_shifted = place + bits == self.word
            row = LANES * self.word // 8 * (bits * j // self.word)
            yield bits, row, place, is_shifted, below if is_shifted else below - place
            below += bits

    def open(self, builder, tile, k, stride, ahead):
        kind, pieces, inputs = self.kind, _number(self.pieces), PIECE // self.turns
        size = _number(PACKED[kind.name].itemsize)
        block = builder.gep(tile, [builder.mul(builder.sdiv(k, pieces), size)])
        at = builder.mul(builder.srem(k, pieces), _number(piece_bytes(kind)))
        piece = builder.gep(block, [builder.add(at, _number(head_bytes(kind)))])
        start = block if self.pieces == 1 else piece
        ask(builder, start, piece_bytes(kind) + head_bytes(kind) // self.pieces, ahead)
        fma, form = _fma(builder, True), VI if self.word == 32 else VB
        powers = sorted({power for j in range(inputs) for *_, power in self._places(j)})

        def half(index):
            bits = _at(builder, block, 2 * LANES * index, VH)
            return builder.fpext(builder.bitcast(bits, HALVES), VF)

        def factors(scale):
            low = half(1) if kind.has_low else builder.fmul(scale, _each(-float(kind.offset), VF))
            return low, {power: builder.fmul(scale, _each(2.0**power, VF)) for power in powers}

        d = half(0)
        shared = None if kind.has_scales else factors(d)

        def turn(i):
            first, (low, by) = _number(0), shared or (None, None)
            if kind.has_scales:
                whole = builder.sext(_at(builder, piece, builder.mul(i, _number(LANES)), VB), VI)
                low, by = factors(builder.fmul(d, builder.sitofp(whole, VF)))
                first = _number(LANES * PIECE // kind.group)

            def value(j):
                found, plane = low, first
                for bits, row, place, is_shifted, power in self._places(j):
                    start = builder.add(plane, builder.mul(i, _number(2 * bits * inputs)))
                    code = builder.zext(_at(builder, piece, builder.add(start, _number(row)), form), VI)
                    if is_shifted:
                        code = builder.lshr(code, _each(place))
                    else:
                        code = builder.and_(code, _each(((1 << bits) - 1) << place))
                    found = builder.call(fma, [builder.sitofp(code, VF), by[power], found])
                    plane = builder.add(plane, _number(4 * LANES * bits))
                return found

            return value

        return turn
