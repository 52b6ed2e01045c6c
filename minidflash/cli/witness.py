"""The oracle's side of `verify --layers`: a pair as plain equations on whole texts, in float64.

It walks the kernel calls of a run (watch.py) with a model, positions, caches and a loop of its own: what
ought to be called, with which rows, and what comes out. Every stage gets the inputs that the run had, so a
mistake shows where it is made and nowhere behind it. It shares with the engine how files are read
(`config_checks` reads the numbers that matter a second time), and nothing of loop, state, layers or rope.
"""

import numpy as np

from minidflash.kernels import oracle
from minidflash.kernels.record import Record

from .equations import FFNS, MIXERS, At, keys_and_values, normed, normed_product, product, stored_rows
from .findings import Place, compare

# c eps of |error| <= c eps sum |terms| + half a unit of what is stored (engine.md 3), for kernels that got
# the same inputs. bf16: what goes into a sum may be rounded once more.
TOLERANCE = {"f32": 32 * 2.0**-23, "bf16": 2.0**-7}


class Stop(Exception):
    """What comes next would be compared with rows of another text."""


class Witness:
    """Walks one run. engine: the pair on the oracle. calls: of the run, in order. ids: the prompt. width:
    rows verified a round. is_bf16: the run's activations. stop_ids: that end it.

    kept: (model, layer) -> K and V as the run stored them, by position. streams: target layer -> its output
    by position. For reference.py: seen: (round, model, layer, what) -> array; stored: (round, model, layer)
    -> kept as that pass left it; committed: tokens of each round.
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
        if drafter and (self.width > 1 or self._next_is("stage_context")):  # a plain round may let them wait
            self.take("stage_context")
            self._inject(self.start)
        if drafter and self.width > 1:
            ids = [self.text[-1], *[drafter.config.mask_id] * (self.block - 1)]
            x = self._staged("drafter", drafter, ids)
            slots = list(range(1, self.width))
            drafts = self._head("drafter", drafter, x, slots, "draft logits")
            if drafter.names is not None:
                names, found = self._array(drafter.names), self.take("widen").after["ids"].reshape(-1)[slots]
                self.same("draft logits", "ids of the reduced head", found, names[drafts])
                drafts = found.tolist()
        x = self._staged("target", self.engine.target, [self.text[-1], *drafts])
        chosen = self._head("target", self.engine.target, x, range(len(x)), "logits")
        self._accept(drafts, chosen, self.start)

    def _staged(self, side, model, ids):
        self.take("stage")
        return self._pass(side, model, ids, np.arange(self.start, self.start + len(ids)))

    def _accept(self, drafts, chosen, start):
        """Drafts that are the target's choices stay, and its own token behind them; up to a stop id."""
        call = self.take("accept")
        equal = [a == b for a, b in zip(drafts, chosen, strict=False)]
        tokens = chosen[: (equal.index(False) if False in equal else len(equal)) + 1]
        ends = [i for i, token in enumerate(tokens) if token in self.stop_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        record = Record.of(call.after["record"][0])
        self.same("accept", "tokens kept", record.tokens, tokens)
        self.start = start + len(tokens)
        self.same("accept", "start of the next round", call.after["start"][:1], [self.start])
        self.same("accept", "anchor of the next round", call.after["anchor"][:1], tokens[-1:])
        self.text += tokens
        self.committed.append(tokens)

    # ---- a pass over rows ----------------------------------------------------------------------------------

    def _pass(self, side, model, ids, positions):
        """Rows of one model through all its layers; returns their last stream."""
        call, stack = self.take("embed"), model.config
        self.same("rows", "id", call.after["ids"], ids, side, first=positions)
        x = oracle.real(call.after["x"])
        table = np.stack([oracle.real(model.embed.data[i]) for i in ids])
        at = At(side, None, None, None, stack, positions)
        self.numbers("embed", at, "x", x, model.embed_scale * table, np.abs(model.embed_scale * table))
        self.seen[self.round, side, None, "embed"] = x
        for i, layer in enumerate(stack.layers):
            at = At(side, i, model.layers[i], layer, stack, positions)
            x = MIXERS[layer.mixer](self, at, x)
            self.seen[self.round, side, i, "mixed"] = x
            x = FFNS[layer.ffn](self, at, x)
            self.seen[self.round, side, i, "stream"] = x
            if side == "target":
                self.keep(self.streams, i, positions, x)
        return x

    # ---- context features, heads ---------------------------------------------------------------------------

    def _inject(self, end):
        """Taps, fuse and inject of the positions that no injection had, up to `end`."""
        model, positions = self.engine.drafter, np.arange(self.injected, end)
        stack, w, count = model.config, model.weights, end - self.injected
        fuse, call = self.take("fuse"), self.take("inject")
        for name in ("pos", "at"):
            found = call.after[name]
            self.same("inject", name, found[found >= 0], positions, "drafter", first=positions)
        if not count:  # the prompt's are all there
            return
        at = At("drafter", None, w, None, stack, positions)
        taps = self.seen[self.round, "drafter", None, "taps"] = oracle.real(fuse.after["taps"])[:count]
        wanted = np.concatenate([self.streams[tap][positions] for tap in stack.taps], -1)
        self.numbers("taps", at, "column", taps, wanted, np.zeros(1))
        features = self.seen[self.round, "drafter", None, "fused"] = oracle.real(call.after["f"])[:count]
        wanted, size = normed_product(*product(taps, w["fc"]), w["hidden_norm"], stack.eps)
        self.numbers("fuse", at, "feature", features, wanted, size)
        for i, layer in enumerate(stack.layers):
            at = At("drafter", i, model.layers[i], layer, stack, positions)
            keys, values = (rows[:count] for rows in stored_rows(call, i))
            keys_and_values(self, at, "inject", features, keys, values)
        self.injected = end

    def _head(self, side, model, x, picked, stage):
        """Ids that the run took of the picked rows; returns them."""
        call, picked, stack = self.take("head"), list(picked), model.config
        at = At(side, None, None, None, stack, picked)
        self.same(stage, "rows that are ranked", call.after["pick"], picked, side)
        wanted, size = product(normed(x[picked], model.weights["norm"], stack.eps), model.head)
        self.seen[self.round, side, None, "logits"] = call.logits
        self.numbers(stage, at, "logit", call.logits, wanted, size, ("row", "id"))
        ids, rows = call.after["ids"].reshape(-1)[picked], np.arange(len(picked))
        is_valid = (ids >= 0) & (ids < model.ids)
        taken = np.where(is_valid, wanted[rows, np.where(is_valid, ids, 0)], -np.inf)
        best = rows, wanted[:, : model.ids].argmax(-1)
        self.numbers(stage, at, "logit of the id taken", taken, wanted[best], size[best])
        if not is_valid.all():
            raise Stop
        return ids.tolist()

    # ---- what all of it uses -------------------------------------------------------------------------------

    def _peek(self, name):
        """The next call. Stops where it is another one."""
        found = self.calls[self.at].name if self.at < len(self.calls) else "the end"
        if found != name:
            place = Place(round=self.round)
            self.findings.append(compare("calls", place, f"{found} is called, {name} expected", [0], [1], 0))
            raise Stop
        return self.calls[self.at]

    def take(self, name):
        call = self._peek(name)
        self.at += 1
        return call

    def _next_is(self, name):
        return self.at < len(self.calls) and self.calls[self.at].name == name

    def same(self, stage, what, found, expected, side="", i=None, first=None):
        """Integers must be equal; what follows others is not compared."""
        place = Place(side, i, self.round)
        axes = () if first is None else ("position",)
        finding = compare(stage, place, what, found, expected, 0.5, axes, first)
        if finding is None:
            return
        self.findings.append(finding)
        if finding.is_off:
            raise Stop

    def numbers(self, stage, at, what, found, expected, size, axes=("position",)):
        """Adds a Finding of rows of `at`. size: the terms that expected is the sum of, in absolute value; 0:
        a copy, without any error."""
        eps = 2.0 ** (-7 if self.is_bf16 else -23)
        tolerance = self.tolerance * size + np.where(size, eps / 2 * np.abs(expected), np.finfo("f8").tiny)
        place = Place(at.side, at.i, self.round)
        finding = compare(stage, place, what, found, expected, tolerance, axes, at.positions, self.is_bf16)
        self.findings.append(finding)
        return finding

    def keep(self, store, key, positions, rows):
        """Rows by position; those behind the newest are of another text and go."""
        old = store.get(key, np.zeros((0, *rows.shape[1:])))[: positions[0]]
        store[key] = np.concatenate([old, rows])

    def _array(self, buffer):
        return self.engine.ops.download(buffer)
