"""Whole passes have the same bits however rows are bundled: verify widths and prefill chunks (F56, playbook
11)."""

import numpy as np
import pytest

import minidflash as md
from minidflash import loop
from minidflash.request import Request, release, reserve
from tests.compare import assert_same_bits
from tests.conftest import FULL, parameters_with
from tests.golden_files import golden
from tests.models import engine_of, forward, logits_of, state_of, target_of

MAKERS = "numba", "emulate", "cuda"
WIDTHS = 1, 2, 7, 16


TARGETS = "qwen3-tiny", "llama-tiny"


@pytest.mark.parametrize(
    "ops, context, target",
    [
        pytest.param(*p.values, target, id=f"{p.id}-{target}", marks=p.marks)
        for p in parameters_with([1, 37, 120, 127, 128, 250], [120], MAKERS)
        for target in TARGETS
        if FULL or p.values[0][0] != "emulate" or target == TARGETS[p.values[0][1] == "bf16"]
    ],
    indirect=["ops"],
)
def test_verify_widths(ops, context, target):
    """Rows context .. context+15 in passes of 1, 2, 7 and 16: every layer's stream, the caches,
    the logits."""
    engine = engine_of(target, None, ops.name, ops.activations)
    ids = np.random.default_rng(context).integers(0, engine.target.config.vocab, context + 16)
    first = None
    for width in WIDTHS:
        s = state_of(engine, max(context, 16))
        forward(engine, s, ids[:context])
        hidden, logits = [], []
        for at in range(context, context + 16, width):
            stream, rows = forward(engine, s, ids[at : min(at + width, context + 16)], at)
            hidden.append(stream)
            logits.append(logits_of(engine, rows))
        caches = [
            np.stack([ops.download(getattr(c, kind))[:, :, : context + 16] for c in s.caches])
            for kind in "kv"
        ]
        found = [np.concatenate(hidden), np.concatenate(logits), *caches]
        first = first or found
        for what, one, other in zip(("hidden", "logits", "K", "V"), first, found, strict=True):
            assert_same_bits(other, one, f"{what} at width {width}")


def prefilled(engine, ids, monkeypatch):
    """Run prefill; returns its token, both models' caches of the prompt, the taps of every row."""
    ops, taps, run_prompt = engine.ops, [], loop.run_prompt

    def keeping(engine, s, size, drafts):  # a recorded pass calls nothing more of ours
        run_prompt(engine, s, size, drafts)
        is_there = ops.download(s.rows.first(size).pos) >= 0
        taps.append(ops.download(s.prompt_taps[:size])[is_there])

    monkeypatch.setattr(loop, "run_prompt", keeping)
    request = Request.of(engine, ids, {"max_tokens": 4, "block": 8, "verify": 8})
    s = reserve(engine, request)
    try:
        ((first, *_),) = loop.prefill(engine, s, request)
    finally:
        release(engine)
        monkeypatch.undo()
    caches = [
        np.stack([ops.download(getattr(cache, kind))[..., : len(ids), :] for cache in layers])
        for layers in (s.caches, s.drafter_caches)
        for kind in "kv"
    ]
    return [np.array([first]), np.concatenate(taps), *caches]


@pytest.mark.parametrize(
    "ops, pair",
    parameters_with(["dflash-qwen3-trained", "dflash-llama-tiny"], ["dflash-qwen3-trained"], MAKERS),
    indirect=["ops"],
)
def test_prefill_chunks(ops, pair, monkeypatch):
    """Chunks of 1, 3, 16, 37 and 256: caches of target and drafter, and every tap."""
    first, target, length = None, target_of(pair), 40 if ops.name == "emulate" else 150
    for chunk in (1, 3, 16, 37, 256):
        engine = md.load(
            str(golden(target)), drafter=str(golden(pair)), backend=ops.name, activations=ops.activations,
            ctx=320, prefill_chunk=chunk, warm=False,
        )  # fmt: skip
        ids = np.random.default_rng(5).integers(0, engine.target.config.vocab, length).tolist()
        found = prefilled(engine, ids, monkeypatch)
        assert len(found[1]) == len(ids)
        first = first or found
        names = "token", "taps", "target K", "target V", "drafter K", "drafter V"
        for what, one, other in zip(names, first, found, strict=True):
            assert_same_bits(other, one, f"{what} at chunk {chunk}")
