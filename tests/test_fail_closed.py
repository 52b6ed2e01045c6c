"""Nothing is guessed: every tensor deleted, renamed, added, retyped or reshaped, and every key of a config
changed."""

import json
from dataclasses import replace

import pytest
from minidflash.weights import drafter_names, names
from minidflash.weights.safetensors_io import open_tensors

from minidflash.config import read_drafter, read_target
from minidflash.config_keys import IGNORED
from minidflash.errors import UserError
from minidflash.families import TRAINING
from tests.golden_files import golden

TARGETS = ["qwen3-tiny", "qwen3-moe-tiny", "gpt-oss-tiny", "gpt-oss-mxfp4-tiny"]
DRAFTERS = ["dflash-qwen3-moe-tiny", "dflash-gpt-oss-tiny", "dflash-gpt-oss-mxfp4-tiny"]


def opened(name):
    """(config, tensors by name, function that binds them) of a golden checkpoint."""
    config = json.loads((golden(name) / "config.json").read_text())
    tensors = dict(open_tensors(golden(name))[0])
    if name in DRAFTERS:
        return config, tensors, lambda found: drafter_names.bind_drafter(read_drafter(config), found)
    return config, tensors, lambda found: names.bind_target(read_target(config), found)


def refused(do, *words):
    """What `do` is refused with, in one line that has all the words."""
    with pytest.raises(UserError) as error:
        do()
    line = f"{error.value} {error.value.hint}"
    assert error.value.code == 2 and "\n" not in str(error.value), line
    assert all(word in line for word in words), f"{words}: {line}"


@pytest.mark.parametrize("name", [*TARGETS, *DRAFTERS])
def test_every_tensor_is_needed_as_it_is(name):
    _, tensors, bind = opened(name)
    assert bind(tensors)
    for one, tensor in tensors.items():
        others = {key: value for key, value in tensors.items() if key != one}
        refused(lambda others=others: bind(others), one)
        wrong = others | {one: replace(tensor, dtype="I32")}
        refused(lambda wrong=wrong: bind(wrong), one, "I32")
        wrong = others | {one: replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] + 1))}
        refused(lambda wrong=wrong: bind(wrong), one if name not in DRAFTERS or one != "fc.weight" else "fc")
        renamed = others | {one + "_": tensor}
        refused(lambda renamed=renamed: bind(renamed), one)
        refused(lambda one=one, tensor=tensor: bind(tensors | {one + ".more": tensor}), one + ".more")


KINDS = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
# Of dense layers, which it has none of; and what layer_types says for every layer already.
UNUSED = {"qwen3-moe-tiny": {"intermediate_size"}, "qwen3-tiny": {"use_sliding_window"}}
# A key that is refused through another one.
THROUGH = {
    "num_hidden_layers": "layer_types",
    "hidden_size": "head_dim",
    "rope_parameters": "rope_t",
    "use_sliding_window": "layer_types",
}


def other_than(value):
    """A value of the same kind that says something else."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 2
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        is_kinds = value and isinstance(value[0], str)
        return [KINDS[kind] for kind in value] if is_kinds and value[0] in KINDS else [*value, 1]
    return {"mystery": 1}


@pytest.mark.parametrize("spelling", ["config.json", "config.legacy.json"])
@pytest.mark.parametrize("name", TARGETS)
def test_every_key_of_a_target_counts(name, spelling):
    """A key that is changed changes what is read, or is refused by name; an unknown one is refused."""
    config = json.loads((golden(name) / spelling).read_text())
    usual = read_target(config)
    harmless = IGNORED | TRAINING
    for key, value in config.items():
        if key in harmless | UNUSED.get(name, set()) or value is None:
            continue
        wrong = config | {key: other_than(value)}
        try:
            assert read_target(wrong) != usual, f"{key} is {wrong[key]} and nothing changes"
        except UserError as error:
            assert key in f"{error}" or THROUGH.get(key, key) in f"{error}", f"{key}: {error}"
    refused(lambda: read_target(config | {"mystery": 1}), "mystery")


@pytest.mark.parametrize("key, value", [
    ("norm_topk_prob", False), ("norm_topk_prob", None), ("mlp_only_layers", [1]), ("decoder_sparse_step", 2),
    ("shared_expert_intermediate_size", 64), ("qkv_bias", True), ("use_qk_norm", False), ("num_experts", 8),
    ("num_experts_per_tok", 9), ("num_experts_per_tok", 0), ("quantization_config", {"quant_method": "fp8"}),
])  # fmt: skip
def test_what_was_not_checked_of_qwen3_moe_is_refused(key, value):
    config = json.loads((golden("qwen3-moe-tiny") / "config.json").read_text())
    refused(lambda: read_target(config | {key: value}), key)


@pytest.mark.parametrize("key, value, words", [
    ("layer_types", None, "layer_types"), ("swiglu_limit", -1, "swiglu_limit"),
    ("experts_per_token", 3, "experts_per_token"), ("initial_context_length", 64, "initial_context_length"),
    ("quantization_config", {"quant_method": "gptq"}, "quant_method"),
    ("quantization_config", {"quant_method": "mxfp4", "group_size": 16}, "group_size"),
    ("quantization_config", {"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "modules_to_not"),
    ("hidden_size", 100, "hidden_size"), ("hidden_act", "gelu", "hidden_act"),
])  # fmt: skip
def test_what_was_not_checked_of_gpt_oss_is_refused(key, value, words):
    config = json.loads((golden("gpt-oss-mxfp4-tiny") / "config.json").read_text())
    refused(lambda: read_target(config | {key: value}), words)


def test_a_scale_that_stands_for_no_number_is_refused_by_name(tmp_path):
    import minidflash as md

    name, place = "model.layers.2.mlp.experts.down_proj_scales", golden("gpt-oss-mxfp4-tiny")
    data = bytearray((place / "model.safetensors").read_bytes())
    data[open_tensors(place)[0][name].start + 77] = 255
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_text((place / "config.json").read_text())
    refused(lambda: md.load(str(tmp_path), drafter=None, backend="oracle", warm=False), name, "255")
