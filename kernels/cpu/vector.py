"""Explicit 16-lane vectors for Numba, written as LLVM IR: what the auto-vectoriser may not reorder.

An array argument goes in as (array, index of its first element); bf16 is uint16 bits and is widened on load.
Sums use fused multiply-add in a fixed order that depends on the length alone,
so a row's bits never depend on other rows.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..weight import E2M1

LANES = 16
F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VF, VI, VH = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)
VB = ir.VectorType(ir.IntType(8), LANES)
ZERO = ir.Constant(VF, [0.0] * LANES)
NO_VECTOR = ir.Constant(VF, ir.Undefined)
FEATURES = 8  # of MXFP4 in a word
# Bytes of weights to ask for ahead. Measured on 2 cores, 16 rows, 57 MB of bf16: 263 GFLOP/s without, 305 at
# 512, 355 at 1024, 419 at 2048, 470 at 4096, 473 at 8192; one row is not slower.
PREFETCH = 4096


def _number(n):
    return ir.Constant(I64, n)


def _pointer(context, builder, kind, array, at):
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def _fma(builder, vector):
    kind, suffix = (VF, "v16f32") if vector else (F32, "f32")
    return cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.{suffix}"
    )


def _load(builder, kind, pointer, vector):
    """Load one value or 16 as f32, widening bf16 bits."""
    bf16 = kind.dtype == types.uint16
    raw, wide, out = ((VH if bf16 else VF), VI, VF) if vector else ((I16 if bf16 else F32), I32, F32)
    value = builder.load(builder.bitcast(pointer, raw.as_pointer()), align=2 if bf16 else 4)
    if not bf16:
        return value
    shift = ir.Constant(wide, [16] * LANES) if vector else ir.Constant(I32, 16)
    return builder.bitcast(builder.shl(builder.zext(value, wide), shift), out)


def _prefetch(builder, kind, pointer):
    """Ask for what the loop reads PREFETCH bytes later: at 16 rows it is too slow for the hardware to run
    ahead."""
    byte = ir.IntType(8).as_pointer()
    ask = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0"
    )
    ahead = builder.gep(pointer, [_number(PREFETCH // (2 if kind.dtype == types.uint16 else 4))])
    builder.call(ask, [builder.bitcast(ahead, byte), *(ir.Constant(I32, v) for v in (0, 3, 1))])


def _broadcast(builder, scalar):
    one = builder.insert_element(NO_VECTOR, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, NO_VECTOR, ir.Constant(VI, [0] * LANES))


def _fold(builder, vector, combine):
    """Reduce 16 lanes to one by halves: lane i with i + 8, then + 4, + 2, + 1."""
    width = LANES
    while width > 1:
        half = width // 2
        undefined = ir.Constant(ir.VectorType(F32, width), ir.Undefined)
        low, high = (
            builder.shuffle_vector(
                vector, undefined, ir.Constant(ir.VectorType(I32, half), list(range(at, at + half)))
            )
            for at in (0, half)
        )
        vector, width = combine(low, high), half
    return builder.extract_element(vector, ir.Constant(I32, 0))


def _loop(builder, count, step, carried, body):
    """for k in range(0, count, step) while k + step <= count, carrying values;
    returns them after the loop."""
    head, inside, after = (builder.append_basic_block(n) for n in ("head", "inside", "after"))
    before = builder.block
    builder.branch(head)
    builder.position_at_end(head)
    k = builder.phi(I64)
    k.add_incoming(_number(0), before)
    phis = [builder.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, before)
    following = builder.add(k, _number(step), flags=["nsw"])
    builder.cbranch(builder.icmp_signed("<=", following, count), inside, after)
    builder.position_at_end(inside)
    for phi, value in zip(phis, body(k, phis), strict=True):
        phi.add_incoming(value, builder.block)
    k.add_incoming(following, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return k, phis


def _store_sums(builder, sums, tiles, out, stride):
    """out[m * stride + tile * 16 + lane] = the sums, token by token."""
    for n, vector in enumerate(sums):
        at = builder.add(builder.mul(stride, _number(n // tiles)), _number(n % tiles * LANES))
        builder.store(vector, builder.bitcast(builder.gep(out, [at]), VF.as_pointer()), align=4)


def make_tile_dot(tokens, tiles):
    """out[m][tile][lane] = sum_k w[tile][k][lane] * x[k][m], k ascending, one fused multiply-add a term.

    tokens, tiles: how many accumulators of 16 lanes live in registers. Arguments of what is returned:
    (w, w_at, tile_stride, step, x, x_at, x_step, count, out, out_at, out_stride); steps: elements from one k
    to the next. With an x_step below `tokens`, the last tokens are junk, and so is what comes out of them.
    """

    @intrinsic
    def tile_dot(typingctx, w, w_at, tile_stride, step, x, x_at, x_step, count, out, out_at, out_stride):
        n = types.intp

        def codegen(context, builder, signature, args):
            w, w_at, tile_stride, step, x, x_at, x_step, count, out, out_at, out_stride = args
            w_kind, x_kind, out_kind = (signature.args[i] for i in (0, 4, 8))
            w, x, out = (
                _pointer(context, builder, kind, array, at)
                for kind, array, at in ((w_kind, w, w_at), (x_kind, x, x_at), (out_kind, out, out_at))
            )
            fma = _fma(builder, True)

            def body(k, sums):
                row = builder.gep(w, [builder.mul(k, step)])
                weights = []
                for i in range(tiles):
                    address = builder.gep(row, [builder.mul(tile_stride, _number(i))])
                    _prefetch(builder, w_kind, address)
                    weights.append(_load(builder, w_kind, address, True))
                new = []
                for m in range(tokens):
                    at = builder.add(builder.mul(k, x_step), _number(m))
                    token = _broadcast(builder, builder.load(builder.gep(x, [at])))
                    for i in range(tiles):
                        new.append(builder.call(fma, [weights[i], token, sums[m * tiles + i]]))
                return new

            _, sums = _loop(builder, count, 1, [ZERO] * (tokens * tiles), body)
            _store_sums(builder, sums, tiles, out, out_stride)
            return context.get_dummy_value()

        return types.void(w, n, n, n, x, n, n, n, out, n, n), codegen

    return tile_dot


def _each(value):
    return ir.Constant(VI, [value] * LANES)


def _look_up(builder, table, indices):
    """table[indices] lane by lane, in a form that LLVM makes one permutation of."""
    table, found = ir.Constant(ir.VectorType(F32, len(table)), [float(v) for v in table]), NO_VECTOR
    for i in range(LANES):
        lane = ir.Constant(I32, i)
        value = builder.extract_element(table, builder.extract_element(indices, lane))
        found = builder.insert_element(found, value, lane)
    return found


def _nibble(builder, words, feature, is_wide):
    """The e2m1 values of one feature of 16 rows. is_wide: 16 f32 are permuted by one instruction, else 8."""
    shifted = builder.lshr(words, _each(4 * feature))
    if is_wide:
        return _look_up(builder, E2M1, builder.and_(shifted, _each(15)))
    size = builder.bitcast(_look_up(builder, E2M1[:8], builder.and_(shifted, _each(7))), VI)
    sign = builder.shl(builder.and_(shifted, _each(8)), _each(28))
    return builder.bitcast(builder.or_(size, sign), VF)


def _scale(builder, pointer):
    """2^(s - 127) of 16 bytes: s is the exponent's field; 2^-127 is half of the smallest normal number."""
    scales = builder.load(builder.bitcast(pointer, VB.as_pointer()), align=1)
    bits = builder.shl(builder.zext(scales, VI), _each(23))
    smallest = _each(1 << 22)
    return builder.bitcast(builder.select(builder.icmp_unsigned("<", bits, smallest), smallest, bits), VF)


def make_fp4_dot(tokens, tiles):
    """As make_tile_dot, of MXFP4 that becomes f32 in registers: sums of the same bits.

    words: u32 [tile][K/8][16], a lane's word holds 8 features, the first in its lowest bits. scales: u8
    [tile][K/32][16]. Arguments of what is returned: (words, scales, w_at, tile_stride, x, x_at, x_step,
    count, out, out_at, out_stride); w_at, tile_stride: in words; count: a multiple of 32.
    """

    @intrinsic
    def fp4_dot(typingctx, words, scales, w_at, tile_stride, x, x_at, x_step, count, out, out_at, out_stride):
        n = types.intp

        def codegen(context, builder, signature, args):
            words, scales, w_at, tile_stride, x, x_at, x_step, count, out, out_at, out_stride = args
            w_kind, s_kind, x_kind, out_kind = (signature.args[i] for i in (0, 1, 4, 8))
            is_wide = "+avx512f" in context.codegen().magic_tuple()[2]
            quarter = _number(4)  # a scale for 4 words
            words, scales, x, out = (
                _pointer(context, builder, kind, array, at)
                for kind, array, at in (
                    (w_kind, words, w_at), (s_kind, scales, builder.sdiv(w_at, quarter)),
                    (x_kind, x, x_at), (out_kind, out, out_at),
                )
            )  # fmt: skip
            fma, s_stride = _fma(builder, True), builder.sdiv(tile_stride, quarter)

            def body(q, sums):
                given, scale = [], []
                for i in range(tiles):
                    at = builder.add(builder.mul(q, _number(LANES)), builder.mul(tile_stride, _number(i)))
                    address = builder.gep(words, [at])
                    _prefetch(builder, w_kind, address)
                    given.append(builder.load(builder.bitcast(address, VI.as_pointer()), align=4))
                    at = builder.mul(builder.sdiv(q, quarter), _number(LANES))
                    at = builder.add(at, builder.mul(s_stride, _number(i)))
                    scale.append(_scale(builder, builder.gep(scales, [at])))
                sums = list(sums)
                for j in range(FEATURES):
                    weights = [
                        builder.fmul(_nibble(builder, word, j, is_wide), by)
                        for word, by in zip(given, scale, strict=True)
                    ]
                    row = builder.mul(builder.add(builder.mul(q, _number(FEATURES)), _number(j)), x_step)
                    for m in range(tokens):
                        value = builder.load(builder.gep(x, [builder.add(row, _number(m))]))
                        token = _broadcast(builder, value)
                        for i in range(tiles):
                            at = m * tiles + i
                            sums[at] = builder.call(fma, [weights[i], token, sums[at]])
                return sums

            groups = builder.sdiv(count, _number(FEATURES))
            _, sums = _loop(builder, groups, 1, [ZERO] * (tokens * tiles), body)
            _store_sums(builder, sums, tiles, out, out_stride)
            return context.get_dummy_value()

        return types.void(words, scales, n, n, x, n, n, n, out, n, n), codegen

    return fp4_dot


@intrinsic
def row_dot(typingctx, a, a_at, b, b_at, count):
    """sum_i a[i] * b[i] over count elements: 16 lane sums, folded by halves, then the tail in order."""

    def codegen(context, builder, signature, args):
        a, a_at, b, b_at, count = args
        a_kind, b_kind = signature.args[0], signature.args[2]
        a, b = _pointer(context, builder, a_kind, a, a_at), _pointer(context, builder, b_kind, b, b_at)

        def both(k, vector):
            return [
                _load(builder, kind, builder.gep(p, [k]), vector) for kind, p in ((a_kind, a), (b_kind, b))
            ]

        done, (lanes,) = _loop(
            builder,
            count,
            LANES,
            [ZERO],
            lambda k, s: [builder.call(_fma(builder, True), [*both(k, True), s[0]])],
        )
        total = _fold(builder, lanes, builder.fadd)
        tail = builder.sub(count, done)
        _, (total,) = _loop(
            builder,
            tail,
            1,
            [total],
            lambda k, s: [builder.call(_fma(builder, False), [*both(builder.add(done, k), False), s[0]])],
        )
        return total

    return types.float32(a, types.intp, b, types.intp, types.intp), codegen


@intrinsic
def row_max(typingctx, a, a_at, count):
    """Largest of count f32 values; -3.4e38 when there are none. A NaN is passed over (it shows in the
    sum)."""

    def codegen(context, builder, signature, args):
        a, a_at, count = args
        kind = signature.args[0]
        a = _pointer(context, builder, kind, a, a_at)

        def larger(x, y):
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        low = ir.Constant(VF, [-3.4e38] * LANES)
        done, (lanes,) = _loop(
            builder,
            count,
            LANES,
            [low],
            lambda k, s: [larger(_load(builder, kind, builder.gep(a, [k]), True), s[0])],
        )
        best = _fold(builder, lanes, larger)
        _, (best,) = _loop(
            builder,
            builder.sub(count, done),
            1,
            [best],
            lambda k, s: [larger(_load(builder, kind, builder.gep(a, [builder.add(done, k)]), False), s[0])],
        )
        return best

    return types.float32(a, types.intp, types.intp), codegen


@intrinsic
def f32_from_bits(typingctx, bits):
    """float32 with these 32 bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(
        args[0], F32
    )


@intrinsic
def bits_from_f32(typingctx, value):
    """The 32 bits of a float32."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], I32
    )
