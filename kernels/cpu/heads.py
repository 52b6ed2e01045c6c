"""Per-head steps that qkv and inject share: norm over a head, rotation, store into a cache row."""

import numpy as np

from .jit import jit
from .scalar import F, rounded
from .vector import row_dot


@jit
def finish_head(work, at, size, bias, bias_at, norm, norm_at, eps, cos, sin, p):
    """In place on work[at : at + size]: + bias, * norm / rms (models.md 2), rotate by position p (models.md 0)."""
    if len(bias):
        for i in range(size):
            work[at + i] += bias[bias_at + i]
    if len(norm):
        r = F(1.0) / np.sqrt(row_dot(work, at, work, at, size) / F(size) + F(eps))
        for i in range(size):
            work[at + i] = norm[norm_at + i] * (work[at + i] * r)
    half = cos.shape[1]
    for j in range(half):
        a, b = work[at + j], work[at + half + j]
        work[at + j] = a * cos[p, j] - b * sin[p, j]
        work[at + half + j] = b * cos[p, j] + a * sin[p, j]


@jit
def keep_kv(work, at, groups, size, bias, bias_at, norm, norm_at, eps, cos, sin, p, cache_k, cache_v):
    """The k heads, then the v heads, of one row at work[at:] into row p of one slot's caches (G, S, K)."""
    for g in range(groups):
        k_at, v_at = at + g * size, at + (groups + g) * size
        finish_head(work, k_at, size, bias, bias_at + g * size, norm, norm_at, eps, cos, sin, p)
        for i in range(size):
            v = work[v_at + i]
            if len(bias):
                v += bias[bias_at + (groups + g) * size + i]
            cache_k[g, p, i] = rounded(work[k_at + i], cache_k)
            cache_v[g, p, i] = rounded(v, cache_v)
