"""A multimodal checkpoint's config.json, of which only the part about text is read: models.md 0.1."""

from .errors import UserError
from .values import told

# Of the whole: ids and sizes of what is no text, and bookkeeping.
OTHERS = {
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "initializer_range",
    "model_type", "vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id",
    "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "boi_token_index", "eoi_token_index",
    "eoa_token_index", "image_token_index", "audio_token_index", "vision_soft_tokens_per_image", "use_cache",
}  # fmt: skip
EITHER = "tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id"


def unwrap(config, kind):
    """One flat config: text_config, which says what every layer is, and what the whole says of tokens.

    kind: model_type that text_config must have. tie_word_embeddings: true if either says so. Stop ids are
    those of both. Errors: UserError naming the key.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"target config: text_config is {told(text)}, need an object")
    if text.get("model_type") != kind:
        found = told(text.get("model_type"))
        raise UserError(f"target config: text_config.model_type is {found}, need {kind!r}")
    for key, value in config.items():
        if key not in OTHERS and key not in (*EITHER, "text_config") and value is not None:
            raise UserError(
                f"target config: {key} is {told(value)}, need no such key: unknown here, it may change the "
                "algorithm"
            )
    flat = text | {key: config[key] for key in ("architectures", "model_type") if key in config}
    for key in EITHER:
        said = [one[key] for one in (config, text) if one.get(key) is not None]
        if key == "eos_token_id" and said:
            said = [[token for one in said for token in (one if isinstance(one, list) else [one])]]
        if key == "tie_word_embeddings" and True in said:
            said = [True]
        if said:
            flat[key] = said[0]
    return flat
