"""The caller-owned buffers of a run: caches, lengths, anchor, flags, rows, scratch; their bytes.
Allocation only."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minidflash.kernels import record

from .prefix import Prefix


@dataclass
class Rows:
    """The rows of one pass: who they are and their activations. All arrays have R rows;
    a pass uses the first T.

    q, o, h are as wide as the widest layer needs; `wide` gives a layer its part.
    """

    ids: Any  # i32[R] token
    slot: Any  # i32[R] which sequence
    pos: Any  # i32[R] absolute position, -1: inactive
    at: Any  # i32[R] number of its key
    begin: Any  # i32[R] first position of the row's block
    end: Any  # i32[R] one past the row's block
    tap_row: Any  # i32[R] row of the tap buffer
    x: Any  # A[R,D] residual stream
    q: Any  # A[R,H*K] queries
    o: Any  # A[R,H*K] what attention gives
    h: Any  # A[R,F] inside the ffn
    experts: Any  # ExpertRows, None where no layer has experts

    def first(self, count):
        """The same buffers, cut to `count` rows (views)."""
        buffers = [getattr(self, name)[:count] for name in self.__dataclass_fields__ if name != "experts"]
        return Rows(*buffers, self.experts and self.experts.first(count))

    @property
    def address(self):
        """(slot, pos, at): which sequence, where rotation and windows see it, the number of its key."""
        return self.slot, self.pos, self.at

    @property
    def staged(self):
        """What the row `stage` of the table fills, in its order."""
        return self.ids, self.slot, self.pos, self.at, self.begin, self.end, self.tap_row


@dataclass
class ExpertRows:
    """Which experts the rows of a pass go through, as the row `route` says it."""

    touched: Any  # i32[1] distinct experts of all passes and layers so far
    u: Any  # A[R,D] normed rows
    expert: Any  # i32[R,U]
    share: Any  # f32[R,U]
    begin: Any  # i32[E+1] where each expert's pairs begin in order
    order: Any  # i32[R*U] pairs r*U + k, expert by expert
    dense: Any  # A[R,D] what an mlp beside the experts gives, None where there is none
    mixed: Any  # A[R,D] what the experts give then

    def first(self, count):
        """The same buffers for `count` rows (views)."""
        pairs = count * self.expert.shape[1]
        beside = [None if one is None else one[:count] for one in (self.dense, self.mixed)]
        return ExpertRows(
            self.touched, self.u[:count], self.expert[:count], self.share[:count], self.begin,
            self.order[:pairs], *beside,
        )  # fmt: skip

    @property
    def groups(self):
        """What the rows of experts read, in their order."""
        return self.expert, self.begin, self.order


def make_expert_rows(ops, stack, count):
    """ExpertRows for passes of up to `count` rows; None where no layer has experts. One kind of experts a
    stack."""
    kinds = {(e.count, e.used) for e in stack.each("experts") if e}
    if not kinds:
        return None
    ((experts, used),) = kinds
    beside = [ops.array((count, stack.width), "A") if stack.most("dense_width") else None for _ in range(2)]
    return ExpertRows(
        ops.array((1,), "i32"), ops.array((count, stack.width), "A"), ops.array((count, used), "i32"),
        ops.array((count, used), "f32"), ops.array((experts + 1,), "i32"), ops.array((count * used,), "i32"),
        *beside,
    )  # fmt: skip


def wide(buffer, *shape):
    """The first numbers of a buffer (R, most) as (R, *shape)."""
    count = len(buffer)
    return buffer.reshape(-1)[: count * math.prod(shape)].reshape(count, *shape)


def make_rows(ops, stack, count):
    """Rows for passes of up to `count` rows through a stack."""
    i32 = [ops.array((count,), "i32") for _ in range(7)]
    widths = stack.width, stack.most("q_rows"), stack.most("q_rows"), stack.most("inner")
    buffers = [ops.array((count, width), "A") for width in widths]
    return Rows(*i32, *buffers, make_expert_rows(ops, stack, count))


@dataclass
class Cache:
    """Keys and values of one layer for all slots, A[N,G,S,K] each: key n of a slot lies in row n % S."""

    k: Any
    v: Any


def cache_rows(window, room, newest, cut):
    """S of a layer's cache: `room`, or fewer where a window lets old keys go: then it is a ring.

    window: keys a row sees, 0: all. newest: keys that one pass stores at most. A row of that pass still needs
    the window - 1 keys before it, so a ring has window - 1 + newest rows; rounded up to a multiple of `cut`,
    so that the pieces in which attention takes keys never lie across its end.
    """
    ring = -(-(window - 1 + newest) // cut) * cut if window else room
    return min(ring, room)


@dataclass
class State:
    """Everything a run changes, for N slots. Lengths and flags live on the device;
    kernels read and write them.

    start: position of the anchor = rows in the target's cache.
    fresh: context features that wait for injection, at most B.
    left: tokens the slot may still emit. done: 0, or why it ended (kernels/record.py). kept: rows of the last
    verify pass that were committed. carried: arrays [N, ...] that say where a slot is and are not addressed
    by position; `reset`, `snapshot` and `restore` are theirs. drafts: [N, B]; column 0 is not used.
    record: what accept tells the host. key, law, logprob: as in the row sample. margin: as in the row
    head, for runs that are traced.
    mass: [N, B, V], the laws that drafts were drawn from; None where drafts are the likeliest tokens. narrow:
    [N, B, Y], the same as a reduced head has them.
    caches, drafter_caches: a Cache a layer. injected: the drafter's, all layers in one, (L, N, G, S, K): one
    pass injects into all of them. prefixes: of each slot, which ids' rows the caches hold.
    """

    slots: int
    ctx: int
    block: int
    chunk: int
    anchor: Any
    start: Any
    fresh: Any
    left: Any
    done: Any
    kept: Any
    carried: tuple
    stop: Any
    masks: Any
    drafts: Any
    choice: Any
    record: Any
    key: Any
    law: Any
    logprob: Any
    margin: Any
    mass: Any
    narrow: Any
    rows: Rows
    draft_rows: Rows | None
    context_slot: Any
    context_pos: Any
    taps: Any
    prompt_taps: Any
    features: Any
    caches: list
    drafter_caches: list
    injected: Cache | None
    work: Any
    memory: dict
    prefixes: list

    def first(self, lanes):
        """The same buffers, cut to the slots below `lanes` (views): what a round of so many runs on."""
        wide = lanes * self.block
        by_slot = "start", "anchor", "fresh", "left", "done", "kept", "stop", "masks", "drafts", "record"
        by_slot += "key", "law", "mass", "narrow"
        parts = {name: getattr(self, name) for name in by_slot}
        parts = {name: None if one is None else one[:lanes] for name, one in parts.items()}
        return replace(
            self, slots=lanes, **parts, draft_rows=self.draft_rows and self.draft_rows.first(wide),
            context_slot=self.context_slot[:wide], context_pos=self.context_pos[:wide],
            caches=[Cache(one.k[:lanes], one.v[:lanes]) for one in self.caches],
            drafter_caches=[Cache(one.k[:lanes], one.v[:lanes]) for one in self.drafter_caches],
        )  # fmt: skip


def make_state(ops, target, drafter, stops, slots, ctx, block, chunk, rejects=False):
    """Allocate a State.

    target, drafter: configs (drafter None: plain decoding, block 1). stops: stop ids of a slot at most.
    ctx: positions a slot may use, fewer
    where the drafter was made for fewer; the caches hold block rows more, since the last block may overshoot.
    chunk: rows of one prompt pass, whose taps have a buffer of their own: features of other slots may wait.
    rejects: drafts are drawn, so their laws are kept. Errors: MemoryError.
    """
    wide = slots * block
    count = max(chunk, wide)
    room = ctx + block
    rows = make_rows(ops, target, count)
    newest, cut = max(chunk, block), ops.backend.key_cut
    caches = [
        _cache(ops, slots, one.kv_heads, cache_rows(one.window, room, newest, cut), one.head_size)
        for one in target.layers
    ]
    i32 = {name: ops.array((slots,), "i32") for name in ("anchor", "start", "fresh", "left", "done", "kept")}
    stop = ops.array((slots, max(1, stops)), "i32")
    ops.upload(stop, np.full(stop.shape, -1, np.int32))
    masks, drafts = ops.array((slots, block), "i32"), ops.array((slots, block), "i32")
    draft_rows = taps = prompt_taps = features = injected = None
    needs = _work_needs(target, count, wide)
    if drafter is not None:
        ops.upload(masks, np.full((slots, block), drafter.mask_id, np.int32))
        draft_rows = make_rows(ops, drafter, wide)
        columns = len(drafter.taps) * target.width
        taps, prompt_taps = ops.array((wide, columns), "A"), ops.array((chunk, columns), "A")
        features = ops.array((count, drafter.width), "A")
        # One array for all layers, so one S: a ring where all of them slide.
        own = drafter.context(ctx) + block
        longest = max(cache_rows(one.window, own, newest, cut) for one in drafter.layers)
        one, layers = drafter.layers[0], len(drafter.layers)
        injected = _cache(ops, layers, slots, one.kv_heads, longest, one.head_size)
        stacked = layers * one.kv_rows
        needs += _work_needs(drafter, wide, wide)[:-1]
        needs += [
            (count, columns, drafter.width),
            (count, drafter.width, stacked),
            (wide, drafter.width, target.vocab),
        ]
    work = ops.array((max(ops.backend.work_size(*need) for need in needs),), "f32")
    mass = ops.array((slots, block, target.vocab), "f32") if rejects else None
    few = drafter.draft_vocab if rejects and drafter is not None else 0
    narrow = ops.array((slots, block, few), "f32") if few else None
    memory = {
        "target_cache": sum(cache.k.nbytes + cache.v.nbytes for cache in caches),
        "drafter_cache": injected.k.nbytes + injected.v.nbytes if injected else 0,
        "workspace": work.nbytes + _bytes(rows, draft_rows, taps, prompt_taps, features, mass, narrow),
    }
    return State(
        slots, ctx, block, chunk, **i32, carried=tuple(i32.values()), stop=stop, masks=masks, drafts=drafts,
        choice=ops.array((count,), "i32"), record=ops.array((slots, record.size(block)), "i32"),
        key=ops.array((slots, 4), "i32"), law=ops.array((slots, 3), "f32"),
        logprob=ops.array((count, 2), "f32"), margin=ops.array((count,), "f32"), mass=mass,
        narrow=narrow, rows=rows, draft_rows=draft_rows,
        context_slot=ops.array((wide,), "i32"), context_pos=ops.array((wide,), "i32"), taps=taps,
        prompt_taps=prompt_taps, features=features, caches=caches, injected=injected, work=work,
        memory=memory, prefixes=[Prefix() for _ in range(slots)],
        drafter_caches=[Cache(k, v) for k, v in zip(injected.k, injected.v, strict=True)] if injected else [],
    )  # fmt: skip


def _cache(ops, *shape):
    return Cache(ops.array(shape, "A"), ops.array(shape, "A"))


def _work_needs(stack, count, head_rows):
    """(rows, inputs, outputs) of every matrix product of a stack; the last one is its head's."""
    found = {}  # layers of one kind need the same
    for one in stack.layers:
        pairs = count * (one.experts.used if one.experts else 1)
        found |= dict.fromkeys([
            (count, stack.width, one.q_rows + one.kv_rows),
            (count, one.q_rows, stack.width),
            (pairs, stack.width, 2 * one.ffn_width),
            (pairs, one.ffn_width, stack.width),
        ])  # fmt: skip
        if one.experts:
            found[count, stack.width, one.experts.count] = None
        if one.dense_width:
            found |= dict.fromkeys([(count, stack.width, 2 * one.dense_width),
                                    (count, one.dense_width, stack.width)])  # fmt: skip
    return [*found, (head_rows, stack.width, stack.vocab)]


def _bytes(*buffers):
    """Bytes of arrays and of the arrays of Rows."""
    total = 0
    for buffer in buffers:
        if isinstance(buffer, (Rows, ExpertRows)):
            total += _bytes(*(getattr(buffer, name) for name in buffer.__dataclass_fields__))
        elif buffer is not None:
            total += buffer.nbytes
    return total


def reset(ops, s, slot):
    """A slot begins anew: at position 0, nothing carried over. Keys of before lie behind it and are written
    over."""
    for array in s.carried:
        ops.upload(array[slot : slot + 1], np.zeros((1, *array.shape[1:]), array.dtype))


def snapshot(ops, s, slot):
    """Host copies of what a slot carries, for `restore`; no context feature may wait (s.fresh is 0).

    Keys are not part of it: those that are older than the snapshot must still lie in their rows.
    """
    return [ops.download(array[slot : slot + 1]) for array in s.carried]


def restore(ops, s, slot, copies):
    """A slot is where it was at its `snapshot`."""
    for array, values in zip(s.carried, copies, strict=True):
        ops.upload(array[slot : slot + 1], values)


def copy_slot(ops, s, source, slot, rows):
    """A slot becomes what another one is that holds `rows` positions: with its law, its stop ids and the
    context features that wait; behind all that was started before."""
    for array in (*s.carried, s.stop, s.key, s.law):
        ops.copy(array[source : source + 1], array[slot : slot + 1])
    if s.taps is not None:
        taps = s.taps.reshape(-1, s.block, s.taps.shape[1])
        ops.copy(taps[source], taps[slot])
    copy_rows(ops, s, source, slot, rows)


def copy_rows(ops, s, source, slot, rows):
    """The caches of a slot get the first `rows` positions of another one's, and its prefix tells so. A ring
    has fewer: all of them."""
    s.prefixes[slot].cut(0)  # whatever happens meanwhile
    for cache in (*s.caches, *s.drafter_caches):
        for part in (cache.k, cache.v):
            ops.copy(part[source, :, :rows], part[slot, :, :rows])
    s.prefixes[slot] = s.prefixes[source].copy(rows)


def device_ids(ops, values):
    """An i32 buffer with these values."""
    values = np.array(list(values), np.int32)
    out = ops.array(values.shape, "i32")
    ops.upload(out, values)
    return out
