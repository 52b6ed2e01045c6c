"""Golden targets as GGUF files, by the package's writer: the same numbers, or blocks of them."""

import json

import numpy as np
import pytest
from minidflash.weights.gguf_model import LAYER_NAMES, TOP_NAMES
from safetensors.numpy import load_file

from tests.golden_files import golden

FACTS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim", "vocab_size": "vocab_size",
}  # fmt: skip


def interleaved(rows, heads):
    """Rows of q or k from half-split order to GGUF's: pairs (j, j + K/2) become (2j, 2j + 1)."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, case, kind="F32", change=None):
    """The target of a golden case as a file. kind: of the matrices whose rows are whole blocks of it, others
    are F32. change: None, or a function that may alter (keys, tensors), both dicts by the file's names, a
    tensor (numbers, name of its type), before they are written. Returns the path."""
    gguf = pytest.importorskip("gguf")
    config = json.loads((golden(case) / "config.json").read_text())
    rope, name = config["rope_parameters"], config["model_type"]
    keys = {f"{name}.{key}": config[theirs] for key, theirs in FACTS.items()}
    keys |= {f"{name}.rope.freq_base": float(rope["rope_theta"])}
    keys |= {f"{name}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"])}
    names = {theirs: ours for ours, theirs in TOP_NAMES.items()}
    layer = {theirs: ours for ours, theirs in LAYER_NAMES.items()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for theirs, array in load_file(golden(case) / "model.safetensors").items():
        array, ours = array.astype(np.float32), names.get(theirs)
        if ours is None:
            _, _, i, rest = theirs.removesuffix(".weight").split(".", 3)
            ours = f"blk.{i}.{layer[rest]}.weight"
            if layer[rest] in heads and name == "llama":  # of the two, as models.md 11 has it
                array = interleaved(array, heads[layer[rest]])
        fits = (
            array.ndim == 2
            and array.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 0
        )
        tensors[ours] = array, kind if fits else "F32"
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = divisors(config["head_dim"], rope), "F32"
    if change:
        change(keys, tensors)
    writer = gguf.GGUFWriter(path, keys.pop("general.architecture", name))
    for key, value in keys.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_string if isinstance(value, str)
         else writer.add_array if isinstance(value, list) else writer.add_uint32)(key, value)  # fmt: skip
    for ours, (array, stored) in tensors.items():
        number = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(ours, gguf.quants.quantize(array, number), raw_dtype=number)
    return written(writer, path)


def written(writer, path):
    """What a GGUFWriter of this path was given goes to disk. Returns the path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def divisors(size, rope):
    """What llama3 scaling divides each frequency by, as llama.cpp's converter computes it."""
    found = []
    for j in range(size // 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (2 * j / size)
        context, low, high = (rope[key] for key in ("original_max_position_embeddings", "low_freq_factor",
                                                    "high_freq_factor"))  # fmt: skip
        blend = min(max((context / wave - low) / (high - low), 0), 1)
        found.append(1 / ((1 - blend) / rope["factor"] + blend))
    return np.float32(found)
