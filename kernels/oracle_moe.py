"""The float64 truth of the rows of a layer with experts, and of its weights' type.
As oracle.py, which has the equations."""

import numpy as np

from . import oracle
from .table import CLAMPED
from .weight import E2M1


def mxfp4(blocks, scales):
    """f32 (rows, cols) of MXFP4: e2m1 * 2^(scale - 127), infinite where f32 ends.

    blocks: u8 (rows, cols/32, 16), byte b has feature 2b in the low nibble and 2b + 1 in the high one.
    scales: u8 (rows, cols/32), below 255. Source: OCP Microscaling Formats 1.0; models.md 4.
    """
    nibbles = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
    with np.errstate(over="ignore"):
        values = np.ldexp(np.float32(E2M1)[nibbles], scales.astype(np.int32)[..., None] - 127)
    return values.reshape(len(blocks), -1)


def activate(y, act, limit, alpha):
    """What an expert makes of its products: gate, then as many up. y: (2F,). Returns (F,)."""
    gate, up = np.split(y, 2)
    if act != CLAMPED:
        return oracle.GATES[act](gate) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1.0) * gate / (1.0 + np.exp(-alpha * gate))


def choose(logits, used, normalise):
    """(ids, shares) of the `used` likeliest experts of a row: larger logits first,
    of equal ones the smaller id.

    A NaN counts as -infinity. share: softmax over the chosen ones (normalise), or over all, of which it is
    then a part. Where no logit is finite, shares are NaN. logits: (E,).
    """
    logits = np.where(np.isnan(logits), -np.inf, logits)
    ids = np.lexsort((np.arange(len(logits)), -logits))[:used]
    with np.errstate(invalid="ignore"):
        p = np.exp(logits - logits.max())
    return ids, p[ids] / (p[ids] if normalise else p).sum()


def group(expert, experts):
    """(first, order): the pairs of each expert, r ascending, behind those of the expert before.
    expert: (T, U)."""
    flat = expert.reshape(-1)
    groups = [np.flatnonzero(flat == e) for e in range(experts)]
    first = np.cumsum([0, *map(len, groups)])
    return first, np.concatenate([*groups, np.full(len(flat) - first[-1], -1)])


def route(
    x, norm, u_norm, eps, w, bias, normalise, expert_scale, pos, touched, work, u, expert, share, first, order
):
    """Of W r + bias, r = n(x) * norm as stored, rounded to f32 first as in head, the experts of each row and
    their groups; a share times its expert's scale. u = r, or n(x) * u_norm."""
    for t in range(len(x)):
        u[t], expert[t], share[t] = 0, -1, 0
        if pos[t] >= 0:
            oracle.store(oracle.rmsnorm(oracle.real(x[t]), norm, eps), u[t])  # rounded, then read
            logits = oracle.product(oracle.real(u[t]), oracle.matrix(w), bias).astype(np.float32)
            expert[t], share[t] = choose(logits.astype(np.float64), expert.shape[1], normalise)
            if expert_scale is not None:
                share[t] *= expert_scale[expert[t]]
            if u_norm is not None:
                oracle.store(oracle.rmsnorm(oracle.real(x[t]), u_norm, eps), u[t])
    first[:], order[:] = group(expert, w.shape[0])
    touched[0] += np.count_nonzero(np.diff(first))


def experts_up(u, w, bias, expert, first, order, act, limit, alpha, work):
    """h[t, k] = act(Wg u[t] + bg, Wu u[t] + bu) of its expert; w and bias hold the gate rows,
    then the up rows.

    act: SILU silu(gate) * up; CLAMPED g = min(gate, limit), (clamp(up, -limit, limit) + 1) * g *
    sigmoid(alpha g); GELU_TANH gelu_tanh(gate) * up. Inactive rows get 0. Returns (T, U, F).
    """
    h = np.zeros((*expert.shape, w.rows // 2))
    for t, k in np.argwhere(expert >= 0):
        e = expert[t, k]
        y = oracle.product(oracle.real(u[t]), oracle.matrix(w)[e], None if bias is None else bias[e])
        h[t, k] = activate(y, act, limit, alpha)
    return h


def experts_down(h, w, bias, expert, share, first, order, adds, tap_row, tap_at, x, taps, work):
    """x[t] += sum over k of share[t, k] * (W h[t, k] + bias) of its expert, rounded once; taps as in
    linear_add. adds 0: x[t] is that sum, and inactive rows are 0."""
    for t in range(len(x)):
        if expert[t, 0] < 0:
            if not adds:
                x[t] = 0
            continue
        total = oracle.real(x[t]) if adds else np.zeros(x.shape[1])
        for e, part, row in zip(expert[t], share[t], h[t], strict=True):
            total += part * oracle.product(
                oracle.real(row), oracle.matrix(w)[e], None if bias is None else bias[e]
            )
        oracle.store(total, x[t])
        if taps is not None and tap_row[t] >= 0:
            taps[tap_row[t], tap_at : tap_at + x.shape[1]] = x[t]
