"""Rotary tables against the formulas of models.md in float64, at positions near and far (F52)."""

import math

import numpy as np
import pytest
from minidflash.kernels import open_ops

from minidflash.rope import Rope, rope_tables

POSITIONS = [0, 1, 8191, 8192, 100_000]


def llama3(theta, size, factor, low, high, context):
    """Frequencies of llama3 scaling, pair by pair (models.md 1), in float64."""
    out = []
    for j in range(size // 2):
        f = theta ** (-2 * j / size)
        wave = 2 * math.pi / f
        if wave < context / high:
            out.append(f)
        elif wave > context / low:
            out.append(f / factor)
        else:
            blend = (context / wave - low) / (high - low)
            out.append((1 - blend) * f / factor + blend * f)
    return np.array(out)


def tables(rope, size, positions):
    return rope_tables(open_ops("oracle"), rope, size, positions)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("size", [64, 128])
def test_llama3(factor, size):
    rope = Rope(500000.0, "llama3", factor, 1.0, 4.0, 8192)
    wanted = llama3(500000.0, size, factor, 1.0, 4.0, 8192)
    plain = 500000.0 ** (-np.arange(0, size, 2) / size)
    is_kept, is_slow = wanted == plain, np.isclose(wanted, plain / factor, rtol=1e-12)
    assert is_kept.any() and is_slow.any() and (~is_kept & ~is_slow).any(), "all three bands"
    compare(tables(rope, size, POSITIONS[-1] + 1), wanted, 500000.0)
    other = llama3(500000.0, size, 40.0 - factor, 1.0, 4.0, 8192)
    with pytest.raises(AssertionError):
        compare(tables(rope, size, POSITIONS[-1] + 1), other, 500000.0)


@pytest.mark.parametrize("theta, size", [(10000.0, 64), (1e6, 128), (1e7, 32), (10000.0, 24)])
def test_default(theta, size):
    compare(tables(Rope(theta), size, POSITIONS[-1] + 1), theta ** (-np.arange(0, size, 2) / size), theta)


def compare(found, frequencies, theta):
    """The angle is the reference's, in f32: half an ulp for each of its roundings, ln(theta)
    for the exponent's."""
    roundings = 6 + math.log(theta)
    cos, sin = found
    assert cos.dtype == sin.dtype == np.float32
    for p in POSITIONS:
        angle = p * frequencies
        slack = roundings * angle * 2.0**-24 + 2.0**-23
        assert (np.abs(cos[p] - np.cos(angle)) <= slack).all(), f"cos at {p}"
        assert (np.abs(sin[p] - np.sin(angle)) <= slack).all(), f"sin at {p}"
