"""FP8 checkpoints: the dequantised model bit for bit, losslessness; what is not understood is refused."""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from minidflash.weights import drafter_names, names
from minidflash.weights.fp8_names import SCALE
from minidflash.weights.safetensors_io import open_tensors

import minidflash as md
from minidflash.config import read_drafter, read_target
from minidflash.fp8_config import Fp8
from tests.conftest import FULL, parameters
from tests.fp8_files import KEPT, QUANTIZATION, write_twins
from tests.models import forward, logits_of, numbers, state_of, target_of
from tests.refusals import refused
from tests.test_lossless import plain, prompt_of, sweep

SCALES = {"llama-tiny": ml_dtypes.bfloat16, "qwen3-tiny": np.float32, "qwen3-moe-tiny": np.float16}
MATRICES = "q", "kv", "o", "gate_up", "down", "experts_up", "experts_down"


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """name -> (FP8 checkpoint, f32 checkpoint of its numbers)."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = write_twins(folder, name, SCALES.get(name, ml_dtypes.bfloat16))
        return made[name]

    return get


def load(target, drafter=None, **options):
    drafter = drafter and str(drafter)
    options = {"backend": "numba", "activations": "f32", "ctx": 256, "warm": False} | options
    return md.load(str(target), drafter=drafter, **options)


def logits(engine, case):
    ids = numbers(case)["p1.input_ids"]
    return logits_of(engine, forward(engine, state_of(engine, len(ids)), ids)[1])


@pytest.mark.parametrize("backend", ["oracle", "numba"])
@pytest.mark.parametrize("case", SCALES)
def test_logits_are_the_dequantised_model_s(twins, case, backend):
    """Bit for bit; and near the model's that was quantised, whose numbers are others."""
    own, wide = (load(folder, backend=backend) for folder in twins(case))
    found = logits(own, case)
    np.testing.assert_array_equal(found, logits(wide, case))
    error = np.abs(found - numbers(case)["p1.logits"])
    assert 1e-3 < np.median(error) < 0.5, np.median(error)
    held = {name: w.dtype for layer in own.target.layers for name, w in layer.items() if name in MATRICES}
    assert set(held.values()) == {"fp8"} and own.target.head.dtype == own.target.embed.dtype == "f32"
    assert own.target.layers[0].get("router", own.target.head).dtype == "f32"
    assert own.target.nbytes < 0.6 * wide.target.nbytes


@pytest.mark.parametrize("pair", ["dflash-llama-tiny", "dflash-qwen3-moe-tiny", "dflash-speculators-tiny"])
def test_drafted_ids_are_plain_ids(twins, pair):
    """FP8 target and FP8 drafter over blocks, verify widths and chunks; drafts are the dequantised
    drafter's."""
    (target, wide), (drafter, wide_drafter) = twins(target_of(pair)), twins(pair)
    known, rounds = None, set()
    for chunk, blocks, widths in ((7, (1, 4, 16), (3, "auto")), (64, (2, 8), (64,))):
        engine = load(target, drafter, prefill_chunk=chunk)
        prompt = prompt_of(engine, 37)
        ids = plain(engine, prompt, 56)
        known = known or ids
        assert ids == known, f"chunk {chunk} changes plain decoding"
        sweep(engine, prompt, 40, blocks, widths, known)
        rounds.add(str(md.generate(engine, prompt, max_tokens=40).rounds))
    held = {w.dtype for layer in engine.drafter.layers for name, w in layer.items() if name in MATRICES}
    assert held == {"fp8"} and engine.drafter.weights["fc"].dtype == "fp8"
    found = md.generate(load(wide, wide_drafter), prompt, max_tokens=40)
    assert found.tokens == known[:40] and {str(found.rounds)} == rounds


@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["f32"]), indirect=True)
def test_logits_on_a_gpu_are_the_dequantised_model_s(twins, ops):
    case = "qwen3-moe-tiny"
    wanted = logits(load(twins(case)[1], backend="oracle"), case)
    found = logits(load(twins(case)[0], backend=ops.name), case)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
@pytest.mark.parametrize("pair", ["dflash-llama-tiny", "dflash-qwen3-moe-tiny"])
def test_drafted_ids_are_plain_ids_on_a_gpu(twins, ops, pair):
    """With the fast kernels; a prompt in chunks and whole."""
    target, drafter = twins(target_of(pair))[0], twins(pair)[0]
    known, (length, count) = None, (37, 24) if ops.name == "cuda" or FULL else (20, 10)
    for chunk, block in ((7, 4), (64, 16)):
        engine = load(target, drafter, backend=ops.name, activations="bf16", prefill_chunk=chunk)
        prompt = prompt_of(engine, length)
        ids = plain(engine, prompt, count)
        known = known or ids
        assert ids == known, f"chunk {chunk} changes plain decoding"
        sweep(engine, prompt, count, (block,), (block,), known)
        seen = engine.ops.backend.variants
        assert {seen[row] for row in ("qkv", "inject")} <= {"fast", "prefill"}


@pytest.mark.parametrize("activations, block, verify", [("f32", 16, 16), ("f32", 4, 2), ("f32", 8, "auto")])
def test_a_seeds_text_is_the_same_with_a_drafter(twins, activations, block, verify):
    engine = load(twins("llama-tiny")[0], twins("dflash-llama-tiny")[0], activations=activations)
    prompt, law = prompt_of(engine, 21), {"temperature": 0.8, "top_p": 0.95, "seed": 5, "max_tokens": 40}
    wanted = md.generate(engine, prompt, drafter=None, **law).tokens
    assert md.generate(engine, prompt, block=block, verify=verify, **law).tokens == wanted


def test_what_is_foretold_is_what_lies_there(twins, mdf):
    (target, _), (drafter, _) = twins("qwen3-moe-tiny"), twins("dflash-qwen3-moe-tiny")
    pair = ["--target", target, "--drafter", drafter, "--backend", "numba"]
    found = json.loads(mdf("info", *pair, "--json", "--ctx", 100)[1])
    assert found["target"]["facts"]["fp8"] == {"value": True, "from": "quantization_config"}
    engine = load(target, drafter, ctx=100)
    models = engine.target, engine.drafter
    assert found["memory"]["bytes"]["weights"] == sum(model.nbytes for model in models)


def opened(folder, name):
    """(config, tensors by name, what binds them)."""
    config, tensors = json.loads((folder / "config.json").read_text()), dict(open_tensors(folder)[0])

    def bind(found, config=config):
        if name.startswith("dflash"):
            return drafter_names.bind_drafter(read_drafter(config), found)
        return names.bind_target(read_target(config), found)

    return config, tensors, bind


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-moe-tiny", "dflash-llama-tiny"])
def test_every_tensor_is_needed_as_it_is(twins, name):
    """Codes and scales; of the many of experts, those of one."""
    _, tensors, bind = opened(twins(name)[0], name)
    assert bind(tensors)
    for one, tensor in tensors.items():
        if tensor.dtype != "F8_E4M3" and not one.endswith(SCALE) or "experts" in one and ".3." not in one:
            continue
        others = {key: value for key, value in tensors.items() if key != one}
        refused(lambda others=others: bind(others), one)
        renamed = others | {one + "_": replace(tensor, name=one + "_")}
        refused(lambda renamed=renamed: bind(renamed), one)
        for kind in ("BF16" if tensor.dtype == "F8_E4M3" else "U8", "F8_E5M2"):
            wrong = others | {one: replace(tensor, dtype=kind)}
            refused(lambda wrong=wrong: bind(wrong), one, kind)
        for shape in ((*tensor.shape[:-1], tensor.shape[-1] + 1), (), (1,), tensor.shape[::-1] + (1,)):
            wrong = others | {one: replace(tensor, shape=shape)}
            refused(lambda wrong=wrong: bind(wrong), "fc" if one == "fc.weight" else one)
    more = one.removesuffix("weight").removesuffix(SCALE)
    for ending, words in (
        (".input_scale", "static"),
        (".weight_scale", "128 x 128"),
        (".weight_packed", "FP8"),
    ):
        another = replace(tensor, name="x" + more + ending)
        refused(lambda another=another: bind(tensors | {another.name: another}), another.name, words)


CHANGES = [
    ("quant_method", "compressed-tensors"), ("quant_method", None), ("fmt", "e5m2"), ("fmt", True),
    ("activation_scheme", "static"), ("activation_scheme", None), ("weight_block_size", [64, 128]),
    ("weight_block_size", None), ("weight_block_size", [128]), ("scale_fmt", "ue8m0"), ("dequantize", True),
    ("dequantize", 0), ("modules_to_not_convert", "lm_head"), ("modules_to_not_convert", [3]),
    ("modules_to_not_convert", ["(a+)+$"]), ("modules_to_not_convert", ["a.*.*.*.*.b"]),
    ("modules_to_not_convert", ["*"]), ("modules_to_not_convert", [""]), ("ignored_layers", ["o_proj"]),
    ("config_groups", {}), ("modules_to_convert", ["lm_head"]), ("kv_cache_scheme", "static"),
]  # fmt: skip


@pytest.mark.parametrize("key, value", CHANGES)
@pytest.mark.parametrize("name", ["qwen3-tiny", "dflash-llama-tiny", "dflash-speculators-tiny"])
def test_every_key_says_what_is_built_or_is_refused(twins, name, key, value):
    config, _, _ = opened(twins(name)[0], name)
    read = read_drafter if name.startswith("dflash") else read_target
    stated = {one: found for one, found in (QUANTIZATION | {key: value}).items() if found is not None}
    refused(lambda: read(config | {"quantization_config": stated}), f"quantization_config.{key}")


def test_what_may_be_left_out_or_said_twice(twins):
    config, _, _ = opened(twins("qwen3-tiny")[0], "qwen3-tiny")

    def read(**keys):
        return read_target(config | {"quantization_config": QUANTIZATION | keys}).fp8

    assert read() == read(fmt=None, dequantize=False, scale_fmt="float") == Fp8(("lm_head",))
    assert read(ignored_layers=["lm_head"]) == read()
    assert read(modules_to_not_convert=None) == read(modules_to_not_convert=[]) == Fp8()
    assert read(modules_to_not_convert=None, ignored_layers=["a", "b.*"]) == Fp8(("a", "b.*"))
    for wrong in ("fp8", []):
        refused(lambda wrong=wrong: read_target(config | {"quantization_config": wrong}), "quant")
    gemma = {"architectures": ["Gemma4ForCausalLM"], "quantization_config": QUANTIZATION}
    refused(lambda: read_target(gemma))


def test_modules_are_matched_as_transformers_does():
    """At the beginning of a name, as a regular expression; or letter by letter at its end."""
    fp8 = Fp8(("model.layers.1.mlp", "fc1", "model.layers.*.o_proj", "gate"))
    left_out = (
        "model.layers.1.mlp.up_proj", "model.layers.1.mlp", "model.layers.1.mlp_2", "x.fc1", "fc1.y",
        "model.layers.7.o_proj", "model.layers.2.mlp.gate",
    )  # fmt: skip
    assert all(fp8.skips(name) for name in left_out)
    assert not any(
        fp8.skips(name) for name in ("model.layers.2.mlp.up_proj", "x.fc1.y", "model.layers.12.mlp")
    )
    assert not Fp8().skips("anything")


def test_what_the_list_leaves_out_must_stay_and_nothing_else(tmp_path):
    """Kept modules in bf16 or f32, others in FP8: a file that says otherwise is refused by the tensor's
    name."""
    kept = (*KEPT, "o_proj", "layers.1.")
    listed = ["lm_head", "o_proj", "model.layers.1"]
    folder, wide = write_twins(tmp_path / "a", "llama-tiny", kept=kept, modules_to_not_convert=listed)
    own = load(folder, backend="oracle")
    held = [{name: layer[name].dtype for name in ("q", "o", "down")} for layer in own.target.layers]
    kinds = {"q": "fp8", "o": "f32", "down": "fp8"}
    assert held == [kinds, dict.fromkeys(kinds, "f32"), kinds]
    np.testing.assert_array_equal(
        logits(own, "llama-tiny"), logits(load(wide, backend="oracle"), "llama-tiny")
    )
    config, tensors, bind = opened(folder, "llama-tiny")

    def stating(*listed):
        stated = {"quantization_config": QUANTIZATION | {"modules_to_not_convert": list(listed)}}
        return lambda: bind(tensors, config | stated)

    refused(stating("lm_head", "o_proj"), "model.layers.1.", SCALE, "missing")
    refused(stating("o_proj", "model.layers.1", "q_proj"), "q_proj", "quantization_config")
    refused(stating("o_proj", "model.layers.1", "k_proj"), "k_proj", "v_proj", "one weight")
    refused(lambda: bind(tensors, {k: v for k, v in config.items() if k != "quantization_config"}), SCALE)


def test_what_is_no_number_is_refused_when_it_is_read(twins, tmp_path):
    folder, _ = twins("llama-tiny")
    name = "model.layers.2.mlp.down_proj.weight"
    for one, at, value in ((name, 5000, b"\xff"), (name, 7, b"\x7f"), (name + "_scale_inv", 0, b"\x80\x7f")):
        data = bytearray((folder / "model.safetensors").read_bytes())
        start = open_tensors(folder)[0][one].start + at
        data[start : start + len(value)] = value
        (tmp_path / "model.safetensors").write_bytes(data)
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        for backend in ("oracle", "numba"):
            refused(lambda backend=backend: load(tmp_path, backend=backend), one)


def test_rows_that_cannot_be_joined_are_refused_by_name(twins):
    _, tensors, bind = opened(twins("llama-tiny")[0], "llama-tiny")
    config = json.loads((twins("llama-tiny")[0] / "config.json").read_text())
    refused(lambda: bind(tensors, config | {"intermediate_size": 204}), "gate_proj.weight", "204", "8 rows")
