"""stage_context: addresses of the context features that wait; afterwards none does."""

import numpy as np
import pytest

from tests.cases import run, truth


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize(
    "start, fresh", [([40], [3]), ([40], [0]), ([5], [1]), ([40, 7, 16], [0, 4, 16]), ([9, 9], [1, 9])]
)
def test_rows(ops, start, fresh, width):
    fresh = np.minimum(fresh, width).astype(np.int32)
    case = {"start": np.array(start, np.int32), "fresh": fresh}
    got = run(ops, "stage_context", case, T=len(start) * width)
    slots, positions = [], []
    for n, (end, count) in enumerate(zip(start, fresh.tolist(), strict=True)):
        slots += [n] * width
        positions += [*range(end - count, end)] + [-1] * (width - count)
    assert got["slot"].tolist() == slots
    assert got["pos"].tolist() == positions
    assert got["fresh"].tolist() == [0] * len(start)
    for name, value in truth("stage_context", case, T=len(start) * width).items():
        assert got[name].tolist() == value.tolist(), name
