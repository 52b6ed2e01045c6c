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
from minidflash.wrapper import EITHER
from tests.golden_files import golden
from tests.refusals import refused

TARGETS = [
    "qwen3-tiny", "qwen3-moe-tiny", "gpt-oss-tiny", "gpt-oss-mxfp4-tiny", "gemma4-tiny", "gemma4-moe-tiny",
]  # fmt: skip
DRAFTERS = ["dflash-qwen3-moe-tiny", "dflash-gpt-oss-tiny", "dflash-gpt-oss-mxfp4-tiny"]


def opened(name):
    """(config, tensors by name, function that binds them) of a golden checkpoint."""
    config = json.loads((golden(name) / "config.json").read_text())
    tensors = dict(open_tensors(golden(name))[0])
    if name in DRAFTERS:
        return config, tensors, lambda found: drafter_names.bind_drafter(read_drafter(config), found)
    return config, tensors, lambda found: names.bind_target(read_target(config), found)


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
        another = replace(tensor, name=one + ".more")
        refused(lambda another=another: bind(tensors | {another.name: another}), another.name)


KINDS = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
# Of dense layers, which it has none of; and what layer_types says for every layer already.
UNUSED = {
    "qwen3-moe-tiny": {"intermediate_size"}, "qwen3-tiny": {"use_sliding_window"},
    "gemma4-tiny": {"vocab_size_per_layer_input"}, "gemma4-moe-tiny": {"vocab_size_per_layer_input"},
}  # fmt: skip
# A key that is refused through another one.
THROUGH = {
    "num_hidden_layers": "layer_types",
    "hidden_size": "head_dim",
    "rope_parameters": "rope_t",
    "use_sliding_window": "layer_types",
    "enable_moe_block": "num_experts",
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
    harmless = IGNORED | TRAINING | UNUSED.get(name, set())
    text = config.get("text_config", {})  # of a multimodal model
    changes = [(key, config | {key: other_than(value)}) for key, value in config.items() if value is not None]
    changes += [
        (key, config | {"text_config": text | {key: other_than(value)}})
        for key, value in text.items() if value is not None
    ]  # fmt: skip
    for key, wrong in changes:
        if key in harmless or (text and key in EITHER):  # where one is enough
            continue
        try:
            assert read_target(wrong) != usual, f"{key} is another and nothing changes"
        except UserError as error:
            assert key in f"{error}" or THROUGH.get(key, key) in f"{error}", f"{key}: {error}"
    refused(lambda: read_target(config | {"mystery": 1}), "mystery")
    if text:
        refused(lambda: read_target(config | {"text_config": text | {"mystery": 1}}), "mystery")


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


@pytest.mark.parametrize("key, value", [
    ("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 2), ("use_double_wide_mlp", True),
    ("use_bidirectional_attention", "all"), ("attention_bias", True), ("hidden_activation", "silu"),
    ("layer_types", None), ("per_layer_config", {"9": {"head_dim": 32}}),
    ("per_layer_config", {"1": {"head_dim": 32, "rope": 1}}), ("per_layer_config", {"1": {"head_dim": 33}}),
    ("global_head_dim", 32), ("num_global_key_value_heads", 1), ("num_experts", None),
    ("top_k_experts", 7), ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", -1),
    ("rope_parameters", {"sliding_attention": {"rope_theta": 1e4}}), ("rope_theta", 1e4),
    ("model_type", "gemma3_text"),
])  # fmt: skip
def test_what_was_not_checked_of_gemma4_is_refused(key, value):
    config = json.loads((golden("gemma4-moe-tiny") / "config.json").read_text())
    wrong = config | {"text_config": config["text_config"] | {key: value}}
    refused(lambda: read_target(wrong), "head_dim" if "33" in f"{value}" else key)


@pytest.mark.parametrize("key", ["global_head_dim", "num_global_key_value_heads", "rope_parameters"])
def test_sizes_of_gemma4s_full_layers_have_no_default(key):
    config = json.loads((golden("gemma4-tiny") / "config.legacy.json").read_text())
    refused(lambda: read_target({name: value for name, value in config.items() if name != key}), key)


@pytest.mark.parametrize("kind, more, words", [
    ("full_attention", {"partial_rotary_factor": None}, "partial_rotary_factor"),
    ("full_attention", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("full_attention", {"factor": 0}, "factor"), ("full_attention", {"rope_theta": None}, "rope_theta"),
    ("sliding_attention", {"mystery": 1}, "mystery"), ("sliding_attention", {"rope_type": "x"}, "rope_type"),
])  # fmt: skip
def test_ropes_of_kinds_of_layers_are_read_completely(kind, more, words):
    config = json.loads((golden("gemma4-tiny") / "config.json").read_text())
    ropes = config["rope_parameters"]
    wrong = config | {"rope_parameters": ropes | {kind: ropes[kind] | more}}
    refused(lambda: read_target(wrong), f"rope_parameters.{kind}", words)


def test_a_multimodal_checkpoint_is_read_where_it_is_text():
    """Tensors of other parts are skipped by name; the tie flag may stand at either level."""
    config, tensors, bind = opened("gemma4-moe-tiny")
    one = tensors["model.language_model.norm.weight"]
    parts = {f"model.{part}.x.weight": one for part in ("vision_tower", "embed_vision", "audio_tower",
                                                        "embed_audio")}  # fmt: skip
    assert bind(tensors | parts).keys() == bind(tensors).keys()
    mystery = "model.mystery_tower.x.weight"
    refused(lambda: bind(tensors | {mystery: replace(one, name=mystery)}), mystery)
    usual, text = read_target(config), config["text_config"]
    below = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    above = config | {"text_config": text | {"tie_word_embeddings": None}}
    assert read_target(below) == read_target(above) == usual and usual.tied
    neither = below | {"text_config": text | {"tie_word_embeddings": False}}
    assert not read_target(neither).tied
    refused(lambda: bind_as(neither, tensors), "lm_head.weight", "tie_word_embeddings")
    stops = config | {"eos_token_id": [1, 106], "text_config": text | {"eos_token_id": 1}}
    assert read_target(stops).stop_ids == (1, 106)
    refused(lambda: read_target({key: config[key] for key in ("architectures", "model_type")}), "text_config")


def bind_as(config, tensors):
    return names.bind_target(read_target(config), tensors)


def test_a_scale_that_stands_for_no_number_is_refused_by_name(tmp_path):
    import minidflash as md

    name, place = "model.layers.2.mlp.experts.down_proj_scales", golden("gpt-oss-mxfp4-tiny")
    data = bytearray((place / "model.safetensors").read_bytes())
    data[open_tensors(place)[0][name].start + 77] = 255
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_text((place / "config.json").read_text())
    refused(lambda: md.load(str(tmp_path), drafter=None, backend="oracle", warm=False), name, "255")
