"""What holds after every round (engine.md 2), looked at on the host under MINIDFLASH_CHECK=1."""

import numpy as np


def check(engine, s, lane, record, slot, injected):
    """Invariants of engine.md 2, on the host, after a round.
    Errors: AssertionError naming the one that broke.

    s: cut to the slots that the round ran on. lane: Lane that has taken the round in. record: of it, a
    kernels.record.Record. slot: where it ran. injected: how many context features it had to inject there;
    None for a round that lets them wait.
    """
    ops, vocab, emitted = engine.ops, engine.target.config.vocab, record.emitted
    start, fresh, anchor, kept = (int(ops.download(b)[slot]) for b in (s.start, s.fresh, s.anchor, s.kept))
    ids = record.tokens + record.drafts
    before, width = start - emitted, len(record.drafts) + 1
    assert 1 <= emitted <= width, f"a round of {width} rows emitted {emitted} tokens"
    assert kept == emitted, f"{kept} rows kept, {emitted} tokens emitted"
    assert all(0 <= i < vocab for i in ids), f"ids outside 0..{vocab - 1}: {ids}"
    assert anchor == ids[emitted - 1], f"anchor {anchor} is not the last token emitted, {ids[emitted - 1]}"
    assert start == lane.start < s.ctx, f"start {start} after {lane.committed} tokens"
    # With the rows before them, what the target's cache holds.
    own = slice(slot * width, (slot + 1) * width)
    rows = ops.download(s.rows.pos)[own].tolist()
    assert rows == list(range(before, before + width)), f"target cache rows {rows} verified at start {before}"
    if lane.request.drafts:
        assert emitted <= fresh <= s.block, f"{fresh} context features wait, {emitted} are new"
    if injected is not None:
        waited = ops.download(s.context_pos)[slot * s.block : (slot + 1) * s.block]
        stored = [p for p in waited.tolist() if p >= 0]
        assert stored == list(range(before - injected, before)), (
            f"drafter rows {stored} injected at start {before}"
        )
        assert fresh == emitted, f"drafter context and {fresh} fresh rows are not start {start}"
    model, config = engine.target, engine.target.config
    logits = ops.array((width, vocab), "f32")
    work = ops.array((ops.backend.work_size(width, config.width, vocab),), "f32")
    ops.head_logits(s.rows.x[own], model.weights["norm"], config.eps, model.head, 1.0, 0.0, work, logits)
    assert np.isfinite(ops.download(logits)).all(), "the logits are not finite"
