"""A target in a GGUF file: what its metadata and names are in a Hugging Face checkpoint's.

Everything in the file is used or refused by name, as everywhere. Source: models.md 11.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from minidflash.weights.gguf_io import GgufTensor, read_gguf
from minidflash.weights.gguf_text import tokenizer_files
from minidflash.weights.safetensors_io import Tensors

from minidflash.errors import UserError

LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
FACTORS = "rope_freqs.weight"  # what the frequencies are divided by: llama3 scaling
# architecture -> model_type, class, whether rows of q and k are interleaved
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM", True), "qwen3": ("qwen3", "Qwen3ForCausalLM", False),
}  # fmt: skip
SIZES = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "context_length": "max_position_embeddings",
}  # fmt: skip
READ_KEYS = {
    *SIZES, "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "vocab_size",
}  # fmt: skip


class GgufTensors(Tensors):
    """Hugging Face name -> GgufTensor. spelled: such a name as the file spells it."""

    def __init__(self, tensors, spelling):
        super().__init__(tensors)
        self.spelling = spelling

    def spelled(self, name):
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        return self.spelling.get(name) or f"blk.{layer}.{self.spelling.get(rest, rest)}"


@dataclass(frozen=True)
class Converted:
    """A tensor whose numbers become f32, or are rounded to bf16, when they are asked for."""

    tensor: GgufTensor
    dtype: str

    @property
    def name(self):
        return self.tensor.name

    @property
    def shape(self):
        return self.tensor.shape

    @property
    def nbytes(self):
        return int(np.prod(self.shape)) * {"BF16": 2, "F32": 4}[self.dtype]

    @property
    def array(self):
        found = self.tensor.widened()
        return found.astype(ml_dtypes.bfloat16).view(np.uint16) if self.dtype == "BF16" else found

    def drop(self):
        self.tensor.drop()


def rounded(tensors):
    """GgufTensors as they would be in a bf16 checkpoint."""
    return GgufTensors(
        {name: Converted(tensor, "BF16") for name, tensor in tensors.items()}, tensors.spelling
    )


def without_blocks(tensors):
    """name -> tensor, blocks as f32: a drafter runs on every backend, and is small."""
    return {name: Converted(tensor, "F32") if tensor.kind else tensor for name, tensor in tensors.items()}


def open_gguf(path):
    """(config, generation config, GgufTensors, tokenizer's files) of a GGUF target, as a folder would have
    them: objects by file name.

    Errors: UserError naming the key or tensor, what was found and what is supported.
    """
    path = Path(path)
    metadata, tensors = read_gguf(path)
    named = _named(path, metadata, tensors)
    config = _config(path, metadata, tensors)
    texts = tokenizer_files(path, metadata, config)
    stops = [metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
             if key in metadata]  # fmt: skip
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return config, {"bos_token_id": bos, "eos_token_id": stops}, named, texts


def architecture(path, metadata):
    """(model_type, class, whether q and k are interleaved). Errors: UserError for one that is not built."""
    found = metadata.get("general.architecture")
    if found == "dflash":
        raise UserError(f"{path} holds a DFlash drafter, not a target", hint="give it as --drafter")
    if found not in ARCHITECTURES:
        raise UserError(
            f"{path}: general.architecture {found!r} is not built from GGUF files",
            hint=f"built: {', '.join(ARCHITECTURES)}; else take the Hugging Face checkpoint",
        )
    return ARCHITECTURES[found]


def _named(path, metadata, tensors):
    interleaved = architecture(path, metadata)[2]
    prefix = metadata["general.architecture"] + ".attention.head_count"
    heads = {"attn_q": metadata.get(prefix), "attn_k": metadata.get(prefix + "_kv", metadata.get(prefix))}
    found = {}
    for name, tensor in tensors.items():
        part = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if name in TOP_NAMES:
            found[TOP_NAMES[name]] = tensor
        elif part and part[2] in LAYER_NAMES and str(int(part[1])) == part[1]:
            count = heads.get(part[2]) if interleaved else 0
            if count:
                rows = tensor.shape[0]
                if type(count) is not int or count < 1 or rows % (2 * count):
                    raise UserError(
                        f"{path}: tensor {name} has {rows} rows, which {count!r} heads cannot share"
                    )
                tensor = replace(tensor, interleaved=count)
            found[f"model.layers.{part[1]}.{LAYER_NAMES[part[2]]}.weight"] = tensor
        elif name != FACTORS:
            raise UserError(f"{path}: tensor {name} is unknown here: its weights cannot be left out")
    spelling = {theirs: ours for ours, theirs in TOP_NAMES.items()}
    spelling |= {theirs + ".weight": ours + ".weight" for ours, theirs in LAYER_NAMES.items()}
    return GgufTensors(found, spelling)


def _config(path, metadata, tensors):
    """config.json's object."""
    model_type, name, _ = architecture(path, metadata)
    prefix = metadata["general.architecture"] + "."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if unknown := sorted(own.keys() - READ_KEYS):
        raise UserError(
            f"{path}: key {prefix}{unknown[0]} is unknown here, and it may change the algorithm",
            hint="take the Hugging Face checkpoint",
        )
    if missing := [
        key for key in (*SIZES, "rope.freq_base") if key not in own and key != "attention.head_count_kv"
    ]:
        raise UserError(f"{path}: key {prefix}{missing[0]} is missing, and it has no safe default")
    heads, size = own["attention.head_count"], own.get("attention.key_length")
    if type(heads) is not int or heads < 1:
        raise UserError(
            f"{path}: {prefix}attention.head_count is {heads!r}, need a whole number of at least 1"
        )
    size = own["embedding_length"] // heads if size is None else size
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, size) != size:
            raise UserError(f"{path}: {prefix}{key} is {own[key]!r}, need the head size {size}")
    if own.get("rope.scaling.type", "none") != "none":
        found = own["rope.scaling.type"]
        raise UserError(f"{path}: {prefix}rope.scaling.type is {found!r}, need none, or {FACTORS} of llama3")
    tokens = len(metadata.get("tokenizer.ggml.tokens", ()))
    config = {
        "architectures": [name], "model_type": model_type, "dtype": _most(tensors), "hidden_act": "silu",
        "attention_bias": False, **{theirs: own[key] for key, theirs in SIZES.items() if key in own},
        "head_dim": size, "rms_norm_eps": _shortest(own.get("attention.layer_norm_rms_epsilon")),
        "rope_theta": own["rope.freq_base"], "vocab_size": own.get("vocab_size", tokens),
        "tie_word_embeddings": "output.weight" not in tensors,
    }  # fmt: skip
    if FACTORS in tensors:
        divisors = tensors[FACTORS].widened().tolist()
        config["rope_scaling"] = {"rope_type": "divisors", "divisors": divisors}
    return config


def _most(tensors):
    """What most numbers are stored as."""
    found = {}
    for tensor in tensors.values():
        found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
    return max(found, key=found.get, default="").lower()


def _shortest(number):
    """A number stored as f32: its shortest decimal is what the author typed."""
    return number if number is None else float(str(np.float32(number)))
