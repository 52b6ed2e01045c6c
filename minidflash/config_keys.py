"""Reading config.json key by key: checked values, where they came from, and a refusal of everything else.

Every key is read, ignored by name (it cannot change the numbers), or must hold the one value that is built;
any other key is refused, because an algorithm that is quietly left out still makes fluent text.
"""

from .errors import UserError
from .rope import ROPE_KEYS, Rope
from .values import told

# Bookkeeping and training keys: no effect on what one forward pass computes.
IGNORED = {
    "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype",
    "initializer_range", "use_cache", "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id",
    "pretraining_tp", "is_llama_config", "name_or_path", "return_dict", "output_attentions",
    "output_hidden_states", "id2label", "label2id", "problem_type", "task_specific_params", "use_bfloat16",
    "torchscript", "chunk_size_feed_forward", "max_length", "do_sample", "temperature", "top_p", "top_k",
    "transformers.js_config", "unsloth_fixed", "unsloth_version", "max_window_layers", "finetuning_task",
}  # fmt: skip
# Keys that may be present, but only with the value that is computed here.
FIXED = {
    "hidden_act": "silu", "mlp_bias": False, "rope_interleaved": False, "partial_rotary_factor": 1,
    "is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False,
    "cross_attention_hidden_size": None, "quantization_config": None, "pruned_heads": {},
    "tie_encoder_decoder": False,
}  # fmt: skip
DRAFTER_FIXED = {
    "use_swa": False,
    "sample_from_anchor": False, "causal_head": False, "attention_sink_bias": False,
    "attention_value_scale": 1, "projector_type": None, "shift_label": False,
}  # fmt: skip
DRAFTER_NESTED = (
    "block_size", "num_target_layers", "target_layer_ids", "mask_token_id", "is_causal", "causal",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping", "draft_vocab_size",
    "sample_from_anchor", "sliding_window_non_causal", "target_hidden_size", "speculative_tokens",
    "value_length", "rope_dimensions",
)  # fmt: skip

MOST_LAYERS = 1024  # that are believed where the files are not at hand
LARGEST = 2**31 - 1  # ids, positions and sizes are 32-bit numbers in every kernel


class Reader:
    """One config.json being read: checked values out, the keys they came from in `sources`.

    spelled: key -> what the file calls it, where it is no config.json of transformers. body: what stands
    before keys that are not there.
    """

    def __init__(self, config, label, tensors=None, spelled=None, body=""):
        if not isinstance(config, dict):
            raise UserError(f"{label} config.json holds a {type(config).__name__}, need an object")
        self.config, self.label, self.sources, self.used = config, label, {}, set()
        self.tensors = tensors  # what the files hold, by name; None: not known
        self.spelled, self.body = spelled or {}, body
        self.nested = config.get("dflash_config") or {}
        if not isinstance(self.nested, dict):
            self.refuse("dflash_config", self.nested, "an object")

    def said(self, key):
        """What the file calls a key, or a part of its value."""
        for name in (key, "dflash_config." + key):
            if name in self.spelled:
                return self.spelled[name]
        whole, dot, part = key.partition(".")
        return self.spelled.get(whole, whole) + dot + part

    def refuse(self, key, found, needed, hint=None):
        raise UserError(f"{self.label} config: {self.said(key)} is {told(found)}, need {needed}", hint=hint)

    def missing(self, key, hint=None):
        key = self.said(key) if self.said(key) != key else self.body + key
        raise UserError(f"{self.label} config: {key} is missing, and it has no safe default", hint=hint)

    def value(self, fact, *keys):
        """First value that is there and not null, or None. A nested dflash_config key wins over a top one."""
        self.used.update(keys)
        places = ((self.nested, "dflash_config."), (self.config, ""))
        for place, prefix in places if keys[0] in DRAFTER_NESTED else places[1:]:
            for key in keys:
                if place.get(key) is not None:
                    self.sources[fact] = self.said(prefix + key)
                    return place[key]
        return None

    def number(self, fact, key, kind, low, default=None, hint=None, high=None):
        """An int or float of at least `low`, at most `high`; without a default the key must be there."""
        found = self.value(fact, key)
        if found is None:
            if default is None:
                self.missing(key, hint)
            self.sources[fact] = f"{self.said(key)} is absent"
            return default
        return self.checked(self.sources[fact], found, kind, low, high)

    def checked(self, key, found, kind, low, high=None):
        high = high or (LARGEST if kind is int else 2**53)
        fits = isinstance(found, int) if kind is int else isinstance(found, (int, float))
        if isinstance(found, bool) or not fits or not low <= found <= high:  # also false for nan
            needed = f"{'a whole number' if kind is int else 'a number'} of at least {low}"
            self.refuse(key, found, needed + f", at most {high}" * (fits and found > low))
        return kind(found)

    def flag(self, fact, key, default=None):
        found = self.value(fact, key)
        if found is not None and not isinstance(found, bool):
            self.refuse(self.sources[fact], found, "true or false")
        return default if found is None else found

    def unused(self, condition, *keys):
        """Keys that say nothing here must not be there: `condition` is false."""
        for key in keys:
            if (found := self.value(key, key)) is not None:
                self.refuse(key, found, f"null: {condition} is not true")

    def sizes(self, bias=False, rope_kinds=()):
        """(width, eps and ropes, facts of all layers by name, how many): what targets and drafters share.

        rope_kinds: kinds of layers that have a rope each; (): one for all.
        """
        width = self.number("width", "hidden_size", int, 1)
        heads = self.number("heads", "num_attention_heads", int, 1)
        kv_heads = self.number("kv_heads", "num_key_value_heads", int, 1, default=heads)
        if heads % kv_heads:
            self.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
        if self.config.get("head_dim") is None and width % heads:
            self.refuse("num_attention_heads", heads, f"head_dim beside it, as it does not divide {width}")
        head_size = self.number("head_size", "head_dim", int, 1, default=width // heads)
        if head_size % 2:
            self.refuse("head_dim", head_size, "an even number: RoPE turns pairs")
        eps = self.number("eps", "rms_norm_eps", float, 0)
        if eps == 0:
            self.refuse("rms_norm_eps", eps, "more than 0")
        ropes = self.ropes(rope_kinds) if rope_kinds else (self.rope(),)
        self.sources["ropes"] = self.sources["rope"]
        layers = self.layers()
        facts = {
            "heads": heads, "kv_heads": kv_heads, "head_size": head_size, "scale": head_size**-0.5,
            "ffn_width": self.number("ffn_width", "intermediate_size", int, 1),
            "attention_bias": self.flag("attention_bias", "attention_bias", bias),
        }  # fmt: skip
        return {"width": width, "eps": eps, "ropes": ropes}, facts, layers

    def layers(self):
        """How many layers; of each there are tensors, so lists and tables of a false number are never
        made."""
        is_unknown = self.tensors is None
        layers = self.number("layers", "num_hidden_layers", int, 1, high=MOST_LAYERS if is_unknown else None)
        if not is_unknown and layers > len(self.tensors):
            self.refuse(
                "num_hidden_layers", layers, f"fewer: the files hold {len(self.tensors)} tensors in all"
            )
        return layers

    def ropes(self, kinds):
        """The rope of each kind of layer: rope_parameters holds them by its name, in both spellings."""
        found = self.value("rope", "rope_parameters")
        if not isinstance(found, dict) or set(found) != set(kinds):
            self.refuse("rope_parameters", found, "an object with " + " and ".join(kinds))
        ropes = []
        for kind in kinds:
            name, given = f"rope_parameters.{kind}", found[kind]
            if not isinstance(given, dict):
                self.refuse(name, given, "an object")
            given = dict(given)
            if given.get("rope_theta") is None:
                self.missing(f"{name}.rope_theta")
            theta = self.checked(f"{name}.rope_theta", given.pop("rope_theta"), float, 1)
            self.sources["rope"] = f"{name}.rope_theta"
            ropes.append(self._rope(name, theta, given))
        self.sources["rope"] = "rope_parameters"
        return tuple(ropes)

    def divisors(self, key, found):
        """One number above 0 for every frequency, as a tuple."""
        heads, width = (self.config.get(name) for name in ("num_attention_heads", "hidden_size"))
        count = (self.config.get("head_dim") or width // heads) // 2
        if not isinstance(found, list) or len(found) != count:
            self.refuse(key, found, f"a list of {count} numbers")
        if any(self.checked(key, one, float, 0) == 0 for one in found):
            self.refuse(key, found, "numbers above 0")
        return tuple(map(float, found))

    def rope(self):
        """The rope of both spellings (models.md 0.1); unknown types and keys are refused."""
        self.used.update(("rope_theta", "rope_scaling", "rope_parameters"))
        old, new = self.config.get("rope_scaling"), self.config.get("rope_parameters")
        for key, found in (("rope_scaling", old), ("rope_parameters", new)):
            if found is not None and not isinstance(found, dict):
                self.refuse(key, found, "an object or null")
        name = "rope_parameters" if new else "rope_scaling"
        given = dict(new or old or {})
        top, theta = self.config.get("rope_theta"), given.pop("rope_theta", None)
        if theta is None and top is None:
            self.missing("rope_theta")
        if theta is not None and top is not None and theta != top:
            self.refuse(f"{name}.rope_theta", theta, f"the same as rope_theta = {top!r}")
        if new and old and {**old, "rope_theta": None} != {**new, "rope_theta": None}:
            self.refuse("rope_scaling", old, f"the same as rope_parameters = {new!r}")
        self.sources["rope"] = self.said("rope_theta" if theta is None else f"{name}.rope_theta")
        theta = self.checked(self.sources["rope"], top if theta is None else theta, float, 1)
        return self._rope(name, theta, given)

    def _rope(self, name, theta, given):
        """A rope of the keys that are left."""
        kinds = [given.pop(key) for key in ("rope_type", "type") if key in given] or ["default"]
        kind = kinds[0]
        if len(set(map(str, kinds))) > 1 or not isinstance(kind, str) or kind not in ROPE_KEYS:
            key = f"{name}.rope_type"
            self.refuse(key, kind if len(kinds) == 1 else kinds, "one of " + ", ".join(ROPE_KEYS))
        if given.get("partial_rotary_factor") == 1 and kind != "proportional":
            del given["partial_rotary_factor"]
        fields = {}
        for key, default in ROPE_KEYS[kind].items():
            found = given.pop(key, None)
            if found is None and default is None:
                self.missing(f"{name}.{key}")
            if key == "divisors":
                found = self.divisors(f"{name}.{key}", found)
            elif isinstance(default, bool):
                if found is not None and not isinstance(found, bool):
                    self.refuse(f"{name}.{key}", found, "true or false")
            elif found is not None:
                whole = key == "original_max_position_embeddings"
                most = 1 if key == "partial_rotary_factor" else None
                found = self.checked(f"{name}.{key}", found, int if whole else float, 1 if whole else 0, most)
                if found == 0 and key in ("factor", "low_freq_factor", "beta_fast", "beta_slow"):
                    self.refuse(f"{name}.{key}", found, "more than 0")
            fields[key] = default if found is None else found
        for key, found in given.items():
            if found is not None:
                self.refuse(f"{name}.{key}", found, f"no such key for rope type {kind!r}")
        if kind == "llama3" and fields["high_freq_factor"] <= fields["low_freq_factor"]:
            self.refuse(f"{name}.high_freq_factor", fields["high_freq_factor"], "more than low_freq_factor")
        if kind == "yarn" and theta <= 1:
            self.refuse(self.sources["rope"], theta, "more than 1 with yarn")
        return Rope(theta, kind, **fields)

    def windows(self, layers):
        """Window of each layer, 0: full attention."""
        kinds = self.value("windows", "layer_types")
        window, use = self.value("window", "sliding_window"), self.flag("use_window", "use_sliding_window")
        if kinds is None:
            if use:
                self.missing("layer_types", "use_sliding_window is true: say which layers slide")
            return (0,) * layers
        if not isinstance(kinds, list) or len(kinds) != layers:
            self.refuse("layer_types", kinds, f"a list of {layers}, one a layer")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                self.refuse("layer_types", kind, "full_attention or sliding_attention")
        if "sliding_attention" not in kinds:
            return (0,) * layers
        if use is False:
            self.refuse("use_sliding_window", False, "true: layer_types has sliding_attention")
        if window is None:
            self.missing("sliding_window", "layer_types has sliding_attention")
        window = self.checked("sliding_window", window, int, 1)
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

    def finish(self, fixed):
        """Refuse every key that was neither read nor known to be harmless, naming it."""
        for key, found in self.nested.items():
            is_read = key in DRAFTER_NESTED and key in self.used
            self._known("dflash_config." + key, found, fixed, key, is_read)
        for key, found in self.config.items():
            harmless = key in self.used or key in IGNORED or key.startswith("_") or key == "dflash_config"
            self._known(key, found, fixed, key, harmless)

    def _known(self, name, found, fixed, key, harmless):
        if found is None:  # the library's way to write "not set"
            return
        if key in fixed:
            wanted = fixed[key]
            if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
                self.refuse(name, found, f"{'null' if wanted is None else wanted}: nothing else is built")
        elif not harmless:
            self.refuse(name, found, "no such key: unknown here, it may change the algorithm")
