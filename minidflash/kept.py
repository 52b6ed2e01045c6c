"""What slots hold of texts, of those that ended there too: one that begins alike gets these rows."""

import numpy as np

from .prefix import alike
from .state import copy_rows

LEAST = 16  # rows that a copy is worth: fewer are run as soon


def bring(engine, s, request, slot, free):
    """A slot gets what its new text can reuse, from the one that holds most of it. What the slot kept itself
    moves into a free one, unless the new text goes on from its prompt.

    slot: whose text has not begun. free: slots of nobody.
    """
    _forget_waiting(engine.ops, s, slot)
    if not request.resumes:
        return
    own, best = s.prefixes[slot].holds(engine, s, request), slot
    rows = own + LEAST - 1
    for one, prefix in enumerate(s.prefixes):
        if found := _more_than(rows, prefix, engine, s, request):
            best, rows = one, found
    if own < s.prefixes[slot].prompt - 1:  # a prompt's last row always runs
        set_aside(engine.ops, s, slot, [one for one in free if one != best])
    if best != slot:
        copy_rows(engine.ops, s, best, slot, rows)
        if best in free:
            s.prefixes[best].used = 0  # two have it now


def gains_by_waiting(engine, s, request, others):
    """Whether rows that a new text can reuse are in a pass with the texts of these requests: it would run
    them too, beside them."""
    if not request.resumes or not others:
        return False
    ids = request.ids
    rows = max(alike(ids, one.ids, min(len(ids), len(one.ids))) for one in others) - LEAST
    return rows >= 0 and not any(_more_than(rows, prefix, engine, s, request) for prefix in s.prefixes)


def _more_than(rows, prefix, engine, s, request):
    """How many rows of a request a slot holds, 0 where they are no more than that."""
    may_have = prefix.ids[rows : rows + 1] == request.ids[rows : rows + 1]  # seen at once
    found = prefix.holds(engine, s, request) if may_have else 0
    return found if found > rows else 0


def set_aside(ops, s, slot, free):
    """What a slot keeps moves into the free one whose text is the oldest, unless its own is that."""
    kept, prefixes = s.prefixes[slot], s.prefixes
    oldest = min(free, key=lambda one: len(prefixes[one].ids) >= LEAST and prefixes[one].used, default=slot)
    is_older = len(prefixes[oldest].ids) < LEAST or prefixes[oldest].used < kept.used
    if len(kept.ids) >= LEAST and oldest != slot and is_older:
        _forget_waiting(ops, s, oldest)
        copy_rows(ops, s, slot, oldest, len(kept.ids))


def _forget_waiting(ops, s, slot):
    """Context features of a text that ended: a round would inject them into rows that are another's."""
    ops.upload(s.fresh[slot : slot + 1], np.zeros(1, np.int32))
