"""Calls of the fast kernels for tests: weights get the role that packs them,
and the fast variant must have run.

C_NORMED: the norm's scale is multiplied in before the product and that is rounded to bf16, half of 2^-7 of
each term; the f32 sums are far below.
"""

from collections import Counter
from contextlib import contextmanager

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


@contextmanager
def variant(ops, name, wanted, wide=False):
    """The row runs in this variant; wide: whether the wide ones may take it."""
    ops.backend.variants.pop(name, None)
    ops.backend.wide = wide
    try:
        yield Fast(ops, name)
    finally:
        ops.backend.wide = True
    assert ops.backend.variants[name] == wanted


def fast_run(ops, name, case, **sizes):
    with variant(ops, name, "fast") as fast_ops:
        return run(fast_ops, name, case, **sizes)


def fast_check(ops, name, case, terms, c, **sizes):
    with variant(ops, name, "fast") as fast_ops:
        return check(fast_ops, name, case, terms, c, **sizes)


def counted(backend, monkeypatch):
    """{kernel: launches} from here on; where a product lays h for the next one, its name with " laid"."""
    names, launch = Counter(), backend.launch

    def noted(file, kernel, grid, block, shared, args, defines=None, **how):
        names[kernel + " laid" * ("LAID_WARPS" in (defines or {}))] += 1
        return launch(file, kernel, grid, block, shared, args, defines, **how)

    monkeypatch.setattr(backend, "launch", noted)
    return names
