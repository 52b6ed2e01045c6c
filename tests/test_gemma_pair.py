"""A Gemma 4 pair with heads of published sizes on the fast kernels: no plain one runs, ids and laws are those
of plain decoding whatever the chunk, past wraps of its rings."""

import numpy as np
import pytest

import minidflash as md
from minidflash.engine import in_type
from tests.conftest import FULL, open_or_skip, parameters
from tests.random_gemma import write_gemma
from tests.replay import Replay, proposing

PROMPT = np.random.default_rng(3).integers(0, 83, 330).tolist()
CONTROL = {"stage", "stage_context", "accept"}


def opened(folder, ops, chunk, has_experts):
    target, drafter = write_gemma(folder, has_experts)
    return md.load(str(target), drafter=str(drafter), backend=ops.name, activations=ops.activations,
                   warm=False, prefill_chunk=chunk, ctx=400)  # fmt: skip


@pytest.mark.parametrize("width, dtype, scale", [(5376, "BF16", 73.5), (2816, "BF16", 53.0),
                                                 (80, "F32", np.float32(80) ** 0.5)])  # fmt: skip
def test_the_scale_of_embedded_rows_has_the_tables_type(width, dtype, scale):
    """models.md 5."""
    assert in_type(width**0.5, dtype) == scale


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
def test_drafted_is_plain_on_the_fast_kernels(ops, tmp_path, has_experts):
    engine = opened(tmp_path, ops, 16, has_experts)
    prompt, count = PROMPT[: 20 if ops.name == "emulate" and not FULL else 330], 6
    known = md.generate(engine, prompt, max_tokens=count + 4, drafter=False, logprobs=True)
    options = {"max_tokens": count, "block": 4, "verify": 4, "logprobs": True}
    with proposing(engine, Replay(prompt + known.tokens, len(prompt), 4, 83)):
        run = md.generate(engine, prompt, **options)
    assert run.tokens == known.tokens[:count] and run.logprobs == known.logprobs[:count]
    taken = engine.ops.backend.variants
    slow = {row for row, variant in taken.items() if variant == "plain" and row not in CONTROL}
    assert not slow and {"qkv", "attend", "linear_add"} <= taken.keys()
    assert ("join" in taken) == has_experts


@pytest.mark.parametrize("activations", ["f32", "bf16"] if FULL else ["bf16"])
def test_chunks_and_wraps_change_nothing(tmp_path, activations):
    """On the CPU; rings of 128 or so rows wrap twice."""
    known = None
    for chunk in (1, 7, 16, 1000) if FULL else (16, 1000):
        engine = opened(tmp_path / str(chunk), open_or_skip("numba", activations), chunk, True)
        plain = md.generate(engine, PROMPT, max_tokens=12, drafter=False).tokens
        known = known or plain
        assert plain == known, f"chunk {chunk}"
        with proposing(engine, Replay(PROMPT + plain, len(PROMPT), 8, 83)):
            assert md.generate(engine, PROMPT, max_tokens=12, block=8, verify=8).tokens == known
        if chunk < 1000:
            rooms = [cache.k.shape[2] for cache in engine.state.caches]
            assert len(PROMPT) // rooms[0] >= 2 and rooms[1] > len(PROMPT)
