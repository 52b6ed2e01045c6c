"""eps under the root, where it matters, on numba and on the plain kernels:
rows that are small beside it, and zeros.

Models have an eps of 1e-5 or 1e-6, which no random row shows.
"""

import pytest

from tests.cases import check, slip
from tests.conftest import parameters
from tests.kernels import test_fuse, test_gate_up, test_head_logits, test_inject, test_linear_add, test_qkv

EPS = 30.0  # what it divides is of size 1
MAKE = {  # row -> (its tests, shape and more of `make`, sizes of outputs, what holds the rows)
    "qkv": (test_qkv, [(5, 96, 5, 1, 24, 12), "bf16", True, True], {"H": 5}, "x"),
    "linear_add": (test_linear_add, [5, 123, 77, "bf16", True, None, True, True], {}, "a"),
    "gate_up": (test_gate_up, [5, 96, 40, "bf16"], {"F": 40}, "x"),
    "head_logits": (test_head_logits, [5, 96, 77, "bf16"], {}, "x"),
    "fuse": (test_fuse, [5, 77, 160, "bf16"], {"D": 77}, "taps"),
    "inject": (test_inject, [(5, 96, 3, 1, 24, 12), "bf16", True, False], {}, "f"),
}
plain = pytest.mark.parametrize("ops", parameters(["numba", "emulate"]), indirect=True)


def case_of(ops, rng, name):
    tests, shape, sizes, rows = MAKE[name]
    case = tests.make(ops, rng, *shape)
    terms = tests.terms_of(case)
    case[rows][0] = 0
    return case | {"eps": EPS}, terms, tests.C, sizes


@plain
@pytest.mark.parametrize("name", MAKE)
def test_eps_counts(ops, rng, name):
    case, terms, c, sizes = case_of(ops, rng, name)
    check(ops, name, case, terms, c, **sizes)


@plain
@pytest.mark.parametrize("name", MAKE)
def test_sees_a_wrong_eps(ops, rng, name):
    case, terms, c, _ = case_of(ops, rng, name)
    for wrong in (1e-6, 1.0):
        assert slip(ops, name, case, {"eps": wrong}, terms, c) > 10
