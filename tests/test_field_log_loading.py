"""Field log 3: what only shows when a loaded checkpoint runs. Rows of the loader alone: test_config,
test_names, test_safetensors, test_default."""

import json
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import minidflash as md
from minidflash.errors import UserError
from tests.automaton import EOS, build, write_safetensors
from tests.conftest import FULL
from tests.random_pair import write_random

ROOT = Path(__file__).resolve().parent.parent
WHOLE = 64
P = [9] * 40 + [5]


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CHECK", "1")


def open_pair(folders, **options):
    target, drafter = folders
    return md.load(str(target), drafter=str(drafter), **{"warm": False, **options})


def both(engine, prompt, count, **options):
    """Rounds of a drafted run, whose ids must be the plain ones, and the ids."""
    plain = md.generate(engine, prompt, max_tokens=count, drafter=None)
    drafted = md.generate(engine, prompt, max_tokens=count, **{"verify": WHOLE, **options})
    assert drafted.tokens == plain.tokens
    return drafted.rounds, plain.tokens


def test_f44_swapped_folders_say_so(tmp_path):
    target, drafter = build(tmp_path)
    with pytest.raises(UserError) as error:
        md.load(str(drafter), drafter=None)
    assert "drafter" in str(error.value) and "--drafter" in error.value.hint
    with pytest.raises(UserError) as error:
        md.load(str(target), drafter=str(target))
    assert "--target" in error.value.hint


@pytest.mark.parametrize("which", [0, 1])
def test_f45_f46_no_weights_or_too_few_bytes(tmp_path, which):
    folders = build(tmp_path)
    path = folders[which] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        open_pair(folders)
    path.unlink()
    with pytest.raises(UserError, match="no weights"):
        open_pair(folders)


def test_f46_f47_shards_follow_the_index(tmp_path):
    folders = target, _ = build(tmp_path)
    whole = target / "model.safetensors"
    raw = whole.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    names = list(header)
    files = [f"model.safetensors-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        tensors = {}
        for name in part:
            a, b = (8 + size + at for at in header[name]["data_offsets"])
            tensors[name] = np.frombuffer(raw[a:b], ml_dtypes.bfloat16).reshape(header[name]["shape"])
        write_bf16(target / file, tensors)
    index = {name: files[i % 2] for i, name in enumerate(names)}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole.rename(target / "stray.safetensors")  # nobody names it, so nobody loads it
    assert both(open_pair(folders), P, 33)[0] == [8] * 4
    (target / files[1]).unlink()
    with pytest.raises(UserError, match=re.escape(files[1])):
        open_pair(folders)


def write_bf16(path, tensors):
    write_safetensors(path, {name: array.view(np.uint16) for name, array in tensors.items()})


@pytest.mark.parametrize("activations", ["f32", "bf16"])
def test_f48_f49_tied_heads(tmp_path, activations):
    engine = open_pair(build(tmp_path / "without", tied=True), activations=activations)
    rounds, ids = both(engine, P, 40)
    assert ids == [5] * 40 and sum(rounds) == 39  # a tied automaton repeats its last token
    folders = build(tmp_path / "untied", tied=False, target_config={"tie_word_embeddings": True})
    with pytest.raises(
        UserError, match="lm_head"
    ):  # tied, and a head that differs: which is right nobody can say
        open_pair(folders)


@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_f51_weights_stay_in_their_type(tmp_path, kind):
    engine = open_pair(write_random(tmp_path, dtype=kind), activations="f32")
    size = sum(
        (folder / "model.safetensors").stat().st_size for folder in (tmp_path / "target", tmp_path / "draft")
    )
    stored = md.generate(engine, [1, 2, 3], max_tokens=2).memory_bytes.weights
    copied = sum(2 if kind == "bf16" else 4 for _ in ()) + 2 * 40 * 60 * (
        2 if kind == "bf16" else 4
    )  # see build()
    assert abs(stored - copied - size) < 0.1 * size  # norms are kept in f32, the header is no weight


MEASURE = """
import re, sys
sys.path.insert(0, sys.argv[1])
import minidflash as md
from minidflash.kernels import open_ops
def kib(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
md.load(sys.argv[3], drafter=None, backend="numba", ctx=64, warm=False, activations="bf16")
before = kib()
engine = md.load(sys.argv[2], drafter=None, backend="numba", ctx=64, warm=False, activations="bf16")
print(kib() - before, engine.target.nbytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads VmHWM from /proc")
def test_f51_loading_takes_little_more_than_the_file(tmp_path):
    width, ffn, vocab, layers = (
        768,
        2048,
        12000,
        6,
    )  # the largest tensor, a seventh, is there twice for a moment
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
        "vocab_size": vocab,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64, "hidden_act": "silu",
        "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None, "torch_dtype": "bfloat16",
    }  # fmt: skip
    shapes = {"model.embed_tokens": (vocab, width), "lm_head": (vocab, width), "model.norm": (width,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{part}_proj": (width, width) for part in "qkvo"}
        shapes |= {f"{at}mlp.{part}_proj": (ffn, width) for part in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj": (width, ffn), f"{at}input_layernorm": (width,)}
        shapes |= {f"{at}post_attention_layernorm": (width,)}
    tensors = {f"{name}.weight": np.full(shape, 0x3C00, np.uint16) for name, shape in shapes.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    small, _ = build(tmp_path / "small")
    words = [sys.executable, "-c", MEASURE, str(ROOT), str(tmp_path), str(small)]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    peak, weights = map(int, out.split())
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 80e6 and peak * 1024 < 1.3 * size, (
        f"{peak / 1024:.0f} MiB for a file of {size / 2**20:.0f} MiB"
    )
    assert abs(weights - size) < 0.01 * size


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 15, 16, 17])
def test_f55_short_prompts(tmp_path, length):
    """Prompts of 1, 2, 3, block - 1, block, block + 1 tokens, on an automaton and on random pairs."""
    automaton = open_pair(build(tmp_path / "fx"))
    both(automaton, ([9] * 16 + [5])[-length:], 40)
    for name in ("odd", "grouped"):
        for chunk, blocks in ((1, [8]), (256, [16])) if not FULL else ((1, [8, 16]), (256, [8, 16])):
            engine = open_pair(write_random(tmp_path / name, name), prefill_chunk=chunk)
            prompt = np.random.default_rng(length).integers(0, 97, length).tolist()
            for block in blocks:
                both(engine, prompt, 40, block=block)


def test_a_checkpoint_without_a_tokenizer_still_runs_on_ids(tmp_path):
    engine = open_pair(write_random(tmp_path))
    result = md.generate(engine, [3, 1, 4], max_tokens=8)
    assert engine.tokenizer is None and result.text is None and len(result.tokens) == 8
    with pytest.raises(UserError, match="tokenizer"):
        md.generate(engine, "text")
    with pytest.raises(UserError, match="tokenizer"):
        md.generate(engine, [3], max_tokens=8, stop=["x"])
    assert len(md.generate(engine, [3, 1, 4], max_tokens=8).tokens) == 8


def test_weights_survive_their_files(tmp_path):
    """A load copies: deleting or rewriting the files afterwards changes nothing."""
    folders = build(tmp_path)
    engine = open_pair(folders)
    for folder in folders:
        (folder / "model.safetensors").unlink()
    rounds, ids = both(engine, P, 33)
    assert rounds == [8] * 4 and EOS not in ids
