"""sample, propose, reject: draws from the filtered laws of rows' logits. oracle.py says the laws.
Moves: the weights.

Nothing is sorted: the last id that a filter keeps is found from sums of integer masses over 2048 bins of
logits, then by bisection inside one bin. Sums of integers are exact,
so neither their order nor the threads show in a draw.
"""

import numba
import numpy as np

from .jit import jit
from .scalar import F, all_finite, exp, soft_cap
from .tiles import lay_tokens, matmul
from .vector import bits_from_f32, row_max

MASS = 2.0**43
BINS, BINS_A_UNIT = 2048, 64  # bins of (best - logit) / temperature, the last one open
GREEDY_BELOW = F(1e-5)
LOW = np.uint64(0xFFFFFFFF)
DRAW, DRAFT, ACCEPT, RESIDUAL = range(4)  # what a random number is for
WHOLE = 2.0**60  # a law's share as a whole number


def scratch(outputs):
    """f32 of workspace a thread: 2048 sums of 64 bits, a list of ids, masses."""
    return 2 * BINS + 2 * outputs + 48


@jit
def _order(logit):
    """A number that orders as the logit does; -0 and 0 are one."""
    bits = np.int64(bits_from_f32(logit + F(0.0)))
    return 0xFFFFFFFF - bits if bits & 0x80000000 else bits + 0x80000000


@jit
def _below(logit, best, curve):
    """How far the logit, scaled and capped, lies below the best one. Never above: tanh may round either way.

    curve: multiplier and cap, as table.py has them.
    """
    multiplier, cap = curve
    if cap > F(0.0):
        return min(soft_cap(logit, multiplier, cap) - soft_cap(best, multiplier, cap), F(0.0))
    return F(0.0) if logit == best else (logit - best) * multiplier


@jit
def _depth(logit, best, temperature, curve):
    """That over the temperature, from 0 down to -80, below which there is no mass."""
    z = _below(logit, best, curve) / temperature
    return z if z > F(-80.0) else F(-80.0)


@jit
def _bin(logit, best, temperature, curve):
    return np.int64(min(_depth(logit, best, temperature, curve) * F(-BINS_A_UNIT), F(BINS - 1)))


@jit
def _weigh(logits, best, temperature, curve, mass):
    """mass[n] = round(2^43 e^depth): whole numbers, exact in f32."""
    for n in range(len(logits)):
        mass[n] = np.floor(exp(_depth(logits[n], best, temperature, curve)) * F(MASS) + F(0.5))


@jit
def _drop(logits, cut, last, mass):
    """No mass for what lies behind (cut, last), by falling logit and rising id."""
    for n in range(len(logits)):
        is_kept = logits[n] > cut or (logits[n] == cut and n <= last)
        mass[n] = mass[n] if is_kept else F(0.0)


@jit
def _drop_light(least, mass):
    for n in range(len(mass)):
        mass[n] = mass[n] if mass[n] >= least else F(0.0)


@jit
def _sums(mass, sums, step):
    """Masses of every `step` ids, into sums; returns all of it."""
    total = np.int64(0)
    for at in range((len(mass) + step - 1) // step):
        part, chunk = np.int64(0), mass[at * step : (at + 1) * step]
        for n in range(len(chunk)):
            part += np.int64(chunk[n])
        sums[at] = part
        total += part
    return total


@jit
def _last_kept(logits, best, temperature, curve, mass, need, is_count, floor, bins, ids):
    """(logit, id) of the first element, by falling logit and rising id,
    with which the sum of parts reaches `need`.

    A part is 1 (is_count) or the mass. floor: what has less mass cannot be the answer.
    """
    bins[:] = 0
    for n in range(len(logits)):
        if mass[n] >= floor:
            bins[_bin(logits[n], best, temperature, curve)] += np.int64(1) if is_count else np.int64(mass[n])
    before, at = np.int64(0), 0
    while at < BINS - 1 and before + bins[at] < need:
        before += bins[at]
        at += 1
    count, low, high = 0, np.int64(1) << 32, np.int64(-1)
    for n in range(len(logits)):
        if _bin(logits[n], best, temperature, curve) == at:
            ids[count] = n
            count += 1
            low, high = min(low, _order(logits[n])), max(high, _order(logits[n]))
    while low < high:  # the largest order from which on up the sum reaches what is needed
        middle = low + (high - low + 1) // 2
        total = before
        for i in range(count):
            n = ids[i]
            if _order(logits[n]) >= middle:
                total += np.int64(1) if is_count else np.int64(mass[n])
        if total >= need:
            low = middle
        else:
            high = middle - 1
    for i in range(count):
        n = ids[i]
        if _order(logits[n]) > low:
            before += np.int64(1) if is_count else np.int64(mass[n])
    last = 0
    for i in range(count):
        n = ids[i]
        if _order(logits[n]) == low and before < need:
            last = n
            before += np.int64(1) if is_count else np.int64(mass[n])
    return logits[last], last


@jit
def _philox(key, position, purpose):
    """64 random bits, in halves. Source: Salmon et al. 2011, Philox 4x32-10."""
    c0, c1, c2, c3 = np.uint64(position), _word(key[2]), np.uint64(purpose), np.uint64(0)
    a, b = _word(key[0]), _word(key[1])
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (second >> np.uint64(32)) ^ c1 ^ a, second & LOW
        c2, c3 = (first >> np.uint64(32)) ^ c3 ^ b, first & LOW
        a, b = (a + np.uint64(0x9E3779B9)) & LOW, (b + np.uint64(0xBB67AE85)) & LOW
    return c0, c1


@jit
def _word(value):
    return np.uint64(np.int64(value) & np.int64(0xFFFFFFFF))


@jit
def _scaled(high, low, total):
    """floor(random * total / 2^64) of the random number high * 2^32 + low."""
    shift, upper, lower = np.uint64(32), np.uint64(total) >> np.uint64(32), np.uint64(total) & LOW
    a, b = high * lower, low * upper
    carry = ((low * lower) >> shift) + (a & LOW) + (b & LOW)
    return np.int64(high * upper + (a >> shift) + (b >> shift) + (carry >> shift))


@jit
def _find(mass, sums, step, drawn):
    """The first id whose running sum of masses exceeds `drawn`."""
    at = 0
    while drawn >= sums[at]:
        drawn -= sums[at]
        at += 1
    n = at * step
    while drawn >= np.int64(mass[n]):
        drawn -= np.int64(mass[n])
        n += 1
    return n


@jit
def _draw(mass, bins, key, position, purpose):
    """A draw by masses."""
    step = _step(mass)
    total = _sums(mass, bins, step)
    high, low = _philox(key, position, purpose)
    return _find(mass, bins, step, _scaled(high, low, total))


@jit
def _step(mass):
    """Ids to one sum of `bins`."""
    return max(256, (len(mass) + BINS - 1) // BINS)


@jit
def _best(logits):
    """The largest; NaN where one of them is not finite."""
    return row_max(logits, 0, len(logits)) if all_finite(logits) else F(np.nan)


@jit
def _certain(logits, best, temperature):
    """The id that has all the mass, or -1. Logits that are not finite have no law: id 0."""
    if best != best:
        return 0
    if temperature >= GREEDY_BELOW:
        return -1
    found = 0
    while logits[found] != best:
        found += 1
    return found


@jit
def _filter(logits, best, curve, key, law, bins, ids, mass):
    """mass: of the law after all filters. Returns the id that has all of it, or -1."""
    temperature, top_p, top_k, count = law[0], np.float64(law[1]), np.int64(key[3]), len(logits)
    only = _certain(logits, best, temperature)
    if only >= 0:
        mass[:] = F(0.0)
        mass[only] = F(MASS)
        return only
    _weigh(logits, best, temperature, curve, mass)
    if 0 < top_k < count:
        cut, last = _last_kept(logits, best, temperature, curve, mass, top_k, True, F(0.0), bins, ids)
        _drop(logits, cut, last, mass)
    if top_p < 1.0:
        need = np.int64(np.ceil(top_p * np.float64(_sums(mass, bins, _step(mass)))))
        # All that weighs less than the floor weighs less than what top_p leaves over:
        # the answer lies above it.
        floor = F((1.0 - top_p) * MASS / count * 0.5)
        cut, last = _last_kept(logits, best, temperature, curve, mass, need, False, floor, bins, ids)
        _drop(logits, cut, last, mass)
    if law[2] > F(0.0):
        _drop_light(law[2] * F(MASS), mass)
    return only


@jit
def _score(logits, best, curve, found, share, bins, mass, logprob):
    """Log-probabilities of the found id, whose share of the filtered law is known."""
    logprob[0] = np.log(share)
    _weigh(logits, best, F(1.0), curve, mass)
    every = np.float64(_sums(mass, bins, _step(mass))) / MASS
    logprob[1] = _below(logits[found], best, curve) - np.log(every)


@jit
def _sample(logits, curve, key, law, position, logprob, bins, ids, mass):
    """One row's id, -1 where a logit is not finite. logprob: (2,) to fill, or empty."""
    best = _best(logits)
    if best != best:
        logprob[:] = F(-np.inf)
        return -1
    found, share = _certain(logits, best, law[0]), 1.0
    if found < 0:
        _filter(logits, best, curve, key, law, bins, ids, mass)
        found = _draw(mass, bins, key, position, DRAW)
        share = np.float64(mass[found]) / np.float64(_sums(mass, bins, _step(mass))) if len(logprob) else 1.0
    if len(logprob):
        _score(logits, best, curve, found, share, bins, mass, logprob)
    return found


@jit
def _reject(logits, curve, key, law, position, draft, drafted, logprob, bins, ids, mass):
    """One row's id: the draft, or another; -1 where a logit is not finite.

    draft, drafted: the id and its law's masses; -1 behind the last.
    """
    best = _best(logits)
    if best != best:
        logprob[:] = F(-np.inf)
        return -1
    _filter(logits, best, curve, key, law, bins, ids, mass)
    total = np.float64(_sums(mass, bins, _step(mass)))
    found, left = -1, False
    if draft >= 0:
        p, q = WHOLE / total, WHOLE / np.float64(_sums(drafted, bins, _step(drafted)))
        high, low = _philox(key, position, ACCEPT)
        u = np.float64(np.int64((high << np.uint64(32) | low) >> np.uint64(11))) * 2.0**-53
        if u * (np.float64(drafted[draft]) * q) < np.float64(mass[draft]) * p:
            found = draft
        else:
            for n in range(len(mass)):
                left |= np.float64(mass[n]) * p - np.float64(drafted[n]) * q >= 1.0
    if left:
        for n in range(len(mass)):
            mass[n] = np.floor(max(np.float64(mass[n]) * p - np.float64(drafted[n]) * q, 0.0))
    if found < 0:
        found = _draw(mass, bins, key, position, DRAW if draft < 0 else RESIDUAL)
    if len(logprob):
        _filter(logits, best, curve, key, law, bins, ids, mass)
        _score(logits, best, curve, found, np.float64(mass[found]) / total, bins, mass, logprob)
    return found


@jit
def _share(work, at, thread, room, limit):
    """(64-bit sums, ids, masses) of a thread, behind what `at` says is used."""
    at = (at + 15) // 16 * 16 + np.int64(thread) * (2 * BINS + 2 * room)
    bins, at = work[at : at + 2 * BINS].view(np.int64), at + 2 * BINS
    return bins, work[at : at + limit].view(np.int32), work[at + room : at + room + limit]


@jit(parallel=True)
def _run(x, pick, address, norm, eps, w, limit, curve, dice, ids, logprob, proposed, work, threads):
    """sample, or propose where `proposed` is not empty: it gets the masses. dice: keys and laws of slots."""
    (slot, pos), (key, law) = address, dice
    rows = lay_tokens(x, pick, norm, eps, work, threads)
    y_at, ld = rows * x.shape[1], w.shape[0] * 16
    matmul(w, rows, x.shape[1], work, y_at, ld, threads)
    for thread in numba.prange(threads):
        bins, listed, mass = _share(work, y_at + rows * ld, thread, (limit + 15) // 16 * 16, limit)
        for i in range(len(pick) * thread // threads, len(pick) * (thread + 1) // threads):
            r = np.int64(pick[i])
            if pos[r] < 0:
                continue
            begin, n, position = y_at + np.int64(i) * ld, slot[r], np.int64(pos[r])
            logits = work[begin : begin + limit]
            if len(proposed):
                own = proposed[r]
                _filter(logits, _best(logits), curve, key[n], law[n], bins, listed, own[:limit])
                own[limit:] = F(0.0)
                ids[r] = _draw(own[:limit], bins, key[n], position, DRAFT)
            else:
                mine = logprob[r] if len(logprob) else logprob[:0].reshape(-1)
                ids[r] = _sample(logits, curve, key[n], law[n], position + 1, mine, bins, listed, mass)


def sample(backend, x, pick, slot, pos, norm, eps, w, limit, multiplier, cap, key, law, ids, logprob, work):
    b, address, curve, dice = backend, (slot, pos), (F(multiplier), F(cap)), (key, law)
    logprob, none = b.none_pairs if logprob is None else logprob, b.none_pairs
    return len(pick) and (_run, (
        x, pick, address, norm, eps, w.data, limit, curve, dice, ids, logprob, none, work, b.threads
    ))  # fmt: skip


def propose(backend, x, pick, slot, pos, norm, eps, w, limit, multiplier, cap, key, law, ids, mass, work):
    b, address, curve, dice = backend, (slot, pos), (F(multiplier), F(cap)), (key, law)
    return len(pick) and (_run, (
        x, pick, address, norm, eps, w.data, limit, curve, dice, ids, b.none_pairs, mass, work, b.threads
    ))  # fmt: skip


@jit(parallel=True)
def _run_reject(
    x, none_i, pos, norm, eps, w, limit, curve, dice, drafts, drafted, ids, logprob, work, threads
):
    key, law = dice
    rows = lay_tokens(x, none_i, norm, eps, work, threads)
    y_at, ld = rows * x.shape[1], w.shape[0] * 16
    matmul(w, rows, x.shape[1], work, y_at, ld, threads)
    width = len(x) // len(key)
    for thread in numba.prange(threads):
        bins, listed, mass = _share(work, y_at + rows * ld, thread, (limit + 15) // 16 * 16, limit)
        own = np.int64(thread)
        for r in range(len(x) * own // threads, len(x) * (own + 1) // threads):
            if pos[r] < 0:
                continue
            begin, n, i = y_at + np.int64(r) * ld, r // width, r % width + 1
            logits = work[begin : begin + limit]
            mine = logprob[r] if len(logprob) else logprob[:0].reshape(-1)
            draft = np.int64(drafts[n, i]) if i < width else np.int64(-1)
            law_of_draft = drafted[n, min(i, width - 1), :limit]
            position = np.int64(pos[r]) + 1
            ids[r] = _reject(
                logits, curve, key[n], law[n], position, draft, law_of_draft, mine, bins, listed, mass
            )


def reject(backend, x, pos, norm, eps, w, limit, multiplier, cap, key, law, drafts, mass, ids, logprob, work):
    b, curve, dice = backend, (F(multiplier), F(cap)), (key, law)
    logprob = b.none_pairs if logprob is None else logprob
    return _run_reject, (
        x, b.none_i, pos, norm, eps, w.data, limit, curve, dice, drafts, mass, ids, logprob, work, b.threads
    )  # fmt: skip
