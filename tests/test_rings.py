"""A sliding layer keeps its keys in a ring: key n in row n % S. Bits are those of a cache that holds
everything."""

from functools import partial

import numpy as np
import pytest

import minidflash as md
from minidflash import state
from tests.cases import Make, run
from tests.compare import assert_same_bits
from tests.conftest import FULL, open_or_skip, parameters
from tests.random_pair import write_random
from tests.replay import Replay, proposing

WINDOW, BLOCK, CHUNK = 20, 8, 16
SLIDING = ["sliding_attention", "sliding_attention"]
PROMPT = np.random.default_rng(3).integers(0, 97, 304).tolist()


RINGS = [(20, 16, 1, 35), (20, 16, 128, 128), (128, 16, 128, 256), (113, 16, 128, 128), (0, 16, 128, 1000),
         (2000, 16, 1, 1000)]  # fmt: skip


@pytest.mark.parametrize("window, newest, cut, rows", RINGS)
def test_how_long_a_ring_is(window, newest, cut, rows):
    assert state.cache_rows(window, 1000, newest, cut) == rows


def open_pair(folder, ops, chunk, kinds=SLIDING):
    target, drafter = write_random(
        folder, "grouped", family="qwen3", block=BLOCK, max_pos=512, windows=(SLIDING, WINDOW, True),
        target_config={"layer_types": kinds, "sliding_window": WINDOW, "use_sliding_window": True},
    )  # fmt: skip
    return md.load(str(target), drafter=str(drafter), backend=ops.name, activations=ops.activations,
                   warm=False, prefill_chunk=chunk)  # fmt: skip


def told_of(prompt, engine, known=None, new=30, **options):
    """(ids, log-probabilities) of a run, which show every bit of its logits.

    known: ids that drafts repeat, with mistakes so that every length is accepted and rolled back.
    """

    def run():
        result = md.generate(engine, prompt, max_tokens=new, logprobs=True, **options)
        return result.tokens, result.logprobs

    if known is None:
        return run()
    with proposing(engine, Replay(prompt + known, len(prompt), BLOCK, engine.target.config.vocab)):
        return run()


KINDS = {"all": SLIDING, "one": ["full_attention", "sliding_attention"]}  # how many layers slide
SLOW = "oracle", "emulate"
FEW = {("oracle", "f32", "all"), ("oracle", "bf16", "one"), ("emulate", "bf16", "one")}
CASES = [  # on these few pairs
    pytest.param(p.values[0], kinds, id=f"{p.id}-{kinds}", marks=p.marks)
    for p in parameters()
    for kinds in KINDS
    if FULL or p.values[0][0] not in SLOW or (*p.values[0], kinds) in FEW
]


@pytest.mark.parametrize("ops, kinds", CASES, indirect=["ops"])
def test_wraps_and_rollbacks_change_no_bit(ops, tmp_path, monkeypatch, kinds):
    kinds = KINDS[kinds]
    monkeypatch.setenv("MINIDFLASH_CHECK", "1")
    chunks = (CHUNK,) if ops.name == "emulate" else (7, CHUNK)
    prompt, new = (
        (PROMPT, 30) if ops.name != "emulate" else (PROMPT[:280], 12)
    )  # two rings of 144 rows, a bit
    told = partial(told_of, prompt, new=new)
    found = []
    for chunk in chunks:
        engine = open_pair(tmp_path / str(chunk), ops, chunk, kinds)
        plain = told(engine, drafter=False)
        found.append(plain)
        for verify in (BLOCK,) if ops.name == "emulate" else (3, BLOCK):
            assert told(engine, plain[0], verify=verify) == plain, verify
        rooms = [cache.k.shape[2] for cache in engine.state.caches]
        last = len(prompt) + new
        assert all(
            last // room >= 2 for room, kind in zip(rooms, kinds, strict=True) if kind == SLIDING[0]
        ), rooms
        assert all(room >= last for room, kind in zip(rooms, kinds, strict=True) if kind != SLIDING[0]), rooms
        assert last // engine.state.injected.k.shape[3] >= 2
    with monkeypatch.context() as patch:  # the same with caches that hold all keys
        patch.setattr(state, "cache_rows", lambda window, room, newest, cut: room)
        whole = open_pair(tmp_path / "whole", ops, CHUNK, kinds)
        found.append(told(whole, drafter=False))
        assert whole.state.caches[0].k.shape[2] >= len(prompt) + new
        drafted = told(whole, verify=BLOCK), whole
    assert found == [found[0]] * len(found)
    assert told(engine, verify=BLOCK) == drafted[0], "and the drafter's own drafts"


@pytest.mark.parametrize("ops", parameters(["oracle", "numba", "emulate", "cuda"]), indirect=True)
@pytest.mark.parametrize(
    "size, window, has_sinks", [(64, 200, False), (24, 100, False), (128, 40, False), (64, 128, True)]
)
def test_attention_on_a_ring_has_the_bits_of_a_whole_cache(ops, rng, size, window, has_sinks):
    """Rows at every distance from the wrap; the ring's other rows hold older keys, which nobody may see."""
    groups, heads, total = 2, 4, 1000
    room = state.cache_rows(window, total, BLOCK, ops.backend.key_cut)
    make = Make(rng, ops.activations)
    whole = {name: make.a(1, groups, total, size) for name in ("cache_k", "cache_v")}
    for start in (room - 3, room, 2 * room + room // 2, 3 * room - BLOCK):
        pos = start + np.arange(BLOCK, dtype=np.int32)
        case = {"q": make.a(BLOCK, heads, size), **whole, "slot": np.zeros(BLOCK, np.int32), "pos": pos,
                "begin": pos,
                "end": pos + 1, "window": window, "causal": 1, "scale": size**-0.5,
                "sinks": make.v(heads) if has_sinks else None}  # fmt: skip
        ring = dict(case)
        for name in ("cache_k", "cache_v"):
            ring[name] = np.empty_like(whole[name][:, :, :room])
            for key in range(start + BLOCK):
                ring[name][:, :, key % room] = whole[name][:, :, key]
        assert_same_bits(
            run(ops, "attend", ring)["o"], run(ops, "attend", case)["o"], f"start {start} of {room}"
        )


@pytest.mark.parametrize("ops", parameters(), indirect=True)
def test_keys_are_stored_by_number_and_turned_by_position(ops, rng):
    """What tree nodes need: pos says how a key is turned, at where it lies."""
    from tests.kernels.test_rows import make

    for name in ("qkv", "inject"):
        case, sizes = make(name, rng, ops.activations, "bf16")
        room = case["cache_k"].shape[-2]
        plain = run(ops, name, case, **sizes)
        shift = rng.permutation(room)[: len(case["pos"])].astype(np.int32) + room * (case["pos"] % 3)
        slot = np.arange(len(shift), dtype=np.int32) % 2
        moved = run(ops, name, case | {"at": shift.astype(np.int32), "slot": slot}, **sizes)
        for cache in ("cache_k", "cache_v"):
            for t, (s, p) in enumerate(zip(case["slot"], case["pos"], strict=True)):
                assert_same_bits(
                    moved[cache][..., slot[t], :, shift[t] % room, :], plain[cache][..., s, :, p, :], name
                )


def test_rings_need_room_for_a_whole_pass(tmp_path, monkeypatch):
    """One row fewer, and a pass overwrites a key that its first row still sees: it shows."""
    ops = open_or_skip("oracle", "f32")
    told = partial(told_of, PROMPT)
    right = told(open_pair(tmp_path / "right", ops, CHUNK), drafter=False)
    short = state.cache_rows
    monkeypatch.setattr(
        state, "cache_rows", lambda window, *rest: short(window, *rest) - (1 if window else 0)
    )
    assert told(open_pair(tmp_path / "short", ops, CHUNK), drafter=False) != right
