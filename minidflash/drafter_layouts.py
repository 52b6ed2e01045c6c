"""How other files say what z-lab's config.json says of a drafter: a table of facts and of paths to them.

`as_zlab` spells a file's keys as z-lab does; config.read_drafter then reads all files alike. Source:
models.md 7.7 and 11.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .config_keys import DRAFTER_NESTED, IGNORED
from .errors import UserError
from .values import told

ZLAB, SPECULATORS, GGUF = "z-lab", "speculators", "gguf"


@dataclass(frozen=True)
class Layout:
    """What a layout says, where. A path is "a.b" for key b of object a, "a.0.b" inside a list.

    facts: z-lab's key -> its paths; where several are there, all say the same. body: the object whose other
    keys are those of a Qwen3 config. make: z-lab's key -> its value of the file's. implied: z-lab's key ->
    its value, from all that was found. fixed: paths that may have this value alone. free: paths that change
    nothing; what begins with one that ends in a dot, too. defaults: values of a Qwen3 config's keys that may
    be left out; the tensors' shapes confirm all but eps. first_layer: number of the first target layer in
    the taps. ids: what d2t holds. tensors: patterns in z-lab's names
    of tensors, and what is there instead. others: such a name -> another one that files hold in its place.
    """

    facts: Mapping
    body: str = ""
    make: Mapping = field(default_factory=dict)
    fixed: Mapping = field(default_factory=dict)
    free: tuple = ()
    defaults: Mapping = field(default_factory=dict)
    implied: Mapping = field(default_factory=dict)
    first_layer: int = 0
    ids: str = ""
    tensors: tuple = ()
    others: Mapping = field(default_factory=dict)

    def tensor(self, name, held=()):
        """What a file calls a tensor of z-lab's name. held: the names in that file."""
        for pattern, new in self.tensors:
            name = re.sub(pattern, new, name)
        other = self.others.get(name)
        return other if other in held else name

    def is_free(self, path):
        return path in self.free or any(one.endswith(".") and path.startswith(one) for one in self.free)


def kinds_of(pattern):
    """layer_types of a list of booleans, true where a layer slides; anything else stays, and is refused."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    is_list = isinstance(pattern, list) and all(type(one) is bool for one in pattern)
    return [kinds[one] for one in pattern] if is_list else pattern


def no_window(window):
    """llama.cpp writes 0 where there is none."""
    return window or None


def rows_of(vocabulary):
    """How many tokens: a number, or all of them, as llama.cpp's converter writes."""
    return len(vocabulary) if isinstance(vocabulary, list) else vocabulary


def rope_type(kind):
    return "default" if kind == "none" else kind


LAYOUTS: dict[str, Layout] = {
    ZLAB: Layout({}),
    SPECULATORS: Layout(
        facts={
            "target_layer_ids": ("aux_hidden_state_layer_ids",),
            **{key: (key,) for key in (
                "block_size", "mask_token_id", "draft_vocab_size", "sample_from_anchor",
                "sliding_window_non_causal", "target_hidden_size", "quantization_config",
            )},
            "speculative_tokens": ("speculators_config.proposal_methods.0.speculative_tokens",),
        },
        body="transformer_layer_config",
        fixed={
            "speculators_model_type": "dflash", "speculators_config.algorithm": "dflash",
            "speculators_config.default_proposal_method": "greedy",
            "speculators_config.proposal_methods.0.proposal_type": "greedy",
            "speculators_config.proposal_methods.0.accept_tolerance": 0.0,
            "speculators_config.proposal_methods.0.verifier_accept_k": 1,
        },
        free=("speculators_version", "tie_word_embeddings", "speculators_config.verifier",
              "speculators_config.verifier.", *sorted(IGNORED)),
        # of transformers' Qwen3Config; a base of its rope is not among them, since versions differ
        defaults={
            "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "head_dim": 128,
            "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "vocab_size": 151936,
            "max_position_embeddings": 32768,
        },
        first_layer=1,
        ids="offset",
    ),
    GGUF: Layout(
        facts={
            "hidden_size": ("dflash.embedding_length",), "intermediate_size": ("dflash.feed_forward_length",),
            "num_hidden_layers": ("dflash.block_count",), "head_dim": ("dflash.attention.key_length",),
            "num_attention_heads": ("dflash.attention.head_count",),
            "num_key_value_heads": ("dflash.attention.head_count_kv",),
            "rms_norm_eps": ("dflash.attention.layer_norm_rms_epsilon",),
            "max_position_embeddings": ("dflash.context_length",),
            "vocab_size": ("dflash.vocab_size", "tokenizer.ggml.tokens"),
            "rope_theta": ("dflash.rope.freq_base",), "rope_scaling.rope_type": ("dflash.rope.scaling.type",),
            "rope_scaling.factor": ("dflash.rope.scaling.factor",),
            "rope_scaling.original_max_position_embeddings": ("dflash.rope.scaling.original_context_length",),
            "rope_scaling.beta_fast": ("dflash.rope.scaling.yarn_beta_fast",),
            "rope_scaling.beta_slow": ("dflash.rope.scaling.yarn_beta_slow",),
            "sliding_window": ("dflash.attention.sliding_window",),
            "layer_types": ("dflash.attention.sliding_window_pattern",),
            "is_causal": ("dflash.attention.causal",), "block_size": ("dflash.block_size",),
            "target_layer_ids": ("dflash.target_layers",),
            "mask_token_id": ("tokenizer.ggml.mask_token_id", "dflash.mask_token_id"),
            "final_logit_softcapping": ("dflash.final_logit_softcapping",),
            "output_multiplier": ("dflash.logit_scale",),
            "input_embedding_scale": ("dflash.embedding_scale",),
            "value_length": ("dflash.attention.value_length",),
            "rope_dimensions": ("dflash.rope.dimension_count",),
        },
        make={"layer_types": kinds_of, "sliding_window": no_window, "rope_scaling.rope_type": rope_type,
              "vocab_size": rows_of},
        implied={"use_sliding_window": lambda found: True if found.get("sliding_window") else None},
        fixed={"general.architecture": "dflash", "general.type": "model"},
        free=("general.", "tokenizer.", "quantize."),
        first_layer=1,
        ids="absolute",
        tensors=(
            (r"^hidden_norm", "enc.output_norm"), (r"^norm", "output_norm"), (r"^embed_tokens", "token_embd"),
            (r"^lm_head", "output"), (r"^layers\.", "blk."), (r"input_layernorm", "attn_norm"),
            (r"post_attention_layernorm", "ffn_norm"), (r"self_attn\.o_proj", "attn_output"),
            (r"self_attn\.(\w)_proj", r"attn_\1"), (r"self_attn\.(\w)_norm", r"attn_\1_norm"),
            (r"mlp\.(\w+)_proj", r"ffn_\1"),
        ),
        # llama.cpp (src/llama-arch.cpp) writes and reads the first; dflash.md 2.4 spells the second, and so
        # do files that were made by it
        others={"enc.output_norm.weight": "enc_output_norm.weight"},
    ),
}  # fmt: skip


def layout_of(config):
    """The name of the layout that a drafter's file has."""
    if "general.architecture" in config:
        return GGUF
    is_theirs = "speculators_model_type" in config or "transformer_layer_config" in config
    return SPECULATORS if is_theirs else ZLAB


def as_zlab(config, name):
    """(z-lab's config.json of a file of another layout, z-lab's key -> path in the file).

    Errors: UserError naming the path of what is unknown, or has another value than the one that is built.
    """
    layout = LAYOUTS[name]
    keys = {path: key for key, paths in layout.facts.items() for path in paths}
    inside = layout.body + "."
    flat = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **layout.defaults}
    spelled, found = {}, {}

    def spell(key, path):
        spelled["dflash_config." + key if key in DRAFTER_NESTED else key] = path

    for key, paths in layout.facts.items():
        spell(key, paths[0])
    for key in layout.defaults:
        spell(key, inside + key)
    for path, value in _leaves(config, layout.body):
        key, own = keys.get(path), path.removeprefix(inside)
        value = layout.make[key](value) if key in layout.make else value
        if key in found and value not in (None, found[key]):
            _refuse(name, path, value, f"the same as the file says elsewhere, {told(found[key])}")
        elif key is not None:
            found[key] = value
            spell(key, path)
        elif path in layout.fixed:
            wanted = layout.fixed[path]
            if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
                _refuse(name, path, value, f"{told(wanted)}: nothing else is built")
        elif path.startswith(inside) and own not in DRAFTER_NESTED:
            found[own] = value
            spell(own, path)
        elif value is not None and not layout.is_free(path):
            _refuse(name, path, value, "no such key: unknown here, it may change the algorithm")
    found |= {key: make(found) for key, make in layout.implied.items()}
    for key, value in found.items():
        place, _, last = key.rpartition(".")
        place = "dflash_config" if key in DRAFTER_NESTED else place
        (flat.setdefault(place, {}) if place else flat)[last] = value
    return flat, spelled


def _leaves(config, body, path=""):
    """(path, value) of everything that is no object or list of objects; of the body's keys, their values."""
    for key, value in enumerate(config) if isinstance(config, list) else config.items():
        here = f"{path}{key}"
        is_list = isinstance(value, list) and any(isinstance(one, dict) for one in value)
        opens = (isinstance(value, dict) or is_list) and (not path or path.split(".")[0] != body)
        if opens and value and here not in ("auto_map", "quantization_config"):
            yield from _leaves(value, body, here + ".")
        else:
            yield here, value


def _refuse(name, path, found, needed):
    raise UserError(f"drafter config, {name} layout: {path} is {told(found)}, need {needed}")
