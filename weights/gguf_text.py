"""The tokenizer of a GGUF file as the files of a Hugging Face checkpoint: objects by file name."""

from minidflash.errors import UserError

KEY = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4  # types of tokens that stand for themselves
NORMAL = {1, 2, CONTROL, USER_DEFINED, 5, 6}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bytes_of(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(numbers):
    pattern = {
        "type": "Split",
        "pattern": {"Regex": _WORDS % numbers},
        "behavior": "Isolated",
        "invert": False,
    }
    return [pattern, _bytes_of(False)]


# `tokenizer.ggml.pre`: a name for how text is split, which the file does not hold.
RULES = {
    "smollm": [{"type": "Digits", "individual_digits": True}, _bytes_of(True)],
    "qwen2": _split(r"\p{N}"),
    "llama-bpe": _split(r"\p{N}{1,3}"),
}


def tokenizer_files(path, metadata, config):
    """tokenizer.json and tokenizer_config.json, or {} where the file has no tokenizer.

    Errors: UserError naming the key, what it holds and what is supported. Source: models.md 11.
    """
    own = {key.removeprefix(KEY): value for key, value in metadata.items() if key.startswith(KEY)}
    if "model" not in own and "tokens" not in own:
        return {}
    for key, known in (("model", ["gpt2"]), ("pre", list(RULES))):
        if own.get(key) not in known:
            found = repr(own[key]) if key in own else "missing"
            raise UserError(
                f"{path}: {KEY}{key} is {found}, need {' or '.join(known)}",
                hint="take the Hugging Face checkpoint, or prompts of ids from a file without a tokenizer",
            )
    for key in ("tokens", "token_type", "merges"):
        if not isinstance(own.get(key), list):
            raise UserError(f"{path}: {KEY}{key} is missing")
    tokens, kinds = own["tokens"], own["token_type"]
    if len(tokens) != len(kinds) or len(set(tokens)) != len(tokens) or set(kinds) - NORMAL:
        raise UserError(
            f"{path}: {len(tokens)} {KEY}tokens, {len(set(tokens))} distinct, and {len(kinds)} types of "
            f"{sorted(set(kinds))}: need one known type for each token, and no token twice"
        )
    known = set(tokens)
    for merge in own["merges"]:
        pair = str(merge).split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= known:
            raise UserError(
                f"{path}: {KEY}merges has {merge!r}, need two tokens whose text together is a third"
            )
    for key in ("bos", "eos", "eot"):
        found = own.get(key + "_token_id", 0)
        if type(found) is not int or not 0 <= found < len(tokens):
            raise UserError(
                f"{path}: {KEY}{key}_token_id is {found!r}, need an id from 0 to {len(tokens) - 1}"
            )
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (CONTROL, USER_DEFINED)
    ]  # fmt: skip
    is_llama = own["pre"] == "llama-bpe"
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": RULES[own["pre"]]},
        "post_processor": None, "decoder": _bytes_of(True),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": is_llama, "vocab": {token: i for i, token in enumerate(tokens)},
                  "merges": own["merges"]},
    }  # fmt: skip
    named = {key: tokens[own[key + "_token_id"]] for key in ("bos", "eos") if key + "_token_id" in own}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False,
        "add_bos_token": bool(own.get("add_bos_token", is_llama)),
        **{f"{key}_token": token for key, token in named.items()},
        "clean_up_tokenization_spaces": False, "model_max_length": config["max_position_embeddings"],
    }  # fmt: skip
    if "tokenizer.chat_template" in metadata:
        tokenizer_config["chat_template"] = metadata["tokenizer.chat_template"]
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config}
