"""sample: the filtered law of the first `limit` ids, drawn by a number that belongs to the position."""

import numpy as np
import pytest
from minidflash.kernels import oracle

from tests.cases import JUNK, Make, Matrix, run, truth
from tests.chance import filtered, surprise
from tests.conftest import FULL, parameters
from tests.fast_rows import fast_run

EPS = 1e-6
BARE = {"multiplier": 1.0, "cap": 0.0}
CURVES = [(0.375, 9.0), (2.5, 0.0), (1.0, 4.0), (3.0, 0.5), (0.7, 1e30)]  # multiplier, cap
FILTERS = [{}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.9}, {"top_p": 1e-4}, {"min_p": 0.2}, {"min_p": 1.0},
           {"top_k": 20, "top_p": 0.8}, {"top_k": 5000, "top_p": 0.999, "min_p": 0.01}]  # fmt: skip

# Draws from given logits: what comes in does not show in the law, so one type of activations is enough on
# slow backends.
on_exact_logits = pytest.mark.parametrize(
    "ops",
    [p for p in parameters() if FULL or p.values[0] not in (("oracle", "bf16"), ("emulate", "bf16"))],
    indirect=True,
)


TEMPERATURES = 0.3, 1.0, 1.7


def on_exact_laws(laws):
    """(ops, temperature, law): on the slow backends each law at one temperature by turns, where
    MINIDFLASH_FULL=1 does not ask for all; test_matches_oracle and test_both_match_the_oracle pair them."""
    return pytest.mark.parametrize(
        "ops, temperature, law",
        [
            pytest.param(p.values[0], temperature, law, id=f"{temperature}-{law}-{p.id}", marks=p.marks)
            for t, temperature in enumerate(TEMPERATURES)
            for i, law in enumerate(laws)
            for p in on_exact_logits.args[1]
            if FULL or p.values[0][0] not in ("oracle", "emulate") or i % len(TEMPERATURES) == t
        ],
        indirect=["ops"],
    )


def ask(case, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, number=0):
    """The case with this law in both slots; the second slot is another sample."""
    words = [seed & 0xFFFFFFFF, seed >> 32]
    key = np.array([[*words, number, top_k], [*words, number + 1, top_k]], np.uint32).view(np.int32)
    return case | {"key": key, "law": np.array([[temperature, top_p, min_p]] * 2, np.float32)}


def make(ops, rng, T, D, V, pick=None, **law):
    make = Make(rng, ops.activations)
    case = {
        "x": make.a(T, D), "pick": np.arange(T, dtype=np.int32) if pick is None else np.array(pick, np.int32),
        "slot": rng.integers(0, 2, T).astype(np.int32), "pos": rng.integers(0, 900, T).astype(np.int32),
        "norm": make.v(D, around=1), "eps": EPS, "w": make.w(V, D), "limit": V, **BARE,
        "ids": np.full(T, JUNK["i32"], np.int32), "logprob": np.full((T, 2), 7, np.float32),
    }  # fmt: skip
    return ask(case, **law)


def exactly(ops, logits):
    """A head whose rows sum to these numbers: themselves, or, for which Numba compiles nothing more, three
    bf16 numbers each, whose f32 sum in this order is exact."""
    rest, parts = np.array(logits, np.float32).reshape(-1, 1), []
    if FULL or ops.name != "numba":
        return rest
    for _ in range(3):
        bits = rest.view(np.uint32) >> 16
        parts.append(bits.astype(np.uint16))
        high = (bits << 16).view(np.float32)
        rest = np.where(np.isfinite(high), rest - np.where(np.isfinite(high), high, 0), np.float32(0))
    return np.concatenate(parts, 1)


def of_logits(ops, logits, T=1, **law):
    """A case whose T rows, at positions 0 .. T-1 of slot 0, all have exactly these logits."""
    w = exactly(ops, logits)
    cols = w.shape[1]
    case = {
        "x": np.ones((T, cols), np.float32), "pick": np.arange(T, dtype=np.int32),
        "slot": np.zeros(T, np.int32), "pos": np.arange(T, dtype=np.int32),
        "norm": np.ones(cols, np.float32), "eps": 0.0, "w": Matrix(w), "limit": len(logits), **BARE,
        "ids": np.full(T, JUNK["i32"], np.int32), "logprob": np.zeros((T, 2), np.float32),
    }  # fmt: skip
    if ops.activations == "bf16":
        case["x"] = np.full((T, cols), 0x3F80, np.uint16)
    return ask(case, **law)


def bent(case, curve):
    """The case with this multiplier and cap."""
    return case | dict(zip(BARE, curve, strict=True))


def agree(got, want, what):
    assert got["ids"].tolist() == want["ids"].tolist(), what
    np.testing.assert_allclose(got["logprob"], want["logprob"], rtol=2e-5, atol=2e-5, err_msg=str(what))


def test_philox_gives_the_published_numbers():
    assert oracle.philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert oracle.philox((ones, ones), (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("law", FILTERS, ids=str)
@pytest.mark.parametrize("T, D, V", [(5, 64, 700), (17, 40, 77), (1, 24, 5003), (3, 8, 1)])
def test_matches_oracle(ops, rng, T, D, V, law):
    for temperature in (0.3, 1.0, 1.7, 50.0):
        case = make(ops, rng, T, D, V, temperature=temperature, **law)
        agree(run(ops, "sample", case), truth("sample", case), (temperature, law))


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_laws_of_capped_logits_match_oracle(ops, rng, curve):
    for law, temperature in zip(FILTERS, (1.0, 0.3, 1.7, 0.5, 1.0, 0.3, 1.0, 1.7, 0.7), strict=True):
        if law.get("min_p") == 1:  # many are as likely as the likeliest, but for rounding
            continue
        case = bent(make(ops, rng, 5, 40, 300, temperature=temperature, **law), curve)
        agree(run(ops, "sample", case), truth("sample", case), law)


@on_exact_logits
@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_log_probabilities_are_of_the_capped_logits(ops, curve):
    logits = np.random.default_rng(4).standard_normal(40)
    got = run(ops, "sample", bent(of_logits(ops, logits, 64, temperature=0.6, top_k=12), curve))
    z = logits.astype(np.float32).astype(np.float64) * curve[0]
    z = curve[1] * np.tanh(z / curve[1]) if curve[1] else z
    for column, want in enumerate((filtered(z, 0.6, top_k=12), filtered(z))):
        np.testing.assert_allclose(got["logprob"][:, column], np.log(want[got["ids"]]), rtol=1e-4, atol=1e-4)
    assert len(set(got["ids"].tolist())) > 3


def test_ids_whose_capped_logits_are_equal_are_ranked_by_the_bare_ones(ops):
    """tanh of all of these is 1 in f32; greedy text takes the largest, as head does."""
    logits = [300.0, 310.0, 305.0, 310.0, 200.0, 309.0]
    for law, allowed in (({"temperature": 0.0}, {1}), ({"top_k": 1}, {1}), ({"top_k": 3}, {1, 3, 5}),
                         ({"top_k": 5}, {0, 1, 2, 3, 5}), ({"top_p": 0.4}, {1, 3, 5})):  # fmt: skip
        got = run(ops, "sample", bent(of_logits(ops, logits, 100, **law), (1.0, 2.0)))
        assert set(got["ids"].tolist()) == allowed, law
    even = run(ops, "sample", bent(of_logits(ops, logits, 100), (1.0, 2.0)))
    np.testing.assert_allclose(even["logprob"], -np.log(6), rtol=1e-5)


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 3e38])
@pytest.mark.parametrize("curve", [(1e30, 1e-30), (1e-30, 1e30), (3e38, 0.0), (1e-38, 3e38)], ids=str)
def test_extreme_curves_give_no_nan(ops, curve, temperature):
    for values in ([1e38, -1e38, 0, 1e-40, -1e-40, 2.5, 2.5], [0.0] * 9, [-5.0, -5.0, -3e38]):
        for law in ({"top_p": 0.9}, {"top_k": 2}):
            got = run(ops, "sample", bent(of_logits(ops, values, 8, temperature=temperature, **law), curve))
            assert np.isfinite(got["logprob"][:, 0]).all() and not np.isnan(got["logprob"]).any()
            assert 0 <= got["ids"].min() <= got["ids"].max() < len(values)


@pytest.mark.parametrize("name, value", [("multiplier", 0.0), ("multiplier", -1.0), ("multiplier", np.nan),
                                         ("cap", -1.0), ("cap", np.inf)])  # fmt: skip
def test_a_curve_that_does_not_rise_is_refused(ops, name, value):
    with pytest.raises(ValueError, match=f"sample: {name} is {value}, needed one of the finite numbers"):
        run(ops, "sample", of_logits(ops, [1.0, 2.0]) | {name: value})


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 9e-6])
def test_temperatures_near_zero_name_what_head_names(ops, rng, temperature):
    case = make(ops, rng, 6, 40, 300, temperature=temperature, top_k=3, top_p=0.5)
    want = run(ops, "head", {name: case[name] for name in ("x", "pick", "norm", "eps", "w", "limit", "ids")})
    got = run(ops, "sample", case)
    assert got["ids"].tolist() == want["ids"].tolist()
    assert (got["logprob"][:, 0] == 0).all() and (got["logprob"][:, 1] < 0).all()


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 50.0, 1e30, 3e38])
@pytest.mark.parametrize("law", FILTERS, ids=str)
def test_extreme_temperatures_and_logits_give_no_nan(ops, temperature, law):
    logits = [1e38, -1e38, 0, 1e-40, -1e-40, 2.5, 2.5]
    for values in (logits, [0.0] * 9, [-5.0, -5.0, -3e38]):
        case = of_logits(ops, values, 8, temperature=temperature, **law)
        got = run(ops, "sample", case)
        agree(got, truth("sample", case), values)
        assert np.isfinite(got["logprob"][:, 0]).all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("values", [[np.nan, 1.0, 2.0], [3.0, np.inf], [-np.inf, 4.0], [1.0] * 16 + [np.nan]])
def test_a_logit_that_is_not_finite_gives_no_id(ops, values, temperature):
    case = of_logits(ops, values, 3, temperature=temperature, top_p=0.9)
    case["x"][1] = 0  # the other rows are broken all the same
    got = run(ops, "sample", case)
    assert got["ids"].tolist() == [-1] * 3 and (got["logprob"] == -np.inf).all()
    last = run(ops, "sample", of_logits(ops, [0.5, *values[::-1]], 1) | {"limit": 1})
    assert last["ids"].tolist() == [0], "ids from the limit on do not count"


@pytest.mark.parametrize("pick", [[0], [4, 1], [3, 0, 2], []])
def test_only_picked_and_active_rows_are_written(ops, rng, pick):
    case = make(ops, rng, 6, 40, 61, pick=pick)
    case["pos"][1] = -1
    got, want = run(ops, "sample", case), truth("sample", case)
    agree(got, want, pick)
    idle = sorted(set(range(6)) - set(pick) | {1})
    assert (got["ids"][idle] == JUNK["i32"]).all() and (got["logprob"][idle] == 7).all()


def test_log_probabilities_may_be_left_out_and_ids_stay(ops, rng):
    case = make(ops, rng, 5, 40, 61, temperature=0.7, top_p=0.9)
    want = run(ops, "sample", case)["ids"]
    assert run(ops, "sample", case | {"logprob": None})["ids"].tolist() == want.tolist()


@pytest.mark.parametrize("limit", [1, 15, 16, 17, 60])
def test_ids_from_the_limit_on_are_never_drawn(ops, limit):
    case = of_logits(ops, [0.0] * limit + [30.0] * (61 - limit), 64) | {"limit": limit}
    got = run(ops, "sample", case)
    assert got["ids"].max() < limit
    np.testing.assert_allclose(got["logprob"], -np.log(limit), rtol=1e-5, atol=1e-6)


def test_ties_at_a_filters_edge_go_to_the_smallest_ids(ops):
    logits = [1.0, 2.0, 1.0, 2.0, 1.0, -0.0, 0.0, 1.0]
    for law, allowed in (({"top_k": 1}, {1}), ({"top_k": 3}, {0, 1, 3}), ({"top_k": 4}, {0, 1, 2, 3}),
                         ({"top_k": 7}, {0, 1, 2, 3, 4, 5, 7}), ({"top_p": 0.4}, {1, 3}),
                         ({"top_p": 0.6}, {0, 1, 3}), ({"min_p": 1.0}, {1, 3})):  # fmt: skip
        got = run(ops, "sample", of_logits(ops, logits, 200, **law))["ids"]
        assert set(got.tolist()) == allowed, law


@on_exact_logits
@pytest.mark.parametrize("top_k, top_p", [(1, 1.0), (300, 1.0), (0, 0.5), (700, 0.25)])
def test_many_equal_logits_are_cut_by_id(ops, top_k, top_p):
    got = run(ops, "sample", of_logits(ops, [1.5] * 5000, 40, top_k=top_k, top_p=top_p))
    kept = (top_k or 5000) * top_p
    assert got["ids"].max() < kept
    np.testing.assert_allclose(got["logprob"][:, 0], -np.log(kept), rtol=1e-5, atol=1e-6)


@on_exact_laws(FILTERS)
def test_the_law_is_the_filtered_one(ops, temperature, law):
    logits = np.random.default_rng(4).standard_normal(40) * 2
    counts, count = np.zeros(40), 2 if ops.name in ("oracle", "emulate") else 8
    for seed in range(count):
        got = run(ops, "sample", of_logits(ops, logits, 256, temperature=temperature, seed=seed, **law))
        counts += np.bincount(got["ids"], minlength=40)
    want = filtered(logits, temperature, **law)
    assert surprise(counts, want) < 4.5
    np.testing.assert_allclose(got["logprob"][:, 0], np.log(want[got["ids"]]), rtol=1e-4, atol=1e-5)
    raw = filtered(logits)[got["ids"]]
    np.testing.assert_allclose(got["logprob"][:, 1], np.log(raw), rtol=1e-4, atol=1e-5)


def test_a_wrong_law_is_seen():
    """The statistic of the test above on draws from laws that are a little off."""
    rng, logits = np.random.default_rng(1), np.random.default_rng(4).standard_normal(40) * 2
    right = filtered(logits, 1.0)
    assert surprise(rng.multinomial(2048, right), right) < 4.5
    for wrong in (filtered(logits, 1.3), filtered(logits, 1.0, top_p=0.9), filtered(logits, 1.0, top_k=12)):
        assert surprise(rng.multinomial(2048, wrong), right) > 6
    assert surprise(rng.multinomial(2048, right), filtered(logits, top_k=20)) == np.inf


@on_exact_logits
def test_a_draw_belongs_to_seed_sample_and_position(ops):
    logits = np.zeros(5000)
    first = run(ops, "sample", of_logits(ops, logits, 64))["ids"]
    assert run(ops, "sample", of_logits(ops, logits, 64))["ids"].tolist() == first.tolist()
    assert len(set(first.tolist())) > 55
    for other in ({"seed": 6}, {"seed": 5 + 2**32}, {"number": 1}):
        ids = run(ops, "sample", of_logits(ops, logits, 64, **other))["ids"]
        assert (ids == first).mean() < 0.1, other
    slots = of_logits(ops, logits, 64) | {"slot": np.ones(64, np.int32)}
    assert (
        run(ops, "sample", slots)["ids"].tolist()
        == run(ops, "sample", of_logits(ops, logits, 64, number=1))["ids"].tolist()
    )
    shifted = of_logits(ops, logits, 64)
    shifted["pos"] += 7
    assert run(ops, "sample", shifted)["ids"][:-7].tolist() == first[7:].tolist()


@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
@pytest.mark.parametrize("T", [1, 5, 33])
def test_the_fast_variant_draws_from_its_own_logits(ops, rng, T):
    case = make(ops, rng, T, 64, 700, temperature=0.9, top_k=300, top_p=0.95)
    curve = (0.5, 2.0) if T == 5 else tuple(BARE.values())
    got = fast_run(ops, "sample", bent(case, curve))
    logits = fast_run(ops, "head_logits", {name: case[name] for name in ("x", "norm", "eps", "w", *BARE)})[
        "logits"
    ]
    for t in range(T):
        exact = of_logits(
            ops, logits[t], 1, temperature=0.9, top_k=300, top_p=0.95, number=int(case["slot"][t])
        )
        exact["pos"][:] = case["pos"][t]
        want = truth("sample", bent(exact, curve))
        agree({k: v[t : t + 1] for k, v in got.items() if k != "work"}, want, t)
