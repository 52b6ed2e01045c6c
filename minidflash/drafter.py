"""The DFlash drafter: fuse and inject context features, then one pass over the block. models.md 7."""

from .layers import run_layer


def inject(ops, model, s, taps, slot, pos):
    """KV injection: the context features of `taps` rows go to every drafter layer's cache as key `pos` of the slot.

    taps: A[T,C] rows of tapped target states. Rows with pos < 0 are not stored.
    """
    w, config = model.weights, model.config
    features = s.features[: len(taps)]
    ops.fuse(taps, w["fc"], w["hidden_norm"], config.eps, s.work, features)
    ops.inject(
        features, w["kv"], w.get("kv_bias"), w["k_norm"], config.eps, *model.tables, slot, pos, pos, s.injected.k,
        s.injected.v, s.work,
    )  # fmt: skip


def inject_fresh(ops, model, s):
    """Inject the context features that wait: the kept rows of the verify passes since the last injection."""
    ops.stage_context(s.start, s.fresh, s.context_slot, s.context_pos)
    inject(ops, model, s, s.taps[: s.slots * s.block], s.context_slot, s.context_pos)


def draft(ops, engine, s, drafted_rows):
    """One pass over [anchor, mask ...] of every slot; s.drafts gets the ids of the slots in drafted_rows.

    They are the likeliest, or where s.mass wants their laws, drawn.

    Block keys and values land in the caches behind the context, where the next injection overwrites them.
    drafted_rows: i32 row numbers n * B + i, i in 1..v-1; the others need no head.
    """
    model, target = engine.drafter, engine.target
    config, rows = model.config, s.draft_rows
    ops.stage(
        s.anchor,
        s.start,
        s.fresh,
        s.done,
        s.masks,
        rows.ids,
        rows.slot,
        rows.pos,
        rows.at,
        rows.begin,
        rows.end,
        rows.tap_row,
    )
    ops.embed(rows.ids, target.weights["embed"], 1.0, rows.x)
    for i, layer in enumerate(model.layers):
        run_layer(
            ops, config, layer, model.tables, rows, s.drafter_caches[i],
            rows.begin if config.causal[i] else rows.pos, config.windows[i], int(config.causal[i]), s.work,
        )  # fmt: skip
    w = model.weights
    vocab = min(config.vocab or target.config.vocab, target.config.vocab)
    head, drafts = target.weights["head"], s.drafts.reshape(-1)
    if s.mass is None:
        ops.head(rows.x, drafted_rows, w["norm"], config.eps, head, vocab, drafts, s.work)
        return
    ops.propose(
        rows.x, drafted_rows, rows.slot, rows.pos, w["norm"], config.eps, head, min(vocab, target.ids), s.key, s.law,
        drafts, s.mass.reshape(len(drafts), -1), s.work,
    )  # fmt: skip
