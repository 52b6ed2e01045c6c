"""One layer: its mixer, then its ffn, each a short function found by the name that the Layer says."""

from .state import wide


def run_layer(ops, model, i, rows, cache, work, taps=None, tap_at=0):
    """Layer i of a model on rows.x, in place; what later rows need of it goes to its cache.

    model: engine.Model. rows: state.Rows. cache: state.Cache of the layer. taps: where the new x also goes,
    at column tap_at. Source: models.md 0, 7.3.
    """
    layer, w = model.config.layers[i], model.layers[i]
    MIXERS[layer.mixer](ops, model.config, layer, w, model.tables[i], rows, cache, work)
    FFNS[layer.ffn](ops, model.config, layer, w, rows, work, taps, tap_at)


def attention(ops, stack, layer, w, tables, rows, cache, work):
    """x += Wo attend(Wq n(x), keys and values of the cache), after this pass's own went there."""
    q, o = (wide(buffer, layer.heads, layer.head_size) for buffer in (rows.q, rows.o))
    ops.qkv(
        rows.x, w["attn_norm"], stack.eps, w["q"], w["kv"], w.get("q_bias"), w.get("kv_bias"),
        w.get("q_norm"), w.get("k_norm"), w.get("v_norm"), *tables, *rows.address, cache.k, cache.v, work, q,
    )  # fmt: skip
    begin = rows.begin if layer.sees_block else rows.pos
    ops.attend(
        q, cache.k, cache.v, rows.slot, rows.pos, begin, rows.end, layer.window, int(layer.causal),
        layer.scale, w.get("sinks"), work, o,
    )  # fmt: skip
    add(ops, stack, wide(rows.o, layer.q_rows), w, "o", rows, work)


def add(ops, stack, a, w, name, rows, work, taps=None, tap_at=0):
    """What ends a mixer or an mlp, of any family: x = scale (x + n(a W^T + bias) norm), where w has norm and
    scale; and to the taps. name: of the weight W."""
    tap_row = rows.tap_row if taps is not None else None
    ends = w.get(name + "_bias"), w.get(name + "_norm"), stack.eps, w.get(name + "_scale")
    ops.linear_add(a, w[name], *ends, tap_row, tap_at, rows.x, taps, work)


def mlp(ops, stack, layer, w, rows, work, taps, tap_at):
    """x += Wdown (act(Wgate n(x)) * Wup n(x)), and to the taps."""
    h = wide(rows.h, layer.ffn_width)
    ops.gate_up(rows.x, w["mlp_norm"], stack.eps, layer.act, w["gate_up"], work, h)
    add(ops, stack, h, w, "down", rows, work, taps, tap_at)


def experts(ops, stack, layer, w, rows, work, taps, tap_at):
    """x += what the chosen experts make of n(x), each by its share; and to the taps."""
    mix(ops, stack, layer, w, rows, work, rows.x, 1, taps, tap_at)


def mix(ops, stack, layer, w, rows, work, x, adds, taps=None, tap_at=0):
    """What the chosen experts make of n(x), each by its share, added to x or, in another buffer, alone."""
    e, r = layer.experts, rows.experts
    h = wide(rows.h, e.used, layer.ffn_width)
    own = w["experts_norm"]
    norms = (w["router_norm"], own) if e.own_norm else (own, None)
    ops.route(
        rows.x, *norms, stack.eps, w["router"], w.get("router_bias"), int(e.normalise), w.get("expert_scale"),
        rows.pos, r.touched, work, r.u, r.expert, r.share, r.begin, r.order,
    )  # fmt: skip
    ops.experts_up(r.u, w["experts_up"], w.get("up_bias"), *r.groups, layer.act, e.limit, e.alpha, work, h)
    tap_row = rows.tap_row if taps is not None else None
    ops.experts_down(
        h, w["experts_down"], w.get("down_bias"), r.expert, r.share, r.begin, r.order, adds, tap_row, tap_at,
        x, taps, work,
    )  # fmt: skip


def mlp_and_experts(ops, stack, layer, w, rows, work, taps, tap_at):
    """x = scale (x + n(n(mlp of n(x)) + n(experts of n(x)))), and to the taps; models.md 5."""
    r, h = rows.experts, wide(rows.h, layer.dense_width)
    ops.gate_up(rows.x, w["mlp_norm"], stack.eps, layer.act, w["gate_up"], work, h)
    ops.linear(h, w["down"], None, work, r.dense)
    mix(ops, stack, layer, w, rows, work, r.mixed, 0)
    tap_row = rows.tap_row if taps is not None else None
    norms = w["dense_norm"], w["mixed_norm"], w["end_norm"]
    ops.join(r.dense, r.mixed, *norms, stack.eps, w.get("end_scale"), tap_row, tap_at, rows.x, taps)


def addressed_by_position(ops, s, layer, cache):
    """Commit of attention: nothing. Keys behind the committed rows are written over before a row sees
    them."""


MIXERS = {"attention": attention}
FFNS = {"mlp": mlp, "experts": experts, "mlp_and_experts": mlp_and_experts}
# mixer -> how its cache becomes that behind the s.kept rows of the verify pass
COMMITS = {"attention": addressed_by_position}
