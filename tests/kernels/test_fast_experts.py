"""The fast kernels of layers with experts: the tests of their rows again, in bf16, and what decides who runs."""

from functools import partial

import pytest

from tests.fast_rows import Fast, fast_run, on_gpu_backends
from tests.kernels import test_route


@on_gpu_backends
@pytest.mark.parametrize("bias, normalise", [(False, 1), (True, 0)])
@pytest.mark.parametrize("T, E, U, D", [*test_route.SHAPES, (16, 128, 8, 2048), (20, 300, 8, 104)])
def test_route_matches_oracle(ops, rng, T, E, U, D, bias, normalise):
    case, size = test_route.make(ops, rng, T, E, U, D, "bf16", bias, normalise)
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
    ],
    ids=["inactive", "equal", "nan", "one"],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_route_of_strange_rows(ops, rng, halves, test):
    test(Fast(ops, "route"), rng)
    assert ops.backend.variants["route"] == "fast"


@on_gpu_backends
@pytest.mark.parametrize("T, E, U, D", [(9, 20, 4, 123), (33, 128, 8, 64)])
def test_a_routed_rows_bits_are_its_own(ops, rng, T, E, U, D):
    test_route.test_a_rows_bits_are_its_own(Fast(ops, "route"), rng, T, E, U, D)
    assert ops.backend.variants["route"] == "fast"
