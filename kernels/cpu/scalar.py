"""Scalars of the CPU kernels: bf16 load and store, exp, silu, gelu. bf16 is kept as its bits (uint16)."""

import numpy as np
from numba import types
from numba.extending import overload

from .jit import jit
from .vector import bits_from_f32, f32_from_bits

F = np.float32


def load(value):
    """An activation as f32. value: f32, or bf16 bits."""
    raise NotImplementedError("only inside compiled code")


@overload(load, inline="always")
def _load(value):
    if value == types.uint16:
        return lambda value: f32_from_bits(np.uint32(value) << np.uint32(16))
    return lambda value: value


@jit
def to_bf16(value):
    """bf16 bits of an f32, to nearest even; NaN stays NaN."""
    bits = bits_from_f32(value)
    if value != value:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@jit
def all_finite(values):
    """Whether no f32 of a contiguous array is NaN or infinite. A maximum of whole numbers,
    which vectors do."""
    largest = np.int32(0)
    for bits in values.view(np.int32):
        largest = max(largest, np.int32(bits & np.int32(0x7FFFFFFF)))
    return largest < np.int32(0x7F800000)


def rounded(value, out):
    """value in the element type of the array `out`: f32 as it is, bf16 rounded."""
    raise NotImplementedError("only inside compiled code")


@overload(rounded, inline="always")
def _rounded(value, out):
    if out.dtype == types.uint16:
        return lambda value, out: to_bf16(value)
    return lambda value, out: value


@jit
def exp(x):
    """e^x in f32 to about 2 ulp, in plain arithmetic that vectorises; NaN stays NaN. Source: Cephes expf."""
    x = F(-87.3) if x < F(-87.3) else x
    x = F(88.0) if x > F(88.0) else x
    n = np.floor(x * F(1.44269504088896341) + F(0.5))
    r = x - n * F(0.693359375) + n * F(2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    p = p * r * r + r + F(1.0)
    return p * f32_from_bits(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))


@jit
def tanh(x):
    """In f32 to about 2 ulp, in plain arithmetic that vectorises; NaN stays NaN. Source: Cephes tanhf."""
    a, z = abs(x), x * x
    p = F(-5.70498872745e-3)
    p = p * z + F(2.06390887954e-2)
    p = p * z - F(5.37397155531e-2)
    p = p * z + F(1.33314422036e-1)
    p = p * z - F(3.33332819422e-1)
    large = F(1.0) - F(2.0) / (exp(a + a) + F(1.0))
    large = large if x > F(0.0) else -large
    return p * z * x + x if a < F(0.625) else large


@jit
def soft_cap(z, multiplier, cap):
    """cap * tanh(multiplier * z / cap); cap 0: multiplier * z."""
    return cap * tanh(z * multiplier / cap) if cap > F(0.0) else z * multiplier


@jit
def silu(z):
    """z * sigmoid(z)."""
    return z / (F(1.0) + exp(-z))


@jit
def gelu_tanh(z):
    """0.5 z (1 + tanh(s / 2)), which is z * sigmoid(s): however large s is, that makes no NaN."""
    s = F(1.5957691216057308) * (z + F(0.044715) * z * z * z)
    return z / (F(1.0) + exp(-s))
