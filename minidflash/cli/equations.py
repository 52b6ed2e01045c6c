"""Layers as the oracle's side of `verify --layers` has them: plain equations over whole passes, float64.

A function takes the Witness (witness.py), which has the run's calls and gets the findings, an At, and the
stream that the run had; it returns the stream that the run had behind it. With every sum goes the sum of its
terms in absolute value, which is what errors are measured by (engine.md 3).
"""

from dataclasses import dataclass

import numpy as np

from minidflash.kernels import oracle

from ..errors import UserError

ANGLE = 2.0**-22  # of an angle: its frequency and itself are f32, half a unit off each, on both sides
TERMS = 8  # what is no single sum is taken for one whose terms are so many times its largest result


@dataclass(frozen=True)
class At:
    """Which rows of what: side ("target", "drafter"), layer number, its weights, its Layer, the Stack,
    positions of the rows."""

    side: str
    i: int | None
    w: dict | None
    layer: object
    stack: object
    positions: object


def product(x, w, bias=None):
    """(x W^T + bias, its terms in absolute value): two (T, N)."""
    data, shift = oracle.matrix(w), 0.0 if bias is None else np.asarray(bias, np.float64)
    return x @ data.T + shift, np.abs(x) @ np.abs(data).T + np.abs(shift)


def normed(x, norm, eps):
    """n(x) * norm; x itself where there is no norm."""
    return oracle.normed(x, None if norm is None else np.asarray(norm, np.float64), eps)


def normed_product(y, size, norm, eps):
    """The same of a product and of its terms."""
    if norm is None:
        return y, size
    gain = np.abs(np.asarray(norm, np.float64)) / np.sqrt((y * y).mean(-1, keepdims=True) + eps)
    return normed(y, norm, eps), size * gain


def attention(run, at, x):
    call, layer, w = run.take("qkv"), at.layer, at.w
    for name in ("pos", "at"):
        run.same("rows", name, call.after[name], at.positions, at.side, at.i, at.positions)
    y = normed(x, w["attn_norm"], at.stack.eps)
    keys, values = stored_rows(call)
    if w["attn_norm"] is not None and not layer.v_norm:
        y = y * _factors(run, at, y, values)
    keys_and_values(run, at, "qkv", y, keys, values)
    q = oracle.real(call.after["q"])
    wanted, size = (z.reshape(q.shape) for z in product(y, w["q"], w.get("q_bias")))
    _rotated(run, at, "qkv", "q", q, *normed_product(wanted, size, w.get("q_norm"), at.stack.eps))
    o = oracle.real(run.take("attend").after["o"])
    run.numbers("attention", at, "o", o, *_attended(run, at, q), ("position", "head"))
    return _ended(run, at, "attention", "o", o.reshape(len(o), -1), x)


def _attended(run, at, q):
    """What heads give, and the largest v that they see: as much as a score is off, times that."""
    layer, kept, wanted, size = at.layer, run.kept[at.side, at.i], np.zeros(q.shape), np.zeros(q.shape)
    end, sinks = at.positions[-1] + 1, at.w.get("sinks")
    for t, p in enumerate(at.positions):
        begin = at.positions[0] if layer.sees_block else p
        seen = slice(*oracle.key_range(p, begin, end, layer.window, layer.causal))
        for h in range(layer.heads):
            k, v = kept[seen, :, h // (layer.heads // layer.kv_heads)].swapaxes(0, 1)
            sink = None if sinks is None else float(sinks[h])
            wanted[t, h] = oracle.softmax_attend(q[t, h], k, v, layer.scale, sink)
            size[t, h] = np.abs(v).max() * (1 + layer.scale * (np.abs(k) @ np.abs(q[t, h])).max())
    return wanted, size


def _factors(run, at, y, values):
    """The norm stage: one factor a row by which all v differ, (T, 1); 1 where they differ otherwise. What
    follows is compared with the norm that was found, so that a mistake has one name."""
    bias, count = at.w.get("kv_bias"), values[0].size
    v, size = (z[:, -count:] for z in product(y, at.w["kv"]))
    found = values.reshape(len(y), -1) - (0 if bias is None else np.asarray(bias, np.float64)[-count:])
    factors = (found * v).sum(-1, keepdims=True) / np.maximum((v * v).sum(-1, keepdims=True), 1e-300)
    is_one = (np.abs(found - factors * v) <= 2 * run.tolerance * size).all(-1, keepdims=True) & (factors > 0)
    factors = np.where(is_one, factors, 1.0)
    run.numbers("norm", at, "factor of v", factors[:, 0], np.ones(len(y)), np.ones(len(y)))
    return factors


def keys_and_values(run, at, stage, y, keys, values):
    """K and V (T, G, K) that the run stored for rows y, kept from now on as what later rows see."""
    kv, size = (z.reshape(len(y), -1, *keys.shape[1:]) for z in product(y, at.w["kv"], at.w.get("kv_bias")))
    wanted = normed_product(kv[:, -1], size[:, -1], at.w.get("v_norm"), at.stack.eps)
    run.numbers(stage, at, "v", values, *wanted, ("position", "head"))
    wanted = normed_product(kv[:, 0], size[:, 0], at.w.get("k_norm"), at.stack.eps)
    _rotated(run, at, stage, "k", keys, *wanted)
    run.keep(run.kept, (at.side, at.i), at.positions, np.stack([keys, values], 1))
    run.stored[run.round, at.side, at.i] = run.kept[at.side, at.i]


def _rotated(run, at, stage, name, found, wanted, size):
    """Lengths of pairs belong to `stage`; where they are right, their angles belong to rope."""
    rope, half, size = at.stack.ropes[at.layer.rope], found.shape[-1] // 2, size.max(-1, keepdims=True)
    wanted = rotated(wanted, rope, at.positions)
    a, b = (np.hypot(z[..., :half], z[..., half:]) for z in (found, wanted))
    what, axes = f"length of {name}'s pair", ("position", "head", "pair")
    if not run.numbers(stage, at, what, a, b, size, axes).is_off:
        angles = ANGLE * np.asarray(at.positions)[:, None, None] * np.abs(wanted).max(-1, keepdims=True)
        size = size + angles / run.tolerance
        run.numbers("rope", at, name, found, wanted, size, ("position", "head", "component"))


def rotated(x, rope, positions):
    """x (T, heads, K) with its pairs (j, j + K/2) turned by position * frequency. The plain frequencies are
    theta^(-2j/K); those of other kinds are the engine's (rope.py)."""
    size = x.shape[-1]
    if rope.kind == "default":
        frequencies, stretch = float(rope.theta) ** (-np.arange(0, size, 2) / size), 1.0
    else:
        frequencies, stretch = rope.frequencies(size)
    angles = np.asarray(positions, np.float64)[:, None] * np.asarray(frequencies, np.float64)
    cos, sin = stretch * np.cos(angles), stretch * np.sin(angles)
    return np.stack([oracle.rope(*row) for row in zip(x, cos, sin, strict=True)])


def mlp(run, at, x):
    return _ended(run, at, "mlp", "down", _gated(run, at, x), x)


def _gated(run, at, x):
    h = oracle.real(run.take("gate_up").after["h"])
    y, size = product(normed(x, at.w["mlp_norm"], at.stack.eps), at.w["gate_up"])
    (gate, up), (gate_size, up_size) = np.split(y, 2, -1), np.split(size, 2, -1)
    acted = oracle.GATES[at.layer.act](gate)
    run.numbers("mlp", at, "h", h, acted * up, gate_size * np.abs(up) + up_size * np.abs(acted))
    return h


def _ended(run, at, stage, name, a, x):
    """The stream behind linear_add."""
    found, w = oracle.real(run.take("linear_add").after["x"]), at.w
    added = normed_product(*product(a, w[name], w.get(name + "_bias")), w.get(name + "_norm"), at.stack.eps)
    return _added(run, at, stage, f"stream behind {name}", found, x, *added, w.get(name + "_scale"))


def _added(run, at, stage, what, found, x, added, size, scale=None):
    """found beside scale * (x + added)."""
    scale = 1.0 if scale is None else float(scale[0])
    run.numbers(stage, at, what, found, scale * (x + added), scale * (np.abs(x) + size))
    return found


def experts(run, at, x):
    return _mixed(run, at, x, x)


def _mixed(run, at, x, total):
    """Rows of the oracle itself, on what the run had. total: what their sum is added to."""
    e, w, route = at.layer.experts, at.w, run.take("route").after
    norms = (w["router_norm"], w["experts_norm"]) if e.own_norm else (w["experts_norm"], None)
    u, expert, share, first, order = (
        np.zeros_like(route[name]) for name in ("u", "expert", "share", "first", "order")
    )
    oracle.route(x, *norms, at.stack.eps, w["router"], w.get("router_bias"), int(e.normalise),
                 w.get("expert_scale"), np.arange(len(x)), np.zeros(1, np.int32), None, u, expert, share,
                 first, order)  # fmt: skip
    run.numbers("route", at, "u", oracle.real(route["u"]), oracle.real(u), _largest(oracle.real(u)))
    run.same("route", "expert", route["expert"], expert, at.side, at.i, at.positions)
    for name, wanted in (("first", first), ("order", order)):
        run.same("route", name, route[name], wanted, at.side, at.i)
    run.numbers("route", at, "share", route["share"], share, _largest(share), ("position", "choice"))
    h = oracle.real(run.take("experts_up").after["h"])
    groups = expert, first, order
    wanted = oracle.experts_up(route["u"], w["experts_up"], w.get("up_bias"), *groups, at.layer.act, e.limit,
                               e.alpha, None)  # fmt: skip
    run.numbers("experts", at, "h", h, wanted, _largest(wanted), ("position", "choice"))
    added = np.zeros(x.shape)
    oracle.experts_down(h, w["experts_down"], w.get("down_bias"), expert, route["share"], first, order, 0,
                        None, 0, added, None, None)  # fmt: skip
    found = oracle.real(run.take("experts_down").after["x"])
    return _added(run, at, "experts", "stream", found, total, added, _largest(added))


def mlp_and_experts(run, at, x):
    h, w, eps = _gated(run, at, x), at.w, at.stack.eps
    dense = oracle.real(run.take("linear").after["y"])
    run.numbers("mlp", at, "y", dense, *product(h, w["down"]))
    mixed = _mixed(run, at, x, np.zeros(x.shape))
    both = normed(dense, w["dense_norm"], eps) + normed(mixed, w["mixed_norm"], eps)
    added, found = normed(both, w["end_norm"], eps), oracle.real(run.take("join").after["x"])
    return _added(run, at, "mlp", "stream", found, x, added, _largest(added), w.get("end_scale"))


def _largest(results):
    return TERMS * np.broadcast_to(np.abs(results).max(-1, keepdims=True), results.shape)


def stored_rows(call, of=...):
    """K and V that a call stored, (T, G, K) each; of: a layer of inject."""
    return tuple(oracle.real(call.after[name])[of].swapaxes(0, 1) for name in ("cache_k", "cache_v"))


MIXERS = {"attention": attention}
FFNS = {"mlp": mlp, "experts": experts, "mlp_and_experts": mlp_and_experts}


def check_known(stack):
    """Refuse layers that nobody wrote down here. Errors: UserError naming them."""
    for kind, known in (("mixer", MIXERS), ("ffn", FFNS)):
        other = sorted(set(stack.each(kind)) - set(known))
        if other:
            raise UserError(f"verify --layers does not know the {kind} {', '.join(other)}",
                            "minidflash verify checks its kernels and its tokens")  # fmt: skip
