"""config.json -> one frozen ModelConfig or DrafterConfig (stack.py).
Families differ in fields, not in classes."""

from itertools import pairwise

from minidflash.kernels.table import WIDEST

from .config_keys import DRAFTER_FIXED, FIXED, Reader
from .drafter_layouts import LAYOUTS, SPECULATORS, ZLAB, as_zlab, layout_of
from .errors import UserError
from .families import FAMILIES, TRAINING
from .fp8_config import KEY as QUANTIZATION
from .fp8_config import read_fp8
from .stack import DrafterConfig, Layer, ModelConfig
from .values import told
from .wrapper import unwrap

# Named here so that the refusal says "not built yet" and not "unknown"; models.md 3 to 6.
LATER = {
    "qwen3_5": "qwen3_5", "qwen3_5_text": "qwen3_5", "qwen3_5_moe": "qwen3_5",
}  # fmt: skip
BUILT = {name: family.architecture for name, family in FAMILIES.items()}
DRAFTER, SPECULATOR = "DFlashDraftModel", "DFlashSpeculator"
PADDING = 1024  # rows at most by which two tables of one vocabulary differ; 512 are known (F07)
VARIANTS = {
    "DFlash2DraftModel": "DFlash 2", "DominoDraftModel": "Domino", "DSparkDraftModel": "DSpark",
    "LiLiCorrDraftModel": "LiLiCorr",
}  # fmt: skip


def _architecture(config):
    """(architectures, model_type) as strings; '' where absent."""
    names = config.get("architectures")
    names = names if isinstance(names, list) else [names] if names else []
    return ", ".join(map(str, names)), str(config.get("model_type") or "")


def is_drafter(config):
    """True if this config.json describes a DFlash drafter of any dialect."""
    names = _architecture(config)[0]
    return (
        names in VARIANTS
        or names == DRAFTER
        or "dflash_config" in config
        or "speculators_model_type" in config
        or config.get("general.architecture") == "dflash"
    )


def _ids(reader, key, found, vocab):
    """Token ids of one eos entry: null, an int, or a list of ints, all inside the vocabulary."""
    for token in found if isinstance(found, list) else [] if found is None else [found]:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            reader.refuse(key, token, f"token ids from 0 to {vocab - 1}")
        yield token


def read_target(config, generation=None, tensors=None):
    """The target that config.json describes.

    config, generation: the parsed config.json and generation_config.json (None: no such file). tensors: what
    the files hold, by name; sizes are believed no further than that (None: not known).
    Errors: UserError naming the key, what it holds and what is supported. Source: models.md 0.1, 1, 2.
    """
    reader = Reader(config, "target", tensors)
    names, model_type = _architecture(config)
    if is_drafter(config):
        raise UserError("this folder holds a DFlash drafter, not a target", hint="give it as --drafter")
    if not names and not model_type:
        reader.missing("model_type")
    for family, architecture in BUILT.items():
        if model_type in (family, "") and names in (architecture, ""):
            break
        if model_type == family or names == architecture:
            reader.refuse("architectures", names, f"{architecture} for model_type {model_type or family!r}")
    else:
        hint = "built: " + ", ".join(BUILT.values())
        if model_type in LATER:
            raise UserError(
                f"architecture {names or model_type} ({LATER[model_type]}) is not built yet", hint=hint
            )
        raise UserError(f"architecture {names or model_type} is not supported", hint=hint)
    rules = FAMILIES[family]
    if rules.text:
        config = unwrap(config, rules.text)
        reader = Reader(config, "target", tensors)
    sizes, facts, count = reader.sizes(rules.bias, rules.rope_kinds)
    windows = reader.windows(count)
    own = rules.layer(reader, facts, windows)
    each = own if isinstance(own, list) else [own] * count
    vocab = reader.number("vocab", "vocab_size", int, 1)
    tied = reader.flag("tied", "tie_word_embeddings", False)
    generation = generation or {}
    stops = [*_ids(reader, "eos_token_id", config.get("eos_token_id"), vocab)]
    stops += _ids(reader, "generation_config.eos_token_id", generation.get("eos_token_id"), vocab)
    bos = config.get("bos_token_id")
    bos = list(_ids(reader, "bos_token_id", generation.get("bos_token_id") if bos is None else bos, vocab))
    result = ModelConfig(
        family=family, vocab=vocab, tied=tied,
        layers=tuple(Layer(window=window, **facts | one) for window, one in zip(windows, each, strict=True)),
        prefix=rules.prefix, embed_scale=sizes["width"] ** 0.5 if rules.scales_embedding else 1.0,
        soft_cap=_soft_cap(reader) if rules.caps else 0.0, fp8=read_fp8(reader) if rules.fp8 else None,
        max_positions=reader.number("max_positions", "max_position_embeddings", int, 1),
        stop_ids=tuple(dict.fromkeys(stops)), bos_id=bos[0] if bos else None,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""), sources=reader.sources, **sizes,
    )  # fmt: skip
    if any(layer.experts for layer in result.layers):
        reader.used |= TRAINING
    free = rules.free | ({QUANTIZATION} if rules.fp8 else set())
    reader.finish({key: value for key, value in FIXED.items() if key not in free} | rules.fixed)
    return result


def _soft_cap(reader):
    """0: none."""
    return reader.number("soft_cap", "final_logit_softcapping", float, 0, default=0.0)


def suggested_taps(target_layers, n):
    """The reference's default rule for n taps; only ever printed as a hint, never used (F03).
    models.md 7.1."""
    if n == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (n - 1)) for i in range(n)]


def read_drafter(config, tensors=None):
    """The DFlash v1 drafter that config.json describes, or the metadata of a GGUF file.

    tensors: as read_target. Errors: UserError naming the key, as the file spells it; variants and unknown
    keys are refused by name. Source: models.md 7.1, 7.5, 7.7 and 11, dflash.md 2.
    """
    names, model_type = _architecture(config)
    name = layout_of(config)
    layout, spelled = LAYOUTS[name], {}
    if names in VARIANTS:
        raise UserError(
            f"drafter architecture {names} ({VARIANTS[names]}) is not built", hint=f"built: {DRAFTER}"
        )
    if name != ZLAB:
        if name == SPECULATORS and names not in (DRAFTER, SPECULATOR):
            Reader(config, "drafter").refuse("architectures", names, f"{DRAFTER} or {SPECULATOR}")
        config, spelled = as_zlab(config, name)
        names, model_type = _architecture(config)
    reader = Reader(config, "drafter", tensors, spelled, layout.body and layout.body + ".")
    if names != DRAFTER and not is_drafter(config):
        hint = "give it as --target" if model_type in BUILT or model_type in LATER else f"built: {DRAFTER}"
        raise UserError(f"architecture {names or model_type} is no DFlash drafter, need {DRAFTER}", hint=hint)
    if names != DRAFTER:
        reader.refuse("architectures", names, DRAFTER)
    if model_type != "qwen3":
        reader.refuse("model_type", model_type, "'qwen3'")
    sizes, facts, count = reader.sizes()
    target_layers = reader.number("target_layers", "num_target_layers", int, 1, default=0) or None
    windows = reader.windows(count)
    vocab = reader.number("vocab", "vocab_size", int, 1, default=0)
    kinds = zip(windows, _causal(reader, windows, layout), strict=True)
    result = DrafterConfig(
        layers=tuple(
            Layer(window=window, causal=causal, sees_block=causal, qk_norm=True, **facts) for window,
            causal in kinds
        ),
        taps=_taps(reader, layout, target_layers, count), vocab=vocab, target_layers=target_layers,
        block=reader.number("block", "block_size", int, 1, high=WIDEST),
        mask_id=reader.number("mask_id", "mask_token_id", int, 0),
        max_positions=reader.number("max_positions", "max_position_embeddings", int, 1, default=0),
        embed_scale=_positive(reader, "embed_scale", "input_embedding_scale"),
        output_multiplier=_positive(reader, "output_multiplier", "output_multiplier"),
        soft_cap=reader.number("soft_cap", "final_logit_softcapping", float, 0, default=0.0),
        layout=name, draft_vocab=_draft_vocab(reader, layout, vocab), fp8=read_fp8(reader),
        sources=reader.sources, **sizes,
    )  # fmt: skip
    _check_layout(reader, layout, result)
    reader.used.add("tie_word_embeddings")  # names.py asks the files
    fixed = {key: value for key, value in FIXED.items() if key != QUANTIZATION} | DRAFTER_FIXED
    reader.finish(fixed | ({"draft_vocab_size": vocab or None} if name == ZLAB else {}))
    return result


def _taps(reader, layout, target_layers, count):
    """Target layers that feed the drafter, from 0."""
    hint = "the checkpoint's author knows them"
    if target_layers and target_layers > 4:
        hint = f"the usual rule would give {suggested_taps(target_layers, count)}; " + hint
    taps, first = reader.value("taps", "target_layer_ids"), layout.first_layer
    if taps is None:
        reader.missing("dflash_config.target_layer_ids", hint)
    whole = isinstance(taps, list) and taps and all(type(tap) is int and tap >= first for tap in taps)
    if not whole or any(a >= b for a, b in pairwise(taps)):
        needed = f"target layers, counted from {first}, strictly increasing"
        reader.refuse(reader.sources["taps"], taps, needed)
    return tuple(tap - first for tap in taps)


def _positive(reader, fact, key):
    """A factor, 1 where it is not stated."""
    found = reader.number(fact, key, float, 0, default=1.0)
    if found == 0:
        reader.refuse(reader.sources[fact], found, "more than 0")
    return found


def _draft_vocab(reader, layout, vocab):
    """How many ids a reduced head ranks; 0: all of the vocabulary."""
    if "draft_vocab_size" in layout.facts:
        if not vocab:
            reader.missing("vocab_size")
        found = reader.number("draft_vocab", "draft_vocab_size", int, 1, high=vocab)
        return found if found < vocab else 0
    ids = (reader.tensors or {}).get("d2t") if layout.ids else None
    if ids is None:
        return 0
    reader.sources["draft_vocab"] = "tensor d2t"
    return ids.shape[0]


def _check_layout(reader, layout, config):
    """What a layout says a second time must agree."""
    size = config.layers[0].head_size
    for key, fact, wanted in (
        ("target_hidden_size", "width", config.width), ("speculative_tokens", "block", config.block - 1),
        ("value_length", "head_size", size), ("rope_dimensions", "head_size", size),
    ):  # fmt: skip
        found = reader.value(key, key) if key in layout.facts else None
        if found is not None and (type(found) is not int or found != wanted):
            reader.refuse(reader.sources[key], found, f"{wanted} beside this {reader.sources[fact]}")


def _causal(reader, windows, layout):
    """Causal inside the block, one a layer: is_causal, else dflash_config.causal, else by layer, where z-lab
    and speculators differ in what they state (models.md 7.5, 7.7)."""
    second, first = reader.flag("causal", "causal"), reader.flag("causal", "is_causal")
    stated = second if first is None else first
    if stated is not None:
        return (stated,) * len(windows)
    key, is_two_sided = "is_causal", None
    if "sliding_window_non_causal" in layout.facts:
        key = "sliding_window_non_causal"
        is_two_sided = reader.flag("causal", key)
    is_clear = is_two_sided is not None or not any(windows)
    if not is_clear and (layout is not LAYOUTS[ZLAB] or all(windows)):
        hint = "drafters with windows exist in causal and in non-causal form"
        reader.missing(key, hint)
    reader.sources.setdefault("causal", reader.said("layer_types"))
    return tuple(window > 0 and not is_two_sided for window in windows)


def check_pair(target, drafter):
    """Refuse a target and a drafter that were not made for each other, before any compute.

    Errors: UserError with both numbers. Vocabularies may differ by padding rows, which do no harm (F07, F08).
    Source: dflash.md 2.6.
    """
    source = drafter.sources.get("taps", "target_layer_ids")
    if target.width != drafter.width:
        raise UserError(f"drafter hidden_size is {drafter.width}, the target's is {target.width}: not a pair")
    if drafter.vocab and abs(drafter.vocab - target.vocab) > PADDING:
        found = f"drafter vocab_size is {drafter.vocab}, the target's is {target.vocab}: not a pair"
        raise UserError(found, hint=f"padding of one vocabulary explains {PADDING} rows at most")
    count = len(target.layers)
    if drafter.target_layers not in (None, count):
        found = f"drafter num_target_layers is {drafter.target_layers}"
        raise UserError(f"{found}, the target has {count} layers: not a pair")
    if drafter.taps[-1] >= count:
        raise UserError(
            f"drafter {source} taps layer {told(drafter.taps[-1])}, the target has {count} layers"
        )
    if drafter.taps[-1] == count - 1:
        # The reference hands out the last layer after the final norm, other engines before it:
        # nobody can say.
        raise UserError(
            f"drafter {source} taps the last target layer {drafter.taps[-1]}: with or without norm?"
        )
    if drafter.mask_id >= target.vocab:
        raise UserError(
            f"drafter mask_token_id is {drafter.mask_id}, the target embeds ids 0 to {target.vocab - 1}"
        )
