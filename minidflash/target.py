"""The target: one pass over rows for prefill and verify; taps are written on the way."""

from .layers import COMMITS, run_layer


def forward(ops, model, s, rows, taps):
    """Run `rows` (ids, slot, pos set) through all layers against the caches of state s;
    rows.x holds the result.

    model: engine.Model. taps: target layers whose output also goes to s.taps, side by side; () for none.
    """
    ops.embed(rows.ids, model.embed, model.embed_scale, rows.x)
    for i, cache in enumerate(s.caches):
        to, at = (s.taps, taps.index(i) * model.config.width) if i in taps else (None, 0)
        run_layer(ops, model, i, rows, cache, s.work, to, at)


def choose(ops, model, s, rows, pick, ids, choice):
    """ids[r] = the target's token after row r, for r in pick (i32[M] on the device).

    choice: "likeliest"; "ranked", the same with its margin in s.margin; "drawn", by s.key and s.law; or
    "scored": drawn, with its log-probabilities in s.logprob.
    """
    ranked = model.weights["norm"], model.config.eps, model.head, model.ids
    if choice in ("likeliest", "ranked"):
        ops.head(rows.x, pick, *ranked, ids, s.margin[: len(ids)] if choice == "ranked" else None, s.work)
        return
    logprob, curve = s.logprob[: len(ids)] if choice == "scored" else None, model.config.curve
    ops.sample(rows.x, pick, rows.slot, rows.pos, *ranked, *curve, s.key, s.law, ids, logprob, s.work)


def accept_or_redraw(ops, model, s, rows, ids, choice):
    """ids[r] = the draft behind row r of a verify pass, or by rejection sampling another in its place.
    choice: as above."""
    ranked = model.weights["norm"], model.config.eps, model.head, model.ids
    logprob, curve = s.logprob[: len(ids)] if choice == "scored" else None, model.config.curve
    ops.reject(rows.x, rows.pos, *ranked, *curve, s.key, s.law, s.drafts, s.mass, ids, logprob, s.work)


def verify(ops, model, s, width, taps, all_rows, choice="likeliest"):
    """Verify pass: [anchor, drafts[1..width-1]] of every slot; s.choice gets the target's token after each
    row."""
    rows, ids = s.rows.first(s.slots * width), s.choice[: s.slots * width]
    ops.stage(s.anchor, s.start, s.fresh, s.done, s.drafts, *rows.staged)
    forward(ops, model, s, rows, taps)
    if s.mass is not None and width > 1:
        accept_or_redraw(ops, model, s, rows, ids, choice)
    else:
        choose(ops, model, s, rows, all_rows, ids, choice)


def commit(ops, model, s):
    """After accept: what the caches hold is what the committed rows, s.kept of each slot's, left there."""
    for layer, cache in zip(model.config.layers, s.caches, strict=True):
        COMMITS[layer.mixer](ops, s, layer, cache)
