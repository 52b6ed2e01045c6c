"""experts_down: the experts' products, weighted and added to the row in router order;
and the weights' own types."""

import numpy as np
import pytest
from minidflash.kernels import oracle_moe

from tests.cases import Blocks, Experts, Make, Matrix, check, grouped, junk, run, slip, stored
from tests.compare import assert_same_bits, real

C = 16
# T, E, U, D, F; F of mxfp4 is rounded up to whole blocks
SHAPES = [
    (1, 4, 2, 96, 512),
    (16, 12, 4, 40, 96),
    (5, 7, 3, 37, 123),
    (33, 3, 1, 13, 40),
    (2, 5, 5, 1, 8),
    (1, 9, 8, 16, 300),
]


def make(ops, rng, T, E, U, D, F, weights="bf16", bias=True, tap_at=None, idle=()):
    """A case; tap_at None: no taps, else their column. Every third row has no place among them."""
    make = Make(rng, ops.activations, weights)
    F = -(-F // 32) * 32 if weights == "mxfp4" else F
    share = rng.dirichlet(np.ones(U), T).astype(np.float32)
    share[list(idle)] = 0
    rows = rng.permutation(T + 2)[:T].astype(np.int32)
    rows[2::3] = -1
    return {
        "h": make.a(T, U, F), "w": make.experts(E, D, F), "bias": make.v(E, D) if bias else None,
        **make.routing(T, E, U, idle), "share": share, "tap_row": None if tap_at is None else rows,
        "tap_at": tap_at or 0, "adds": 1,
        "x": make.a(T, D), "taps": None if tap_at is None else junk(ops, (T + 2, tap_at + D + 5), "A"),
    }  # fmt: skip


def terms_of(case):
    w, h, total = case["w"].real, real(case["h"]), np.abs(real(case["x"])) * case["adds"]
    for t, k in np.argwhere(case["expert"] >= 0):
        e = case["expert"][t, k]
        terms = np.abs(w[e]) @ np.abs(h[t, k]) + (0 if case["bias"] is None else np.abs(case["bias"][e]))
        total[t] += case["share"][t, k] * terms
    return {"x": total}


@pytest.mark.parametrize("T, weights", [(5, "bf16"), (40, "bf16"), (5, "f32"), (5, "mxfp4")])
def test_a_row_may_be_the_sum_alone(ops, rng, T, weights):
    """What was there, NaN even, does not show; inactive rows become 0."""
    case = make(ops, rng, T, 7, 2, 40, 64, weights, idle=[1, 3]) | {"adds": 0}
    case["x"] = junk(ops, case["x"].shape, "A")
    terms = {"x": np.nan_to_num(terms_of(case | {"x": np.zeros_like(case["x"])})["x"])}
    got = check(ops, "experts_down", case, terms, C)
    assert not real(got["x"])[[1, 3]].any()


@pytest.mark.parametrize("weights", ["bf16", "f32", "mxfp4"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("T, E, U, D, F", SHAPES)
def test_matches_oracle(ops, rng, T, E, U, D, F, bias, weights):
    case = make(ops, rng, T, E, U, D, F, weights, bias)
    check(ops, "experts_down", case, terms_of(case), C)


@pytest.mark.parametrize("tap_at", [0, 11])
@pytest.mark.parametrize("T, E, U, D, F", SHAPES)
def test_taps_hold_the_new_rows_and_nothing_else_changes(ops, rng, T, E, U, D, F, tap_at):
    case = make(ops, rng, T, E, U, D, F, tap_at=tap_at, idle=[0] if T > 1 else [])
    got = check(ops, "experts_down", case, terms_of(case), C)
    want = case["taps"].copy()
    for t, row in enumerate(case["tap_row"]):
        if row >= 0 and case["expert"][t, 0] >= 0:
            want[row, tap_at : tap_at + D] = got["x"][t]
    assert_same_bits(got["taps"], want, "taps")
    plain = run(ops, "experts_down", case | {"taps": None, "tap_row": None})
    assert_same_bits(got["x"], plain["x"], "x with and without taps")


@pytest.mark.parametrize("idle", [[0], [8], [1, 2, 5], range(9)], ids=str)
def test_inactive_rows_stay_as_they_are(ops, rng, idle):
    case = make(ops, rng, 9, 6, 2, 24, 40, idle=idle)
    case["h"][list(idle)] = stored(np.nan, ops.activations)
    got = check(ops, "experts_down", case, terms_of(case), C)
    assert_same_bits(got["x"][list(idle)], case["x"][list(idle)], "x")


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 49])
def test_one_expert_may_have_all_rows(ops, rng, rows):
    case = make(ops, rng, rows, 5, 1, 24, 40) | grouped(np.full((rows, 1), 3, np.int32), 5)
    check(ops, "experts_down", case, terms_of(case), C)


@pytest.mark.parametrize("weights", ["bf16", "f32", "mxfp4"])
@pytest.mark.parametrize("T, E, U", [(9, 7, 3), (40, 3, 2)])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_rows_bits_are_its_own(ops, rng, T, E, U, weights):
    """Alone, in company and beside rows of NaN."""
    case = make(ops, rng, T, E, U, 37, 96, weights)
    whole = run(ops, "experts_down", case)["x"]
    mine = [0, 3, T - 1]
    others = np.setdiff1d(np.arange(T), mine)
    spoiled = case | {"h": case["h"].copy(), "x": case["x"].copy()}
    spoiled["h"][others] = spoiled["x"][others] = stored(np.nan, ops.activations)
    assert_same_bits(run(ops, "experts_down", spoiled)["x"][mine], whole[mine], "NaN beside")
    for t in mine:
        one = case | {what: case[what][t : t + 1] for what in ("h", "x", "share")}
        one |= grouped(case["expert"][t : t + 1], E)
        assert_same_bits(run(ops, "experts_down", one)["x"], whole[t : t + 1], f"row {t} alone")


ORDERS = np.int32([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])


def assert_added_in_order(ops, run, expert, weights="f32"):
    """Outputs 2^26, 1, -2^26 and a row of 0: only one order of f32 sums gives what each order of the experts
    gives."""
    (T, U), E, D, F = expert.shape, 3, 17, 32
    values = np.float32([2**26, 1, -(2**26)])
    w = np.zeros((E, D, F), np.float32)
    w[:, :, 0] = values[:, None]
    h = np.zeros((T, U, F), np.float32)
    h[:, :, 0] = 1
    case = {
        "h": stored(h, ops.activations), "w": Experts([Matrix(stored(w.reshape(-1, F), weights))], E),
        "bias": None, **grouped(expert, E), "share": np.ones((T, U), np.float32), "tap_row": None,
        "tap_at": 0, "adds": 1, "x": stored(np.zeros((T, D)), ops.activations), "taps": None,
    }  # fmt: skip
    got = real(run(ops, "experts_down", case)["x"])
    if ops.name == "oracle":
        assert (got == 1).all()
        return
    want = [np.float32(np.float32(a + b) + c) for a, b, c in values[expert]]
    np.testing.assert_array_equal(got, np.repeat(want, D).reshape(T, D))


def test_experts_are_added_in_router_order(ops, rng):
    assert_added_in_order(ops, run, ORDERS)


NIBBLES, SCALES = np.arange(16), np.arange(255)


@pytest.mark.parametrize("column", [0, 1, 30, 31])
def test_mxfp4_is_what_it_says_bit_for_bit(ops, column):
    """All nibbles times all scales, one in each row: x = 0 + 1 * (w h) with one h of 1 is the value
    itself."""
    D = len(NIBBLES) * len(SCALES)
    mixed = np.random.default_rng(0).permutation(D)  # rows of a tile have scales of their own
    nibble, scale = (grid.reshape(-1)[mixed].astype(np.uint8) for grid in np.meshgrid(NIBBLES, SCALES))
    blocks = np.zeros((D, 1, 16), np.uint8)
    blocks[:, 0, column // 2] = nibble << (4 if column % 2 else 0)
    h = np.zeros((1, 1, 32))
    h[..., column] = 1
    case = {
        "h": stored(h, ops.activations), "w": Experts([Blocks(blocks, scale[:, None])], 1), "bias": None,
        **grouped(np.zeros((1, 1), np.int32), 1), "share": np.ones((1, 1), np.float32), "tap_row": None,
        "tap_at": 0, "adds": 1,
        "x": stored(np.zeros((1, D)), ops.activations), "taps": None,
    }  # fmt: skip
    got = run(ops, "experts_down", case)["x"][0]
    values = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    want = values[nibble] * 2.0 ** (scale.astype(int) - 127)
    with np.errstate(over="ignore"):
        assert_same_bits(got, stored(want, ops.activations), "x")


def test_mxfp4_parts_are_stacked_in_the_order_of_the_features(ops, rng):
    """Blocks of one nibble each: feature 2b in the low half of byte b, 2b + 1 in the high half."""
    array = np.zeros((2, 2, 16), np.uint8)
    array[0, 1, 3], array[1, 0, 15] = 0x02, 0xD0
    found = oracle_moe.mxfp4(array, np.array([[127, 128], [126, 127]], np.uint8))
    want = np.zeros((2, 64), np.float32)
    want[0, 32 + 6], want[1, 31] = 2.0, -1.5
    np.testing.assert_array_equal(found, want)
    case = make(ops, rng, 4, 6, 2, 20, 64, "mxfp4")
    (whole,) = case["w"].parts
    cuts = [20, 25, 77]
    parts = [
        Blocks(a, s) for a, s in zip(np.split(whole.array, cuts), np.split(whole.scales, cuts), strict=True)
    ]
    one, many = (run(ops, "experts_down", case | {"w": Experts(p, 6)})["x"] for p in ([whole], parts))
    assert_same_bits(many, one, "x")


def test_sees_wrong_kernels(ops, rng):
    case = make(ops, rng, 5, 6, 3, 77, 96, "mxfp4")
    (part,) = case["w"].parts
    blocks, scales = part.array.reshape(6, 77, 3, 16), part.scales

    def weights(array, scales=scales):
        return {"w": Experts([Blocks(np.ascontiguousarray(array).reshape(-1, 3, 16), scales)], 6)}

    turned = np.ascontiguousarray(case["expert"][:, ::-1])
    wrong = {
        "residual dropped": {"x": np.zeros_like(case["x"])},
        "bias dropped": {"bias": None},
        "bias not weighted": {"bias": case["bias"] * 2},
        "the next expert's bias": {"bias": np.roll(case["bias"], 1, 0)},
        "the next expert's weights": weights(np.roll(blocks, 1, 0)),
        "shares in another order": {"share": np.ascontiguousarray(case["share"][:, ::-1])},
        "experts in another order": {"expert": turned},
        "shares of one": {"share": np.ones_like(case["share"])},
        "last expert dropped": {"share": np.where(np.arange(3) == 2, 0, case["share"]).astype(np.float32)},
        "nibbles swapped": weights(blocks >> 4 | blocks << 4),
        "sign dropped": weights(blocks & 0x77),
        "half is zero": weights(np.where(blocks & 7 == 1, blocks & 0xF8, blocks)),
        "the next block's scale": weights(blocks, np.roll(scales, 1, 1)),
        "bias of 128": weights(blocks, scales - np.uint8(1)),
        "outputs mirrored": weights(blocks[:, ::-1]),
        "rows shifted": {"h": np.roll(case["h"], 1, 0)},
    }
    for what, change in wrong.items():
        assert slip(ops, "experts_down", case, change, terms_of(case), C) > 10, what
