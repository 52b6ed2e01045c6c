"""`--reference FILE`: a run beside golden numbers that nobody here wrote. The names in the file are those of
the golden fixtures (a target, a drafter pair, or the embedded pair's ids and rounds).

Its side ran alone, so an error travels from where it is made: the first finding in the order of a run counts.
"""

import json
from pathlib import Path

import numpy as np

from minidflash.kernels import oracle

from ..errors import UserError
from .findings import Place, compare

# Golden README, "Tolerances", f32: logits absolutely, states relative to the RMS of a row, normed tensors.
LOGITS, STATES, NORMED = 1e-3, 1e-3, 5e-4
NEW, BLOCK = 48, 8  # tokens of every trace, and the block of the inside view


class Reference:
    """A golden.safetensors. prompt: its ids. block: of its rounds, None: a target's file, plain decoding."""

    def __init__(self, path):
        """Errors: UserError for a file that cannot be read or holds no golden run."""
        self.path, self.numbers = str(path), read(path)
        found = self.numbers
        self.is_pair, self.is_run = "s0.draft_logits" in found, "p0.b16.rounds" in found
        if self.is_pair:
            self.prompt, self.block = found["b8.p1.output_ids"][:-NEW].tolist(), BLOCK
            self.target = beside(path)
        elif self.is_run:
            self.prompt, self.block, self.target = found["p0.input_ids"].tolist(), 16, {}
        elif "p1.hidden.0" in found:
            self.prompt, self.block, self.target = found["p1.input_ids"].tolist(), None, found
        else:
            raise UserError(f"{path} holds no golden run: no s0.draft_logits, p0.b16.rounds or p1.hidden.0",
                            "name the golden.safetensors of a target or of a pair")  # fmt: skip

    def compare(self, witness, drafts):
        """Findings of what the run left in the Witness. drafts: whether there was a drafter.
        Errors: UserError where the file needs one."""
        if not drafts and self.block:
            raise UserError(f"{self.path} is of a pair, and there is no drafter", "--drafter names one")
        self.witness, self.findings = witness, []
        if self.target:
            self._target()
        if self.is_pair:
            for call in (0, 1):
                self._call(call)
        if self.is_run:
            self._run()
        return self.findings

    def _target(self):
        """Every layer of the prompt."""
        g, side, where = self.target, "target", np.arange(len(self.prompt))
        config = self.witness.engine.target.config
        self._states("embed", side, None, 0, "x", self._seen(0, side, None, "embed"), g["p1.embed"], where)
        for i in range(len(config.layers)):
            self._keys(side, i, 0, g[f"p1.cache.{i}.k"], g[f"p1.cache.{i}.v"], where)
            stream, wanted = self._seen(0, side, i, "stream"), g[f"p1.hidden.{i}"]
            if f"p1.mod.layers.{i}.self_attn" in g and "p1.mod.layers.0.post_feedforward_layernorm" not in g:
                before = g["p1.embed"] if i == 0 else g[f"p1.hidden.{i - 1}"]
                mixed = before + g[f"p1.mod.layers.{i}.self_attn"]
                found = self._seen(0, side, i, "mixed")
                self._states("attention", side, i, 0, "stream behind o", found, mixed, where)
            stage = "experts" if config.layers[i].ffn == "experts" else "mlp"
            self._states(stage, side, i, 0, "stream", stream, wanted, where)
        found = oracle.soft_cap(oracle.real(self._seen(0, side, None, "logits")), *config.curve)
        self._add("logits", side, None, 0, "logit", found, g["p1.logits"][-1:], LOGITS, where[-1:])

    def _call(self, k):
        """Drafter call number k: what it was given, then layer by layer."""
        g, side = {name[3:]: a for name, a in self.numbers.items() if name.startswith(f"s{k}.")}, "drafter"
        if "position_ids" not in g:
            return
        fresh = len(g["position_ids"]) - BLOCK
        context, block = g["position_ids"][:fresh], g["position_ids"][fresh:]
        injected = 0 if k == 0 else k + 1  # the prompt's features are there before the first round
        taps, fused = (self._seen(injected, side, None, name) for name in ("taps", "fused"))
        self._states("taps", side, None, injected, "column", taps, g["target_hidden"], context)
        self._add("fuse", side, None, injected, "feature", fused, g["fused"], NORMED, context)
        n = k + 1
        x = self._seen(n, side, None, "embed")
        self._add("rows", side, None, n, "embedded block", x, g["noise_embedding"], NORMED, block)
        before = g["noise_embedding"]
        for i in range(len(self.witness.engine.drafter.config.layers)):
            total = np.arange(g[f"kv.{i}.k"].shape[1])
            self._keys(side, i, n, g[f"kv.{i}.k"], g[f"kv.{i}.v"], total)
            if f"mod.{i}.self_attn" in g:
                mixed = self._seen(n, side, i, "mixed")
                wanted = before + g[f"mod.{i}.self_attn"]
                self._states("attention", side, i, n, "stream behind o", mixed, wanted, block)
            before = g[f"layer.{i}"]
            self._states("mlp", side, i, n, "stream", self._seen(n, side, i, "stream"), before, block)
        if "draft_logits" in g:
            found = self._seen(n, side, None, "logits")
            self._add("draft logits", side, None, n, "logit", found, g["draft_logits"], LOGITS, block[1:])

    def _run(self):
        """First logits, then ids and rounds of the embedded pair."""
        g, w = self.numbers, self.witness
        found = self._seen(0, "target", None, "logits")
        self._add("logits", "target", None, 0, "logit", found, g["p0.last_logits"][None], LOGITS, [0])
        new, rounds = w.text[len(self.prompt) :], [len(tokens) for tokens in w.committed[1:]]
        self._add("accept", "", None, 1, "tokens a round", rounds, g["p0.b16.rounds"][: len(rounds)], 0.5)
        self._add("accept", "", None, 1, "token", new, g["p0.b16.output_ids"][: len(new)], 0.5)

    def _keys(self, side, i, n, k, v, positions):
        """K and V (G, T, K) of a layer: v, then k as Witness has it."""
        stored = self.witness.stored[n, side, i][positions]
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        stage = "qkv" if side == "target" else "inject"
        self._states(stage, side, i, n, "v", stored[:, 1], v, positions)
        half = k.shape[-1] // 2
        a, b = (np.hypot(z[..., :half], z[..., half:]) for z in (stored[:, 0], k))
        size = STATES * np.sqrt((k.astype(np.float64) ** 2).mean(-1, keepdims=True))
        if not self._add(stage, side, i, n, "length of k's pair", a, b, size, positions).is_off:
            self._add("rope", side, i, n, "k", stored[:, 0], k, size, positions)

    def _seen(self, *key):
        """What the run showed. Errors: UserError where it did not come so far."""
        if key not in self.witness.seen:
            words = f"the run ended before that of {self.path}"
            raise UserError(words, "leave out --reference: the stages say why", code=1)
        return self.witness.seen[key]

    def _states(self, stage, side, i, n, what, found, wanted, positions):
        size = STATES * np.sqrt((np.asarray(wanted, np.float64) ** 2).mean(-1, keepdims=True))
        self._add(stage, side, i, n, what, found, wanted, size, positions)

    def _add(self, stage, side, i, n, what, found, wanted, tolerance, positions=None):
        place = Place(side, i, n, Path(self.path).parent.name or self.path)
        one = compare(stage, place, what, found, wanted, tolerance, ("position",), positions)
        self.findings.append(one)
        return one


def read(path):
    """name -> array of a safetensors file. Errors: UserError naming it."""
    import ml_dtypes  # noqa: F401 with it NumPy knows bfloat16
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}",
                        "--reference needs a golden.safetensors") from None  # fmt: skip


def beside(path):
    """The golden numbers of a pair's target, which pair.json names; {} where they are not there."""
    folder = Path(path).parent
    try:
        target = json.loads((folder / "pair.json").read_text(encoding="utf-8"))["target"]
        return read(folder / target / "golden.safetensors")
    except (OSError, ValueError, KeyError, UserError):
        return {}
