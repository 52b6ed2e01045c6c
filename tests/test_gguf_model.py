"""Targets in GGUF files: the folder's model out of another container; what is not understood is refused by
name. The embedded target's own file: test_golden_default.py."""

import numpy as np
import pytest
from minidflash.kernels.blocks import KINDS
from minidflash.weights import open_checkpoint

import minidflash as md
from minidflash.config import read_target
from minidflash.errors import UserError
from minidflash.pair import check_kinds, open_pair
from tests.conftest import open_or_skip
from tests.gguf_files import write_gguf
from tests.golden_files import golden
from tests.models import forward, logits_of, numbers, state_of


def logits(target, backend="oracle", **options):
    """Of the golden prompt p0, by an engine on this target."""
    engine = md.load(
        str(target), drafter=None, backend=backend, activations="f32", warm=False, ctx=128, **options
    )
    ids = numbers("llama-tiny")["p1.input_ids"]
    _, rows = forward(engine, state_of(engine, len(ids)), ids)
    return logits_of(engine, rows), engine


@pytest.mark.parametrize("case", ["llama-tiny", "llama-tiny-tied", "qwen3-tiny"])
def test_a_file_is_the_folder_s_model(tmp_path, case):
    """Names, sizes, rows of q and k, tied and own heads, llama3's divisors."""
    path = write_gguf(tmp_path / "x.gguf", case)
    opened = open_checkpoint(str(path), "target")
    mine, theirs = (
        read_target(opened.config),
        read_target(open_checkpoint(str(golden(case)), "target").config),
    )
    same = ("family", "vocab", "tied", "width", "eps", "max_positions")
    assert [getattr(mine, name) for name in same] == [getattr(theirs, name) for name in same]
    assert mine.layers == theirs.layers
    found, wanted = logits(path)[0], logits(golden(case))[0]
    if case == "llama-tiny-tied":  # its divisors are rounded to f32
        assert np.abs(found - wanted).max() < 1e-4
    else:
        np.testing.assert_array_equal(found, wanted)


def test_blocks_are_the_dequantised_model(tmp_path):
    """The model of the same numbers in f32: bit for bit on the CPU, whatever the rows beside a row."""
    path = write_gguf(tmp_path / "x.gguf", "llama-tiny", "Q8_0")

    def widened(keys, tensors):
        gguf = pytest.importorskip("gguf")
        number = gguf.GGMLQuantizationType.Q8_0
        for name, (array, kind) in tensors.items():
            if kind == "Q8_0":
                tensors[name] = gguf.quants.dequantize(gguf.quants.quantize(array, number), number), "F32"

    plain = write_gguf(tmp_path / "y.gguf", "llama-tiny", "Q8_0", widened)
    (found, engine), (wanted, _) = logits(path, "numba"), logits(plain, "numba")
    np.testing.assert_array_equal(found, wanted)
    kinds = {
        name: weight.dtype for name, weight in engine.target.layers[0].items() if hasattr(weight, "dtype")
    }
    assert kinds["q"] == kinds["gate_up"] == "q8_0" and engine.target.embed.dtype == "q8_0"
    drafted = md.load(
        str(path), drafter=str(golden("dflash-llama-tiny")), backend="numba", warm=False, ctx=128
    )
    ids = numbers("llama-tiny")["p1.input_ids"].tolist()
    plain = md.generate(drafted, ids, max_tokens=24, verify=1).tokens
    assert md.generate(drafted, ids, max_tokens=24, verify=8).tokens == plain


def test_bf16_rounds_and_other_backends_ask_for_it(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", "llama-tiny", "Q8_0")
    with pytest.raises(UserError, match="Q8_0 blocks") as error:
        check_kinds(open_or_skip("numba", "f32").__class__(Named("emulate")), open_pair(str(path)))
    assert error.value.code == 3 and "--weights bf16" in error.value.hint
    pair = open_pair(str(path), weights="bf16")
    assert {bound.dtype for bound in pair.target.bound.values()} == {"bf16", "f32"}
    check_kinds(open_or_skip("numba", "f32").__class__(Named("emulate")), pair)
    with pytest.raises(UserError, match="no GGUF file"):
        open_pair(str(golden("llama-tiny")), weights="bf16")
    with pytest.raises(UserError, match="weights"):
        md.load(str(path), weights="q4")


class Named:
    """Enough of a backend to ask its name."""

    activations = "f32"

    def __init__(self, name):
        self.name = name

    def __getattr__(self, name):
        return None


def key(name, value):
    """A change: this key has this value, None: is not there."""

    def change(keys, tensors):
        keys.pop(name, None)
        if value is not None:
            keys[name] = value

    return change


def tensor(name, array, kind="F32"):
    def change(keys, tensors):
        tensors.pop(name, None)
        if array is not None:
            tensors[name] = array, kind

    return change


SQUARE = np.ones((32, 32), np.float32)
TEXT = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": ["a", "b", "ab"],
    "token_type": [1, 1, 1],
    "merges": ["a b"],
}


def text(**other):
    def change(keys, tensors):
        keys.update({"tokenizer.ggml." + name: value for name, value in (TEXT | other).items()})

    return change


@pytest.mark.parametrize(
    "change, words",
    [
        (key("general.architecture", "gemma3"), ["gemma3", "llama, qwen3"]),
        (key("general.architecture", "dflash"), ["drafter", "--drafter"]),
        (key("llama.rope.scaling.type", "yarn"), ["rope.scaling.type", "yarn"]),
        (key("llama.rope.scaling.factor", 4.0), ["llama.rope.scaling.factor"]),
        (key("llama.expert_count", 8), ["llama.expert_count"]),
        (key("llama.attention.sliding_window", 8), ["sliding_window"]),
        (key("llama.rope.dimension_count", 8), ["rope.dimension_count", "16"]),
        (key("llama.attention.value_length", 8), ["value_length"]),
        (key("llama.rope.freq_base", None), ["llama.rope.freq_base", "missing"]),
        (key("llama.attention.layer_norm_rms_epsilon", None), ["eps"]),
        (key("llama.attention.head_count", 0), ["head_count"]),
        (key("llama.attention.head_count_kv", 7), ["attn_k"]),
        (tensor("blk.1.attn_v.weight", None), ["blk.1.attn_v.weight is missing"]),
        (tensor("output_norm.weight", None), ["output_norm.weight is missing"]),
        (tensor("blk.0.attn_q.bias", SQUARE[0]), ["blk.0.attn_q.bias"]),
        (tensor("blk.3.ffn_up.weight", SQUARE), ["blk.3"]),
        (tensor("blk.0.ffn_up.weight", SQUARE), ["blk.0.ffn_up.weight", "[32, 32]"]),
        (tensor("blk.0.ffn_norm.weight", np.ones(96, np.float32), "Q8_0"), ["ffn_norm", "Q8_0"]),
        (tensor("output_norm.weight", SQUARE[:1, :], "Q5_0"), ["Q5_0", "Q8_0", "output_norm"]),
        (text(model="llama"), ["tokenizer.ggml.model", "llama", "gpt2"]),
        (text(pre="gemma4"), ["tokenizer.ggml.pre", "gemma4", "smollm"]),
        (text(token_type=[1]), ["token"]),
        (text(tokens=["a", "a", "ab"]), ["distinct"]),
        (text(tokens=["a", "b", "c"]), ["merges", "a b"]),
        (text(merges=["ab"]), ["merges", "ab"]),
        (text(eos_token_id=3), ["eos_token_id"]),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(tmp_path, change, words):
    path = write_gguf(tmp_path / "x.gguf", "llama-tiny", change=change)
    with pytest.raises(UserError) as error:
        open_pair(str(path))
    line = f"{error.value} ({error.value.hint})"
    assert error.value.code == 2 and "\n" not in line and all(word in line for word in words), line


@pytest.mark.parametrize("pre, pieces", [
    ("smollm", ["don", "'t", " a", "1", "2", "3", "4", " ", " b", "\n\n"]),
    ("qwen2", ["don", "'t", " a", "1", "2", "3", "4", " ", " b", "\n\n"]),
    ("llama-bpe", ["don", "'t", " a", "123", "4", " ", " b", "\n\n"]),
])  # fmt: skip
def test_text_is_split_by_the_rule_that_is_named(pre, pieces):
    tokenizers = pytest.importorskip("tokenizers")
    from minidflash.weights.gguf_text import tokenizer_files

    metadata = {"tokenizer.ggml." + name: value for name, value in (TEXT | {"pre": pre}).items()}
    files = tokenizer_files("x", metadata, {"max_position_embeddings": 9})
    import json

    splitter = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"])).pre_tokenizer
    shown = [
        piece.replace("Ġ", " ").replace("Ċ", "\n")
        for piece, _ in splitter.pre_tokenize_str("don't a1234  b\n\n")
    ]
    assert shown == pieces
    assert files["tokenizer_config.json"]["add_bos_token"] == (pre == "llama-bpe")


def test_every_kind_is_one_that_files_name():
    gguf = pytest.importorskip("gguf")
    for name, kind in KINDS.items():
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
        assert (kind.values, kind.block.itemsize) == (values, size)
