"""The fast kernels over packed weights against the oracle: the tests of their rows again, in bf16."""

import numpy as np
import pytest
from minidflash.kernels.gpu import fast
from minidflash.kernels.table import GELU_TANH, SILU

from tests.cases import JUNK, Make, Matrix, dot_terms, normed, slip, stored, truth
from tests.compare import assert_same_bits, real
from tests.fast_rows import C_NORMED, C, fast_check, fast_run, on_gpu_backends
from tests.kernels import (
    test_embed,
    test_fuse,
    test_gate_up,
    test_head,
    test_head_logits,
    test_inject,
    test_join,
    test_linear,
    test_linear_add,
    test_qkv,
)


@on_gpu_backends
@pytest.mark.parametrize("rows, cols", [(16, 32), (576, 576), (37, 77), (8, 24), (130, 4096), (1, 3)])
@pytest.mark.parametrize("role", ["matrix", "pairs"])
def test_a_packed_weight_unpacks_to_itself(ops, rng, rows, cols, role):
    rows += rows % 2 if role == "pairs" else 0
    plain = rng.integers(0, 65536, (rows, cols)).astype(np.uint16)
    backend, weight = ops.backend, ops.backend.weight([Matrix(plain)], role)
    assert weight.shape == (rows, cols) and weight.layout != "plain"
    half = rows // 2 if role == "pairs" else min(rows, 8)
    sizes = [half, half, 8] if role == "pairs" else [rows, rows - half, 16]
    tiles = fast.tiles_of(rows, role == "pairs")
    back = backend.empty((rows, cols), np.uint16)
    grid = -(-tiles * -(-cols // 32) * 32 // 256)
    backend.launch("pack.cu", "unpack", grid, 256, 0, [back, back[half:], weight.data, *sizes, tiles, cols])
    assert_same_bits(backend.download(back), plain)


@on_gpu_backends
@pytest.mark.parametrize("T, V, D", [(1, 1009, 576), (5, 77, 123), (17, 16, 40), (1, 1, 3)])
def test_embed_matches_oracle(ops, rng, T, V, D):
    ids = rng.integers(0, V, T).astype(np.int32)
    ids[0], ids[-1] = V - 1, 0
    table = Make(rng, "bf16").w(V, D)
    case = {"ids": ids, "table": table, "scale": 8.485281}
    terms = {"x": np.abs(case["scale"] * table.real[ids])}
    fast_check(ops, "embed", case, terms, test_embed.C, T=T, D=D)


@on_gpu_backends
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("T, D, F", [*test_linear.SHAPES, (32, 96, 320), (33, 16, 32)])
def test_linear_matches_oracle(ops, rng, T, D, F, bias):
    case = test_linear.make(ops, rng, T, D, F, "bf16", bias)
    fast_check(ops, "linear", case, test_linear.terms_of(case), C)


@on_gpu_backends
@pytest.mark.parametrize("bias, tap_at", [(False, None), (True, 11)])
@pytest.mark.parametrize("T, D, F", [*test_linear_add.SHAPES, (32, 96, 320), (33, 16, 32)])
def test_linear_add_matches_oracle(ops, rng, T, D, F, bias, tap_at):
    case = test_linear_add.make(ops, rng, T, D, F, "bf16", bias, tap_at)
    got = fast_check(ops, "linear_add", case, test_linear_add.terms_of(case), C)
    if tap_at is not None:
        want = case["taps"].copy()
        for t, row in enumerate(case["tap_row"]):
            if row >= 0:
                want[row, tap_at : tap_at + D] = got["x"][t]
        assert_same_bits(got["taps"], want, "taps")


@on_gpu_backends
@pytest.mark.parametrize("bias, norm, scale", [(False, True, False), (True, False, True), (True, True, True)])
@pytest.mark.parametrize(
    "T, D, F", [(1, 576, 576), (16, 264, 640), (5, 123, 77), (17, 24, 4096), (33, 16, 32)]
)
def test_a_norm_and_a_scale_at_a_layers_end(ops, rng, T, D, F, bias, norm, scale):
    case = test_linear_add.make(ops, rng, T, D, F, "bf16", bias, 3, norm, scale)
    got = fast_check(ops, "linear_add", case, test_linear_add.terms_of(case), C)
    want = case["taps"].copy()
    for t, row in enumerate(case["tap_row"]):
        if row >= 0:
            want[row, 3 : 3 + D] = got["x"][t]
    assert_same_bits(got["taps"], want, "taps")
    if norm:
        for t in (0, T - 1):
            one = {name: case[name][t : t + 1] for name in ("a", "x", "tap_row")}
            assert_same_bits(fast_run(ops, "linear_add", case | one)["x"][0], got["x"][t], f"row {t} alone")


@on_gpu_backends
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("shape", test_qkv.GEMMA, ids=str)
def test_qkv_of_normed_or_shared_values(ops, rng, shape, shares):
    _, D, H, G, K, _ = shape
    case = test_qkv.make(ops, rng, shape, "bf16", True, False)
    case["v_norm"] = 1 + 0.1 * np.arange(K, dtype=np.float32)
    if shares:
        case["wkv"] = Make(rng, "bf16").w(G * K, D)
    terms = test_qkv.terms_of(case)
    fast_check(ops, "qkv", case, terms, C_NORMED, H=H)


@on_gpu_backends
@pytest.mark.parametrize("T, D", [(1, 576), (16, 64), (5, 124), (3, 2816), (2, 5376)])
def test_join_matches_oracle(ops, rng, T, D):
    case = test_join.make(ops, rng, T, D)
    got = fast_check(ops, "join", case, test_join.terms_of(case), test_join.C)
    want = case["taps"].copy()
    for t, row in enumerate(case["tap_row"]):
        if row >= 0:
            want[row, 8 : 8 + D] = got["x"][t]
    assert_same_bits(got["taps"], want, "taps")


@on_gpu_backends
@pytest.mark.parametrize(
    "T, D, F",
    [(1, 576, 1536), (16, 576, 400), (5, 123, 77), (17, 80, 24), (3, 37, 13), (1, 4096, 112), (2, 8, 1)],
)
@pytest.mark.parametrize("act", [SILU, GELU_TANH])
def test_gate_up_matches_oracle(ops, rng, T, D, F, act):
    case = test_gate_up.make(ops, rng, T, D, F, "bf16", act=act)
    fast_check(ops, "gate_up", case, test_gate_up.terms_of(case), C_NORMED, F=F)


@on_gpu_backends
@pytest.mark.parametrize("act, norm", [(SILU, 200), (GELU_TANH, 200), (GELU_TANH, 1e13)])
def test_gate_up_of_large_gates_saturates(ops, rng, act, norm):
    case = test_gate_up.make(ops, rng, 3, 40, 24, "bf16", act=act) | {"norm": np.full(40, norm, np.float32)}
    got = fast_check(ops, "gate_up", case, test_gate_up.terms_of(case), C_NORMED, F=24)
    assert np.isfinite(real(got["h"])).all()


@on_gpu_backends
@pytest.mark.parametrize("norms, bias", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("shape", test_qkv.SHAPES, ids=str)
def test_qkv_matches_oracle(ops, rng, shape, norms, bias):
    case = test_qkv.make(ops, rng, shape, "bf16", norms, bias)
    got = fast_check(ops, "qkv", case, test_qkv.terms_of(case), C_NORMED, H=shape[2])
    is_active = case["pos"] >= 0
    assert (got["q"][~is_active] == 0).all(), "inactive rows give zeros"
    for name in ("cache_k", "cache_v"):
        written = np.zeros(case[name].shape, bool)
        written[case["slot"][is_active], :, case["pos"][is_active]] = True
        assert_same_bits(got[name][~written], case[name][~written], f"{name}: rows of others")
        assert not np.isnan(real(got[name][written])).any()


@on_gpu_backends
def test_without_a_norm_rows_are_as_they_are(ops, rng):
    """Nothing is rounded before the product then."""
    for shape in (test_qkv.SHAPES[1], (5, 123, 5, 1, 24, 12), (33, 320, 3, 1, 64, 32)):
        case = test_qkv.make(ops, rng, shape, "bf16", True, True) | {"norm": None}
        fast_check(ops, "qkv", case, test_qkv.terms_of(case), C, H=shape[2])
    for T, D, F in ((16, 576, 40), (5, 123, 77), (33, 320, 24)):
        case = test_gate_up.make(ops, rng, T, D, F, "bf16") | {"norm": None, "eps": 1e6}
        fast_check(ops, "gate_up", case, test_gate_up.terms_of(case), C, F=F)


@on_gpu_backends
@pytest.mark.parametrize("norm, bias", [(True, False), (False, True)])
@pytest.mark.parametrize("shape", test_inject.SHAPES, ids=str)
def test_inject_matches_oracle(ops, rng, shape, norm, bias):
    case = test_inject.make(ops, rng, shape, "bf16", norm, bias)
    got = fast_check(ops, "inject", case, test_inject.terms_of(case), C)
    for name in ("cache_k", "cache_v"):
        written = np.zeros(case[name].shape, bool)
        for s, p in zip(case["slot"], case["pos"], strict=True):
            if p >= 0:
                written[:, s, :, p] = True
        assert_same_bits(got[name][~written], case[name][~written], f"{name}: rows of others")


@on_gpu_backends
@pytest.mark.parametrize("T, D, C_", [(1, 576, 2880), (5, 77, 123), (17, 80, 240), (3, 13, 37), (37, 24, 48)])
def test_fuse_matches_oracle(ops, rng, T, D, C_):
    case = test_fuse.make(ops, rng, T, D, C_, "bf16")
    fast_check(ops, "fuse", case, test_fuse.terms_of(case), C)


HEAD_SHAPES = [(1, 576, 5003), (16, 576, 384), (5, 123, 77), (17, 80, 509), (3, 37, 1), (1, 4096, 320)]


@on_gpu_backends
@pytest.mark.parametrize("multiplier, cap", [(0.375, 9.0), (2.5, 0.0)])
def test_head_logits_are_scaled_and_capped(ops, rng, multiplier, cap):
    case = test_head_logits.make(ops, rng, 17, 80, 509, "bf16") | {"multiplier": multiplier, "cap": cap}
    fast_check(ops, "head_logits", case, test_head_logits.terms_of(case), C_NORMED)


@on_gpu_backends
@pytest.mark.parametrize("T, D, V", HEAD_SHAPES)
def test_head_is_the_argmax_of_head_logits(ops, rng, T, D, V):
    case = test_head_logits.make(ops, rng, T, D, V, "bf16")
    case["w"].array[-1] = case["w"].array[V // 2]  # a tie wherever it leads
    terms = test_head_logits.terms_of(case)
    logits = fast_check(ops, "head_logits", case, terms, C_NORMED)["logits"]
    picked = case | {
        "pick": np.arange(T, dtype=np.int32)[::-1].copy(), "limit": V,
        "ids": np.full(T, JUNK["i32"], np.int32), "margin": np.zeros(T, np.float32),
    }  # fmt: skip
    got, top = fast_run(ops, "head", picked), np.sort(logits, axis=1)
    assert got["ids"].tolist() == logits.argmax(1).tolist()
    assert got["margin"].tolist() == (top[:, -1] - top[:, -2] if V > 1 else np.full(T, np.inf)).tolist()
    assert fast_run(ops, "head", picked | {"margin": None})["ids"].tolist() == got["ids"].tolist()


@on_gpu_backends
@pytest.mark.parametrize("pick", [[0], [4, 1], [*range(1, 16), 17], []])
def test_head_writes_picked_rows_only(ops, rng, pick):
    case = test_head.make(ops, rng, 18, 40, 61, pick=pick)
    got = fast_run(ops, "head", case)["ids"]
    whole = fast_run(ops, "head", case | {"pick": np.arange(18, dtype=np.int32)})["ids"]
    assert got[pick].tolist() == whole[pick].tolist()
    assert (np.delete(got, pick) == JUNK["i32"]).all()


@on_gpu_backends
@pytest.mark.parametrize("limit", [1, 15, 16, 17, 60])
def test_head_never_chooses_ids_from_the_limit_on(ops, rng, limit):
    case = test_head.make(ops, rng, 5, 40, 61, limit=limit)
    case["w"].array[limit:] = stored(normed(case["x"], case["norm"], test_head.EPS)[0] * 9, "bf16")
    assert test_head.logits(case)[0].argmax() >= limit
    got = fast_run(ops, "head", case)["ids"]
    assert (got < limit).all()
    values = test_head.logits(case)[:, :limit]
    slack = (
        2 * C_NORMED * 2.0**-23 * dot_terms(normed(case["x"], case["norm"], test_head.EPS), case["w"]).max(1)
    )
    assert (values[np.arange(5), got] >= values.max(1) - slack).all()


@on_gpu_backends
@pytest.mark.parametrize("same", [(3, 4), (15, 16), (0, 60), (17, 33, 49), (5, 13)])
def test_head_ties_go_to_the_smallest_id(ops, rng, same):
    case = test_head.make(ops, rng, 3, 40, 61)
    for row in same:
        case["w"].array[row] = stored(normed(case["x"], case["norm"], test_head.EPS)[1], "bf16")
    assert fast_run(ops, "head", case)["ids"][1] == min(same)


@on_gpu_backends
def test_head_gives_no_id_where_a_logit_is_not_finite(ops, rng):
    case = test_head.make(ops, rng, 3, 40, 61, limit=60)
    wanted = truth("head", case)["ids"].tolist()
    case["w"].array[60] = stored(np.nan, "bf16")  # behind the limit
    case["x"][2] = stored(np.nan, "bf16")
    assert fast_run(ops, "head", case)["ids"].tolist() == [*wanted[:2], -1]
    for bad, value in ((0, np.nan), (7, np.inf), (8, -np.inf), (59, np.nan)):
        case = test_head.make(ops, rng, 3, 40, 61, limit=60)
        case["w"].array[bad] = stored(value, "bf16")
        assert fast_run(ops, "head", case)["ids"].tolist() == [-1] * 3, (bad, value)
        case = test_head.make(ops, rng, 3, 40, 61, limit=60)
        case["w"].array[bad, 5] = stored(value, "bf16")  # a logit of plus or minus infinity, and no NaN
        assert fast_run(ops, "head", case)["ids"].tolist() == [-1] * 3, (bad, value)


@on_gpu_backends
def test_head_of_zeros_is_zero(ops, rng):
    case = test_head.make(ops, rng, 3, 40, 61)
    case["x"][:] = 0
    assert fast_run(ops, "head", case)["ids"].tolist() == [0] * 3


def test_sees_wrong_kernels(rng):
    """With the tolerance of the normed products too."""
    ops = type("Bf16", (), {"activations": "bf16"})
    case = test_gate_up.make(ops, rng, 5, 123, 77, "bf16")
    wrong = {
        "norm scale dropped": {"norm": np.ones(123, np.float32)},
        "gate and up swapped": {"w": Matrix(np.roll(case["w"].array, 77, 0))},
    }
    for what, change in wrong.items():
        assert slip(ops, "gate_up", case, change, test_gate_up.terms_of(case), C_NORMED) > 10, what
    case = test_qkv.make(ops, rng, (5, 123, 6, 2, 24, 12), norms=True, bias=True)
    wrong = {
        "norm scale dropped": {"norm": np.ones(123, np.float32)},
        "k and v swapped": {"wkv": Matrix(np.roll(case["wkv"].array, 48, 0))},
        "rotated the other way": {"sin": -case["sin"]},
        "position off by one": {"cos": np.roll(case["cos"], 1, 0), "sin": np.roll(case["sin"], 1, 0)},
        "q norm dropped": {"q_norm": None}, "q bias dropped": {"q_bias": None},
    }  # fmt: skip
    for what, change in wrong.items():
        assert slip(ops, "qkv", case, change, test_qkv.terms_of(case), C_NORMED) > 10, what
    case = test_head_logits.make(ops, rng, 5, 123, 77, "bf16")

    def dropped(x, norm, eps, w, *rest):
        return x @ w.data.T

    for change in (dropped, {"norm": np.ones(123, np.float32)}):
        assert slip(ops, "head_logits", case, change, test_head_logits.terms_of(case), C_NORMED) > 10
