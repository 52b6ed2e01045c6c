"""The target: one pass over rows for prefill and verify; taps are written on the way."""

from .layers import run_layer


def forward(ops, model, s, rows, taps):
    """Run `rows` (ids, slot, pos set) through all layers against the caches of state s; rows.x holds the result.

    model: engine.Model. taps: target layers whose output also goes to s.taps, side by side; () for none.
    """
    config, w = model.config, model.weights
    ops.embed(rows.ids, w["embed"], 1.0, rows.x)
    for i, layer in enumerate(model.layers):
        to, at = (s.taps, taps.index(i) * config.width) if i in taps else (None, 0)
        run_layer(
            ops, config, layer, model.tables, rows, s.caches[i], rows.pos, config.windows[i], 1,
            s.work, to, at,
        )  # fmt: skip


def choose(ops, model, s, rows, pick, ids, choice):
    """ids[r] = the target's token after row r, for r in pick (i32[M] on the device).

    choice: "likeliest"; "drawn", by s.key and s.law; or "scored": drawn, with its log-probabilities in s.logprob.
    """
    w, config = model.weights, model.config
    if choice == "likeliest":
        ops.head(rows.x, pick, w["norm"], config.eps, w["head"], model.ids, ids, s.work)
        return
    logprob = s.logprob[: len(ids)] if choice == "scored" else None
    ops.sample(
        rows.x, pick, rows.slot, rows.pos, w["norm"], config.eps, w["head"], model.ids, s.key, s.law, ids, logprob, s.work
    )  # fmt: skip


def accept_or_redraw(ops, model, s, rows, ids, choice):
    """ids[r] = the draft behind row r of a verify pass, or by rejection sampling another in its place. choice: as above."""
    w, config = model.weights, model.config
    logprob = s.logprob[: len(ids)] if choice == "scored" else None
    ops.reject(
        rows.x, rows.pos, w["norm"], config.eps, w["head"], model.ids, s.key, s.law, s.drafts, s.mass, ids, logprob, s.work
    )  # fmt: skip


def verify(ops, model, s, width, taps, all_rows, choice="likeliest"):
    """Verify pass: [anchor, drafts[1..width-1]] of every slot; s.choice gets the target's token after each row."""
    rows = s.rows.first(s.slots * width)
    ops.stage(
        s.anchor,
        s.start,
        s.fresh,
        s.done,
        s.drafts,
        rows.ids,
        rows.slot,
        rows.pos,
        rows.at,
        rows.begin,
        rows.end,
        rows.tap_row,
    )
    forward(ops, model, s, rows, taps)
    if s.mass is not None and width > 1:
        accept_or_redraw(ops, model, s, rows, s.choice[: s.slots * width], choice)
    else:
        choose(ops, model, s, rows, all_rows, s.choice[: s.slots * width], choice)
