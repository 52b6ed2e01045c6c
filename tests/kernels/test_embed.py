"""embed: rows of the table, scaled and rounded once."""

import numpy as np
import pytest

from tests.cases import Make, check, run, slip

C = 1  # one product


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize("T, V, D", [(1, 1009, 576), (16, 130, 4096), (5, 77, 123), (17, 16, 40), (1, 1, 3)])
@pytest.mark.parametrize("scale", [1.0, 8.485281])
def test_matches_oracle(ops, rng, T, V, D, weights, scale):
    table = Make(rng, ops.activations, weights).w(V, D)
    ids = rng.integers(0, V, T).astype(np.int32)
    ids[0], ids[-1] = V - 1, 0
    case = {"ids": ids, "table": table, "scale": scale}
    terms = {"x": np.abs(scale * table.real[ids])}
    check(ops, "embed", case, terms, C, T=T, D=D)
    wrong = {"next row": {"ids": (ids + 1) % V}, "scale dropped": {"scale": 2 * scale}}
    for what, change in wrong.items():
        if V > 1 or what != "next row":
            assert slip(ops, "embed", case, change, terms, C) > 10, what


@pytest.mark.filterwarnings("ignore:invalid value")  # signalling NaNs on their way to float64
def test_every_bf16_pattern(ops):
    """F50, F66: all 65,536 patterns through load and store; NaN stays NaN, infinities,
    zeros and subnormals too."""
    from tests.cases import Matrix

    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    case = {"ids": np.arange(256, dtype=np.int32), "table": Matrix(bits), "scale": 1.0}
    x = run(ops, "embed", case, T=256, D=256)["x"]
    wanted = bits.astype(np.uint32) << 16
    is_nan = np.isnan(wanted.view(np.float32))
    got = x.astype(np.uint32) << 16 if x.dtype == np.uint16 else x.view(np.uint32)
    assert is_nan.sum() == 254
    assert np.isnan(got.view(np.float32))[is_nan].all()
    assert (got[~is_nan] == wanted[~is_nan]).all()
