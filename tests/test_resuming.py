"""A prompt that begins as the caches do runs only its other rows, and every bit is a fresh run's."""

import numpy as np
import pytest

import minidflash as md
from minidflash import layers, request, state
from minidflash.loop import rounds_of
from minidflash.request import Request
from minidflash.run import complete
from minidflash.stats import Timing
from tests.compare import assert_same_bits
from tests.conftest import FULL, open_or_skip, parameters
from tests.golden_files import golden
from tests.models import last_keys, target_of
from tests.random_gemma import write_gemma
from tests.test_rings import WINDOW, open_pair

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = ["dflash-llama-tiny", "dflash-qwen3-swa-tiny", "dflash-qwen3-moe-tiny", "dflash-gpt-oss-mxfp4-tiny",
         "dflash-gemma4-tiny", "dflash-gemma4-moe-tiny"]  # fmt: skip
IDS = np.random.default_rng(8).integers(0, 83, 400).tolist()
WAYS = {
    "greedy": {"verify": 3},
    "drawn": {"verify": 4, "temperature": 1.0, "seed": 3},
    "rejecting": {"verify": 4, "temperature": 1.0, "accept": "reject"},  # its text shows the drafter's bits
    "plain": {"verify": 1},
}


def opened(pair, ops, **options):
    options = {"warm": False, "ctx": 400, "prefill_chunk": 16} | options
    return md.load(str(golden(target_of(pair))), drafter=str(golden(pair)), backend=ops.name,
                   activations=ops.activations, **options)  # fmt: skip


def asked(engine, ids, **options):
    """(Request that resumes, its rounds)."""
    request = Request.of(engine, ids, {"logprobs": True, **options}, resumes=True)
    return request, rounds_of(engine, request, Timing())


def turn(engine, ids, **options):
    """Result of a run that resumes."""
    request, rounds = asked(engine, ids, **options)
    return complete(engine, request, rounds, Timing())


def kept(engine, total):
    """The keys and values of rows before `total` that the caches still hold, of target and drafter."""
    return [
        last_keys(engine.ops, part, total)[1]
        for cache in [*engine.state.caches, *engine.state.drafter_caches]
        for part in (cache.k, cache.v)
    ]


def assert_fresh(engine, ids, is_drafted=True, **options):
    """A turn has the tokens, laws and caches of a fresh run. Returns its Result."""
    found = turn(engine, ids, **options)
    behind = kept(engine, len(ids))
    fresh = md.generate(engine, ids, logprobs=True, **options)
    assert (fresh.stats.rows_reused, fresh.stats.rows_run) == (0, len(ids))
    assert (found.tokens, found.logprobs) == (fresh.tokens, fresh.logprobs)
    assert found.stats.rows_reused + found.stats.rows_run == len(ids)
    if len(found.tokens) == 1:  # else rounds wrote behind the prompt, and over rings
        for one, other in zip(behind, kept(engine, len(ids)), strict=True):
            assert_same_bits(one, other)
    return found


def is_alike(engine):
    """Whether rows of rounds have the bits of a prompt's."""
    return engine.ops.for_prefill is engine.ops


CASES = [
    pytest.param(p.values[0], pair, id=f"{p.id}-{pair}", marks=p.marks)
    for p in parameters()
    for name, kind in [p.values[0]]
    for pair in PAIRS
    if FULL or name == "cuda" or (name == "numba" and (kind == "bf16") == (PAIRS.index(pair) % 2 == 0))
    or (name, kind, pair) == ("emulate", "bf16", PAIRS[3])
]  # fmt: skip


@pytest.mark.parametrize("ops, pair", CASES, indirect=["ops"])
def test_a_turn_runs_what_is_new_and_has_the_bits_of_a_fresh_run(ops, pair):
    engine = opened(pair, ops)
    ways = WAYS if ops.name != "emulate" or FULL else {"greedy": {"verify": 3}}
    for way, options in ways.items():
        ids, count = IDS[:21], 12 if ops.name != "emulate" else 5
        before = md.generate(engine, ids, max_tokens=count, **options)
        ids = ids + before.tokens + IDS[21:30]
        reused = 21 + (count - 1 if is_alike(engine) else 0)  # the anchor has no row
        found = turn(engine, ids, max_tokens=count, **options)
        assert (found.stats.rows_reused, found.stats.rows_run) == (reused, len(ids) - reused), way
        fresh = md.generate(engine, ids, max_tokens=count, logprobs=True, **options)
        assert (found.tokens, found.logprobs) == (fresh.tokens, fresh.logprobs), way
        if ops.name != "emulate" or FULL:
            turn(engine, IDS[:21], max_tokens=count, **options)
            assert assert_fresh(engine, ids, max_tokens=1, **options).stats.rows_reused == reused


@pytest.mark.parametrize("ops", parameters(["numba"], ["bf16"]), indirect=True)
def test_a_plain_turn_reuses_all_rows_and_a_drafted_one_those_that_were_injected(ops):
    engine = opened(PAIRS[1], ops)
    plain, ids = {"drafter": False}, IDS[:21]
    turn(engine, ids, max_tokens=1)  # buffers of a drafted run, which plain ones use too
    ids = ids + turn(engine, ids, max_tokens=9, **plain).tokens + IDS[40:45]
    assert turn(engine, ids, max_tokens=1, **plain).stats.rows_reused == 21 + 8
    assert assert_fresh(engine, ids, max_tokens=1, verify=4).stats.rows_reused == 20  # its last row ran again
    assert turn(engine, IDS[:9], max_tokens=1).stats.rows_reused == 8
    assert turn(engine, [1, *IDS[1:9]], max_tokens=1).stats.rows_reused == 0  # nothing alike


def test_whoever_ran_in_between(tmp_path):
    """Another run's rows are what the caches hold then; a run of other shape makes other buffers."""
    engine = opened(PAIRS[0], open_or_skip("numba", "f32"))
    turn(engine, IDS[:30], max_tokens=4, verify=4)
    md.generate(engine, IDS[:12] + IDS[60:80], max_tokens=4, verify=4)
    assert assert_fresh(engine, IDS[:40], max_tokens=1, verify=4).stats.rows_reused == 12
    md.generate(engine, IDS[:40], max_tokens=4, block=4)
    assert assert_fresh(engine, IDS[:50], max_tokens=1, verify=4).stats.rows_reused == 0
    several = {"temperature": 1.0, "samples": 3, "max_tokens": 9, "verify": 4, "trace": True}  # in one slot
    texts = [one["tokens"] for one in md.generate(engine, IDS[:40], **several).samples]
    alike = next(i for i in range(9) if texts[0][i] != texts[2][i])  # the caches hold the last one
    found = assert_fresh(engine, IDS[:40] + texts[0], max_tokens=1, verify=4)
    assert found.stats.rows_reused == 40 + alike
    turn(engine, IDS[:12] + IDS[70:90], max_tokens=4, drafter=False)
    found = assert_fresh(engine, IDS[:12] + IDS[70:95], max_tokens=1, verify=4)
    assert found.stats.rows_reused == 12  # those behind were never injected
    md.generate(engine, IDS[:40], **several | {"trace": False})  # side by side, in buffers of their own
    assert assert_fresh(engine, IDS[:40], max_tokens=1, verify=4).stats.rows_reused == 0


def test_measuring_writes_over_rows():
    engine = opened(PAIRS[0], open_or_skip("numba", "f32"))
    turn(engine, IDS[:30], max_tokens=4, verify=4)
    assert not engine.schedule.seconds
    found = turn(engine, IDS[:40], max_tokens=1)  # verify="auto" measures first
    assert engine.schedule.seconds and found.stats.rows_reused == 0
    assert assert_fresh(engine, IDS[:40], max_tokens=1).stats.rows_reused == 39


def test_a_cache_that_holds_no_rows_is_not_reused(monkeypatch):
    engine = opened(PAIRS[0], open_or_skip("numba", "f32"))
    turn(engine, IDS[:30], max_tokens=4, verify=4)
    monkeypatch.setitem(layers.COMMITS, "attention", lambda *args: None)
    assert turn(engine, IDS[:40], max_tokens=1, verify=4).stats.rows_reused == 0


RINGS = {"qwen3": 128, "gemma": 128}  # keys that a ring holds on the CPU


@pytest.mark.parametrize("family", RINGS)
@pytest.mark.parametrize("count", [60, 115])
def test_a_ring_that_lost_rows_runs_the_prompt_again(tmp_path, family, count):
    """As a template does that leaves out of old turns what was thought."""
    ops = open_or_skip("numba", "bf16")
    if family == "qwen3":
        engine = open_pair(tmp_path, ops, 16)
    else:
        target, drafter = write_gemma(tmp_path)
        engine = md.load(str(target), drafter=str(drafter), backend="numba", activations="bf16", warm=False,
                         prefill_chunk=16, ctx=400)  # fmt: skip
    options = {"verify": 4, "block": 8}
    turn(engine, IDS[:40], max_tokens=count, **options)
    rooms = {cache.k.shape[2] for cache in engine.state.caches if cache.k.shape[2] < 400}
    assert rooms == {RINGS[family]}
    ids = IDS[:40] + IDS[60:70]
    found = assert_fresh(engine, ids, max_tokens=1, **options)
    assert found.stats.rows_reused == (40 if 40 - WINDOW + 1 + 128 >= 40 + count + 8 else 0)
    # Behind a long text, where rings are full, the next turn finds what it needs.
    ids = IDS[:300]
    ids += turn(engine, ids, max_tokens=20, **options).tokens + IDS[:7]
    assert assert_fresh(engine, ids, max_tokens=9, **options).stats.rows_reused > 300


@pytest.mark.parametrize("slots", [1, 2])
def test_samples_past_the_end_of_a_ring_begin_behind_the_prompt(tmp_path, monkeypatch, slots):
    """The first answers write over the prompt's keys, which the last one needs."""
    ops, options = open_or_skip("numba", "f32"), {"temperature": 1.0, "samples": slots + 1, "max_tokens": 115}
    monkeypatch.setattr(request, "SIDE_BY_SIDE", slots)
    found = md.generate(open_pair(tmp_path / "a", ops, 16), IDS[:60], verify=4, **options).samples
    with monkeypatch.context() as patch:
        patch.setattr(state, "cache_rows", lambda window, room, newest, cut: room)
        whole = md.generate(open_pair(tmp_path / "b", ops, 16), IDS[:60], drafter=False, **options).samples
    assert [one["tokens"] for one in found] == [one["tokens"] for one in whole]


# ---- runs that do not end ----------------------------------------------------------------------------------


def test_a_run_closed_after_any_round_leaves_what_it_says(monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CHECK", "1")
    engine, seen = opened(PAIRS[1], open_or_skip("numba", "f32")), set()
    for number in range(9):
        _, rounds = asked(engine, IDS[:21], max_tokens=20, verify=4)
        tokens = [token for _, r in zip(range(number), rounds, strict=False) for token in r.tokens]
        rounds.close()
        found = assert_fresh(engine, IDS[:21] + tokens + IDS[90:94], max_tokens=1, verify=4)
        seen.add(found.stats.rows_reused)
        assert found.stats.rows_reused == (20 + len(tokens) if tokens else 0), number
    assert len(seen) > 4


def test_a_run_that_fails_at_any_kernel_leaves_what_it_says():
    engine = opened(PAIRS[1], open_or_skip("numba", "f32"))
    calls, last, kind = [0], [-1], [KeyboardInterrupt]

    def failing(kernel):
        def call(*args):
            kernel(*args)
            calls[0] += 1
            if calls[0] == last[0]:
                raise kind[0]

        return call

    for name in ("attend", "stage_context", "inject", "accept"):
        setattr(engine.ops.backend, name, failing(getattr(engine.ops.backend, name)))
    ids, options = IDS[:21], {"max_tokens": 8, "verify": 4}
    known = turn(engine, ids, **options)
    total, seen, longer = calls[0], set(), ids + known.tokens
    fresh = md.generate(engine, longer, max_tokens=1, logprobs=True)
    behind = kept(engine, len(longer))
    for at in range(1, total):
        if at % 2:  # the prompt runs from a row within its first chunk on
            turn(engine, ids[:8] + IDS[50:55], max_tokens=1, verify=4)
        calls[0], last[0], kind[0] = 0, at, (KeyboardInterrupt, MemoryError)[at % 3 == 0]
        try:
            list(asked(engine, ids, **options)[1])
            assert calls[0] < at
        except kind[0]:
            assert calls[0] == at
        last[0] = -1
        found = turn(engine, longer, max_tokens=1, verify=4)
        seen.add(found.stats.rows_reused)
        assert (found.tokens, found.logprobs) == (fresh.tokens, fresh.logprobs), at
        for one, other in zip(kept(engine, len(longer)), behind, strict=True):
            assert_same_bits(one, other, f"call {at}")
    assert 8 in seen and max(seen) > 24
