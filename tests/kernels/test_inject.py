"""inject: k and v of every drafter layer from the context features."""

import numpy as np
import pytest

from tests.cases import Make, Matrix, check, dot_terms, junk, norm_terms, rope_terms, slip, stored
from tests.compare import assert_same_bits, real

C = 16
EPS = 1e-6
N, S = 3, 29
# T, D, L, G, K, J
SHAPES = [(16, 576, 4, 3, 64, 32), (1, 1024, 2, 8, 128, 64), (5, 77, 3, 1, 24, 12), (17, 40, 1, 3, 80, 40),
          (64, 24, 2, 2, 16, 8)]  # fmt: skip


def make(ops, rng, shape, weights="bf16", norm=True, bias=False):
    T, D, L, G, K, J = shape
    make = Make(rng, ops.activations, weights)
    cells = rng.permutation(N * S)[:T]
    slot, pos = (cells // S).astype(np.int32), (cells % S).astype(np.int32)
    f = make.a(T, D)
    f[2::5] = stored(np.nan, ops.activations)
    pos[2::5] = -1
    cos, sin = make.tables(S, J)
    return {
        "f": f, "wkv": make.w(L * 2 * G * K, D), "kv_bias": make.v(L * 2 * G * K) if bias else None,
        "k_norm": make.v(L, K, around=1) if norm else None, "eps": EPS, "cos": cos, "sin": sin,
        "slot": slot, "pos": pos,
        "cache_k": junk(ops, (L, N, G, S, K), "A"), "cache_v": junk(ops, (L, N, G, S, K), "A"),
    }  # fmt: skip


def terms_of(case):
    is_active = case["pos"] >= 0
    pos, slot = case["pos"][is_active], case["slot"][is_active]
    L, _, G, _, K = case["cache_k"].shape
    f, bias, shape = real(case["f"][is_active]), case["kv_bias"], (len(pos), L, 2, G, K)
    y = (f @ case["wkv"].real.T + (0 if bias is None else bias)).reshape(shape)
    terms = dot_terms(f, case["wkv"], bias).reshape(shape)
    k, v = terms[:, :, 0], terms[:, :, 1]
    if case["k_norm"] is not None:
        k = norm_terms(y[:, :, 0], k, case["k_norm"][:, None], EPS)
    k = rope_terms(k, *(real(case[name])[pos][:, None, None] for name in ("cos", "sin")))
    out = {name: np.zeros(case[name].shape) for name in ("cache_k", "cache_v")}
    for i in range(len(pos)):
        out["cache_k"][:, slot[i], :, pos[i]] = k[i]
        out["cache_v"][:, slot[i], :, pos[i]] = v[i]
    return out


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize("norm, bias", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_oracle(ops, rng, shape, norm, bias, weights):
    case = make(ops, rng, shape, weights, norm, bias)
    got = check(ops, "inject", case, terms_of(case), C)
    for name in ("cache_k", "cache_v"):
        written = np.zeros(case[name].shape, bool)
        for s, p in zip(case["slot"], case["pos"], strict=True):
            if p >= 0:
                written[:, s, :, p] = True
        assert_same_bits(got[name][~written], case[name][~written], f"{name}: rows of others")
        assert not np.isnan(real(got[name][written])).any()


def test_all_rows_inactive_touches_nothing(ops, rng):
    case = make(ops, rng, SHAPES[2])
    case["pos"][:] = -1
    got = check(ops, "inject", case, terms_of(case), C)
    assert_same_bits(got["cache_k"], case["cache_k"])
    assert_same_bits(got["cache_v"], case["cache_v"])


def test_sees_wrong_kernels(ops, rng):
    L, G, K = 3, 2, 24
    case = make(ops, rng, (5, 77, L, G, K, 12), bias=True)
    rows, norm = case["wkv"].array.reshape(L, 2, G, K, 77), case["k_norm"]

    def stacked(array):
        return Matrix(np.ascontiguousarray(array).reshape(-1, 77))

    wrong = {
        "k and v swapped": {"wkv": stacked(rows[:, ::-1])},
        "layers shifted": {"wkv": stacked(np.roll(rows, 1, 0))},
        "all k, then all v": {"wkv": stacked(rows.reshape(2, L, G, K, 77).swapaxes(0, 1))},
        "heads swapped": {"wkv": stacked(rows[:, :, ::-1])},
        "norm of another layer": {"k_norm": np.roll(norm, 1, 0)},
        "norm dropped": {"k_norm": None},
        "bias dropped": {"kv_bias": None},
        "not rotated": {"cos": np.ones_like(case["cos"]), "sin": np.zeros_like(case["sin"])},
        "position off by one": {"cos": np.roll(case["cos"], 1, 0), "sin": np.roll(case["sin"], 1, 0)},
    }
    for what, change in wrong.items():
        assert slip(ops, "inject", case, change, terms_of(case), C) > 10, what
