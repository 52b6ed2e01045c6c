"""One transformer layer, as the calls of the table. The target and the drafter are stacks of it."""


def run_layer(ops, config, w, tables, rows, cache, begin, window, causal, work, taps=None, tap_at=0):
    """x += attention(norm(x)); x += mlp(norm(x)), in place on rows.x; k and v go to the caches of this layer.

    w: the layer's weights by name (weights/names.py). tables: cos, sin (P, J). cache: state.Cache of the layer.
    begin: keys from this position on are inside any window (oracle.key_range).
    window: keys a row sees, itself included; 0: all. causal: 1, or 0 for the drafter's whole-block view.
    taps: where the new x also goes, at column tap_at. Source: models.md 1, 2, 7.3.
    """
    cos, sin = tables
    flat = rows.o.reshape(len(rows.o), -1)
    ops.qkv(
        rows.x, w["attn_norm"], config.eps, w["q"], w["kv"], w.get("q_bias"), w.get("kv_bias"), w.get("q_norm"),
        w.get("k_norm"), cos, sin, rows.slot, rows.pos, rows.at, cache.k, cache.v, work, rows.q,
    )  # fmt: skip
    scale = config.head_size**-0.5
    ops.attend(
        rows.q, cache.k, cache.v, rows.slot, rows.pos, begin, rows.end, window, causal, scale, work, rows.o
    )
    ops.linear_add(flat, w["o"], w.get("o_bias"), None, 0, rows.x, None, work)
    ops.gate_up(rows.x, w["mlp_norm"], config.eps, w["gate_up"], work, rows.h)
    tap_row = rows.tap_row if taps is not None else None
    ops.linear_add(rows.h, w["down"], None, tap_row, tap_at, rows.x, taps, work)
