"""What holds after every round (engine.md 2), looked at on the host under MINIDFLASH_CHECK=1."""

import numpy as np


def check(engine, s, request, record, committed, injected):
    """Invariants of engine.md 2, on the host, after a round.
    Errors: AssertionError naming the one that broke.

    committed: tokens of the run so far, this round's included. injected: how many context features this round
    had to inject; None for a round that lets them wait.
    """
    ops, vocab, emitted = engine.ops, engine.target.config.vocab, int(record[0])
    start, fresh, anchor = (int(ops.download(b)[0]) for b in (s.start, s.fresh, s.anchor))
    drafts = [i for i in record[3 + s.block :].tolist() if i != -1]
    ids = [*record[3 : 3 + emitted].tolist(), *drafts]
    before, width = start - emitted, len(drafts) + 1
    assert 1 <= emitted <= width, f"a round of {width} rows emitted {emitted} tokens"
    assert all(0 <= i < vocab for i in ids), f"ids outside 0..{vocab - 1}: {ids}"
    assert anchor == ids[emitted - 1], f"anchor {anchor} is not the last token emitted, {ids[emitted - 1]}"
    assert start == len(request.ids) + committed - 1 < s.ctx, f"start {start} after {committed} tokens"
    rows = ops.download(s.rows.pos)[
        :width
    ].tolist()  # with the rows before them, what the target's cache holds
    assert rows == list(range(before, before + width)), f"target cache rows {rows} verified at start {before}"
    if request.drafts:
        assert emitted <= fresh <= s.block, f"{fresh} context features wait, {emitted} are new"
    if injected is not None:
        kept = [p for p in ops.download(s.context_pos).tolist() if p >= 0]
        assert kept == list(range(before - injected, before)), (
            f"drafter rows {kept} injected at start {before}"
        )
        assert fresh == emitted, f"drafter context and {fresh} fresh rows are not start {start}"
    w, config = engine.target.weights, engine.target.config
    logits = ops.array((width, vocab), "f32")
    work = ops.array((ops.backend.work_size(width, config.width, vocab),), "f32")
    ops.head_logits(s.rows.x[:width], w["norm"], config.eps, w["head"], work, logits)
    assert np.isfinite(ops.download(logits)).all(), "the logits are not finite"
