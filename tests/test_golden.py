"""Targets against the reference: hidden states, caches, logits and greedy ids of golden cases."""

import dataclasses
import shutil

import numpy as np
import pytest

import minidflash as md
from tests.conftest import FULL, parameters
from tests.golden_files import golden
from tests.models import engine_of, forward, logits_of, numbers, relative, state_of

TARGETS = [
    "llama-tiny",
    "llama-tiny-tied",
    "qwen3-tiny",
    "qwen3-moe-tiny",
    "gpt-oss-tiny",
    "gpt-oss-mxfp4-tiny",
    "gemma4-tiny",
    "gemma4-moe-tiny",
]
FILES = "config.json", "config.legacy.json"
exact = pytest.mark.parametrize(
    "ops, engine_of_config",
    [
        pytest.param(p.values[0], file, id=f"{p.id}-{file}", marks=p.marks)
        for p in parameters(["oracle", "numba", "emulate", "cuda"], ["f32"])
        for file in (FILES if p.values[0][0] == "numba" or FULL else FILES[:1])
    ],
    indirect=True,
)
CLOSE = (
    1e-3  # logits absolutely; hidden states, K and V relative to the row's RMS (golden README, "Tolerances")
)


def prompts(ops, few):
    """Of the golden prompts all, or on the emulator, which is slow, `few`."""
    return few if ops.name == "emulate" and not FULL else ("p0", "p1")


def tokens(ops):
    """How many of the 32 golden ids are compared; on the emulator fewer."""
    return 12 if ops.name == "emulate" and not FULL else 32


@pytest.fixture
def engine_of_config(request, tmp_path):
    """(target, ops) -> engine that reads the named config file of the case."""

    def load(target, ops):
        if request.param == "config.json":
            return engine_of(target, None, ops.name, ops.activations)
        shutil.copy(golden(target) / request.param, tmp_path / "config.json")
        for file in golden(target).glob("model*"):
            (tmp_path / file.name).symlink_to(file)
        return md.load(str(tmp_path), drafter=None, backend=ops.name, activations=ops.activations, warm=False)

    return load


@exact
@pytest.mark.parametrize("target", TARGETS)
def test_every_layer_of_a_prompt(ops, target, engine_of_config):
    engine, g = engine_of_config(target, ops), numbers(target)
    for p in ("p0", "p1"):
        ids = g[f"{p}.input_ids"]
        s = state_of(engine, len(ids))
        hidden, rows = forward(engine, s, ids)
        for i in range(len(engine.target.config.layers)):
            assert relative(hidden[:, i], g[f"{p}.hidden.{i}"]) < CLOSE, f"{p} layer {i}"
            for kind in "kv":
                found = ops.download(getattr(s.caches[i], kind))[0, :, : len(ids)]
                assert relative(found, g[f"{p}.cache.{i}.{kind}"]) < CLOSE, f"{p} layer {i} {kind}"
        logits = logits_of(engine, rows)
        assert np.abs(logits - g[f"{p}.logits"]).max() < CLOSE, p
        ops.embed(rows.ids, engine.target.embed, engine.target.embed_scale, rows.x)
        assert (ops.download(rows.x) == g[f"{p}.embed"]).all(), f"{p} embed"


@exact
@pytest.mark.parametrize("target", TARGETS)
def test_greedy_ids(ops, target, engine_of_config):
    engine, g = engine_of_config(target, ops), numbers(target)
    for p in prompts(ops, ["p0"]):
        count = tokens(ops)
        result = md.generate(engine, g[f"{p}.input_ids"].tolist(), max_tokens=count, drafter=False)
        assert result.tokens == g[f"{p}.greedy_ids"][:count].tolist(), p
        assert result.finish_reason == "length" and result.rounds == []


@pytest.mark.parametrize("target", TARGETS)
def test_rope_frequencies(target):
    config, g = engine_of(target, None, "oracle", "f32").target.config, numbers(target)
    kinds = ("sliding_attention_", "full_attention_") if len(config.ropes) > 1 else ("",)
    for i, kind in enumerate(kinds):
        size = next(layer.head_size for layer in config.layers if layer.rope == i)
        frequencies, multiplier = config.ropes[i].frequencies(size)
        np.testing.assert_array_equal(frequencies, g[f"rope.{kind}inv_freq"])
        assert multiplier == g[f"rope.{kind}attention_scaling"][0]


def rotate_neighbours(engine):
    """K rows of the first layer as if pairs were neighbours: what a reader of the other RoPE layout would
    have."""
    kv = engine.target.layers[0]["kv"]
    size = engine.target.config.layers[0].head_size
    order = np.arange(size).reshape(-1, 2).T.reshape(-1)
    data = kv.data.copy()
    data[:size] = data[:size][order]
    engine.target.layers[0]["kv"] = dataclasses.replace(kv, parts=(data,))


def drop_scaling(engine):
    from minidflash.rope import rope_tables

    config = engine.target.config
    rope, size = config.rotations[0]
    tables = rope_tables(engine.ops, dataclasses.replace(rope, kind="default"), size, 600)
    engine.target.tables = [tables] * len(config.layers)


def shift_positions(engine):
    tables = tuple(np.roll(t, 1, 0)[:-1].copy() for t in engine.target.tables[0])
    for table, first in zip(tables, (1, 0), strict=True):
        table[0] = first
    engine.target.tables = [tables] * len(engine.target.layers)


def double_norm(engine):
    engine.target.weights["norm"] = engine.target.weights["norm"] ** 2


def drop_q_norm(engine):
    layer = engine.target.layers[-1]
    layer["q_norm"] = np.ones_like(layer["q_norm"])


@pytest.mark.parametrize(
    "target, damage",
    [("llama-tiny", rotate_neighbours), ("llama-tiny-tied", drop_scaling), ("llama-tiny", shift_positions),
     ("qwen3-tiny", double_norm), ("qwen3-tiny", drop_q_norm)],
)  # fmt: skip
def test_golden_logits_see_wrong_models(target, damage):
    """Each planted mistake moves some logit by ten tolerances at least."""
    engine, g = md.load(str(golden(target)), drafter=None, backend="oracle", warm=False), numbers(target)
    damage(engine)
    ids = g["p0.input_ids"]
    _, rows = forward(engine, state_of(engine, len(ids)), ids)
    assert np.abs(logits_of(engine, rows) - g["p0.logits"]).max() > 10 * CLOSE


@pytest.mark.parametrize("ops", parameters(["oracle", "numba", "emulate", "cuda"], ["bf16"]), indirect=True)
@pytest.mark.parametrize("target", TARGETS)
def test_bf16_activations(ops, target):
    """Median row error within 6 % of the logits' spread, and the argmax where it is not close (golden
    README)."""
    engine, g = engine_of(target, None, ops.name, "bf16"), numbers(target)
    for p in prompts(ops, ["p1"]):
        ids, want = g[f"{p}.input_ids"], g[f"{p}.logits"]
        _, rows = forward(engine, state_of(engine, len(ids)), ids)
        logits = logits_of(engine, rows)
        error = np.sqrt(((logits - want) ** 2).mean(-1)) / want.std()
        assert np.median(error) <= 0.06
        top = np.sort(want, axis=-1)[:, ::-1]
        is_clear = top[:, 0] - top[:, 1] > 0.5
        assert (logits.argmax(-1) == want.argmax(-1))[is_clear].mean() >= 0.95
        count = tokens(ops)
        result = md.generate(engine, ids.tolist(), max_tokens=count, drafter=False)
        assert_until_close(result.tokens, g[f"{p}.greedy_ids"][:count], g[f"{p}.greedy_margin"][:count])


def assert_until_close(tokens, wanted, margins, limit=0.5):
    """Ids equal up to the first one whose margin is below the limit."""
    close = np.flatnonzero(np.asarray(margins) < limit)
    count = int(close[0]) if len(close) else len(wanted)
    assert list(tokens[:count]) == np.asarray(wanted)[:count].tolist()
