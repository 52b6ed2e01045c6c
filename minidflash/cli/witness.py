"""The oracle's side of `verify --layers`: a pair as plain equations on whole texts, in float64.

It walks the kernel calls of a run (watch.py) with a model, positions, caches and a loop of its own: what
ought to be called, with which rows, and what comes out. Every stage gets the inputs that the run had, so a
mistake shows where it is made and nowhere behind it. It shares with the engine how files are read
(`config_checks` reads the numbers that matter a second time), and nothing of loop, state, layers or rope.
"""

import numpy as np

from minidflash.kernels import oracle
from minidflash.kernels.record import Record

from ..errors import UserError
from .findings import Place, compare

# Of the largest expected number of a row; kernels with the run's own inputs stay far below (a dot product: some
# eps of its terms, engine.md 3).
TOLERANCE = {"f32": 1e-5, "bf16": 2e-2}
ANGLE = 2.0**-22  # of an angle: its frequency and itself are f32, half a unit off each, and so are theirs


class Stop(Exception):
    """What comes next would be compared with rows of another text."""


class Witness:
    """Walks one run. engine: the pair on the oracle. calls: of the run, in order. ids: the prompt. width:
    rows verified a round. is_bf16: the run's activations. stop_ids: that end it.

    kept: (model, layer) -> K and V as the run stored them, by position. streams: target layer -> its output
    by position. For reference.py: seen: (round, model, layer, what) -> array; stored: (round, model, layer) ->
    kept as that pass left it; committed: tokens of each round.
    """

    def __init__(self, engine, calls, ids, block, width, is_bf16, stop_ids=frozenset()):
        self.engine, self.calls, self.text = engine, calls, list(ids)
        self.block, self.width, self.stop_ids = block, width, stop_ids
        self.is_bf16, self.tolerance = is_bf16, TOLERANCE["bf16" if is_bf16 else "f32"]
        self.at, self.round, self.start, self.injected = 0, 0, 0, 0
        self.findings, self.kept, self.streams = [], {}, {}
        self.seen, self.stored, self.committed = {}, {}, []

    def walk(self):
        """All findings, in the order of the run; ends behind a round whose rows or tokens are others."""
        try:
            self._prompt()
            while self.at < len(self.calls):
                self.round += 1
                self._round()
        except Stop:
            pass
        return self.findings

    # ---- the loop ------------------------------------------------------------------------------------------

    def _prompt(self):
        total = len(self.text)
        while self.start < total:
            count = len(self._peek("embed").after["ids"])
            positions = np.arange(self.start, min(self.start + count, total))
            x = self._pass("target", self.engine.target, self.text[self.start : total][:count], positions)
            self.start += count
            if self.engine.drafter:
                self._inject(self.start)
        chosen = self._head("target", self.engine.target, x, [len(x) - 1], "logits")
        self._accept([], chosen, total - 1)

    def _round(self):
        drafts, drafter = [], self.engine.drafter
        if self._next_is("stage_context"):
            self._take("stage_context")
            self._inject(self.start)
        if drafter and self.width > 1:
            ids = [self.text[-1], *[drafter.config.mask_id] * (self.block - 1)]
            x = self._staged("drafter", drafter, ids)
            slots = list(range(1, self.width))
            drafts = self._head("drafter", drafter, x, slots, "draft logits")
            if drafter.names is not None:
                names, found = self._array(drafter.names), self._take("widen").after["ids"].reshape(-1)[slots]
                self._same("draft logits", "ids of the reduced head", found, names[drafts])
                drafts = found.tolist()
        x = self._staged("target", self.engine.target, [self.text[-1], *drafts])
        chosen = self._head("target", self.engine.target, x, range(len(x)), "logits")
        self._accept(drafts, chosen, self.start)

    def _staged(self, side, model, ids):
        self._take("stage")
        return self._pass(side, model, ids, np.arange(self.start, self.start + len(ids)))

    def _accept(self, drafts, chosen, start):
        """Drafts that are the target's choices stay, and its own token behind them; up to a stop id."""
        call = self._take("accept")
        equal = [a == b for a, b in zip(drafts, chosen, strict=False)]
        tokens = chosen[: (equal.index(False) if False in equal else len(equal)) + 1]
        ends = [i for i, token in enumerate(tokens) if token in self.stop_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        record = Record.of(call.after["record"][0])
        self._same("accept", "tokens kept", record.tokens, tokens)
        self.start = start + len(tokens)
        self._same("accept", "start of the next round", call.after["start"][:1], [self.start])
        self._same("accept", "anchor of the next round", call.after["anchor"][:1], tokens[-1:])
        self.text += tokens
        self.committed.append(tokens)

    # ---- a pass over rows ----------------------------------------------------------------------------------

    def _pass(self, side, model, ids, positions):
        """Rows of one model through all its layers; returns their last stream."""
        call, stack = self._take("embed"), model.config
        self._same("rows", "id", call.after["ids"], ids, side, first=positions)
        x = oracle.real(call.after["x"])
        table = np.stack([oracle.real(model.embed.data[i]) for i in ids])
        self._numbers("embed", side, None, "x", x, model.embed_scale * table, first=positions)
        self.seen[self.round, side, None, "embed"] = x
        end = positions[-1] + 1
        for i, layer in enumerate(stack.layers):
            where = side, i, model.layers[i], layer, stack, positions
            x = MIXERS[layer.mixer](self, *where, x, end)
            self.seen[self.round, side, i, "mixed"] = x
            x = FFNS[layer.ffn](self, *where, x)
            self.seen[self.round, side, i, "stream"] = x
            if side == "target":
                self._keep(self.streams, i, positions, x)
        return x

    def attention(self, side, i, w, layer, stack, positions, x, end):
        call = self._take("qkv")
        for name in ("pos", "at"):
            self._same("rows", name, call.after[name], positions, side, i, first=positions)
        y = _normed(x, w["attn_norm"], stack.eps)
        keys, values = (_rows_of(oracle.real(call.after[f"cache_{kind}"][0]), positions) for kind in "kv")
        q = oracle.real(call.after["q"])
        self._projections(side, i, w, layer, stack, positions, y, q, keys, values)
        self._keep(self.kept, (side, i), positions, np.stack([keys, values], 1))
        self.stored[self.round, side, i] = self.kept[side, i]
        call = self._take("attend")
        o, wanted = oracle.real(call.after["o"]), np.zeros(q.shape)
        ratio, kept = layer.heads // layer.kv_heads, self.kept[side, i]
        for t, p in enumerate(positions):
            begin = positions[0] if layer.sees_block else p
            first, last = oracle.key_range(p, begin, end, layer.window, layer.causal)
            for h in range(layer.heads):
                k, v = (kept[first:last, kind, h // ratio] for kind in (0, 1))
                sink = None if w.get("sinks") is None else float(w["sinks"][h])
                wanted[t, h] = oracle.softmax_attend(q[t, h], k, v, layer.scale, sink)
        self._numbers("attention", side, i, "o", o, wanted, ("position", "head"), positions)
        return self._ended("attention", side, i, w, "o", stack, positions, o.reshape(len(o), -1), x)

    def _projections(self, side, i, w, layer, stack, positions, y, q, keys, values):
        """Norm, qkv and rope, told apart by what each of them can change."""
        size, count = layer.head_size, layer.kv_heads
        bias = w.get("kv_bias")
        shift = 0 if bias is None else np.asarray(bias, np.float64)
        scale = np.ones(len(y))
        if not layer.v_norm and w.get("attn_norm") is not None:
            v = (y @ oracle.matrix(w["kv"]).T)[:, -count * size :]
            bare = values.reshape(len(y), -1) - (shift[-count * size :] if bias is not None else 0)
            scale = _factors(bare, v, self.tolerance)
            self._numbers("norm", side, i, "factor of v", scale, np.ones(len(y)), (), positions)
        y = y * scale[:, None]
        kv = (y @ oracle.matrix(w["kv"]).T + shift).reshape(len(y), -1, count, size)
        head = y @ oracle.matrix(w["q"]).T + (0 if w.get("q_bias") is None else w["q_bias"])
        head, k, v = head.reshape(len(y), -1, size), kv[:, 0], kv[:, -1]
        v = v if w.get("v_norm") is None else oracle.rmsnorm(v, w["v_norm"], stack.eps)
        self._numbers("qkv", side, i, "v", values, v, ("position", "head"), positions)
        for name, found, wanted in (("q", q, head), ("k", keys, k)):
            if layer.qk_norm:
                wanted = oracle.rmsnorm(wanted, np.asarray(w[f"{name}_norm"], np.float64), stack.eps)
            self._rotated("qkv", side, i, name, found, wanted, stack.ropes[layer.rope], positions)

    def _rotated(self, stage, side, i, name, found, wanted, rope, positions):
        """Lengths of pairs belong to `stage`, where they are right, their angles to rope."""
        wanted = rotated(wanted, rope, positions)
        half = wanted.shape[-1] // 2
        a, b = (np.hypot(z[..., :half], z[..., half:]) for z in (found, wanted))
        what, scale = f"length of {name}'s pair", np.abs(wanted).max(-1, keepdims=True)
        axes = "position", "head", "pair"
        if not self._numbers(stage, side, i, what, a, b, axes, positions, scale).is_off:
            axes = "position", "head", "component"
            scale = scale * (1 + ANGLE / self.tolerance * positions[:, None, None])
            self._numbers("rope", side, i, name, found, wanted, axes, positions, scale)

    def mlp(self, side, i, w, layer, stack, positions, x):
        h = self._gated(side, i, w, layer, stack, positions, x)
        return self._ended("mlp", side, i, w, "down", stack, positions, h, x)

    def _gated(self, side, i, w, layer, stack, positions, x):
        h = oracle.real(self._take("gate_up").after["h"])
        y = _normed(x, w["mlp_norm"], stack.eps) @ oracle.matrix(w["gate_up"]).T
        gate, up = np.split(y, 2, -1)
        self._numbers("mlp", side, i, "h", h, oracle.GATES[layer.act](gate) * up, ("position",), positions)
        return h

    def _ended(self, stage, side, i, w, name, stack, positions, a, x):
        """The stream behind linear_add; errors are measured by what it adds."""
        found = oracle.real(self._take("linear_add").after["x"])
        added = a @ oracle.matrix(w[name]).T + (0 if w.get(name + "_bias") is None else w[name + "_bias"])
        added = oracle.normed(added, w.get(name + "_norm"), stack.eps)
        scale = 1.0 if w.get(name + "_scale") is None else float(w[name + "_scale"][0])
        size = np.abs(added).max(-1, keepdims=True)
        what = f"stream behind {name}"
        self._numbers(
            stage, side, i, what, found, scale * (x + added), ("position",), positions, scale * size
        )
        return found

    def experts(self, side, i, w, layer, stack, positions, x):
        return self._mixed(side, i, w, layer, stack, positions, x, np.array(x))

    def _mixed(self, side, i, w, layer, stack, positions, x, total):
        """Rows of the oracle, on what the run had. total: what the experts' sum is added to; None: nothing."""
        e, route = layer.experts, self._take("route").after
        own = w["experts_norm"]
        norms = (w["router_norm"], own) if e.own_norm else (own, None)
        u, expert, share = (np.zeros_like(route[n]) for n in ("u", "expert", "share"))
        first, order = np.zeros_like(route["first"]), np.zeros_like(route["order"])
        where = np.arange(len(x)), np.zeros(1, np.int32), None
        oracle.route(x, *norms, stack.eps, w["router"], w.get("router_bias"), int(e.normalise),
                     w.get("expert_scale"), *where, u, expert, share, first, order)  # fmt: skip
        found = oracle.real(route["u"])
        self._numbers("route", side, i, "u", found, oracle.real(u), ("position",), positions)
        for name, wanted in (("expert", expert), ("first", first), ("order", order)):
            rows = positions if name == "expert" else None
            self._same("route", name, route[name], wanted, side, i, rows)
        self._numbers("route", side, i, "share", route["share"], share, ("position", "choice"), positions)
        h = oracle.real(self._take("experts_up").after["h"])
        wanted = oracle.experts_up(route["u"], w["experts_up"], w.get("up_bias"), expert, first, order,
                                   layer.act, e.limit, e.alpha, None)  # fmt: skip
        self._numbers("experts", side, i, "h", h, wanted, ("position", "choice"), positions)
        added = np.zeros(x.shape)
        oracle.experts_down(h, w["experts_down"], w.get("down_bias"), expert, share, first, order, 0, None, 0,
                            added, None, None)  # fmt: skip
        found, size = oracle.real(self._take("experts_down").after["x"]), np.abs(added).max(-1, keepdims=True)
        wanted = added if total is None else total + added
        self._numbers("experts", side, i, "stream", found, wanted, ("position",), positions, size)
        return found

    def mlp_and_experts(self, side, i, w, layer, stack, positions, x):
        h = self._gated(side, i, w, layer, stack, positions, x)
        dense = oracle.real(self._take("linear").after["y"])
        self._numbers("mlp", side, i, "y", dense, h @ oracle.matrix(w["down"]).T, ("position",), positions)
        mixed = self._mixed(side, i, w, layer, stack, positions, x, None)
        found, both = oracle.real(self._take("join").after["x"]), 0
        for part, name in ((dense, "dense_norm"), (mixed, "mixed_norm")):
            both = both + oracle.rmsnorm(part, w[name], stack.eps)
        added = oracle.rmsnorm(both, w["end_norm"], stack.eps)
        scale = 1.0 if w.get("end_scale") is None else float(w["end_scale"][0])
        size = scale * np.abs(added).max(-1, keepdims=True)
        self._numbers("mlp", side, i, "stream", found, scale * (x + added), ("position",), positions, size)
        return found

    # ---- context features, heads ---------------------------------------------------------------------------

    def _inject(self, end):
        """Taps, fuse and inject of the positions that no injection had, up to `end`."""
        model, positions = self.engine.drafter, np.arange(self.injected, end)
        stack, w, count = model.config, model.weights, end - self.injected
        fuse, call = self._take("fuse"), self._take("inject")
        for name in ("pos", "at"):
            found = call.after[name]
            self._same("inject", name, found[found >= 0], positions, "drafter", first=positions)
        if not count:  # the prompt's are all there
            return
        taps = oracle.real(fuse.after["taps"])[:count]
        wanted = np.concatenate([self.streams[tap][positions] for tap in stack.taps], -1)
        self.seen[self.round, "drafter", None, "taps"] = taps
        self._numbers("taps", "drafter", None, "column", taps, wanted, ("position",), positions, exact=True)
        features = oracle.real(call.after["f"])[:count]
        wanted = oracle.rmsnorm(taps @ oracle.matrix(w["fc"]).T, w["hidden_norm"], stack.eps)
        self.seen[self.round, "drafter", None, "fused"] = features
        self._numbers("fuse", "drafter", None, "feature", features, wanted, ("position",), positions)
        for i, layer in enumerate(stack.layers):
            own, shape = model.layers[i], (count, -1, layer.kv_heads, layer.head_size)
            kv = features @ oracle.matrix(own["kv"]).T
            kv = (kv + (0 if own.get("kv_bias") is None else own["kv_bias"])).reshape(shape)
            keys, values = (_rows_of(oracle.real(call.after[f"cache_{c}"][i, 0]), positions) for c in "kv")
            self._numbers("inject", "drafter", i, "v", values, kv[:, 1], ("position", "head"), positions)
            k = oracle.rmsnorm(kv[:, 0], np.asarray(own["k_norm"], np.float64), stack.eps)
            self._rotated("inject", "drafter", i, "k", keys, k, stack.ropes[layer.rope], positions)
            self._keep(self.kept, ("drafter", i), positions, np.stack([keys, values], 1))
        self.injected = end

    def _head(self, side, model, x, picked, stage):
        """Ids that the run took of the picked rows; returns them."""
        call, picked, stack = self._take("head"), list(picked), model.config
        place = side, len(stack.layers) - 1
        self._same(stage, "rows that are ranked", call.after["pick"], picked, *place)
        y = oracle.rmsnorm(x[picked], np.asarray(model.weights["norm"], np.float64), stack.eps)
        wanted = y @ oracle.matrix(model.head).T
        self.seen[self.round, side, None, "logits"] = call.logits
        found = self._numbers(stage, *place, "logit", call.logits, wanted, ("row", "id"), picked)
        ids = call.after["ids"].reshape(-1)[picked]
        best = wanted[:, : model.ids].max(-1)
        is_valid = (ids >= 0) & (ids < model.ids)
        chosen = np.where(is_valid, wanted[np.arange(len(ids)), np.where(is_valid, ids, 0)], -np.inf)
        size = np.abs(wanted).max(-1)
        self._numbers(stage, *place, "logit of the id taken", chosen, best, ("row",), picked, size)
        if found.is_off and not is_valid.all():
            raise Stop
        return ids.tolist()

    # ---- what all of it uses -------------------------------------------------------------------------------

    def _peek(self, name):
        """The next call. Stops where it is another one."""
        found = self.calls[self.at].name if self.at < len(self.calls) else "the end"
        if found != name:
            place = Place(round=self.round)
            self.findings.append(compare("calls", place, f"{name} expected, {found} called:", [0], [1], 0))
            raise Stop
        return self.calls[self.at]

    def _take(self, name):
        call = self._peek(name)
        self.at += 1
        return call

    def _next_is(self, name):
        return self.at < len(self.calls) and self.calls[self.at].name == name

    def _same(self, stage, what, found, expected, side="", i=None, first=None):
        """Integers must be equal; what follows others is not compared."""
        place = Place(side, i, self.round)
        finding = compare(stage, place, what, found, expected, 0.5, ("position",), first)
        if finding is None:
            return
        self.findings.append(finding)
        if finding.is_off:
            raise Stop

    def _numbers(self, stage, side, i, what, found, expected, axes=("position",), first=None, size=None,
                 exact=False):  # fmt: skip
        """size: what errors are measured by, default the largest expected of a row. exact: none is allowed."""
        size = np.abs(expected).max(-1, keepdims=np.ndim(expected) > 1) if size is None else size
        tolerance = np.finfo(np.float64).tiny if exact else self.tolerance * size
        if not exact:
            unit = 2.0 ** (-8 if self.is_bf16 else -24)  # half a unit of what is stored
            tolerance = tolerance + unit * np.abs(expected)
        place, axes = Place(side, i, self.round), axes or ("position",)
        finding = compare(stage, place, what, found, expected, tolerance, axes, first, self.is_bf16)
        self.findings.append(finding)
        return finding

    def _keep(self, store, key, positions, rows):
        """Rows by position; those behind the newest are of another text and go."""
        old = store.get(key, np.zeros((0, *rows.shape[1:])))[: positions[0]]
        store[key] = np.concatenate([old, rows])

    def _array(self, buffer):
        return self.engine.ops.download(buffer)


MIXERS = {"attention": Witness.attention}
FFNS = {"mlp": Witness.mlp, "experts": Witness.experts, "mlp_and_experts": Witness.mlp_and_experts}


def check_known(stack):
    """Refuse layers that nobody wrote down here. Errors: UserError naming them."""
    for kind, known in (("mixer", MIXERS), ("ffn", FFNS)):
        other = sorted(set(stack.each(kind)) - set(known))
        if other:
            raise UserError(f"verify --layers does not know the {kind} {', '.join(other)}",
                            "minidflash verify checks its kernels and its tokens")  # fmt: skip


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


def _normed(x, norm, eps):
    return oracle.normed(x, None if norm is None else np.asarray(norm, np.float64), eps)


def _factors(found, expected, tolerance):
    """One number a row by which found is a multiple of expected; 1 where it is none."""
    factors = (found * expected).sum(-1) / np.maximum((expected**2).sum(-1), np.finfo(np.float64).tiny)
    rest = np.abs(found - factors[:, None] * expected).max(-1)
    is_multiple = (rest <= tolerance * np.abs(expected).max(-1)) & (factors > 0)
    return np.where(is_multiple, factors, 1.0)


def _rows_of(cache, positions):
    """Rows of a cache (G, S, K) at the positions: (T, G, K)."""
    return cache[:, positions % cache.shape[1]].swapaxes(0, 1)
