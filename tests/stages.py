"""Every stage of a draft, out of the running engine, beside a float64 drafter written from the equations
alone.

`record_stages` replays a recorded round call by call and keeps what each kernel wrote; `Reference` reads the
checkpoint files and knows nothing of kernels, caches or rounds: it takes all context features at once,
under a dense mask.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from minidflash.kernels.table import ROWS

import minidflash as md
from tests.replay import proposing


def record_stages(engine, prompt, rounds=1):
    """Names and arrays of the draft that round number `rounds` makes after `prompt`: {"0.q": ..., "final":
    ...}.

    Also "taps" [n, C] and "features" of every context row, "anchor", "start" and "drafts". Works where memory
    is the host's.
    """
    found, features, original = {}, {}, engine.draft
    # A prompt's kernels may be others.
    injects = {each: each.backend.inject for each in (engine.ops, engine.ops.for_prefill)}

    def keeping(inject):
        def keep(f, wkv, kv_bias, k_norm, eps, cos, sin, slot, pos, *rest):
            for row, p in enumerate(pos):
                if p >= 0:
                    features[int(p)] = wide(f[row])
            inject(f, wkv, kv_bias, k_norm, eps, cos, sin, slot, pos, *rest)

        return keep

    def use(ops, inject):
        ops.backend.inject = inject
        ops.__dict__.pop("inject", None)  # looked up once, kept there

    def watched(ops, engine, s, drafted_rows):
        calls, before = ops._recording, len(ops._recording)
        original(ops, engine, s, drafted_rows)
        mine, calls[before:] = calls[before:], []

        def run():
            layer = -1
            for name, function, args in mine:
                function(*args)
                layer += name == "qkv"
                spec = ROWS[name]
                for arg, value in zip(spec.args, args, strict=True):
                    if (arg.inplace or arg in spec.outputs) and arg.name in ("q", "o", "h", "x", "ids"):
                        count = sum(k.startswith(f"{layer}.{name}.") for k in found)
                        copy = wide(value) if value.dtype != np.int32 else value.copy()
                        found[f"{layer}.{name}.{arg.name}.{count}"] = copy
            found["start"], found["drafts"] = int(s.start[0]), s.drafts[0].copy()
            found["anchor"] = int(s.anchor[0])
            found["k"], found["v"] = wide(s.injected.k), wide(s.injected.v)
            found.setdefault("round", 0)
            found["round"] += 1

        calls.append(("draft", run, ()))

    for ops, inject in injects.items():
        use(ops, keeping(inject))
    try:
        with proposing(engine, watched):
            stream = md.stream(engine, prompt, max_tokens=64 * rounds, verify=64)
            for _ in range(1 + rounds):
                for key in [key for key in found if key != "round"]:
                    del found[key]
                next(stream)
            stream.close()
    finally:
        for ops, inject in injects.items():
            use(ops, inject)
    return found, np.stack([features[p] for p in range(found["start"])])


def wide(x):
    """float64 copy of activations."""
    return (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float64)


def read_tensors(folder):
    """name -> float64 array of the one safetensors file in a folder."""
    raw = (Path(folder) / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    kinds = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I32": np.int32, "U8": np.uint8}
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            a, b = (8 + size + at for at in entry["data_offsets"])
            tensors[name] = (
                np.frombuffer(raw[a:b], kinds[entry["dtype"]]).reshape(entry["shape"]).astype(np.float64)
            )
    return tensors


def rms(x, w, eps):
    return w * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def linear(w, name, x):
    """x W^T + b, where there is a b."""
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)


def mlp(w, at, y):
    """(the layer's second step, silu(gate) * up) of normed rows."""
    gate, up = (linear(w, f"{at}{part}_proj", y) for part in ("gate", "up"))
    h = gate / (1 + np.exp(-gate)) * up
    return linear(w, at + "down_proj", h), h


def attention(q, k, v, mask):
    """softmax(q k^T / sqrt(K)) v of (rows, H, K) and (keys, G, K) where the mask (rows, keys) is true."""
    k, v = (np.repeat(z, q.shape[1] // z.shape[1], axis=1) for z in (k, v))
    scores = np.where(mask, np.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v)


def rope(config, x, positions):
    """x: (T, heads, K) rotated half-split at `positions`, with yarn's frequencies where a config asks for
    them."""
    size, theta, yarn = x.shape[-1], config["rope_theta"], config.get("rope_scaling")
    pair = np.arange(size // 2)
    frequency, stretch = theta ** (-2 * pair / size), 1.0
    if yarn:  # models.md 4: pairs that turn often stay, those that turn rarely are slowed
        context, factor = yarn["original_max_position_embeddings"], yarn["factor"]
        turns = np.array([yarn["beta_fast"], yarn["beta_slow"]])
        low, high = size * np.log(context / (2 * np.pi * turns)) / (2 * np.log(theta))
        if yarn.get("truncate", True):
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        slowed = np.clip((pair - low) / (high - low), 0, 1)
        frequency, stretch = frequency * (1 - slowed + slowed / factor), 1 + 0.1 * np.log(factor)
    angle = (np.asarray(positions)[:, None] * frequency)[:, None]
    a, b = x[..., : size // 2], x[..., size // 2 :]
    cos, sin = stretch * np.cos(angle), stretch * np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Reference:
    """One draft pass, and the target's pass over a text, in float64. Source: models.md 1, 4, 7.3 and 7.5."""

    def __init__(self, target, drafter):
        """target, drafter: checkpoint folders (z-lab's layout; rotary embedding without scaling,
        or yarn's)."""
        self.w, self.c = read_tensors(drafter), json.loads((Path(drafter) / "config.json").read_text())
        self.target = json.loads((Path(target) / "config.json").read_text())
        tensors = read_tensors(target)
        self.embed = tensors["model.embed_tokens.weight"]
        self.head = tensors.get("lm_head.weight", self.embed)
        self.target_w = tensors

    def logits(self, ids):
        """The target's, after every id of a text: (T, V)."""
        c, w, eps, count = self.target, self.target_w, self.target["rms_norm_eps"], len(ids)
        size = c["head_dim"]
        x, where = self.embed[ids], np.arange(count)
        mask = where[None] <= where[:, None]
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            y = rms(x, w[at + "input_layernorm.weight"], eps)
            q, k, v = (
                linear(w, f"{at}self_attn.{part}_proj", y).reshape(count, -1, size)
                for part in ("q", "k", "v")
            )
            if at + "self_attn.q_norm.weight" in w:
                q, k = (
                    rms(z, w[f"{at}self_attn.{part}_norm.weight"], eps) for z, part in ((q, "q"), (k, "k"))
                )
            q, k = (rope(c, z, where) for z in (q, k))
            x = x + linear(w, at + "self_attn.o_proj", attention(q, k, v, mask).reshape(count, -1))
            x = x + mlp(w, at + "mlp.", rms(x, w[at + "post_attention_layernorm.weight"], eps))[0]
        return rms(x, w["model.norm.weight"], eps) @ self.head.T

    def stages(self, features, anchor, block):
        """{"0.qkv.q": ...} of a block [anchor, mask ...] behind the features of positions 0..start-1."""
        c, w, eps = self.c, self.w, self.c["rms_norm_eps"]
        heads, groups, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        start, mask_id = len(features), c["dflash_config"]["mask_token_id"]
        where = np.arange(start, start + block)
        everywhere = np.arange(start + block)
        x = self.embed[[anchor] + [mask_id] * (block - 1)]
        out = {"embed": x}
        for i, kind in enumerate(c["layer_types"]):
            at = f"layers.{i}."
            y = rms(x, w[at + "input_layernorm.weight"], eps)
            both = np.concatenate([features, y])
            q = linear(w, at + "self_attn.q_proj", y).reshape(block, heads, size)
            k = linear(w, at + "self_attn.k_proj", both).reshape(-1, groups, size)
            v = linear(w, at + "self_attn.v_proj", both).reshape(-1, groups, size)
            q = rope(c, rms(q, w[at + "self_attn.q_norm.weight"], eps), where)
            k = rope(c, rms(k, w[at + "self_attn.k_norm.weight"], eps), everywhere)
            window = c.get("sliding_window") if kind == "sliding_attention" else None
            causal = c.get("is_causal", window is not None)
            a, b = where[:, None], everywhere[None]
            mask = np.full((block, start + block), True)
            if window and not causal:
                mask = np.abs(a - b) < window
            elif causal:
                mask = (b <= a) & ((b >= start) | (a - b < (window or start + block)))
            o = attention(q, k, v, mask)
            out |= {f"{i}.qkv.q": q, f"{i}.attend.o": o, f"{i}.k": k, f"{i}.v": v}
            x = x + linear(w, at + "self_attn.o_proj", o.reshape(block, -1))
            out[f"{i}.attention"] = x
            more, h = mlp(w, at + "mlp.", rms(x, w[at + "post_attention_layernorm.weight"], eps))
            x = x + more
            out |= {f"{i}.gate_up.h": h, f"{i}.mlp": x}
        out["logits"] = rms(x, w["norm.weight"], eps) @ self.head.T
        return out


def compare_stages(engine, prompt, rounds=2, tolerance=2e-4):
    """Assert stage by stage that a draft of `engine` is the reference's.
    Errors: AssertionError naming the first stage."""
    found, features = record_stages(engine, prompt, rounds)
    reference = Reference(engine.target_name, engine.drafter_name)
    start, block = found["start"], len(found["drafts"])
    want = reference.stages(features, found["anchor"], block)
    order = ["embed"]
    for i in range(len(reference.c["layer_types"])):
        order += [
            f"{i}.qkv.q",
            f"{i}.k",
            f"{i}.v",
            f"{i}.attend.o",
            f"{i}.attention",
            f"{i}.gate_up.h",
            f"{i}.mlp",
        ]
    names = {"embed": "-1.embed.x."}
    for i in range(len(reference.c["layer_types"])):
        names |= {
            f"{i}.qkv.q": f"{i}.qkv.q.",
            f"{i}.attend.o": f"{i}.attend.o.",
            f"{i}.gate_up.h": f"{i}.gate_up.h.",
        }
        names |= {f"{i}.attention": f"{i}.linear_add.x.0", f"{i}.mlp": f"{i}.linear_add.x.1"}
    for stage in order:
        if stage.endswith((".k", ".v")):
            layer, part = stage.split(".")
            value = found[part][int(layer), 0, :, : start + block].swapaxes(0, 1)
        else:
            value = next(array for key, array in found.items() if key.startswith(names[stage]))
        error = np.abs(value - want[stage]).max() / max(np.abs(want[stage]).max(), 1e-30)
        assert error < tolerance, f"stage {stage} at context {start}: relative error {error:.2g}"
    gap = np.sort(want["logits"], -1)
    sure = gap[1:, -1] - gap[1:, -2] > 1e-2
    assert np.array_equal(found["drafts"][1:][sure], want["logits"].argmax(-1)[1:][sure]), "stage head"
    return found, want
