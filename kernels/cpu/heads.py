"""Per-head steps that qkv and inject share: norm over a head, rotation, store into a cache row."""

import numpy as np

from .jit import jit
from .scalar import F, rounded
from .vector import row_dot


@jit
def _add(values, bias, at):
    """values += bias[at:], where there is one."""
    if len(bias):
        for i in range(len(values)):
            values[i] += bias[at + i]


@jit
def finish_head(work, at, size, bias, bias_at, norm, norm_at, eps, cos, sin, p):
    """In place on work[at : at + size]: + bias, * norm / rms (models.md 2),
    rotate by position p (models.md 0)."""
    head = work[at : at + size]
    _add(head, bias, bias_at)
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
def keep_row(values, out):
    """Round a row of f32 into storage."""
    for i in range(len(out)):
        out[i] = rounded(values[i], out)


@jit
def keep_kv(
    work, at, groups, values, size, bias, bias_at, norm, norm_at, v_norm, eps, cos, sin, p, key, cache_k,
    cache_v,
):  # fmt: skip
    """The k heads, then the v heads, of one row at work[at:] as key `key` of one slot's caches (G, S, K).

    values: heads before the first v head; 0: values are what the k heads are before norm and rotation.
    """
    row, heads = key % cache_k.shape[1], groups + values
    _add(work[at : at + heads * size], bias, bias_at)
    for g in range(groups):
        k_at, v_at = at + g * size, at + (values + g) * size
        _keep_value(work, v_at, size, v_norm, eps, cache_v[g, row])
        finish_head(work, k_at, size, bias[:0], np.int64(0), norm, norm_at, eps, cos, sin, p)
        keep_row(work[k_at : k_at + size], cache_k[g, row])


@jit
def _keep_value(work, at, size, norm, eps, out):
    """work[at : at + size], normed where there is a norm; it stays as it is."""
    value = work[at : at + size]
    if len(norm):
        r = F(1.0) / np.sqrt(row_dot(work, at, work, at, size) / F(size) + F(eps))
        for i in range(size):
            out[i] = rounded(norm[i] * (value[i] * r), out)
    else:
        keep_row(value, out)
