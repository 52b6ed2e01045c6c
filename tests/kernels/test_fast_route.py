"""The fast kernel of route: its row's tests again; bits under any order and company; what is compiled."""

from functools import partial

import numpy as np
import pytest
from minidflash.kernels import compiler
from minidflash.kernels.ops import Ops

from tests.cases import stored
from tests.compare import assert_same_bits, real
from tests.conftest import parameters
from tests.disassembly import cards
from tests.fast_rows import Fast, fast_run, on_gpu_backends
from tests.kernels import test_route
from tests.kernels.test_compile import needs_nvrtc


@on_gpu_backends
@pytest.mark.parametrize("bias, normalise", [(False, 1), (True, 0)])
@pytest.mark.parametrize(
    "T, E, U, D", [*test_route.SHAPES, (16, 128, 8, 2048), (20, 300, 8, 104), (2, 20, 3, 4360)]
)
def test_route_matches_oracle(ops, rng, T, E, U, D, bias, normalise):
    case, size = test_route.make(ops, rng, T, E, U, -(-D // 8) * 8, "bf16", bias, normalise)
    test_route.assert_routed(fast_run(ops, "route", case, **size), case, U, E)


@pytest.fixture
def halves(monkeypatch):
    """The tests of route make weights in bf16."""
    monkeypatch.setattr(test_route, "make", partial(test_route.make, weights="bf16"))


@on_gpu_backends
@pytest.mark.parametrize(
    "test",
    [
        partial(test_route.test_inactive_rows_have_no_experts, idle=[1, 2, 6]),
        partial(test_route.test_of_equal_logits_the_smaller_id_comes_first, U=4),
        test_route.test_nan_is_the_least_likely_and_ids_stay_in_range,
        test_route.test_one_expert_may_have_all_rows,
        *(
            partial(test_route.test_u_may_have_a_norm_of_its_own_and_experts_a_scale, T=T, E=40, U=U, D=120)
            for T, U in ((1, 8), (2, 4), (9, 3), (36, 3))
        ),
    ],
    ids=["inactive", "equal", "nan", "one", "own norm 1", "own norm 2", "own norm 9", "own norm 36"],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_route_of_strange_rows(ops, rng, halves, test):
    test(Fast(ops, "route"), rng)
    assert ops.backend.variants["route"] == "fast"


@on_gpu_backends
def test_of_equal_logits_of_one_lane_the_smaller_id_comes_first(ops, rng):
    """A lane of choose.cuh looks after every 32nd expert."""
    case, size = test_route.make(ops, rng, 3, 100, 5, 40, "bf16", bias=False)
    case["w"].array[...] = 0
    assert (fast_run(ops, "route", case, **size)["expert"] == np.arange(5)).all()


@on_gpu_backends
def test_a_lane_whose_experts_are_all_chosen_has_no_more(ops, rng):
    case, size = test_route.make(ops, rng, 3, 128, 6, 40, "bf16")
    case["w"].array[...] = 0
    case["bias"][...] = 0
    case["bias"][5::32] = 4, 6, 5, 7
    assert (fast_run(ops, "route", case, **size)["expert"] == [101, 37, 69, 5, 0, 1]).all()


@on_gpu_backends
def test_route_has_its_eps(ops, rng):
    case, size = test_route.make(ops, rng, 3, 9, 2, 40, "bf16")
    case["x"] = stored(1e-3 * real(case["x"]), "bf16")
    test_route.assert_routed(fast_run(ops, "route", case, **size), case, 2, 9)


@on_gpu_backends
@pytest.mark.parametrize("T, E, U, D", [(9, 20, 4, 120), (33, 128, 8, 64)])
def test_a_routed_rows_bits_are_its_own(ops, rng, T, E, U, D):
    test_route.test_a_rows_bits_are_its_own(Fast(ops, "route"), rng, T, E, U, D)
    assert ops.backend.variants["route"] == "fast"


@on_gpu_backends
def test_a_rows_norm_is_the_same_however_many_warps_bring_it(ops, rng):
    """Rows alike, and norms a step of f32 apart about a tie of bf16: u tells an ulp of the root. One lane
    has nearly all of the sum, so that no later rounding hides an order."""
    D = 4104
    is_large = np.arange(D) // 8 % 32 == 0
    for _ in range(8):
        x = np.where(is_large, 2 ** rng.uniform(-8, 4, D), 2.0**-20).astype(np.float32)
        x = real(stored(x, "bf16"))
        root = np.sqrt(np.mean(x.astype(np.float64) ** 2) + 1e-5)
        norm = ((1 + 2**-8) * root * (1 + (np.arange(D) - 1900) * 2**-24)).astype(np.float32)
        whole = None
        for T in (1, 2, 3, 9):
            case, size = test_route.make(ops, rng, T, 5, 2, D, "bf16")
            case |= {"x": stored(np.tile(x, (T, 1)), "bf16"), "norm": norm, "eps": 1e-5}
            u = fast_run(ops, "route", case, **size)["u"]
            whole = u[:1] if whole is None else whole
            assert len(np.unique(whole[0, ~is_large])) == 2, "norms on both sides of the tie"
            assert_same_bits(u, np.repeat(whole, T, 0), f"{T} rows")


@pytest.mark.parametrize("ops", parameters(["emulate"], ["bf16"]), indirect=True)
@pytest.mark.parametrize("T", [5, 20, 36])
def test_every_order_routes_the_same_way(ops, rng, T):
    case, sizes = test_route.make(ops, rng, T, 50, 4, 104, "bf16")
    want = fast_run(ops, "route", case, **sizes)
    for seed in range(1, 4):
        got = fast_run(Ops(type(ops.backend)("bf16", seed=seed)), "route", case, **sizes)
        for argument, value in want.items():
            assert_same_bits(got[argument], value, f"seed {seed}: {argument}")


@needs_nvrtc
@pytest.mark.parametrize(
    "token_tiles, kept, arch",
    [(tiles, kept, arch) for tiles in (1, 2) for kept in (4, 6) for arch in cards(tiles + kept // 4)],
)
def test_route_keeps_to_registers(token_tiles, kept, arch):
    defines = {"TOKEN_TILES": str(token_tiles), "STREAM_WARPS": "16", "KEPT_CHUNKS": str(kept)}
    used = compiler.resources(compiler.compile_cubin("route_fast.cu", arch, defines)[1])["route_fast"]
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0)
