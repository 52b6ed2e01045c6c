"""Explicit 16-lane vectors for Numba, written as LLVM IR: what the auto-vectoriser may not reorder.

An array argument goes in as (array, index of its first element); bf16 is uint16 bits and is widened on load.
Sums use fused multiply-add in a fixed order that depends on the length alone, so a row's bits never depend
on other rows. Products of matrices are dot.py's, what their weights are made of lanes.py's.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VF, VI, VH = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)
VB = ir.VectorType(ir.IntType(8), LANES)
ZERO = ir.Constant(VF, [0.0] * LANES)
NO_VECTOR = ir.Constant(VF, ir.Undefined)
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


def _load(builder, bf16, pointer, vector):
    """Load one value or 16 as f32, widening bf16 bits."""
    raw, wide, out = ((VH if bf16 else VF), VI, VF) if vector else ((I16 if bf16 else F32), I32, F32)
    value = builder.load(builder.bitcast(pointer, raw.as_pointer()), align=2 if bf16 else 4)
    if not bf16:
        return value
    shift = ir.Constant(wide, [16] * LANES) if vector else ir.Constant(I32, 16)
    return builder.bitcast(builder.shl(builder.zext(value, wide), shift), out)


def _prefetch(builder, pointer, ahead):
    """Ask for what the loop reads so many bytes later: at 16 rows it is too slow for the hardware to run
    ahead."""
    byte = ir.IntType(8).as_pointer()
    ask = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0"
    )
    there = builder.gep(builder.bitcast(pointer, byte), [ahead])
    builder.call(ask, [there, *(ir.Constant(I32, v) for v in (0, 3, 1))])


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


@intrinsic
def row_dot(typingctx, a, a_at, b, b_at, count):
    """sum_i a[i] * b[i] over count elements: 16 lane sums, folded by halves, then the tail in order."""

    def codegen(context, builder, signature, args):
        a, a_at, b, b_at, count = args
        a_kind, b_kind = signature.args[0], signature.args[2]
        a, b = _pointer(context, builder, a_kind, a, a_at), _pointer(context, builder, b_kind, b, b_at)

        def both(k, vector):
            return [
                _load(builder, kind.dtype == types.uint16, builder.gep(p, [k]), vector)
                for kind, p in ((a_kind, a), (b_kind, b))
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
def eight_dots(typingctx, a, a_at, b, b_at, count, out, out_at):
    """out[j] = row_dot of a and row j of b, for 8 rows of `count` elements side by side, a multiple of 16.

    The same sums: a fold adds the halves of two rows, then of four, then of eight, in one vector.
    """

    def codegen(context, builder, signature, args):
        a, a_at, b, b_at, count, out, out_at = args
        a_kind, b_kind, out_kind = (signature.args[i] for i in (0, 2, 5))
        a, b = _pointer(context, builder, a_kind, a, a_at), _pointer(context, builder, b_kind, b, b_at)

        def sums_of(some):
            """Lane sums of four rows, which registers hold."""
            rows = [builder.gep(b, [builder.mul(count, _number(j))]) for j in some]

            def more(k, sums):
                one = _load(builder, a_kind.dtype == types.uint16, builder.gep(a, [k]), True)
                for row, total in zip(rows, sums, strict=True):
                    other = _load(builder, b_kind.dtype == types.uint16, builder.gep(row, [k]), True)
                    yield builder.call(_fma(builder, True), [one, other, total])

            return _loop(builder, count, LANES, [ZERO] * 4, more)[1]

        def take(x, y, places):
            return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(places)), places))

        def folded(x, y, low, distance):
            return builder.fadd(take(x, y, low), take(x, y, [i + distance for i in low]))

        twos = []
        for some in ((0, 4, 1, 5), (2, 6, 3, 7)):
            eights = [folded(lanes, lanes, list(range(8)), 8) for lanes in sums_of(some)]
            fours = [folded(*eights[j : j + 2], [*range(4), *range(8, 12)], 4) for j in (0, 2)]
            twos.append(folded(*fours, [0, 1, 8, 9, 4, 5, 12, 13], 2))
        ones = folded(*twos, [0, 2, 8, 10, 4, 6, 12, 14], 1)
        place = _pointer(context, builder, out_kind, out, out_at)
        builder.store(ones, builder.bitcast(place, ones.type.as_pointer()), align=4)
        return context.get_dummy_value()

    n = types.intp
    return types.void(a, n, b, n, n, out, n), codegen


@intrinsic
def row_max(typingctx, a, a_at, count):
    """Largest of count f32 values; -3.4e38 when there are none. A NaN is passed over (it shows in the
    sum)."""

    def codegen(context, builder, signature, args):
        a, a_at, count = args
        kind = signature.args[0]
        a, bf16 = _pointer(context, builder, kind, a, a_at), kind.dtype == types.uint16

        def larger(x, y):
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        low = ir.Constant(VF, [-3.4e38] * LANES)
        done, (lanes,) = _loop(
            builder,
            count,
            LANES,
            [low],
            lambda k, s: [larger(_load(builder, bf16, builder.gep(a, [k]), True), s[0])],
        )
        best = _fold(builder, lanes, larger)
        _, (best,) = _loop(
            builder,
            builder.sub(count, done),
            1,
            [best],
            lambda k, s: [larger(_load(builder, bf16, builder.gep(a, [builder.add(done, k)]), False), s[0])],
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
