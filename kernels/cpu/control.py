"""stage, stage_context, accept: the integers of a round. The oracle's functions say the rule;
these are compiled."""

from .jit import jit

STOPPED, OUT_OF_BUDGET, NOT_FINITE = 1, 2, 3


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
    _stage(*args)


@jit
def _stage_context(start, fresh, slot, pos):
    width = len(slot) // len(start)
    for n in range(len(start)):
        for i in range(width):
            slot[n * width + i] = n
            pos[n * width + i] = start[n] - fresh[n] + i if i < fresh[n] else -1
        fresh[n] = 0


def stage_context(backend, *args):
    _stage_context(*args)


@jit
def _is_stop(token, stop):
    for s in stop:
        if s == token:
            return True
    return False


@jit
def _accept(drafts, choice, stop, start, anchor, fresh, left, done, record):
    width = len(choice) // len(start)
    for n in range(len(start)):
        record[n, :3] = 0
        record[n, 3:] = -1
        if done[n]:
            continue
        for i in range(1, width):
            record[n, 3 + drafts.shape[1] + i] = max(drafts[n, i], 0)
        own = choice[n * width : (n + 1) * width]
        kept = 0
        while kept + 1 < width and drafts[n, kept + 1] == own[kept] and own[kept] >= 0:
            kept += 1
        emitted = 0
        while emitted < min(kept + 1, left[n]) and done[n] == 0:
            if own[emitted] < 0:
                done[n] = NOT_FINITE
                break
            record[n, 3 + emitted] = own[emitted]
            if _is_stop(own[emitted], stop):
                done[n] = STOPPED
            emitted += 1
        start[n] += emitted
        fresh[n] += emitted
        left[n] -= emitted
        if left[n] == 0 and done[n] == 0:
            done[n] = OUT_OF_BUDGET
        if emitted:
            anchor[n] = record[n, 2 + emitted]
        record[n, 0], record[n, 1], record[n, 2] = emitted, kept, done[n]


def accept(backend, *args):
    _accept(*args)
