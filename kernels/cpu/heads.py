"""Per-head steps that qkv and inject share: norm over a head, rotation, store into a cache row."""

import numpy as np

from .jit import jit
from .scalar import F, rounded
from .vector import row_dot


@jit
def finish_head(work, at, size, bias, bias_at, norm, norm_at, eps, cos, sin, p):
    """In place on work[at : at + size]: + bias, * norm / rms (models.md 2),
    rotate by position p (models.md 0)."""
    head = work[at : at + size]
    if len(bias):
        head += bias[bias_at : bias_at + size]
    if len(norm):
        scale = norm[norm_at : norm_at + size]
        r = F(1.0) / np.sqrt(row_dot(work, at, work, at, size) / F(size) + F(eps))
        for i in range(size):
            head[i] = scale[i] * (head[i] * r)
    half = cos.shape[1]
    low, high, c, s = head[:half], head[half : 2 * half], cos[p], sin[p]
    for j in range(half):
        a, b = low[j], high[j]
        low[j] = a * c[j] - b * s[j]
        high[j] = b * c[j] + a * s[j]


@jit
def keep_kv(work, at, groups, size, bias, bias_at, norm, norm_at, eps, cos, sin, p, key, cache_k, cache_v):
    """The k heads, then the v heads, of one row at work[at:] as key `key` of one slot's caches (G, S, K)."""
    row = key % cache_k.shape[1]
    for g in range(groups):
        k_at, v_at = at + g * size, at + (groups + g) * size
        finish_head(work, k_at, size, bias, bias_at + g * size, norm, norm_at, eps, cos, sin, p)
        k, v = work[k_at : k_at + size], work[v_at : v_at + size]
        if len(bias):
            v += bias[bias_at + (groups + g) * size : bias_at + (groups + g + 1) * size]
        keep_row(k, cache_k[g, row])
        keep_row(v, cache_v[g, row])


@jit
def keep_row(values, out):
    """Round a row of f32 into storage."""
    for i in range(len(out)):
        out[i] = rounded(values[i], out)
