"""Pairs whose target has experts: prompts chunk by chunk past wraps of a ring, drawn text, all blocks."""

import numpy as np
import pytest

import minidflash as md
from tests.conftest import FULL, parameters
from tests.golden_files import golden
from tests.models import engine_of, target_of
from tests.replay import Replay, proposing

PAIRS = [
    "dflash-qwen3-moe-tiny", "dflash-gpt-oss-tiny", "dflash-gpt-oss-mxfp4-tiny", "dflash-gemma4-moe-tiny",
]  # fmt: skip
PROMPT = np.random.default_rng(5).integers(0, 384, 300).tolist()


def cases(emulated):
    """Of the slow backends few, unless MINIDFLASH_FULL=1: on the oracle each pair and each type once, on the
    emulator the pair `emulated`, or none."""
    slow = {
        "oracle": {("f32", PAIRS[0]), ("bf16", PAIRS[1]), ("f32", PAIRS[2])},
        "emulate": {("bf16", emulated)},
    }
    return pytest.mark.parametrize(
        "ops, pair",
        [
            pytest.param(p.values[0], pair, id=f"{p.id}-{pair}", marks=p.marks)
            for p in parameters()
            for name, kind in [p.values[0]]
            for pair in PAIRS
            if FULL or name not in slow or (kind, pair) in slow[name]
        ],
        indirect=["ops"],
    )


@cases("dflash-gpt-oss-mxfp4-tiny")
def test_chunks_of_a_long_prompt_change_nothing(ops, pair):
    """gpt-oss's sliding layers see 8 keys, so that their rings wrap again and again, the emulator's once."""
    known, count, prompt = None, 24, PROMPT
    if ops.name == "emulate" and not FULL:
        count, prompt = 6, PROMPT[:150]
    if ops.name == "oracle" and not FULL:
        count, prompt = 8, PROMPT[:220]
    for chunk in (16, 1000) if ops.name in ("emulate", "oracle") and not FULL else (1, 7, 16, 1000):
        engine = md.load(
            str(golden(target_of(pair))), drafter=str(golden(pair)), backend=ops.name,
            activations=ops.activations, warm=False, prefill_chunk=chunk, ctx=400,
        )  # fmt: skip
        plain = md.generate(engine, prompt, max_tokens=count, drafter=False).tokens
        known = known or plain
        assert plain == known, f"chunk {chunk}"
        assert md.generate(engine, prompt, max_tokens=count, block=8, verify=8).tokens == known
        windows = engine.target.config.each("window")
        rooms = [cache.k.shape[2] for cache in engine.state.caches]
        sliding = [room for room, window in zip(rooms, windows, strict=True) if window]
        if sliding and chunk == 16:  # a ring is as long as the pieces that attention cuts keys into
            times = 8 if ops.backend.key_cut == 1 else 1
            assert max(sliding) * times < len(prompt) + count


@cases("dflash-qwen3-moe-tiny")
def test_drawn_text_is_that_of_plain_decoding(ops, pair):
    engine = engine_of(target_of(pair), pair, ops.name, ops.activations)
    law = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 6 if ops.name == "emulate" else 20}
    plain = md.generate(engine, PROMPT[:40], drafter=False, **law).tokens
    for block, verify in ((4, 4), (16, 5), (16, 16)) if ops.name != "emulate" else ((8, 5),):
        assert md.generate(engine, PROMPT[:40], block=block, verify=verify, **law).tokens == plain
    with proposing(engine, Replay(PROMPT[:40] + plain, 40, 8, engine.target.config.vocab)):
        assert md.generate(engine, PROMPT[:40], block=8, verify=8, **law).tokens == plain


@cases(None)
def test_every_block_gives_the_plain_text(ops, pair):
    engine = engine_of(target_of(pair), pair, ops.name, ops.activations)
    plain = md.generate(engine, PROMPT[:30], max_tokens=20, drafter=False).tokens
    for block in range(1, 17) if ops.name != "oracle" or FULL else (1, 5, 16):
        with proposing(engine, Replay(PROMPT[:30] + plain, 30, block, engine.target.config.vocab)):
            assert md.generate(engine, PROMPT[:30], max_tokens=20, block=block, verify=block).tokens == plain
