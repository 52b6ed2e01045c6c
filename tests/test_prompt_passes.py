"""A prompt's pass as a recorded one of more rows: the bits are those of the pass as it is."""

import numpy as np
import pytest

import minidflash as md
from tests.compare import assert_same_bits
from tests.conftest import parameters_with
from tests.models import last_keys
from tests.test_resuming import opened

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = ["dflash-llama-tiny", "dflash-qwen3-swa-tiny", "dflash-gpt-oss-mxfp4-tiny", "dflash-gemma4-moe-tiny"]
IDS = np.random.default_rng(3).integers(0, 83, 100).tolist()
SIZES = 4, 16
PROMPTS = IDS[:3], IDS[20:33], IDS[5:9], IDS[40:55], IDS[60:81]  # of passes of 4, 16, 4, 16, 16 and 16 rows
CTX = 24  # with a block of 4 fewer rows of caches than the last prompt's passes have, inactive ones counted


def told(engine, drafter, prompts, tokens):
    """(ids, logprobs, what the caches hold of the prompt) of each prompt in turn."""
    found = []
    for seed, ids in enumerate(prompts):
        how = {
            "max_tokens": tokens,
            "block": 4,
            "verify": 3,
            "temperature": 1.0,
            "logprobs": True,
            "seed": seed,
        }
        one = md.generate(engine, ids, **how) if drafter else md.generate(engine, ids, drafter=False, **how)
        keys = [last_keys(engine.ops, cache.k, len(ids))[1] for cache in engine.state.caches]
        if drafter:
            keys += [last_keys(engine.ops, cache.v, len(ids))[1] for cache in engine.state.drafter_caches]
        found.append((one.tokens, one.logprobs, keys))
    return found


FEW = PAIRS[0], PAIRS[-1]


@pytest.mark.parametrize(
    "ops, pair",
    parameters_with(PAIRS, FEW, ["numba", "emulate", "cuda"], ["bf16"]),
    indirect=["ops"],
)
def test_a_recorded_pass_has_the_same_bits(ops, pair, monkeypatch):
    """Whether its rows are those of the prompt or more, the first time, as recorded, and replayed."""
    engine, is_slow = opened(pair, ops, ctx=CTX, prefill_chunk=16), ops.name == "emulate"
    sizes, prompts, tokens = (SIZES[1:], PROMPTS[1::2], 2) if is_slow else (SIZES, PROMPTS, 3)
    for drafter in (True, False) if pair == PAIRS[0] and not is_slow else (True,):
        monkeypatch.setattr(engine.ops.for_prefill, "prompt_passes", ())
        want = told(engine, drafter, prompts, tokens)
        monkeypatch.setattr(engine.ops.for_prefill, "prompt_passes", sizes)
        engine.programs.clear()
        for one, (ids, logprobs, keys) in zip(told(engine, drafter, prompts, tokens), want, strict=True):
            assert (one[0], one[1]) == (ids, logprobs)
            for mine, its in zip(one[2], keys, strict=True):
                assert_same_bits(mine, its)
        passes = {kind[1:]: program for kind, program in engine.programs.items() if kind[0] == "prompt"}
        assert set(passes) == {(size, drafter) for size in sizes} and all(passes.values())


def test_the_first_pass_of_a_size_is_not_recorded(monkeypatch):
    """One prompt does not wait for a recording; what is longer than all sizes never does."""
    ops = md.ops("numba", "bf16")
    engine = opened(PAIRS[0], ops, prefill_chunk=64)
    monkeypatch.setattr(engine.ops.for_prefill, "prompt_passes", SIZES)
    md.generate(engine, IDS[:3], max_tokens=2)
    assert engine.programs["prompt", 4, True] is None
    md.generate(engine, IDS[:20], max_tokens=2)
    assert {kind[1] for kind in engine.programs if kind[0] == "prompt"} == {4}
