"""config.json readers: both spellings, golden frequencies, and a refusal by name for whatever is not
understood."""

import json

import numpy as np
import pytest
from minidflash.weights.safetensors_io import read_file

from minidflash.config import check_pair, read_drafter, read_target, suggested_taps
from minidflash.errors import UserError
from minidflash.rope import Rope
from tests.golden_files import golden

TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 200,
    "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 384,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 512,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
QWEN3 = TARGET | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
DRAFTER = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 96, "intermediate_size": 152,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "vocab_size": 384,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "max_position_embeddings": 512,
    "hidden_act": "silu", "attention_bias": False, "num_target_layers": 6, "block_size": 16,
    "layer_types": ["full_attention"] * 3, "sliding_window": None, "use_sliding_window": False,
    "tie_word_embeddings": False, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "dflash_config": {"mask_token_id": 383, "target_layer_ids": [0, 1]},
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


def changed(config, key, value):
    """A copy with one key set, dots going into nested objects; `...` removes it."""
    config = json.loads(json.dumps(config))
    *path, last = key.split(".") if key.startswith("dflash_config.") else [key]
    place = config
    for part in path:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return config


def refused(read, config, *words):
    with pytest.raises(UserError) as error:
        read(config)
    assert error.value.code == 2 and "\n" not in str(error.value)
    for word in words:
        assert word in f"{error.value} | {error.value.hint}"


@pytest.mark.parametrize("name", ["llama-tiny", "llama-tiny-tied", "qwen3-tiny"])
def test_both_spellings_read_alike_and_frequencies_are_golden(name):
    folder = golden(name)
    config = read_target(json.loads((folder / "config.json").read_text()))
    legacy = folder / "config.legacy.json"
    if legacy.is_file():
        assert read_target(json.loads(legacy.read_text())) == config
    found, multiplier = config.ropes[0].frequencies(config.layers[0].head_size)
    tensors = read_file(folder / "golden.safetensors")
    assert found.dtype == np.float32
    assert np.array_equal(found, tensors["rope.inv_freq"].array)  # the reference's bits, not only its values
    assert multiplier == tensors["rope.attention_scaling"].array[0]


def test_yarn_frequencies_are_golden():
    tensors = read_file(golden("gpt-oss-tiny") / "golden.safetensors")
    rope = Rope(150000.0, "yarn", 4.0, original_max_position_embeddings=1024, truncate=False)
    found, multiplier = rope.frequencies(32)
    assert np.array_equal(found, tensors["rope.inv_freq"].array)
    assert multiplier == pytest.approx(float(tensors["rope.attention_scaling"].array[0]), rel=1e-7)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("position", [0, 1, 8191, 8192, 100_000])
def test_llama3_scaling_against_float64(factor, position):  # F52
    theta, size = 500000.0, 128
    config = read_target(TARGET | {"rope_theta": theta, "rope_scaling": LLAMA3 | {"factor": factor}})
    found, _ = config.ropes[0].frequencies(size)
    plain = theta ** (-np.arange(0, size, 2) / size)
    turns = 8192 * plain / (2 * np.pi)
    blend = np.clip((turns - 1) / 3, 0, 1)
    truth = blend * plain + (1 - blend) * plain / factor
    assert np.allclose(found * position, truth * position, rtol=1e-6, atol=0)
    assert abs(found / plain).min() == pytest.approx(1 / factor, rel=1e-6)


def test_yarn_multipliers():
    def multiplier(**more):
        return read_drafter(DRAFTER | {"rope_scaling": YARN | more}).ropes[0].frequencies(24)[1]

    assert multiplier() == pytest.approx(1.3466, abs=1e-4)
    assert multiplier(attention_factor=1.5) == 1.5
    assert multiplier(mscale=1.0, mscale_all_dim=1.0) == 1.0  # the ratio form; the plain term would be wrong
    assert read_drafter(DRAFTER | {"rope_scaling": YARN}).ropes[0].truncate is True


@pytest.mark.parametrize("kind", ["linear", "dynamic", "longrope", "mystery", 3, ["yarn"]])
@pytest.mark.parametrize("read, config", [(read_target, TARGET), (read_drafter, DRAFTER)])
def test_unknown_rope_type_is_refused(read, config, kind):  # F16, F52
    refused(read, config | {"rope_scaling": {"rope_type": kind, "factor": 2.0}}, "rope_type", str(kind))


def test_rope_keys_are_complete_and_known():
    for key in LLAMA3.keys() - {"rope_type"}:
        refused(read_target, TARGET | {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != key}}, key)
    refused(read_target, TARGET | {"rope_scaling": LLAMA3 | {"mystery": 1}}, "mystery")
    refused(read_target, TARGET | {"rope_scaling": LLAMA3 | {"factor": 0}}, "factor")
    refused(read_target, TARGET | {"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "rope_type")
    refused(read_target, TARGET | {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta")
    refused(read_target, TARGET | {"rope_parameters": {"full_attention": {}}}, "full_attention")
    assert read_target(TARGET | {"rope_scaling": {"type": "default"}}).ropes == (Rope(10000.0),)
    assert read_target(TARGET | {"rope_scaling": {}}).ropes == (Rope(10000.0),)
    assert (
        read_target(changed(TARGET, "rope_theta", ...) | {"rope_parameters": {"rope_theta": 7.0}})
        .ropes[0]
        .theta
        == 7
    )


def test_one_source_is_kept_for_every_fact():
    config = read_target(changed(TARGET, "head_dim", ...))
    assert config.layers[0].head_size == 16 and "absent" in config.sources["head_size"]
    assert config.sources["width"] == "hidden_size" and config.sources["rope"] == "rope_theta"
    assert read_drafter(DRAFTER).sources["taps"] == "dflash_config.target_layer_ids"


@pytest.mark.parametrize(
    "heads, kv_heads, width, head_dim", [(9, 3, 576, None), (14, 2, 896, None), (4, 4, 96, 80)]
)
def test_odd_head_shapes_load(heads, kv_heads, width, head_dim):  # F53
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": width,
        "head_dim": head_dim,
    }
    config = read_target(TARGET | sizes)
    assert config.layers[0].head_size == (head_dim or width // heads)


@pytest.mark.parametrize("key, value", [
    ("num_key_value_heads", 4), ("num_key_value_heads", 12), ("num_key_value_heads", 0), ("head_dim", 0),
    ("head_dim", 15), ("head_dim", -2), ("head_dim", "16"), ("num_attention_heads", 0), ("hidden_size", 1.5),
    ("num_hidden_layers", True), ("vocab_size", -1), ("rms_norm_eps", 0), ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", float("inf")), ("rope_theta", 0), ("rope_theta", "x"), ("intermediate_size", 10**400),
    ("max_position_embeddings", 0), ("tie_word_embeddings", "yes"), ("attention_bias", 1),
    ("hidden_act", "gelu"), ("mlp_bias", True), ("partial_rotary_factor", 0.5), ("rope_interleaved", True),
    ("mystery_key", 1), ("quantization_config", {"quant_method": "gptq"}), ("eos_token_id", 384),
    ("eos_token_id", [2, -1]), ("eos_token_id", "2"), ("bos_token_id", True), ("rope_scaling", "linear"),
    ("layer_types", ["full_attention"]),
])  # fmt: skip
def test_bad_target_values_are_refused_by_name(key, value):  # F12, F53, F61
    refused(read_target, changed(TARGET, key, value), key)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                                 "intermediate_size", "rms_norm_eps", "rope_theta",
                                 "max_position_embeddings"])  # fmt: skip
def test_missing_target_keys_are_refused_by_name(key):
    refused(read_target, changed(TARGET, key, ...), key)
    refused(read_target, changed(TARGET, key, None), key)


def test_harmless_keys_do_not_stop_a_load():
    more = {"_name_or_path": "x", "initializer_range": 0.02, "use_cache": True, "pretraining_tp": 1,
            "mystery": None,
            "partial_rotary_factor": 1.0, "transformers.js_config": {},
            "rope_interleaved": False}  # fmt: skip
    assert read_target(TARGET | more) == read_target(TARGET)


@pytest.mark.parametrize("name, model_type", [("Qwen3_5ForCausalLM", "qwen3_5_text")])
def test_later_families_are_refused_by_name(name, model_type):
    refused(read_target, {"architectures": [name], "model_type": model_type}, name, "not built yet")


def test_other_architectures_are_refused_by_name():
    refused(
        read_target,
        TARGET | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "MambaForCausalLM",
    )
    refused(
        read_target, TARGET | {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"
    )
    refused(read_target, TARGET | {"model_type": "mistral"}, "LlamaForCausalLM")
    refused(read_target, {}, "model_type")
    refused(read_target, [], "object")


def test_swapped_folders_say_so():  # F44
    refused(read_target, DRAFTER, "drafter", "--drafter")
    refused(read_drafter, TARGET, "LlamaForCausalLM", "--target")
    refused(read_drafter, {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, "--target")


def test_stop_ids_are_the_union():  # F33, F34
    assert read_target(TARGET, {"eos_token_id": [2, 40]}).stop_ids == (2, 40)
    assert read_target(TARGET, {"eos_token_id": 40}).stop_ids == (2, 40)
    assert read_target(TARGET | {"eos_token_id": [7, 2]}, {"eos_token_id": 2}).stop_ids == (7, 2)
    assert read_target(TARGET | {"eos_token_id": None}, None).stop_ids == ()
    assert read_target(TARGET, {"bos_token_id": 1}).bos_id == 1
    with pytest.raises(UserError, match="generation_config.eos_token_id"):
        read_target(TARGET, {"eos_token_id": [2, 999]})


def test_qwen3_windows_need_layer_types():
    kinds = ["full_attention", "sliding_attention"] * 3
    sliding = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    assert read_target(QWEN3 | sliding | {"layer_types": kinds}).each("window") == (0, 9) * 3
    assert read_target(QWEN3 | {"use_sliding_window": False, "sliding_window": 9}).each("window") == (0,) * 6
    refused(read_target, QWEN3 | sliding, "layer_types")
    refused(read_target, QWEN3 | {"layer_types": kinds, "use_sliding_window": True}, "sliding_window")
    refused(read_target, QWEN3 | {"layer_types": kinds, "use_sliding_window": False}, "use_sliding_window")
    refused(read_target, QWEN3 | {"layer_types": ["linear_attention"] * 6}, "layer_types", "linear_attention")
    refused(read_target, TARGET | sliding | {"layer_types": kinds}, "layer_types")


@pytest.mark.parametrize("key", ["dflash_config.target_layer_ids", "dflash_config.mask_token_id",
                                 "block_size", "rope_theta"])  # fmt: skip
def test_what_has_no_default_is_missed_by_name(key):  # F03, F27
    refused(read_drafter, changed(DRAFTER, key, ...), key.split(".")[-1])
    refused(read_drafter, changed(DRAFTER, key, None), key.split(".")[-1])


def test_missing_taps_come_with_a_list_to_try():  # F03
    wide = changed(DRAFTER, "dflash_config.target_layer_ids", ...) | {
        "num_target_layers": 36, "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5,
    }  # fmt: skip
    refused(read_drafter, wide, "target_layer_ids", "[1, 9, 17, 25, 33]")
    assert suggested_taps(62, 5) == [1, 16, 30, 44, 59]  # half to even
    assert suggested_taps(30, 1) == [15]


@pytest.mark.parametrize("taps", [[], [1, 1], [2, 1], [-1, 0], [True], [1.0], ["1"], 1, [0, None]])
def test_bad_taps_are_refused(taps):
    refused(read_drafter, changed(DRAFTER, "dflash_config.target_layer_ids", taps), "target_layer_ids")


@pytest.mark.parametrize("key, value", [
    ("sample_from_anchor", True), ("causal_head", True), ("projector_type", "domino"),
    ("conv_kernel_size", 2), ("conv_group_size", 16), ("selector_rank", 256), ("selector_top_k", 16),
    ("markov_rank", 256), ("markov_head_type", "gated"), ("use_swa", True), ("swa_window_size", 9),
    ("attention_sink_bias", True), ("attention_value_scale", 0.5), ("input_embedding_scale", 0.0),
    ("output_multiplier", 0), ("output_multiplier", -1.0), ("final_logit_softcapping", -30.0),
    ("draft_vocab_size", 32), ("sliding_window_non_causal", True), ("target_hidden_size", 64),
    ("partial_rotary_factor", 0.25), ("shift_label", True), ("lilicorr_num_layers", 2),
    ("enable_confidence_head", True), ("mystery", 0),
])  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "dflash_config."])
def test_what_changes_the_algorithm_is_refused_by_name(prefix, key, value):  # F06, F09, F17
    refused(read_drafter, changed(DRAFTER, prefix + key, value), key)


def test_explicit_defaults_are_understood():
    more = {"input_embedding_scale": 1.0, "output_multiplier": 1, "sample_from_anchor": False,
            "use_swa": False,
            "final_logit_softcapping": None, "draft_vocab_size": 384,
            "partial_rotary_factor": 1.0}  # fmt: skip
    assert read_drafter(DRAFTER | more) == read_drafter(DRAFTER)
    nested = changed(DRAFTER, "dflash_config.block_size", 8)
    assert read_drafter(nested).block == 8 and read_drafter(changed(nested, "block_size", ...)).block == 8
    old = {
        **{k: v for k, v in DRAFTER.items() if k != "dflash_config"},
        "mask_token_id": 5,
        "target_layer_ids": [3],
    }
    assert read_drafter(old).taps == (3,) and read_drafter(old).mask_id == 5


@pytest.mark.parametrize(
    "name", ["DFlash2DraftModel", "DominoDraftModel", "DSparkDraftModel", "LiLiCorrDraftModel"]
)
def test_variants_are_refused_by_name(name):
    refused(read_drafter, DRAFTER | {"architectures": [name]}, name)


def test_dialects_do_not_mix():  # F02
    for more in ({"speculators_model_type": "dflash"}, {"transformer_layer_config": {}}):
        refused(read_drafter, DRAFTER | more, "speculators layout", "no such key")
    refused(read_drafter, DRAFTER | {"aux_hidden_state_layer_ids": [2]}, "aux_hidden_state_layer_ids")
    refused(
        read_drafter, DRAFTER | {"eagle_aux_hidden_state_layer_ids": [2]}, "eagle_aux_hidden_state_layer_ids"
    )


SLIDING = {"use_sliding_window": True, "sliding_window": 9,
           "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}  # fmt: skip


def test_windows_and_causality():  # models.md 7.5, F19
    mixed = read_drafter(DRAFTER | SLIDING)
    assert mixed.each("window") == (9, 9, 0) and mixed.each("causal") == (True, True, False)
    assert read_drafter(DRAFTER | SLIDING | {"is_causal": False}).each("causal") == (False,) * 3
    assert read_drafter(DRAFTER | SLIDING | {"is_causal": True}).each("causal") == (True,) * 3
    assert read_drafter(DRAFTER | {"is_causal": True}).each("causal") == (True,) * 3
    nested = changed(DRAFTER | SLIDING, "dflash_config.causal", False)
    assert read_drafter(nested).each("causal") == (False,) * 3
    assert (
        read_drafter(nested | {"is_causal": True}).each("causal") == (True,) * 3
    )  # is_causal is asked first
    assert read_drafter(DRAFTER).each("causal") == (False,) * 3
    every = DRAFTER | SLIDING | {"layer_types": ["sliding_attention"] * 3}
    refused(read_drafter, every, "is_causal")
    assert read_drafter(every | {"is_causal": False}).each("window") == (9, 9, 9)
    refused(read_drafter, DRAFTER | SLIDING | {"is_causal": "yes"}, "is_causal")
    refused(read_drafter, DRAFTER | SLIDING | {"sliding_window": None}, "sliding_window")
    refused(read_drafter, DRAFTER | SLIDING | {"sliding_window": 0}, "sliding_window")
    refused(read_drafter, DRAFTER | {"layer_types": ["full_attention"] * 2}, "layer_types")
    refused(read_drafter, changed(DRAFTER | SLIDING, "layer_types", ...), "layer_types")


def pair(target=None, drafter=None):
    check_pair(read_target(TARGET | (target or {})), read_drafter(drafter or DRAFTER))


def test_a_pair_fits_or_says_why():  # F07, F08, F27
    pair()
    pair({"vocab_size": 392})  # padding rows
    pair(drafter=DRAFTER | {"vocab_size": 400})  # the drafter has no table of its own
    for mask in (384, 389):
        with pytest.raises(UserError, match="mask_token_id"):
            pair(drafter=changed(DRAFTER, "dflash_config.mask_token_id", mask))
    refused(read_drafter, changed(DRAFTER, "dflash_config.mask_token_id", -1), "mask_token_id", "-1")
    with pytest.raises(UserError, match="hidden_size is 96, the target's is 192"):
        pair({"hidden_size": 192})
    with pytest.raises(UserError, match="num_target_layers"):
        pair({"num_hidden_layers": 7})
    unnumbered = changed(DRAFTER, "num_target_layers", ...)
    for taps in ([0, 6], [0, 5]):  # outside, and the last layer: with or without the final norm?
        with pytest.raises(UserError, match="target_layer_ids"):
            pair(drafter=changed(unnumbered, "dflash_config.target_layer_ids", taps))
    pair(drafter=changed(unnumbered, "dflash_config.target_layer_ids", [0, 4]))


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny", "qwen3-trained", "qwen3-swa-tiny"])
def test_golden_pairs_fit(name):
    folder = golden("dflash-" + name)
    target = golden(json.loads((folder / "pair.json").read_text())["target"].removeprefix("../"))
    drafter = read_drafter(json.loads((folder / "config.json").read_text()))
    check_pair(read_target(json.loads((target / "config.json").read_text())), drafter)
    assert drafter.each("window") == ((9, 9, 0) if "swa" in name else (0,) * len(drafter.layers))
    assert drafter.each("causal") == tuple(window > 0 for window in drafter.each("window"))
