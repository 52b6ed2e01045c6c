"""Numba's experts: bits whatever the threads, weights as small as in the file, both ways to widen MXFP4."""

import numba
import numpy as np
import pytest
from llvmlite import ir
from minidflash.kernels.cpu import experts, lanes, vector
from minidflash.kernels.table import CLAMPED
from minidflash.kernels.weight import E2M1, EXPERT_PAIRS, EXPERTS
from numba import types
from numba.extending import intrinsic

from tests.cases import Make, Matrix, run
from tests.compare import assert_same_bits
from tests.conftest import FULL, open_or_skip

T, E, U, D, F = 19, 7, 3, 96, 64


def cases(activations, weights):
    """Row -> (a case, sizes that no argument shows)."""
    rng = np.random.default_rng(1)
    make = Make(rng, activations, weights)
    routing, pos = make.routing(T, E, U, [4]), np.arange(T, dtype=np.int32)
    pos[4] = -1
    up = {
        "w": make.experts(E, 2 * F, D),
        "bias": make.v(E, 2 * F),
        "act": CLAMPED,
        "limit": 1.5,
        "alpha": 1.702,
    }
    down = {
        "w": make.experts(E, D, F),
        "bias": make.v(E, D),
        "tap_row": np.arange(T, dtype=np.int32),
        "tap_at": 3,
        "adds": 1,
    }
    share = rng.dirichlet(np.ones(U), T).astype(np.float32)
    router = Make(rng, activations).w(E, D)
    return {
        "route": ({"x": make.a(T, D), "norm": make.v(D, around=1), "eps": 1e-6, "w": router, "bias": None,
                   "normalise": 1, "pos": pos, "touched": np.zeros(1, np.int32)}, {"U": U}),
        "experts_up": ({"u": make.a(T, D), **up, **routing}, {"F": F}),
        "experts_down": ({"h": make.a(T, U, F), **down, **routing, "share": share, "x": make.a(T, D),
                          "taps": np.zeros_like(make.a(T, D + 5))}, {}),
    }  # fmt: skip


PAIRS = [("f32", "bf16"), ("bf16", "mxfp4")]  # activations, weights
PAIRS += [("bf16", "bf16"), ("f32", "mxfp4")] if FULL else []


@pytest.mark.parametrize("activations, weights", PAIRS)
def test_bits_do_not_depend_on_the_threads(activations, weights):
    """Also where there are more threads than tiles."""
    for name, (case, sizes) in cases(activations, weights).items():
        one, *others = (
            run(open_or_skip("numba", activations, threads=threads), name, case, **sizes)
            for threads in (1, 2, 3, 11)
        )
        for other in others:
            for what, value in one.items():
                assert_same_bits(other[what], value, f"{name}: {what}")


@pytest.mark.parametrize("weights", ["bf16", "f32", "mxfp4"])
@pytest.mark.parametrize("role", [EXPERTS, EXPERT_PAIRS])
def test_weights_take_what_their_type_takes(rng, role, weights):
    ops, theirs = open_or_skip("numba", "f32"), Make(rng, "f32", weights).experts(5, 64, 96)
    weight = ops.weight(theirs.parts, role, 5)
    assert weight.dtype == weights and weight.shape == (5, 64, 96)
    assert sum(part.nbytes for part in weight.parts) == weight.nbytes


def test_parts_of_two_types_are_kept_as_f32(rng):
    ops, rows = open_or_skip("numba", "f32"), rng.standard_normal((10, 8)).astype(np.float32)
    half = Matrix((rows[:7].view(np.uint32) >> 16).astype(np.uint16))
    weight = ops.weight([half, Matrix(rows[7:])], EXPERTS, 2)
    assert weight.dtype == "f32"
    packed = weight.data[:, 0, :, :5].swapaxes(1, 2).reshape(10, 8)
    np.testing.assert_array_equal(packed, np.concatenate([half.real, rows[7:]]))


def test_gate_and_up_tiles_take_turns():
    """Two experts of 20 + 20 rows, cut within a tile: row r of expert e has the value 100 e + r."""
    rows = np.repeat(100 * np.arange(2), 40) + np.tile(np.arange(40), 2)
    out = np.zeros((2, 4, 3, 16), np.float32)
    for first, part in ((0, rows[:27]), (27, rows[27:])):
        experts.pack(np.repeat(np.float32(part)[:, None], 3, 1), first, 40, True, out[:, :, :, None])
    for e in range(2):
        halves = out[e].reshape(2, 2, 3, 16).swapaxes(0, 1).swapaxes(1, 2).reshape(2, 3, 32)
        for half, first in zip(halves, (0, 20), strict=True):
            assert (half[:, :20] == 100 * e + first + np.arange(20)).all() and not half[:, 20:].any()


def make_widen(is_wide):
    """What multiplies 16 words' nibbles by 16 scales, without a sum: out[feature][lane]."""

    @intrinsic
    def widen(typingctx, words, scales, out):
        def codegen(context, builder, signature, args):
            words, scales, out = (
                vector._pointer(context, builder, kind, array, ir.Constant(vector.I64, 0))
                for kind, array in zip(signature.args, args, strict=True)
            )
            fp4 = lanes.Fp4(is_wide)
            scale = fp4.scale(builder, builder.load(builder.bitcast(scales, vector.VB.as_pointer()), align=1))
            word = builder.load(builder.bitcast(words, vector.VI.as_pointer()), align=4)
            for feature in range(fp4.in_word):
                value = builder.fmul(fp4.nibble(builder, word, feature), scale)
                place = builder.gep(out, [ir.Constant(vector.I64, feature * vector.LANES)])
                builder.store(value, builder.bitcast(place, vector.VF.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(words, scales, out), codegen

    return numba.njit(lambda words, scales, out: widen(words, scales, out))


@pytest.mark.parametrize("is_wide", [False, True])
def test_nibbles_are_widened_with_and_without_avx512(rng, is_wide):
    widen = make_widen(is_wide)
    nibbles = np.stack([rng.permutation(16) for _ in range(8)], 1).astype(np.uint32)  # lane, feature
    words = (nibbles << np.arange(0, 32, 4, dtype=np.uint32)).sum(1, dtype=np.uint32)
    out = np.empty((8, 16), np.float32)
    for first in (*range(0, 240, 16), 239):
        scales = np.arange(first, first + 16, dtype=np.uint8)
        widen(words, scales, out)
        with np.errstate(over="ignore"):
            want = np.ldexp(np.float32(E2M1)[nibbles].T, scales.astype(np.int32) - 127)
        assert_same_bits(out, want, f"scales from {first} on")
