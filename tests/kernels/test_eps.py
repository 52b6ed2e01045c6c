"""eps under the root, where it matters: rows that are small beside it, rows of zeros.

Models have an eps of 1e-5 or 1e-6, which no random row shows.
"""

import numpy as np
import pytest

from tests.cases import run, slip
from tests.conftest import parameters
from tests.fast_rows import C_NORMED, C, Fast, fast_check
from tests.kernels import (
    test_fuse,
    test_gate_up,
    test_head_logits,
    test_inject,
    test_qkv,
    test_reject,
    test_rows,
    test_sample,
)
from tests.kernels.test_fast_bits import CUTS, cut  # noqa: F401 a fixture
from tests.kernels.test_fast_prefill import frame, prompt_check  # noqa: F401 a fixture

GPU = pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
EPS = 30.0  # what it divides is of size 1


def case_of(ops, rng, name):
    """(case, terms, c, sizes) with that eps; row 0 is zeros."""
    if name == "qkv":
        case = test_qkv.make(ops, rng, (5, 96, 5, 1, 24, 12), "bf16", True, True)
        terms, c, sizes = test_qkv.terms_of(case), C_NORMED, {"H": 5}
    elif name == "gate_up":
        case = test_gate_up.make(ops, rng, 5, 96, 40, "bf16")
        terms, c, sizes = test_gate_up.terms_of(case), C_NORMED, {"F": 40}
    elif name == "head_logits":
        case = test_head_logits.make(ops, rng, 5, 96, 77, "bf16")
        terms, c, sizes = test_head_logits.terms_of(case), C_NORMED, {}
    elif name == "fuse":
        case = test_fuse.make(ops, rng, 5, 77, 160, "bf16")
        terms, c, sizes = test_fuse.terms_of(case), C, {"D": 77}
    else:
        case = test_inject.make(ops, rng, (5, 96, 3, 1, 24, 12), "bf16", True, False)
        terms, c, sizes = test_inject.terms_of(case), C, {}
    case[{"fuse": "taps", "inject": "f"}.get(name, "x")][0] = 0
    return case | {"eps": EPS}, terms, c, sizes


NORMED = "qkv", "gate_up", "head_logits", "fuse", "inject"


@GPU
@pytest.mark.parametrize("cut", CUTS[:2], indirect=True, ids=["whole", "slices"])
@pytest.mark.parametrize("name", NORMED)
def test_eps_counts(ops, rng, cut, name):  # noqa: F811
    case, terms, c, sizes = case_of(ops, rng, name)
    fast_check(ops, name, case, terms, c, **sizes)


@GPU
@pytest.mark.parametrize("name", [name for name in NORMED if name != "head_logits"])
def test_eps_counts_in_a_prompt(ops, frame, rng, name):  # noqa: F811
    case, terms, c, sizes = case_of(ops, rng, name)
    prompt_check(ops, name, case, terms, c, **sizes)


@GPU
@pytest.mark.parametrize("name", NORMED)
def test_sees_a_wrong_eps(ops, rng, name):
    case, terms, c, _ = case_of(ops, rng, name)
    for wrong in (1e-6, 1.0):
        assert slip(ops, name, case, {"eps": wrong}, terms, c) > 10


@pytest.mark.parametrize("name", ["sample", "propose", "reject"])
def test_draws_are_from_the_logits_of_that_eps(ops, rng, name):
    """eps flattens a law: what is said of the draws is what head_logits says with the same eps."""
    case, _ = test_rows.make("sample" if name == "reject" else name, rng, ops.activations, "bf16")
    if name == "reject":
        _, case = test_reject.random_case(ops, rng, 1, 12, 12, 40, 77)
    case = case | {"eps": EPS}
    case["law"], case["key"] = (
        np.float32([[1, 1, 0]] * len(case["law"])),
        case["key"] * np.int32([1, 1, 1, 0]),
    )  # no filter
    got = run(Fast(ops, name), name, case)
    part = {what: case[what] for what in ("x", "norm", "eps", "w", *test_sample.BARE)}
    logits = run(Fast(ops, "head_logits"), "head_logits", part)["logits"].astype(np.float64)
    law = np.exp(logits - logits.max(1, keepdims=True))
    law /= law.sum(1, keepdims=True)
    rows = np.arange(len(law))
    if name == "propose":
        assert np.abs(got["mass"] / got["mass"].sum(1, keepdims=True) - law).max() < 1e-5
    else:
        assert np.abs(got["logprob"][:, 0] - np.log(law[rows, got["ids"]])).max() < 1e-4
