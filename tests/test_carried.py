"""The record that the host reads, the kept count, and what a slot carries: reset, snapshot, restore."""

import numpy as np
import pytest
from minidflash.kernels import record
from minidflash.kernels.record import Record

import minidflash as md
from minidflash.drafter import inject_fresh
from minidflash.loop import begin, one_round, prefill
from minidflash.request import Request, release, reserve
from minidflash.state import reset, restore, snapshot
from tests.conftest import parameters
from tests.golden_files import golden
from tests.models import engine_of, numbers, target_of

PAIR, BLOCK = "dflash-qwen3-trained", 8


def test_a_record_is_read_by_its_fields():
    numbers = np.full(record.size(4), -1, np.int32)
    numbers[[record.EMITTED, record.ACCEPTED, record.WHY]] = 2, 3, record.STOPPED
    numbers[record.TOKENS : record.TOKENS + 2] = 7, 8
    numbers[record.TOKENS + 4 + 1 : record.TOKENS + 4 + 4] = 7, 8, 9
    assert Record.of(numbers) == Record(2, 3, record.STOPPED, [7, 8], [7, 8, 9])


def one(engine, s):
    """The record of a drafting round."""
    one_round(engine, s, True, BLOCK, True)
    return Record.of(engine.ops.download(s.record)[0])


@pytest.mark.parametrize("ops", parameters(["oracle", "numba", "emulate", "cuda"], ["f32"]), indirect=True)
def test_a_slot_goes_back_to_its_snapshot_and_begins_anew(ops):
    """A round behind a restored snapshot is the round of before; behind a reset,
    a prompt is a prompt of a new engine."""
    engine = engine_of(target_of(PAIR), PAIR, ops.name, "f32")
    ids = numbers(target_of(PAIR))["p1.input_ids"].tolist()
    request = Request.of(engine, ids, {"max_tokens": 40, "block": BLOCK, "verify": BLOCK})
    s = reserve(engine, request)
    try:
        (first,) = prefill(engine, s, request)
        begin(engine, s, request, 0, first)
        found = Record.of(ops.download(s.record)[0])
        while found.accepted == 0:
            inject_fresh(ops, engine.drafter, s)  # features that wait are not part of a snapshot
            start, behind = int(ops.download(s.start)[0]), snapshot(ops, s, 0)
            found = one(engine, s)
        assert found.why == 0 and int(ops.download(s.start)[0]) == start + found.emitted
        assert int(ops.download(s.kept)[0]) == found.emitted > 1
        restore(ops, s, 0, behind)
        assert int(ops.download(s.start)[0]) == start
        assert one(engine, s) == found
        reset(ops, s, 0)
        assert not any(values.any() for values in snapshot(ops, s, 0))
    finally:
        release(engine)
    again = md.generate(engine, ids, max_tokens=12, block=BLOCK, verify=BLOCK)
    assert again.tokens == numbers(PAIR)[f"b{BLOCK}.p1.output_ids"].tolist()[len(ids) :][:12]


@pytest.mark.parametrize("ops", parameters(["numba", "cuda"], ["f32"]), indirect=True)
def test_every_sample_begins_behind_the_prompt(ops):
    engine = engine_of(target_of(PAIR), PAIR, ops.name, "f32")
    options = {"max_tokens": 9, "temperature": 1.2, "verify": 4}
    several = md.generate(engine, [3, 5, 7], samples=3, **options).samples
    texts = [s["tokens"] for s in several]
    assert len({*map(tuple, texts)}) > 1
    assert texts[0] == md.generate(engine, [3, 5, 7], **options).tokens
    plain = md.generate(engine, [3, 5, 7], samples=3, drafter=False, **(options | {"verify": 1})).samples
    assert texts == [s["tokens"] for s in plain]


@pytest.mark.parametrize("ops", parameters(["oracle", "numba", "emulate", "cuda"], ["f32"]), indirect=True)
def test_distinct_experts_of_a_round_are_counted(ops):
    """What a round tells is what `route` gave its rows; a plain round goes through as many as a row uses."""
    pair = "dflash-qwen3-moe-tiny"
    options = {"graph": False} if ops.name == "cuda" else {}
    names = [str(golden(name)) for name in (target_of(pair), pair)]
    engine = md.load(names[0], drafter=names[1], backend=ops.name, activations="f32", warm=False, **options)
    backend, layers = engine.ops.backend, engine.target.config.layers
    used, seen, route = layers[0].experts.used, [], backend.route

    def watched(*args):
        route(*args)
        if getattr(backend, "prepared", None) is not None:  # a graph is being prepared: nothing ran
            return
        seen.append(len(set(backend.download(args[12]).reshape(-1).tolist()) - {-1}))

    backend.route = watched
    plain = list(md.stream(engine, [3, 5, 7], max_tokens=4, drafter=False))
    assert [r.experts for r in plain] == [None, used, used, used]
    seen.clear()
    rounds = list(md.stream(engine, [3, 5, 7], max_tokens=9, verify=6, block=8))
    means = [sum(seen[i : i + len(layers)]) / len(layers) for i in range(0, len(seen), len(layers))]
    assert [r.experts for r in rounds[1:]] == means[1 : len(rounds)]  # the first is the prompt's
    assert max(means) > used
