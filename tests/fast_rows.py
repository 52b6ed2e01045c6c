"""Calls of the fast kernels for tests: weights get the role that packs them,
and the fast variant must have run.

C_NORMED: the norm's scale is multiplied in before the product and that is rounded to bf16, half of 2^-7 of
each term; the f32 sums are far below.
"""

import pytest
from minidflash.kernels.gpu import fast
from minidflash.kernels.ops import Ops
from minidflash.kernels.table import role_of

from tests.cases import check, run
from tests.conftest import parameters

C, C_NORMED = 16, 2**15
# The others have tests of their own.
ROWS = [name for name in fast.FAST if name not in ("attend", "reject", "route", "experts_up", "experts_down")]
PRODUCTS = [name for name in ROWS if name != "embed"]
on_gpu_backends = pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)


class Fast(Ops):
    """Ops whose weights get the role that a row gives them; `done` asserts that the fast variant ran."""

    def __init__(self, ops, name):
        super().__init__(ops.backend)
        role = role_of(name, {"embed": "table"}.get(name, "w"))
        self.weight = lambda parts, role=role, experts=0: ops.backend.weight(parts, role, experts)


def fast_run(ops, name, case, **sizes):
    ops.backend.variants.pop(name, None)
    got = run(Fast(ops, name), name, case, **sizes)
    assert ops.backend.variants[name] == "fast"
    return got


def fast_check(ops, name, case, terms, c, **sizes):
    ops.backend.variants.pop(name, None)
    got = check(Fast(ops, name), name, case, terms, c, **sizes)
    assert ops.backend.variants[name] == "fast"
    return got
