"""experts_up: gate, up and activation of each row's experts."""

import numpy as np
import pytest
from minidflash.kernels import oracle, oracle_moe
from minidflash.kernels.table import CLAMPED, GELU_TANH, SILU

from tests.cases import Experts, Make, Matrix, check, grouped, run, slip, stored
from tests.compare import assert_same_bits, real

C = 16
ACTS = {
    "silu": (SILU, 0.0, 0.0),
    "clamped": (CLAMPED, 1.5, 1.702),
    "gelu": (GELU_TANH, 0.0, 0.0),
}  # act, limit, alpha
# T, E, U, D, F; D of mxfp4 is rounded up to whole blocks
SHAPES = [
    (1, 4, 2, 512, 96),
    (16, 12, 4, 96, 40),
    (5, 7, 3, 123, 37),
    (33, 3, 1, 40, 13),
    (2, 5, 5, 8, 1),
    (1, 9, 8, 300, 16),
]


def make(ops, rng, T, E, U, D, F, weights="bf16", act="silu", bias=True, idle=()):
    make = Make(rng, ops.activations, weights)
    D = -(-D // 32) * 32 if weights == "mxfp4" else D
    kind, limit, alpha = ACTS[act]
    return {
        "u": make.a(T, D), "w": make.experts(E, 2 * F, D), "bias": make.v(E, 2 * F) if bias else None,
        **make.routing(T, E, U, idle), "act": kind, "limit": limit, "alpha": alpha,
    }  # fmt: skip


def products(case):
    """(gate, up, their sum |terms|) of every pair, (T, U, F); those of inactive rows are 0."""
    w, u, expert = case["w"].real, real(case["u"]), case["expert"]
    bias = np.zeros(w.shape[:2]) if case["bias"] is None else case["bias"].astype(np.float64)
    y, terms = np.zeros((2, *expert.shape, w.shape[1]))
    for t, k in np.argwhere(expert >= 0):
        e = expert[t, k]
        y[t, k], terms[t, k] = w[e] @ u[t] + bias[e], np.abs(w[e]) @ np.abs(u[t]) + np.abs(bias[e])
    return *np.split(y, 2, -1), *np.split(terms, 2, -1)


def terms_of(case):
    """As of gate_up: every activation's slope is below 1.2, what the up's half is multiplied by its own
    value."""
    gate, up, gate_terms, up_terms = products(case)
    times = np.abs(up) + (case["act"] == CLAMPED)
    soft = np.abs(np.where(gate > 0, gate, 0.3))  # |silu|, |gelu|, |g sigmoid(alpha g)| are below
    return {"h": 1.2 * gate_terms * times + soft * up_terms + soft * times}


@pytest.mark.parametrize("weights", ["bf16", "f32", "mxfp4"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("T, E, U, D, F", SHAPES)
def test_matches_oracle(ops, rng, T, E, U, D, F, act, weights):
    case = make(ops, rng, T, E, U, D, F, weights, act)
    check(ops, "experts_up", case, terms_of(case), C, F=F)


@pytest.mark.parametrize("weights", ["bf16", "mxfp4"])
def test_no_bias_is_a_bias_of_zero(ops, rng, weights):
    case = make(ops, rng, 5, 7, 3, 96, 37, weights, bias=False)
    none = check(ops, "experts_up", case, terms_of(case), C, F=37)
    zero = run(ops, "experts_up", case | {"bias": np.zeros((7, 74), np.float32)}, F=37)
    assert_same_bits(none["h"], zero["h"], "h")


@pytest.mark.parametrize("idle", [[0], [8], [1, 2, 5], range(9)], ids=str)
def test_inactive_rows_are_zero(ops, rng, idle):
    case = make(ops, rng, 9, 6, 2, 40, 24, idle=idle)
    case["u"][list(idle)] = stored(np.nan, ops.activations)
    with np.errstate(invalid="ignore"):
        got = check(ops, "experts_up", case, terms_of(case), C, F=24)
    assert not real(got["h"][list(idle)]).any()


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 49])
def test_one_expert_may_have_all_rows(ops, rng, rows):
    case = make(ops, rng, rows, 5, 1, 40, 24) | grouped(np.full((rows, 1), 3, np.int32), 5)
    check(ops, "experts_up", case, terms_of(case), C, F=24)


@pytest.mark.parametrize("weights", ["bf16", "f32"])
def test_parts_may_be_cut_anywhere(ops, rng, weights):
    """As checkpoints have them: a gate and an up of each expert; or several experts in one."""
    case = make(ops, rng, 4, 6, 2, 40, 13, weights)
    whole = run(ops, "experts_up", case, F=13)
    rows = case["w"].parts[0].array
    for cuts in (range(13, 6 * 26, 13), [26, 78, 79]):
        parts = [Matrix(np.ascontiguousarray(part)) for part in np.split(rows, list(cuts))]
        got = run(ops, "experts_up", case | {"w": Experts(parts, 6)}, F=13)
        assert_same_bits(got["h"], whole["h"], "h")


def wide(ops):
    """f32, but where Numba would compile the pair of types for nothing else (conftest.py)."""
    return "bf16" if (ops.name, ops.activations) == ("numba", "bf16") else "f32"


@pytest.mark.parametrize("act", ACTS)
def test_large_gates_saturate(ops, rng, act):
    """Gates of +-hundreds: the exponential must neither overflow into NaN nor lose the sign."""
    case = make(ops, rng, 3, 4, 2, 40, 24, wide(ops), act)
    case["u"] = stored(300 * real(case["u"]), ops.activations)
    with np.errstate(over="ignore"):
        got = check(ops, "experts_up", case, terms_of(case), C, F=24)
    assert np.isfinite(real(got["h"])).all()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_stays_nan(ops, rng, act):
    """What is clamped too: a row that is not finite must show at the head."""
    case = make(ops, rng, 3, 4, 2, 40, 24, wide(ops), act)
    case["u"][1] = stored(np.nan, ops.activations)
    got = real(run(ops, "experts_up", case, F=24)["h"])
    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()
    case = make(ops, rng, 3, 4, 2, 40, 24, wide(ops), act)
    case["bias"][:, [3, 24 + 7]] = np.nan  # of a gate, of an up
    got = np.isnan(real(run(ops, "experts_up", case, F=24)["h"]))
    assert got[..., [3, 7]].all() and got.sum() == 3 * 2 * 2


@pytest.mark.parametrize("weights", ["bf16", "f32", "mxfp4"])
@pytest.mark.parametrize("T, E, U", [(9, 7, 3), (40, 3, 2)])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_rows_bits_are_its_own(ops, rng, T, E, U, weights):
    """Alone, in company, beside rows of NaN, and whichever of its experts comes first."""
    case = make(ops, rng, T, E, U, 96, 37, weights, "clamped")
    whole = run(ops, "experts_up", case, F=37)["h"]
    mine = [0, 3, T - 1]
    spoiled = case | {"u": case["u"].copy()}
    spoiled["u"][np.setdiff1d(np.arange(T), mine)] = stored(np.nan, ops.activations)
    assert_same_bits(run(ops, "experts_up", spoiled, F=37)["h"][mine], whole[mine], "NaN beside")
    turned = case | grouped(np.ascontiguousarray(case["expert"][:, ::-1]), E)
    assert_same_bits(
        np.ascontiguousarray(run(ops, "experts_up", turned, F=37)["h"][:, ::-1]), whole, "turned"
    )
    for t in mine:
        one = case | {"u": case["u"][t : t + 1]} | grouped(case["expert"][t : t + 1], E)
        assert_same_bits(run(ops, "experts_up", one, F=37)["h"], whole[t : t + 1], f"row {t} alone")


def test_sees_wrong_kernels(ops, rng):
    case = make(ops, rng, 5, 6, 3, 123, 77, act="clamped")
    rows = case["w"].parts[0].array.reshape(6, 2, 77, 123)

    def weights(array):
        return {"w": Experts([Matrix(np.ascontiguousarray(array).reshape(-1, 123))], 6)}

    wrong = {
        "gate and up swapped": weights(rows[:, ::-1]),
        "interleaved": weights(rows.swapaxes(1, 2)),
        "the next expert's weights": weights(np.roll(rows, 1, 0)),
        "the next expert's bias": {"bias": np.roll(case["bias"], 1, 0)},
        "bias dropped": {"bias": None},
        "last input dropped": {"u": np.where(np.arange(123) == 122, 0, case["u"]).astype(case["u"].dtype)},
        "rows shifted": {"u": np.roll(case["u"], 1, 0)},
        "experts in another order": {"expert": np.ascontiguousarray(case["expert"][:, ::-1])},
        "no limit": {"limit": 1e30}, "no alpha": {"alpha": 1.0}, "silu": {"act": SILU},
        "gate clamped below": planted(lambda g, u: (np.clip(g, -1.5, 1.5), np.clip(u, -1.5, 1.5))),
        "up not clamped below": planted(lambda g, u: (np.minimum(g, 1.5), np.minimum(u, 1.5))),
        "limit before the bias": planted(None),
    }  # fmt: skip
    for what, change in wrong.items():
        assert slip(ops, "experts_up", case, change, terms_of(case), C) > 10, what
    other = case | {"act": GELU_TANH}
    assert slip(ops, "experts_up", other, {"act": SILU}, terms_of(other), C) > 10


def planted(clamp):
    """A wrong kernel: gate and up of the clamped activation go through `clamp`;
    None: before the bias is added."""

    def function(u, w, bias, expert, first, order, act, limit, alpha, work):
        h = np.zeros((*expert.shape, w.rows // 2))
        for t, k in np.argwhere(expert >= 0):
            e = expert[t, k]
            y = oracle.matrix(w)[e] @ u[t]
            if clamp is None:
                gate, up = np.split(np.clip(y, -limit, limit) + bias[e], 2)
            else:
                gate, up = clamp(*np.split(y + bias[e], 2))
            h[t, k] = (up + 1) * gate / (1 + np.exp(-alpha * gate))
        return h

    return function


def test_the_activations_are_those_of_the_models():
    """gpt-oss and Gemma, worked out by hand."""
    y = np.array([9.0, -1.0, 8.0, -9.0])
    np.testing.assert_allclose(
        oracle_moe.activate(y, CLAMPED, 7.0, 1.702),
        [8 * 7 / (1 + np.exp(-1.702 * 7)), -6 * -1 / (1 + np.exp(1.702))],
    )
    np.testing.assert_allclose(oracle_moe.activate(y, SILU, 0, 0), [72 / (1 + np.exp(-9)), 9 / (1 + np.e)])
    np.testing.assert_allclose(oracle.gelu_tanh(np.array([1.0, -1.0])), [0.8411919906, -0.1588080094])
