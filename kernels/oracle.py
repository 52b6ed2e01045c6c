"""The float64 truth of every row of the table, one row of activations at a time, slow and obvious.

The first half are the plain equations (models.md); the second half are the rows of the table, which are
compositions of them. A function takes a row's inputs in table order, changes the `&` ones in place and
returns the outputs as float64 (ids as int32); `OracleBackend` rounds them once into the caller's buffers.
Where `Row.fills_outputs`, it takes them last and fills them. Rows of layers with experts: oracle_moe.py;
of integers: oracle_control.py.
"""

import numpy as np

from .oracle_control import accept, stage, stage_context, widen  # noqa: F401 rows of the table too
from .table import GELU_TANH, SILU

# ---- plain equations ---------------------------------------------------------------------------------------


def real(x):
    """float64 of an activation or vector: bf16 bits (uint16), f32 or f64."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def store(y, out):
    """Round y once into out: f32, or bf16 bits to nearest even (NaN stays NaN)."""
    if out.dtype != np.uint16:
        out[...] = y
        return
    with np.errstate(over="ignore"):
        bits = np.asarray(y, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    out[...] = np.where(np.isnan(y), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def matrix(w):
    """float64 (rows, cols), or (experts, rows, cols), of a plain `Weight`."""
    return w.data if w.data.dtype == np.float64 else real(w.data)


def product(x, w, bias=None):
    """y = x W^T + bias for one row. x: (D,), w: (N, D), y: (N,)."""
    y = w @ x
    return y if bias is None else y + bias


def rmsnorm(x, w, eps):
    """y = w * x / sqrt(mean(x^2) + eps) over the last axis. Source: Zhang & Sennrich 2019, eq. 4."""
    return w * (x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))


def normed(x, norm, eps):
    """n(x) * norm of one row; where there is no norm, the row as it is."""
    return x if norm is None else rmsnorm(x, norm, eps)


def rope(x, cos, sin):
    """Rotate pairs (j, j + J) of each head's first 2J components; the rest passes. x: (H, K), cos: (J,)."""
    j = len(cos)
    a, b = x[:, :j], x[:, j : 2 * j]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[:, 2 * j :]], axis=1)


def softmax_attend(q, k, v, scale, sink=None):
    """softmax(scale * q k^T) v for one query head; no key at all gives zeros. q: (K,), k and v: (n, K).

    sink: the logit, not scaled, of one thing more in the softmax, which has no value (models.md 4).
    """
    if len(k) == 0:
        return np.zeros_like(q)
    scores = scale * (k @ q)
    top = scores.max() if sink is None else np.maximum(scores.max(), sink)
    p = np.exp(scores - top)
    total = p.sum() if sink is None else p.sum() + np.exp(sink - top)
    return (p / total) @ v


def silu(z):
    """z * sigmoid(z)."""
    return z / (1.0 + np.exp(-z))


def gelu_tanh(z):
    """0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))). Source: models.md 5."""
    return 0.5 * z * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (z + 0.044715 * z**3)))


GATES = {SILU: silu, GELU_TANH: gelu_tanh}  # act -> what becomes of a gate


def key_range(pos, begin, end, window, causal):
    """First and one past the last key that a row sees (models.md 0 and 7.5). window 0 = no window.

    begin: keys from here on are inside any window: the block's start in a drafter's causal sliding layer,
    where the window bounds the context only; the row's own position everywhere else.
    """
    first = min(begin, max(0, pos - window + 1)) if window else 0
    last = pos + 1 if causal else (min(end, pos + window) if window else end)
    return first, last


# ---- rows of the table -------------------------------------------------------------------------------------


def embed(ids, table, scale):
    """x[t] = scale * table[ids[t]]."""
    return np.stack([scale * real(table.data[i]) for i in ids])


def qkv(
    x, norm, eps, wq, wkv, q_bias, kv_bias, q_norm, k_norm, v_norm, cos, sin, slot, pos, at, cache_k,
    cache_v, work,
):  # fmt: skip
    """q = rope(qnorm(Wq n(x))); k likewise and v = vnorm(Wv n(x)) go to the caches as key `at` of the slot.

    norm None: of x itself. Where wkv has no rows for them, values are what k is before its norm. Returns q:
    (T, H, K).
    """
    groups, room, size = cache_k.shape[1:]
    q = np.zeros((len(x), wq.rows // size, size))
    for t in range(len(x)):
        if pos[t] < 0:
            continue
        y = normed(real(x[t]), norm, eps)
        head = product(y, matrix(wq), q_bias).reshape(-1, size)
        kv = product(y, matrix(wkv), kv_bias).reshape(-1, groups, size)
        k, v = kv[0], kv[-1]
        if q_norm is not None:
            head = rmsnorm(head, q_norm, eps)
        if k_norm is not None:
            k = rmsnorm(k, k_norm, eps)
        if v_norm is not None:
            v = rmsnorm(v, v_norm, eps)
        c, s = real(cos[pos[t]]), real(sin[pos[t]])
        q[t] = rope(head, c, s)
        store(rope(k, c, s), cache_k[slot[t], :, at[t] % room])
        store(v, cache_v[slot[t], :, at[t] % room])
    return q


def attend(q, cache_k, cache_v, slot, pos, begin, end, window, causal, scale, sinks, work):
    """o[t, h] = attention of query head h over the keys its row sees, GQA by consecutive heads. Returns (T,
    H, K)."""
    heads, (groups, room) = q.shape[1], cache_k.shape[1:3]
    o = np.zeros(q.shape)
    for t in range(len(q)):
        if pos[t] < 0:
            continue
        first, last = key_range(pos[t], begin[t], end[t], window, causal)
        for h in range(heads):
            g = h // (heads // groups)
            k, v = (real(c[slot[t], g, np.arange(first, last) % room]) for c in (cache_k, cache_v))
            sink = None if sinks is None else float(sinks[h])
            o[t, h] = softmax_attend(real(q[t, h]), k, v, scale, sink)
    return o


def linear(a, w, bias, work):
    """y = a W^T + bias: (T, D)."""
    return np.stack([product(real(row), matrix(w), bias) for row in a])


def linear_add(a, w, bias, norm, eps, scale, tap_row, tap_at, x, taps, work):
    """x = scale * (x + n(a W^T + bias) * norm), without what is None; the new row also goes to
    taps[tap_row, tap_at:tap_at+D] when there are taps."""
    for t in range(len(a)):
        y = real(x[t]) + normed(product(real(a[t]), matrix(w), bias), norm, eps)
        store(y if scale is None else scale[0] * y, x[t])
        if taps is not None and tap_row[t] >= 0:
            taps[tap_row[t], tap_at : tap_at + x.shape[1]] = x[t]


def join(a, b, a_norm, b_norm, norm, eps, scale, tap_row, tap_at, x, taps):
    """x = scale * (x + n(n(a) a_norm + n(b) b_norm) norm): what ends an mlp and experts side by side; taps
    as in linear_add. Source: models.md 5."""
    for t in range(len(a)):
        both = rmsnorm(real(a[t]), a_norm, eps) + rmsnorm(real(b[t]), b_norm, eps)
        y = real(x[t]) + rmsnorm(both, norm, eps)
        store(y if scale is None else scale[0] * y, x[t])
        if taps is not None and tap_row[t] >= 0:
            taps[tap_row[t], tap_at : tap_at + x.shape[1]] = x[t]


def gate_up(x, norm, eps, act, w, work):
    """h = act(Wg n(x)) * (Wu n(x)), (T, F); w holds gate rows, then up rows. norm None: of x itself."""
    return np.stack([_gated(product(normed(real(row), norm, eps), matrix(w)), act) for row in x])


def _gated(y, act):
    gate, up = y.reshape(2, -1)
    return GATES[act](gate) * up


def head(x, pick, norm, eps, w, limit, ids, margin, work):
    """ids[r] = the smallest argmax of (W n(x[r]))[:limit] for every r in pick; -1 where one is not finite.
    margin[r], where asked for: how far the second one lies below it.

    Compared as f32: NumPy adds up equal rows of W in different orders, and only rounded do they tie.
    """
    for r in pick:
        logits = product(rmsnorm(real(x[r]), norm, eps), matrix(w))[:limit].astype(np.float32)
        ids[r] = np.argmax(logits) if np.isfinite(logits).all() else -1
        if margin is not None:
            margin[r] = (
                logits.max() - np.delete(logits, ids[r]).max(initial=-np.inf) if ids[r] >= 0 else np.inf
            )


MASS = 2.0**43  # of the likeliest id: integers, so that no sum of masses depends on its order
GREEDY_BELOW = float(np.float32(1e-5))  # temperatures from 0 to here name the likeliest id


def soft_cap(logits, multiplier, cap):
    """What laws are made from: cap * tanh(multiplier * z / cap) of bare logits z; cap 0: multiplier * z."""
    return cap * np.tanh(logits * multiplier / cap) if cap else logits * multiplier


def masses(logits, multiplier, cap, temperature, top_k, top_p, min_p):
    """Integer mass of every id under the filtered law: round(2^43 p / p of the likeliest), 0 if dropped.

    Filters in transformers' order; each keeps the first ids by falling logit,
    of equal ones the smallest id first.
    top_k: so many (0: all). top_p: those before which less than this share of what top_k left has passed.
    min_p: those with at least this share of the likeliest's probability. logits: (V,) float64, bare, finite.
    """
    best = logits.max()
    with np.errstate(over="ignore"):
        below = soft_cap(logits, multiplier, cap) - soft_cap(best, multiplier, cap)
        mass = np.floor(np.exp(np.where(logits == best, 0.0, below / temperature)) * MASS + 0.5)
    order = np.lexsort((np.arange(len(logits)), -logits))
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        ranked = mass[order].astype(np.uint64)
        through = np.cumsum(ranked)
        order = order[through - ranked < np.uint64(np.ceil(top_p * float(through[-1])))]
    kept = np.zeros(len(logits), np.uint64)
    kept[order] = mass[order]
    kept[kept < np.uint64(np.ceil(min_p * MASS))] = 0
    return kept


def philox(key, counter):
    """Philox 4x32-10: 4 random u32 from a key of 2 and a counter of 4. Source: Salmon et al. 2011."""
    (a, b), (c0, c1, c2, c3), low = key, counter, 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ a, second & low, (first >> 32) ^ c3 ^ b, first & low
        a, b = (a + 0x9E3779B9) & low, (b + 0xBB67AE85) & low
    return c0, c1, c2, c3


DRAW, DRAFT, ACCEPT, RESIDUAL = range(4)  # what a random number is for


def law_of(x, norm, eps, w, limit, multiplier, cap, top_k, temperature, top_p, min_p):
    """(bare logits below the limit, masses of their filtered law) of a row of activations.

    Temperatures below 1e-5 give all the mass to the smallest argmax. Where a logit is not finite there is no
    law: all the mass is id 0's, and the logits are None. Logits are rounded to f32 first, as in head.
    """
    logits = product(rmsnorm(real(x), norm, eps), matrix(w))[:limit].astype(np.float32).astype(np.float64)
    kept = np.zeros(limit, np.uint64)
    if not np.isfinite(logits).all():
        kept[0] = MASS
        return None, kept
    if temperature >= GREEDY_BELOW:
        return logits, masses(logits, multiplier, cap, temperature, top_k, top_p, min_p)
    kept[np.argmax(logits)] = MASS
    return logits, kept


def draw(kept, key, position, purpose):
    """The first id, ids ascending, whose running sum of masses exceeds the random number times their sum.

    key: seed (low, high word), number of the sample. The number is a function of the key, the position that
    the token will have, and what it is for: not of the round that draws.
    """
    through = np.cumsum(kept)
    drawn = random_bits(key, position, purpose) * int(through[-1]) >> 64
    return np.searchsorted(through, drawn, side="right")


def random_bits(key, position, purpose):
    """64 random bits."""
    low, high, number = (int(v) & 0xFFFFFFFF for v in key[:3])
    high_bits, low_bits = philox((low, high), (position, number, purpose, 0))[:2]
    return high_bits << 32 | low_bits


def log_probabilities(logits, multiplier, cap, kept, chosen):
    """Of the chosen id, under the filtered law and the model's own (temperature 1, ids below the limit)."""
    every = float(masses(logits, multiplier, cap, 1.0, 0, 1.0, 0.0).sum()) / MASS
    logits = soft_cap(logits, multiplier, cap)
    return np.log(float(kept[chosen]) / float(kept.sum())), logits[chosen] - logits.max() - np.log(every)


def sample(x, pick, slot, pos, norm, eps, w, limit, multiplier, cap, key, law, ids, logprob, work):
    """ids[r] = a draw from the filtered law of (W n(x[r]))[:limit];
    of two laws its log-probability, where asked for.

    key[n]: seed (low, high word), number of the sample, top_k. law[n]: temperature, top_p, min_p. A row with
    a logit that is not finite gets id -1 and log-probabilities of -infinity.
    """
    curve = multiplier, cap
    for r in pick:
        if pos[r] >= 0:
            n = slot[r]
            logits, kept = law_of(x[r], norm, eps, w, limit, *curve, key[n][3], *map(float, law[n]))
            ids[r] = -1 if logits is None else draw(kept, key[n], int(pos[r]) + 1, DRAW)
            if logprob is not None:
                logprob[r] = -np.inf if logits is None else log_probabilities(logits, *curve, kept, ids[r])


def propose(x, pick, slot, pos, norm, eps, w, limit, multiplier, cap, key, law, ids, mass, work):
    """As sample, for the drafter: a draft is for the row's own position, by random numbers of its own.

    mass[r]: the integer masses of the law that ids[r] was drawn from, rounded to f32; 0 from the limit on.
    """
    curve = multiplier, cap
    for r in pick:
        if pos[r] >= 0:
            n = slot[r]
            _, kept = law_of(x[r], norm, eps, w, limit, *curve, key[n][3], *map(float, law[n]))
            mass[r] = 0
            mass[r, :limit] = kept
            ids[r] = draw(mass[r].astype(np.uint64), key[n], int(pos[r]), DRAFT)


def reject(x, pos, norm, eps, w, limit, multiplier, cap, key, law, drafts, mass, ids, logprob, work):
    """ids[r] = the token after row r by rejection sampling: the draft that follows, or another in its place.

    The rows of slot n are n * v .. n * v + v - 1. p: the filtered law of row r, as in sample. q: that of the
    draft behind it, drafts[n, i + 1], whose masses are mass[n, i + 1]. The draft stays if u q(draft) <
    p(draft); else the id is drawn from max(p - q, 0), from p where that is 0 everywhere. The last row of a
    slot draws from p. The ids up to the first that is no draft have the law that p alone would give.
    Logits that are not finite: as in sample.
    Source: Leviathan et al. 2023.
    """
    width, curve = len(x) // len(key), (multiplier, cap)
    for r in range(len(x)):
        n, i = divmod(r, width)
        if pos[r] < 0:
            continue
        logits, kept = law_of(x[r], norm, eps, w, limit, *curve, key[n][3], *map(float, law[n]))
        position, left, purpose = int(pos[r]) + 1, kept, DRAW
        ids[r] = -1
        if logits is None:
            if logprob is not None:
                logprob[r] = -np.inf
            continue
        if i + 1 < width:
            p, q = kept / float(kept.sum()), real(mass[n, i + 1, :limit])
            q, draft, purpose = q / q.sum(), drafts[n, i + 1], RESIDUAL
            if random_bits(key[n], position, ACCEPT) * 2.0**-64 * q[draft] < p[draft]:
                ids[r] = draft
            elif (more := (np.maximum(p - q, 0) * 2.0**60).astype(np.uint64)).any():
                left = more
        if ids[r] < 0:
            ids[r] = draw(left, key[n], position, purpose)
        if logprob is not None:
            logprob[r] = log_probabilities(logits, *curve, kept, ids[r])


def head_logits(x, norm, eps, w, multiplier, cap, work):
    """logits = W n(x), scaled and capped: (T, V)."""
    bare = np.stack([product(rmsnorm(real(row), norm, eps), matrix(w)) for row in x])
    return soft_cap(bare, multiplier, cap)


def fuse(taps, w, norm, eps, work):
    """f = hidden_norm(fc taps): the context feature of each row, (T, D)."""
    return np.stack([rmsnorm(product(real(row), matrix(w)), norm, eps) for row in taps])


def inject(f, wkv, kv_bias, k_norm, eps, cos, sin, slot, pos, at, cache_k, cache_v, work):
    """KV injection: k, v of every drafter layer from the features f, as key `at` of the slot.

    wkv rows: [L][k, v][G][K].
    """
    layers, _, groups, room, size = cache_k.shape
    for t in range(len(f)):
        if pos[t] < 0:
            continue
        kv = product(real(f[t]), matrix(wkv), kv_bias).reshape(layers, 2, groups, size)
        for layer in range(layers):
            k, v = kv[layer]
            if k_norm is not None:
                k = rmsnorm(k, k_norm[layer], eps)
            store(rope(k, real(cos[pos[t]]), real(sin[pos[t]])), cache_k[layer, slot[t], :, at[t] % room])
            store(v, cache_v[layer, slot[t], :, at[t] % room])


from .oracle_moe import experts_down, experts_up, mxfp4, route  # noqa: F401 it needs the equations above
