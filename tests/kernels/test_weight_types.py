"""Weights keep the values that they are stored with: F16 widens exactly,
parts of several types meet in one Weight."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.cases import junk, put, stored
from tests.compare import assert_same_bits, real


def part(rng, rows, kind):
    """(a tensor as the reader hands it over, its values as f32)."""
    values = rng.standard_normal((rows, 24)).astype(np.float32)
    if kind == "F16":
        array = values.astype(np.float16)
        array.reshape(-1)[:4] = 65504, 6e-8, -0.0, 1 / 3
        values = array.astype(np.float32)
    else:
        array = stored(values, kind.lower())
        values = real(array).astype(np.float32)
    return SimpleNamespace(array=array, dtype=kind, shape=array.shape, drop=lambda: None), values


@pytest.mark.parametrize(
    "kinds",
    [["F16"], ["BF16"], ["F32"], ["F16", "F16"], ["BF16", "F32"], ["F32", "BF16", "F16"]],
    ids="+".join,
)
def test_values_are_those_of_the_file(ops, rng, kinds):
    parts, values = zip(
        *(part(rng, rows, kind) for rows, kind in zip((16, 5, 19), kinds, strict=False)), strict=True
    )
    want = np.concatenate(values)
    ids = np.arange(len(want), dtype=np.int32)
    x = put(ops, junk(ops, want.shape, "A"), "A")
    ops.embed(put(ops, ids, "i32"), ops.weight(list(parts)), 1.0, x)
    assert_same_bits(ops.download(x), stored(want, ops.activations), "embed")
