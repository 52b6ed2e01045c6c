"""qkv: norm, projections, head norms, rotation, append to the caches at each row's own address."""

import numpy as np
import pytest
from minidflash.kernels import oracle

from tests.cases import (
    Make,
    Matrix,
    check,
    dot_terms,
    junk,
    norm_terms,
    normed,
    rope_terms,
    run,
    slip,
    stored,
    truth,
)
from tests.compare import assert_same_bits, real

C = 16
EPS = 1e-6
N, S = 3, 29  # slots, cached rows
# T, D, H, G, K, J: SmolLM2, Qwen3-0.6B, then awkward ones: G 5/1, K = 80, a head rotated in part,
# rows past 16
SHAPES = [(1, 576, 9, 3, 64, 32), (16, 512, 8, 4, 128, 64), (5, 123, 5, 1, 24, 12), (17, 40, 3, 3, 80, 40),
          (3, 37, 4, 2, 24, 5), (64, 48, 2, 1, 16, 8)]  # fmt: skip


def make(ops, rng, shape, weights="bf16", norms=False, bias=False):
    """A case: every row has a cache cell of its own; the third of five rows is inactive and holds NaN."""
    T, D, H, G, K, J = shape
    make = Make(rng, ops.activations, weights)
    cells = rng.permutation(N * S)[:T]
    slot, pos = (cells // S).astype(np.int32), (cells % S).astype(np.int32)
    x = make.a(T, D)
    x[2::5] = stored(np.nan, ops.activations)
    pos[2::5] = -1
    cos, sin = make.tables(S, J)
    return {
        "x": x, "norm": make.v(D, around=1), "eps": EPS, "wq": make.w(H * K, D), "wkv": make.w(2 * G * K, D),
        "q_bias": make.v(H * K) if bias else None, "kv_bias": make.v(2 * G * K) if bias else None,
        "q_norm": make.v(K, around=1) if norms else None, "k_norm": make.v(K, around=1) if norms else None,
        "cos": cos, "sin": sin, "slot": slot, "pos": pos,
        "cache_k": junk(ops, (N, G, S, K), "A"), "cache_v": junk(ops, (N, G, S, K), "A"),
    }  # fmt: skip


def terms_of(case):
    """Of q and of both caches; zero where nothing is written."""
    is_active = case["pos"] >= 0
    G, K = case["cache_k"].shape[1], case["cache_k"].shape[3]
    pos, slot = case["pos"][is_active], case["slot"][is_active]
    x = normed(case["x"][is_active], case["norm"], EPS)
    cos, sin = (real(case[name])[pos][:, None] for name in ("cos", "sin"))

    def heads(w, bias, norm):
        y = x @ w.real.T + (0 if bias is None else bias)
        y, terms = y.reshape(len(x), -1, K), dot_terms(x, w, bias).reshape(len(x), -1, K)
        return terms if norm is None else norm_terms(y, terms, norm, EPS)

    terms = {"q": np.zeros((len(case["x"]), case["wq"].shape[0] // K, K))}
    terms["q"][is_active] = rope_terms(heads(case["wq"], case["q_bias"], case["q_norm"]), cos, sin)
    kv_bias, parts = case["kv_bias"], case["wkv"].shape[0] // (G * K)
    k, v = (
        heads(
            Matrix(np.split(case["wkv"].real.astype(np.float32), parts)[i % parts]),
            None if kv_bias is None else kv_bias.reshape(parts, -1)[i % parts], norm,
        )
        for i, norm in enumerate((case["k_norm"], case.get("v_norm")))
    )  # fmt: skip
    for name, value in (("cache_k", rope_terms(k, cos, sin)), ("cache_v", v)):
        terms[name] = np.zeros((N, G, S, K))
        terms[name][slot, :, pos] = value
    return terms


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize("norms, bias", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_oracle(ops, rng, shape, norms, bias, weights):
    case = make(ops, rng, shape, weights, norms, bias)
    got = check(ops, "qkv", case, terms_of(case), C, H=shape[2])
    is_active = case["pos"] >= 0
    assert (got["q"][~is_active] == 0).all(), "inactive rows give zeros"
    for name in ("cache_k", "cache_v"):
        written = np.zeros(case[name].shape, bool)
        written[case["slot"][is_active], :, case["pos"][is_active]] = True
        assert_same_bits(got[name][~written], case[name][~written], f"{name}: rows of others")
        assert not np.isnan(real(got[name][written])).any()


@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_without_a_norm_rows_are_as_they_are(ops, rng, shape):
    """eps is the head norms' alone then."""
    case = make(ops, rng, shape, "bf16", True, True) | {"norm": None}
    check(ops, "qkv", case, terms_of(case), C, H=shape[2])
    assert slip(ops, "qkv", case, {"norm": np.ones(shape[1], np.float32)}, terms_of(case), C) > 10


GEMMA = [(5, 64, 4, 2, 16, 8), (17, 48, 6, 1, 32, 16), (3, 40, 2, 1, 256, 128), (9, 72, 2, 1, 512, 256)]


@pytest.mark.parametrize("shares, bias", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", GEMMA, ids=str)
def test_values_are_normed_and_may_be_the_raw_keys(ops, rng, shape, shares, bias):
    """models.md 5: without rows of their own, values are what the keys are before norm and rotation."""
    _, D, H, G, K, _ = shape
    case = make(ops, rng, shape, "bf16", True, bias) | {"v_norm": 1 + 0.1 * np.arange(K, dtype=np.float32)}
    if shares:
        case["wkv"] = Make(rng, ops.activations, "bf16").w(G * K, D)
        case["kv_bias"] = case["kv_bias"][: G * K] if bias else None
    terms = terms_of(case)
    check(ops, "qkv", case, terms, C, H=H)
    wrong = {"v norm dropped": {"v_norm": None}, "v norm's scale": {"v_norm": np.ones(K, np.float32)}}
    if shares:
        other = Matrix(np.concatenate([case["wkv"].array, case["wkv"].array[::-1]]))
        double = {"kv_bias": np.tile(case["kv_bias"], 2)} if bias else {}
        wrong["values of their own"] = {"wkv": other} | double
    for what, change in wrong.items():
        assert slip(ops, "qkv", case, change, terms, C, H=H) > 10, what


def test_position_0_is_not_rotated(ops, rng):
    case = make(ops, rng, (1, 40, 3, 1, 16, 8)) | {"pos": np.zeros(1, np.int32)}
    turned = run(ops, "qkv", case, H=3)
    still = run(
        ops, "qkv", case | {"cos": np.ones((S, 8), np.float32), "sin": np.zeros((S, 8), np.float32)}, H=3
    )
    assert_same_bits(turned["q"], still["q"])
    assert_same_bits(turned["cache_k"], still["cache_k"])


@pytest.mark.parametrize("norms", [False, True])
def test_sees_wrong_kernels(ops, rng, norms):
    case = make(ops, rng, (5, 123, 6, 2, 24, 12), norms=norms, bias=True)
    terms = terms_of(case)
    ones = np.ones(24, np.float32)

    def interleaved(x, norm, eps, wq, wkv, q_bias, kv_bias, q_norm, k_norm, v_norm, cos, sin, *rest):
        """Neighbours (2j, 2j + 1) turned in place of (j, j + J): permute, rotate, permute back."""
        order = np.arange(24).reshape(12, 2).T.reshape(-1)
        slot, pos, _, cache_k, *_ = rest
        still = np.ones_like(cos), np.zeros_like(sin)
        q = oracle.qkv(x, norm, eps, wq, wkv, q_bias, kv_bias, q_norm, k_norm, v_norm, *still, *rest)
        for t in np.flatnonzero(pos >= 0):
            for head in (q[t], cache_k[slot[t], :, pos[t]]):
                head[:, order] = oracle.rope(head[:, order].copy(), cos[pos[t]], sin[pos[t]])
        return q

    wrong = {
        "norm scale dropped": {"norm": np.ones(123, np.float32)},
        "k and v swapped": {"wkv": Matrix(np.roll(case["wkv"].array, 48, 0))},
        "q bias dropped": {"q_bias": None},
        "kv bias dropped": {"kv_bias": None},
        "rotated the other way": {"sin": -case["sin"]},
        "position off by one": {"cos": np.roll(case["cos"], 1, 0), "sin": np.roll(case["sin"], 1, 0)},
        "neighbours rotated": interleaved,
    }
    if norms:
        wrong |= {
            "q norm dropped": {"q_norm": None}, "k norm dropped": {"k_norm": None},
            "q norm scale dropped": {"q_norm": ones}, "k norm scale dropped": {"k_norm": ones},
        }  # fmt: skip
    for what, change in wrong.items():
        assert slip(ops, "qkv", case, change, terms, C) > 10, what
    swapped = truth("qkv", case | {"slot": (case["slot"] + 1) % N})
    assert (np.isnan(swapped["cache_k"]) != np.isnan(truth("qkv", case)["cache_k"])).any(), "slots mixed up"
