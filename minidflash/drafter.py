"""The DFlash drafter: fuse and inject context features, then one pass over the block, then its choice.
models.md 7."""

from .layers import run_layer


def inject(ops, model, s, taps, slot, pos):
    """KV injection: the context features of `taps` rows go to every drafter layer's cache as key `pos` of the
    slot.

    taps: A[T,C] rows of tapped target states. Rows with pos < 0 are not stored.
    """
    w, config = model.weights, model.config
    features = s.features[: len(taps)]
    ops.fuse(taps, w["fc"], w["hidden_norm"], config.eps, s.work, features)
    ops.inject(
        features, w["kv"], w.get("kv_bias"), w["k_norm"], config.eps, *model.tables[0], slot, pos, pos,
        s.injected.k, s.injected.v, s.work,
    )  # fmt: skip


def inject_fresh(ops, model, s):
    """Inject the context features that wait: the kept rows of the verify passes since the last injection."""
    ops.stage_context(s.start, s.fresh, s.context_slot, s.context_pos)
    inject(ops, model, s, s.taps[: s.slots * s.block], s.context_slot, s.context_pos)


def draft(ops, engine, s, drafted_rows):
    """One pass over [anchor, mask ...] of every slot; s.drafts gets the ids at the positions of drafted_rows.

    drafted_rows: i32 row numbers n * B + i, i in 1..v-1; the others need no head.
    """
    draft_rows(ops, engine.drafter, s)
    choose_drafts(ops, engine.drafter, s, drafted_rows)


def draft_rows(ops, model, s):
    """Stage and embed the block, and run the layers: s.draft_rows.x holds the result.

    Block keys and values land in the caches behind the context, where the next injection overwrites them.
    """
    rows = s.draft_rows
    ops.stage(s.anchor, s.start, s.fresh, s.done, s.masks, *rows.staged)
    ops.embed(rows.ids, model.embed, model.embed_scale, rows.x)
    for i, cache in enumerate(s.drafter_caches):
        run_layer(ops, model, i, rows, cache, s.work)


def choose_drafts(ops, model, s, drafted_rows):
    """s.drafts of those rows: the likeliest ids, or, where s.mass keeps their laws, drawn ones.

    No id is proposed that the target cannot choose (model.ids). A reduced head's own numbers become the
    target's ids (model.names).
    """
    rows, drafts = s.draft_rows, s.drafts.reshape(-1)
    ranked = model.weights["norm"], model.config.eps, model.head, model.ids
    if s.mass is None:
        ops.head(rows.x, drafted_rows, *ranked, drafts, None, s.work)
        narrow = mass = None
    else:
        mass = s.mass.reshape(len(drafts), -1)
        narrow = mass if s.narrow is None else s.narrow.reshape(len(drafts), -1)
        where, curve = (drafted_rows, rows.slot, rows.pos), model.config.curve
        ops.propose(rows.x, *where, *ranked, *curve, s.key, s.law, drafts, narrow, s.work)
    if model.names is not None:
        ops.widen(drafted_rows, rows.pos, model.names, narrow, drafts, mass)
