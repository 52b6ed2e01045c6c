"""stage, stage_context, accept, widen: the integers of a round. The oracle's functions say the rule;
these are compiled."""

import numpy as np

from ..record import ACCEPTED, EMITTED, NOT_FINITE, OUT_OF_BUDGET, STOPPED, TOKENS, WHY
from .jit import jit


@jit
def _stage(anchor, start, fresh, done, fill, ids, slot, pos, at, begin, end, row):
    width = len(ids) // len(anchor)
    for n in range(len(anchor)):
        for i in range(width):
            r = n * width + i
            ids[r] = anchor[n] if i == 0 else max(fill[n, i], 0)
            slot[r] = n
            at[r] = start[n] + i
            pos[r] = -1 if done[n] else start[n] + i
            begin[r] = start[n]
            end[r] = start[n] + width
            tap = fresh[n] + i
            row[r] = n * fill.shape[1] + tap if tap < fill.shape[1] else -1


def stage(backend, *args):
    return _stage, args


@jit
def _stage_context(start, fresh, slot, pos):
    width = len(slot) // len(start)
    for n in range(len(start)):
        for i in range(width):
            slot[n * width + i] = n
            pos[n * width + i] = start[n] - fresh[n] + i if i < fresh[n] else -1
        fresh[n] = 0


def stage_context(backend, *args):
    return _stage_context, args


@jit
def _is_stop(token, stop):
    for s in stop:
        if s == token:
            return True
    return False


@jit
def _accept(drafts, choice, stop, start, anchor, fresh, left, done, record, kept):
    width = len(choice) // len(start)
    for n in range(len(start)):
        record[n, :TOKENS], kept[n] = 0, 0
        tokens = record[n, TOKENS:]  # the drafts lie behind them
        tokens[:] = -1
        if done[n]:
            continue
        for i in range(1, width):
            tokens[drafts.shape[1] + i] = max(drafts[n, i], 0)
        own = choice[n * width : (n + 1) * width]
        accepted = 0
        while accepted + 1 < width and drafts[n, accepted + 1] == own[accepted] and own[accepted] >= 0:
            accepted += 1
        emitted = 0
        while emitted < min(accepted + 1, left[n]) and done[n] == 0:
            if own[emitted] < 0:
                done[n] = NOT_FINITE
                break
            tokens[emitted] = own[emitted]
            if _is_stop(own[emitted], stop[n]):
                done[n] = STOPPED
            emitted += 1
        start[n] += emitted
        fresh[n] += emitted
        left[n] -= emitted
        if left[n] == 0 and done[n] == 0:
            done[n] = OUT_OF_BUDGET
        if emitted:
            anchor[n] = tokens[emitted - 1]
        record[n, EMITTED], record[n, ACCEPTED], record[n, WHY] = emitted, accepted, done[n]
        kept[n] = emitted


def accept(backend, *args):
    return _accept, args


@jit
def _widen(pick, pos, names, narrow, ids, mass):
    for r in pick:
        if pos[r] < 0:
            continue
        if ids[r] >= 0:
            ids[r] = names[ids[r]]
        if len(mass):
            mass[r] = np.float32(0)
            for n in range(len(names)):
                if narrow[r, n] > 0:
                    mass[r, names[n]] = narrow[r, n]


def widen(backend, pick, pos, names, narrow, ids, mass):
    none = backend.none_pairs
    return _widen, (pick, pos, names, none if mass is None else narrow, ids, none if mass is None else mass)
