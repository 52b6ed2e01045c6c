"""The integers of a round as the table's rows say them: plain loops over slots, which others follow."""

import numpy as np

from .record import ACCEPTED, EMITTED, NOT_FINITE, OUT_OF_BUDGET, STOPPED, TOKENS, WHY


def stage(anchor, start, fresh, done, fill, ids, slot, pos, at, begin, end, row):
    """Rows of a pass of width w = T/N: ids = [anchor, fill[1..w-1]] at start..start+w-1; pos -1 if done.

    A fill of -1, which a drafter whose logits are not finite leaves, becomes id 0: any draft will do.
    begin, end: the block's first position and one past its last; row: where the row's taps go,
    slot * B + fresh + i: behind the rows that wait for injection; -1 past the slot's B rows.
    """
    width = len(ids) // len(anchor)
    for n in range(len(anchor)):
        for i in range(width):
            r = n * width + i
            ids[r] = anchor[n] if i == 0 else max(fill[n, i], 0)
            slot[r] = n
            tap = fresh[n] + i
            row[r] = n * fill.shape[1] + tap if tap < fill.shape[1] else -1
            at[r] = start[n] + i
            pos[r] = -1 if done[n] else start[n] + i
            begin[r], end[r] = start[n], start[n] + width


def stage_context(start, fresh, slot, pos):
    """Rows of context features that wait: positions start-fresh .. start-1, then -1. fresh becomes 0."""
    width = len(slot) // len(start)
    for n in range(len(start)):
        for i in range(width):
            slot[n * width + i] = n
            pos[n * width + i] = start[n] - fresh[n] + i if i < fresh[n] else -1
        fresh[n] = 0


def accept(drafts, choice, stop, start, anchor, fresh, left, done, record, kept):
    """Accept, commit, stop, next anchor, for every slot (models.md 7.4).

    choice[n*v + i]: the target's token after row i. The longest prefix with drafts[i+1] == choice[i] is kept,
    then the target's own token; the sum is cut at the budget, after the first stop id and before the first
    choice of -1 (a logit is not finite). stop: a slot's stop ids, -1 is none. record: as in record.py.
    kept: rows of the pass that are committed.
    """
    width = len(choice) // len(start)
    for n in range(len(start)):
        record[n], kept[n] = 0, 0
        record[n, TOKENS:] = -1
        tokens, own_drafts = np.split(record[n, TOKENS:], 2)
        if done[n]:
            continue
        own_drafts[1:width] = np.maximum(drafts[n, 1:width], 0)
        own = choice[n * width : (n + 1) * width]
        accepted = 0
        while accepted + 1 < width and drafts[n, accepted + 1] == own[accepted] >= 0:
            accepted += 1
        emitted = 0
        while emitted < min(accepted + 1, left[n]) and not done[n]:
            token = own[emitted]
            if token < 0:
                done[n] = NOT_FINITE
                break
            tokens[emitted] = token
            emitted += 1
            if token in stop[n]:
                done[n] = STOPPED
        start[n] += emitted
        fresh[n] += emitted
        left[n] -= emitted
        if left[n] == 0 and not done[n]:
            done[n] = OUT_OF_BUDGET
        if emitted:
            anchor[n] = tokens[emitted - 1]
        record[n, [EMITTED, ACCEPTED, WHY]] = emitted, accepted, done[n]
        kept[n] = emitted


def widen(pick, pos, names, narrow, ids, mass):
    """Ids and laws of a reduced head become the target's: number n of the head is id names[n].

    ids[r], mass[r]: of the picked rows that are active. narrow: masses over the head's numbers, None where no
    law is kept. An id of -1 stays.
    """
    for r in pick:
        if pos[r] < 0:
            continue
        if ids[r] >= 0:
            ids[r] = names[ids[r]]
        if mass is not None:
            has_mass = np.asarray(narrow[r]) > 0
            mass[r] = 0
            mass[r, names[has_mass]] = narrow[r][has_mass]
