"""The caller-owned buffers of a run: caches, lengths, anchor, flags, rows, scratch; their bytes. Allocation only."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Rows:
    """The rows of one pass: who they are and their activations. All arrays have R rows; a pass uses the first T."""

    ids: Any  # i32[R] token
    slot: Any  # i32[R] which sequence
    pos: Any  # i32[R] absolute position, -1: inactive
    at: Any  # i32[R] number of its key
    begin: Any  # i32[R] first position of the row's block
    end: Any  # i32[R] one past the row's block
    tap_row: Any  # i32[R] row of the tap buffer
    x: Any  # A[R,D] residual stream
    q: Any  # A[R,H,K]
    o: Any  # A[R,H,K]
    h: Any  # A[R,F]

    def first(self, count):
        """The same buffers, cut to `count` rows (views)."""
        return Rows(*(getattr(self, name)[:count] for name in self.__dataclass_fields__))


def make_rows(ops, config, count):
    """Rows for passes of up to `count` rows through a model of `config`."""
    i32 = [ops.array((count,), "i32") for _ in range(7)]
    heads = (count, config.heads, config.head_size)
    return Rows(
        *i32,
        ops.array((count, config.width), "A"),
        ops.array(heads, "A"),
        ops.array(heads, "A"),
        ops.array((count, config.ffn), "A"),
    )


@dataclass
class Cache:
    """Keys and values of one layer for all slots, A[N,G,S,K] each: key n of a slot lies in row n % S."""

    k: Any
    v: Any


def cache_rows(window, room, newest, cut):
    """S of a layer's cache: `room`, or fewer where a window lets old keys go: then it is a ring.

    window: keys a row sees, 0: all. newest: keys that one pass stores at most. A row of that pass still needs the
    window - 1 keys before it, so a ring has window - 1 + newest rows; rounded up to a multiple of `cut`, so that the
    pieces in which attention takes keys never lie across its end.
    """
    ring = -(-(window - 1 + newest) // cut) * cut if window else room
    return min(ring, room)


@dataclass
class State:
    """Everything a run changes, for N slots. Lengths and flags live on the device; kernels read and write them.

    start: position of the anchor = rows in the target's cache. fresh: context features that wait for injection, at most B.
    left: tokens the slot may still emit. done: 0, or why it ended (oracle.STOPPED, OUT_OF_BUDGET).
    drafts: [N, B]; column 0 is not used. record: what accept tells the host. key, law, logprob: as in the row sample.
    mass: [N, B, V], the laws that drafts were drawn from; None where drafts are the likeliest tokens.
    caches, drafter_caches: a Cache a layer. injected: the drafter's, all layers in one, (L, N, G, S, K): one pass injects
    into all of them.
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
    stop: Any
    masks: Any
    drafts: Any
    choice: Any
    record: Any
    key: Any
    law: Any
    logprob: Any
    mass: Any
    rows: Rows
    draft_rows: Rows | None
    context_slot: Any
    context_pos: Any
    taps: Any
    features: Any
    caches: list
    drafter_caches: list
    injected: Cache | None
    work: Any
    memory: dict


def make_state(ops, target, drafter, stop_ids, slots, ctx, block, chunk, rejects=False):
    """Allocate a State.

    target, drafter: configs (drafter None: plain decoding, block 1). ctx: positions a slot may use, fewer where the
    drafter was made for fewer; the caches hold block rows more, since the last block may overshoot. chunk: rows of
    one prefill pass. rejects: drafts are drawn, so their laws are kept. Errors: MemoryError.
    """
    wide = slots * block
    count = max(chunk, wide)
    room = ctx + block
    rows = make_rows(ops, target, count)
    newest, cut = max(chunk, block), ops.backend.key_cut
    caches = [
        _cache(ops, slots, target.kv_heads, cache_rows(window, room, newest, cut), target.head_size)
        for window in target.windows
    ]
    i32 = {name: ops.array((slots,), "i32") for name in ("anchor", "start", "fresh", "left", "done")}
    stop = ops.array((max(1, len(stop_ids)),), "i32")
    ops.upload(stop, np.array(sorted(stop_ids) or [-1], np.int32))
    masks, drafts = ops.array((slots, block), "i32"), ops.array((slots, block), "i32")
    draft_rows = taps = features = injected = None
    needs = _work_needs(target, count, wide)
    if drafter is not None:
        ops.upload(masks, np.full((slots, block), drafter.mask_id, np.int32))
        draft_rows = make_rows(ops, drafter, wide)
        columns = len(drafter.taps) * target.width
        taps = ops.array((count, columns), "A")
        features = ops.array((count, drafter.width), "A")
        # One array for all layers, so one S: a ring where all of them slide.
        own = drafter.context(ctx) + block
        longest = max(cache_rows(window, own, newest, cut) for window in drafter.windows)
        injected = _cache(ops, drafter.layers, slots, drafter.kv_heads, longest, drafter.head_size)
        stacked = 2 * drafter.layers * drafter.kv_heads * drafter.head_size
        needs += _work_needs(drafter, wide, wide)[:-1]
        needs += [
            (count, columns, drafter.width),
            (count, drafter.width, stacked),
            (wide, drafter.width, target.vocab),
        ]
    work = ops.array((max(ops.backend.work_size(*need) for need in needs),), "f32")
    mass = ops.array((slots, block, target.vocab), "f32") if rejects else None
    memory = {
        "target_cache": sum(cache.k.nbytes + cache.v.nbytes for cache in caches),
        "drafter_cache": injected.k.nbytes + injected.v.nbytes if injected else 0,
        "workspace": work.nbytes + _bytes(rows, draft_rows, taps, features, mass),
    }
    return State(
        slots, ctx, block, chunk, **i32, stop=stop, masks=masks, drafts=drafts, choice=ops.array((count,), "i32"),
        record=ops.array((slots, 2 * block + 3), "i32"), key=ops.array((slots, 4), "i32"),
        law=ops.array((slots, 3), "f32"), logprob=ops.array((count, 2), "f32"), mass=mass, rows=rows,
        draft_rows=draft_rows, context_slot=ops.array((wide,), "i32"), context_pos=ops.array((wide,), "i32"), taps=taps, features=features,
        caches=caches, injected=injected, work=work, memory=memory,
        drafter_caches=[Cache(k, v) for k, v in zip(injected.k, injected.v, strict=True)] if injected else [],
    )  # fmt: skip


def _cache(ops, *shape):
    return Cache(ops.array(shape, "A"), ops.array(shape, "A"))


def _work_needs(config, count, head_rows):
    """(rows, inputs, outputs) of every matrix product of a model; the last one is its head's."""
    size = config.head_size
    q, kv = config.heads * size, 2 * config.kv_heads * size
    return [
        (count, config.width, q + kv),
        (count, q, config.width),
        (count, config.width, 2 * config.ffn),
        (count, config.ffn, config.width),
        (head_rows, config.width, config.vocab),
    ]


def _bytes(*buffers):
    """Bytes of arrays and of the arrays of Rows."""
    total = 0
    for buffer in buffers:
        if isinstance(buffer, Rows):
            total += sum(getattr(buffer, name).nbytes for name in buffer.__dataclass_fields__)
        elif buffer is not None:
            total += buffer.nbytes
    return total
