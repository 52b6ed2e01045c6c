"""Twins of golden drafters: the same drafter in another layout, written by what its users write it with."""

import json
import shutil

import gguf
import ml_dtypes
import numpy as np
from minidflash.weights.safetensors_io import open_tensors
from safetensors.numpy import load_file, save_file

from tests.gguf_files import written
from tests.golden_files import golden

SHARD = "model-{:05d}-of-00003.safetensors"
TYPES = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16,
         "BF16": gguf.GGMLQuantizationType.BF16, "Q8_0": gguf.GGMLQuantizationType.Q8_0}  # fmt: skip
# z-lab's keys -> what GGUFWriter calls them, where it knows them by a method of its own
METHODS = {
    "hidden_size": "add_embedding_length", "intermediate_size": "add_feed_forward_length",
    "num_hidden_layers": "add_block_count", "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv", "head_dim": "add_key_length",
    "rms_norm_eps": "add_layer_norm_rms_eps", "rope_theta": "add_rope_freq_base",
    "max_position_embeddings": "add_context_length", "mask_token_id": "add_mask_token_id",
    "final_logit_softcapping": "add_final_logit_softcapping", "output_multiplier": "add_logit_scale",
    "input_embedding_scale": "add_embedding_scale",
}  # fmt: skip
TABLES = "embed_tokens.weight", "lm_head.weight"
# Of z-lab's tensors, what the package has no map for: it has that of Qwen3's layers, and none of this kind
OWN_NAMES = {
    "fc": "fc", "hidden_norm": gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ENC_OUTPUT_NORM],
}  # fmt: skip


def llama_cpp_name(name, count=16):
    """What llama.cpp calls a drafter's tensor of z-lab's name, by its own package, as its converter asks it.
    count: of layers at most. Source: conversion/qwen.py, DFlashModel; src/models/dflash.cpp."""
    stem, dot, ending = name.rpartition(".") if "." in name else (name, "", "")
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, count)
    return (OWN_NAMES.get(stem) or theirs.get_name(f"model.{stem}") or theirs.get_name(stem)) + dot + ending


def config_of(name, file="config.json"):
    """The parsed config of a golden drafter, dflash_config's keys at the top."""
    config = json.loads((golden(name) / file).read_text())
    return config | config.pop("dflash_config", {})


def tensors_of(name):
    """Its tensors as float32, or as the integers that they are; NumPy reads no bf16 by itself."""
    found = load_file(golden(name) / "model.safetensors")
    return {key: value.astype(np.float32) if value.dtype == ml_dtypes.bfloat16 else value
            for key, value in found.items()}  # fmt: skip


def copy(name, folder, file="config.json", **changes):
    """The golden drafter with keys of its config changed, dots going into nested objects."""
    folder.mkdir(parents=True)
    config = json.loads((golden(name) / file).read_text())
    for path, value in changes.items():
        *above, last = path.split("__")
        place = config
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(golden(name) / "model.safetensors", folder)
    return folder


def sharded(name, folder):
    """In three files and an index."""
    copy(name, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {key: SHARD.format(1 + n % 3) for n, key in enumerate(sorted(tensors))}
    for shard in set(place.values()):
        save_file({key: value for key, value in tensors.items() if place[key] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


def with_tables(name, target, folder, file="config.json", more=()):
    """With copies of the target's embedding and head, as older files have them; more: of the head, too."""
    copy(name, folder, file)
    tensors, theirs = load_file(folder / "model.safetensors"), load_file(golden(target) / "model.safetensors")
    tensors["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    for key in ("lm_head.weight", *more):
        tensors[key] = theirs["lm_head.weight"]
    save_file(
        {key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def as_gguf(name, path, kind="F32", tables=None, **more):
    """A GGUF file as llama.cpp's converter writes it; matrices are of that kind, F32 where they are no whole
    blocks of it, norms F32. tables: the target whose embedding and head are its own. more: metadata."""
    config, writer = config_of(name), gguf.GGUFWriter(path, "dflash")
    body = config.get("transformer_layer_config", config) | {
        key: config[key] for key in ("mask_token_id", "block_size")
    }
    for key, method in METHODS.items():
        if body.get(key) is not None:
            getattr(writer, method)(body[key])
    if "rope_theta" not in body:
        writer.add_rope_freq_base(body["rope_parameters"]["rope_theta"])
    writer.add_value_length(body["head_dim"])
    writer.add_rope_dimension_count(body["head_dim"])
    writer.add_name(name)
    writer.add_uint32("dflash.block_size", body["block_size"])
    writer.add_token_list([f"<{i}>" for i in range(body["vocab_size"])])
    taps = config.get("aux_hidden_state_layer_ids") or [tap + 1 for tap in config["target_layer_ids"]]
    writer.add_array("dflash.target_layers", taps)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        kinds = [one == "sliding_attention" for one in config["layer_types"]]
        writer.add_sliding_window_pattern(kinds)
        if (causal := config.get("is_causal", config.get("causal"))) is not None:
            writer.add_causal_attention(causal)
    for key, value in more.items():
        writer.add_key_value(f"dflash.{key}", value, gguf.GGUFValueType.get_type(value))
    tensors = tensors_of(name)
    if tables:
        tensors |= {key: tensors_of(tables)["model." * (key == TABLES[0]) + key] for key in TABLES}
    for key, value in tensors.items():
        if key == "d2t":
            writer.add_tensor("d2t", np.arange(len(value)) + value)
        elif key != "t2d":
            fits = value.ndim == 2 and (kind != "Q8_0" or value.shape[1] % 32 == 0)
            typed = TYPES[kind if fits else "F32"]
            blocks = gguf.quants.quantize(value, typed)
            writer.add_tensor(llama_cpp_name(key), blocks, raw_dtype=typed)
    return written(writer, path)


def widened(name, folder, path):
    """z-lab's twin of a GGUF file: its own values, in F32. The `gguf` package reads them."""
    copy(name, folder)
    spelled = {llama_cpp_name(key): key for key in open_tensors(folder)[0]}
    found = {
        spelled[one.name]: gguf.quants.dequantize(one.data, one.tensor_type).astype(np.float32)
        for one in gguf.GGUFReader(path).tensors
    }
    save_file(
        {key: np.ascontiguousarray(value) for key, value in found.items()}, folder / "model.safetensors"
    )
    return folder
