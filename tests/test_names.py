"""Name tables: every golden checkpoint binds completely; one tensor too few,
too many or too large is named."""

import numpy as np
import pytest
from minidflash.weights import open_checkpoint
from minidflash.weights.drafter_names import bind_drafter
from minidflash.weights.names import bind_target
from minidflash.weights.safetensors_io import SINGLE, read_file

from minidflash.config import read_drafter, read_target
from minidflash.errors import UserError
from tests.automaton import build, write_safetensors
from tests.golden_files import golden


def target_of(folder):
    checkpoint = open_checkpoint(folder, "target")
    return bind_target(read_target(checkpoint.config, checkpoint.generation), checkpoint.tensors)


def drafter_of(folder):
    checkpoint = open_checkpoint(folder, "drafter")
    return bind_drafter(read_drafter(checkpoint.config), checkpoint.tensors)


def edit(folder, **changes):
    """Rewrite the folder's weights; a value of None removes the tensor (`__` stands for a dot)."""
    tensors = {name: tensor.array.copy() for name, tensor in read_file(folder / SINGLE).items()}
    for name, array in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if array is not None:
            tensors[name] = np.asarray(array)
    write_safetensors(folder / SINGLE, tensors)


def refused(bind, folder, *words):
    with pytest.raises(UserError) as error:
        bind(folder)
    assert error.value.code == 2 and "\n" not in str(error.value)
    for word in words:
        assert word in f"{error.value} {error.value.hint}"


@pytest.mark.parametrize(
    "name, head", [("llama-tiny", True), ("llama-tiny-tied", False), ("qwen3-tiny", True)]
)
def test_golden_targets_bind_completely(name, head):
    checkpoint = open_checkpoint(golden(name), "target")
    config = read_target(checkpoint.config)
    bound = bind_target(config, checkpoint.tensors)
    used = [tensor.name for one in bound.values() for tensor in one.parts]
    assert sorted(used) == sorted(checkpoint.tensors)  # each once
    assert ("head" in bound) is head and ("layers.0.q_norm" in bound) is (config.family == "qwen3")
    rows = {name: one.shape[0] for name, one in bound.items()}
    assert rows["layers.0.kv"] == config.layers[0].kv_rows
    assert (
        rows["layers.0.gate_up"] == 2 * config.layers[0].ffn_width and rows["layers.2.down"] == config.width
    )
    assert [t.name.split(".")[-2] for t in bound["layers.1.kv"].parts] == ["k_proj", "v_proj"]
    assert [t.name.split(".")[-2] for t in bound["layers.1.gate_up"].parts] == ["gate_proj", "up_proj"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-trained", "qwen3-swa", "gpt-oss", "qwen3-moe",
                                  "qwen3_5", "gemma4"])  # fmt: skip
def test_golden_drafters_bind_completely(name):
    name = name if name.endswith("trained") else name + "-tiny"
    checkpoint = open_checkpoint(golden("dflash-" + name), "drafter")
    bound = bind_drafter(read_drafter(checkpoint.config), checkpoint.tensors)
    assert sorted({t.name for one in bound.values() for t in one.parts}) == sorted(checkpoint.tensors)


def test_the_embedded_drafter_binds_completely():
    checkpoint = open_checkpoint("default", "drafter")
    config = read_drafter(checkpoint.config)
    bound = bind_drafter(config, checkpoint.tensors)
    assert sorted({t.name for one in bound.values() for t in one.parts}) == sorted(checkpoint.tensors)
    assert config.taps == (1, 8, 14, 20, 27) and config.block == 16 and len(checkpoint.files) == 3


@pytest.mark.parametrize("name", ["FX-A", "FX-B", "FX-E", "FX-H", "FX-L", "FX-R", "FX-S"])
def test_automata_bind(tmp_path, name):
    target, drafter = build(tmp_path, name)
    assert target_of(target) and drafter_of(drafter)


def test_four_outcomes_of_flag_and_head(tmp_path):  # F48, models.md 0.1
    tied, untied = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
    build(tmp_path / "a", tied=True)
    assert "head" not in target_of(tmp_path / "a" / "target")
    build(tmp_path / "b", target_config=untied)
    assert "head" in target_of(tmp_path / "b" / "target")
    refused(target_of, build(tmp_path / "c", target_config=tied)[0], "lm_head.weight", "tie_word_embeddings")
    refused(target_of, build(tmp_path / "d", tied=True, target_config=untied)[0], "lm_head.weight", "false")
    same = build(tmp_path / "e", tied=True)[0]
    edit(same, lm_head__weight=read_file(same / SINGLE)["model.embed_tokens.weight"].array.copy())
    assert "head" not in target_of(same)
    wide = build(tmp_path / "f", tied=True)[0]
    edit(wide, lm_head__weight=np.eye(64, dtype=np.float32))  # the same shape in another dtype
    refused(target_of, wide, "lm_head.weight")
    absent = {"tie_word_embeddings": ...}
    assert "head" in target_of(build(tmp_path / "g", target_config=absent)[0])
    assert "head" not in target_of(build(tmp_path / "h", tied=True, target_config=absent)[0])


def test_padded_vocabularies_bind(tmp_path):  # F07
    bound = target_of(build(tmp_path, pad=8)[0])
    assert bound["embed"].shape == bound["head"].shape == (72, 64)
    refused(
        target_of,
        build(tmp_path / "x", pad=8, target_config={"vocab_size": 64})[0],
        "embed_tokens",
        "[72, 64]",
    )


@pytest.mark.parametrize("name", ["model__norm__weight", "model__layers__3__mlp__up_proj__weight"])
def test_a_missing_target_tensor_is_named(tmp_path, name):  # F46
    folder = build(tmp_path)[0]
    edit(folder, **{name: None})
    refused(target_of, folder, name.replace("__", "."), "missing")


@pytest.mark.parametrize("name", [
    "model.layers.4.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight", "mystery",
    "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.sinks",
])  # fmt: skip
def test_an_unknown_target_tensor_is_named(tmp_path, name):
    folder = build(tmp_path)[0]
    edit(folder, **{name: np.ones(64)})
    refused(target_of, folder, name, "attention_bias" if name.endswith("bias") else "unknown")


def test_named_leftovers_are_skipped(tmp_path):
    folder = build(tmp_path)[0]
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(8, np.float32))
    assert target_of(folder)


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (64, 64, 1), (64,)])
def test_a_wrong_shape_is_named(tmp_path, shape):
    target, drafter = build(tmp_path)
    edit(target, model__layers__1__self_attn__q_proj__weight=np.ones(shape))
    refused(target_of, target, "model.layers.1.self_attn.q_proj.weight", str(list(shape)), "[64, 64]")
    edit(drafter, layers__0__self_attn__o_proj__weight=np.ones(shape))
    refused(drafter_of, drafter, "layers.0.self_attn.o_proj.weight", str(list(shape)))


def test_a_transposed_matrix_is_named(tmp_path):
    target, drafter = build(tmp_path)
    edit(target, model__layers__1__mlp__gate_proj__weight=np.ones((64, 128)))
    refused(target_of, target, "model.layers.1.mlp.gate_proj.weight", "[64, 128]", "[128, 64]")
    edit(drafter, layers__0__mlp__down_proj__weight=np.ones((128, 64)))
    refused(drafter_of, drafter, "layers.0.mlp.down_proj.weight", "[128, 64]")


def test_dtypes_are_checked(tmp_path):
    folder = build(tmp_path)[0]
    edit(folder, model__layers__0__self_attn__v_proj__weight=np.zeros((64, 64), np.float32))
    refused(target_of, folder, "layers.0.kv", "F32", "BF16")
    edit(folder, model__layers__0__self_attn__k_proj__weight=np.zeros((64, 64), np.float32))
    assert [t.dtype for t in target_of(folder)["layers.0.kv"].parts] == ["F32", "F32"]


@pytest.mark.parametrize("biased", ["target", "draft"])
def test_attention_biases(tmp_path, biased):
    flag = {f"{biased}_config": {"attention_bias": True}}
    folder = build(tmp_path, **flag)[biased == "draft"]
    bind, prefix, layers = (target_of, "model__", 4) if biased == "target" else (drafter_of, "", 1)
    refused(bind, folder, "q_proj.bias", "missing")
    names = [f"{prefix}layers__{i}__self_attn__{part}_proj__bias" for i in range(layers) for part in "qkvo"]
    edit(folder, **dict.fromkeys(names, np.ones(64)))
    bound = bind(folder)
    assert len(bound["layers.0.kv_bias" if biased == "target" else "kv_bias"].parts) == 2
    assert bound["layers.0.q_bias"] and bound["layers.0.o_bias"]


@pytest.mark.parametrize("name", ["lm_head__weight", "d2t", "t2d", "embed_tokens__weight", "mystery",
                                  "layers__0__attention_conv__base_kernel", "model__embed_tokens__weight",
                                  "candidate_selector__predecessor_codebook"])  # fmt: skip
def test_a_drafter_with_more_is_refused_by_name(tmp_path, name):  # F06
    folder = build(tmp_path)[1]
    edit(folder, **{name: np.ones((32, 64))})
    refused(drafter_of, folder, name.replace("__", "."))


def test_taps_and_fc_must_agree(tmp_path):
    folder = build(
        tmp_path, draft_config={"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1]}}
    )[1]
    refused(drafter_of, folder, "fc.weight", "64", "2 taps", "target_layer_ids")


@pytest.mark.parametrize(
    "name", ["fc__weight", "hidden_norm__weight", "layers__0__self_attn__k_norm__weight"]
)
def test_a_missing_drafter_tensor_is_named(tmp_path, name):
    folder = build(tmp_path)[1]
    edit(folder, **{name: None})
    refused(drafter_of, folder, name.replace("__", "."), "missing")


def test_a_drafter_s_weights_under_a_target_s_config(tmp_path):  # F44
    target, drafter = build(tmp_path)
    (drafter / "config.json").write_text((target / "config.json").read_text())
    refused(target_of, drafter, "fc.weight", "--drafter")
