"""Rotary embedding by yarn and biases of attention, end to end: against golden drafters and against float64.

The golden drafters that have them are gpt-oss's. Its target cannot be loaded here, and of a target a drafter
sees its features, its embedding and its head alone: one with those three stands in for it.
"""

import json

import numpy as np
import pytest

import minidflash as md
from minidflash import drafter as draft
from minidflash.request import Request, release, reserve
from tests.automaton import write_safetensors
from tests.conftest import open_or_skip, parameters
from tests.golden_files import golden
from tests.models import numbers, target_of
from tests.random_pair import write_random
from tests.stages import Reference, compare_stages, read_tensors
from tests.test_golden_drafters import compare_call

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0,
        "beta_slow": 1.0}  # fmt: skip
BIASED = {"attention_bias": True}
PROMPT = [5, 9, 17, 3, 70, 41, 2, 2, 60] * 4
HOST = parameters(["oracle", "numba", "emulate"], ["f32"])


def stand_in(folder, pair):
    """A target with the embedding and the head of a pair's own, whose layers are never asked: its folder."""
    other, _ = write_random(folder, "grouped")
    config = json.loads((other / "config.json").read_text())
    tensors, own = read_tensors(other), read_tensors(golden(target_of(pair)))
    theirs = json.loads((golden(target_of(pair)) / "config.json").read_text())
    width, layers = theirs["hidden_size"], theirs["num_hidden_layers"]
    rest = {name: np.zeros([width if n == 48 else n for n in value.shape]) for name, value in tensors.items()}
    first = {name: value for name, value in rest.items() if ".layers.0." in name}
    rest |= {name.replace(".0.", f".{i}."): value for i in range(layers) for name, value in first.items()}
    rest |= {name: own[name] for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")}
    config |= {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": theirs["vocab_size"]}
    config["num_attention_heads"] = width // config["head_dim"]
    (other / "config.json").write_text(json.dumps(config))
    write_safetensors(other / "model.safetensors", {name: np.float32(value) for name, value in rest.items()})
    return other


@pytest.mark.parametrize("ops", parameters(activations=["f32"]), indirect=True)
@pytest.mark.parametrize("pair", ["dflash-gpt-oss-tiny", "dflash-gpt-oss-mxfp4-tiny"])
def test_inside_of_a_golden_drafter(ops, pair, tmp_path):
    """The first has yarn, the second yarn without truncation and biases of q, k, v and o in every layer."""
    g, ids = dict(numbers(pair)), numbers(pair)["p1.input_ids"].tolist()
    before = g["s0.noise_embedding"]
    for i in range(2):  # not kept where the drafter's file was made otherwise
        g.setdefault(f"s0.mod.{i}.mlp", g[f"s0.layer.{i}"] - before - g[f"s0.mod.{i}.self_attn"])
        before = g[f"s0.layer.{i}"]
    engine = md.load(str(stand_in(tmp_path, pair)), drafter=str(golden(pair)), backend=ops.name,
                     activations="f32", ctx=64, warm=False)  # fmt: skip
    ops, request = engine.ops, Request.of(engine, ids, {"max_tokens": 16, "block": 8, "verify": 8})
    s = reserve(engine, request)
    try:
        count = len(ids)
        rows = s.rows.first(count)
        ops.upload(s.prompt_taps[:count], g["s0.target_hidden"])
        ops.upload(rows.slot, np.zeros(count, np.int32))
        ops.upload(rows.pos, np.arange(count, dtype=np.int32))
        draft.inject(ops, engine.drafter, s, s.prompt_taps[:count], rows.slot, rows.pos)
        for buffer, value in (
            (s.start, count),
            (s.anchor, g["b8.p1.first_token"][0]),
            (s.done, 0),
            (s.fresh, 0),
        ):
            ops.upload(buffer, np.array([value], np.int32))
        compare_call(engine, s, g, 0, count)
    finally:
        release(engine)


CASES = {
    "biases": {"draft_config": BIASED},
    "yarn": {"draft_config": {"rope_scaling": YARN}, "target_config": {"rope_scaling": YARN}},
    "both": {
        "draft_config": BIASED | {"rope_scaling": YARN | {"truncate": False}},
        "target_config": BIASED | {"rope_scaling": YARN | {"factor": 3.0}},
    },
}


def assert_run_is_float64(engine, count):
    """Drafted text is the float64 target's, up to the first near tie; returns how far it was compared."""
    result = md.generate(engine, PROMPT, max_tokens=count, verify=4, block=8)
    logits = Reference(engine.target_name, engine.drafter_name).logits(PROMPT + result.tokens[:-1])
    logits = np.sort(logits[len(PROMPT) - 1 :], -1), logits[len(PROMPT) - 1 :].argmax(-1)
    sure = logits[0][:, -1] - logits[0][:, -2] > 1e-2
    far = count if sure.all() else int(sure.argmin())
    assert result.tokens[:far] == logits[1][:far].tolist()
    return far


@pytest.mark.parametrize("ops", HOST, indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_whole_runs_are_float64s(ops, case, tmp_path):
    target, drafter = write_random(
        tmp_path, "grouped", family="qwen3" if case == "yarn" else "llama", **CASES[case]
    )
    engine = md.load(
        str(target), drafter=str(drafter), backend=ops.name, activations="f32", ctx=256, warm=False
    )
    assert assert_run_is_float64(engine, 12) >= 8
    compare_stages(engine, PROMPT, rounds=2)


@pytest.mark.parametrize("case", ["biases", "both"])
def test_on_the_fast_kernels_too(case, tmp_path):
    """In bf16, with heads of 64: what no golden drafter has."""
    open_or_skip("emulate", "bf16")
    target, drafter = write_random(tmp_path, "fast", **CASES[case])
    engine = md.load(
        str(target), drafter=str(drafter), backend="emulate", activations="bf16", ctx=256, warm=False
    )
    compare_stages(engine, PROMPT, rounds=2, tolerance=0.03)
    variants = engine.ops.backend.variants
    assert {variants[row] for row in ("qkv", "attend", "linear_add", "gate_up", "head")} == {"fast"}
