"""Batch: a long prompt holds nobody up, and requests with stops, budgets, seeds and logprobs of their own get
what each gets alone."""

import pytest

import minidflash as md
from minidflash import target
from tests import automaton

CTX, CHUNK = 2304, 64
PROMPT = 2048  # tokens: 32 chunks


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An automaton whose tokens are drawn, with a text for each."""
    target, drafter = automaton.build(tmp_path_factory.mktemp("FX-S"), "FX-S")
    return md.load(str(target), drafter=str(drafter), backend="numba", warm=False, ctx=CTX,
                   prefill_chunk=CHUNK)  # fmt: skip


@pytest.mark.parametrize("drafter", [False, True])
def test_a_long_prompt_delays_no_round_by_more_than_a_chunk(engine, monkeypatch, drafter):
    """Eight others decode; between two rounds of each of them lies one chunk at most."""
    forward, chunks = target.forward, []

    def noted(ops, model, s, rows, *args):
        if len(rows.ids) > CHUNK // 2:  # no round has so many rows
            chunks.append(len(rows.ids))
        return forward(ops, model, s, rows, *args)

    monkeypatch.setattr(target, "forward", noted)
    long = [5 + i % 40 for i in range(PROMPT)]
    alone = md.generate(engine, long, max_tokens=3, drafter=drafter).tokens
    assert len(chunks) == PROMPT // CHUNK
    seen, waits, found = {}, [], []
    with md.Batch(engine, slots=9, drafter=drafter, **({"verify": 2} if drafter else {})) as batch:
        others = [batch.submit([5, i], max_tokens=100, ignore_eos=True) for i in range(8)]
        while len(seen) < len(others):
            seen[next(batch).handle] = len(chunks)
        asked = batch.submit(long, max_tokens=3)
        for one in batch:
            if one.handle is asked:
                found += one.round.tokens
                break
            waits.append(len(chunks) - seen[one.handle])
            seen[one.handle] = len(chunks)
        later = list(batch)
    assert {one.handle for one in later} == {asked, *others}, "all still decoded as the prompt was done"
    found += [token for one in later if one.handle is asked for token in one.round.tokens]
    assert len(chunks) == 2 * PROMPT // CHUNK and found == alone
    assert set(waits) <= {0, 1} and waits.count(1) >= len(others) * (PROMPT // CHUNK - 2)


STOPS = [  # strings, and where one begins: at a token, or inside of one
    (), ("t22",), ("1 t2",), ("t20 t20", "2 t22 t"), ("0 t",), ("t5",), (" t21 t22",), ("never",),
]  # fmt: skip


@pytest.mark.parametrize("slots, verify", [(3, 4), (8, 8), (5, 1)])
def test_stops_budgets_seeds_and_logprobs_are_each_requests_own(engine, slots, verify):
    wanted, found, asked, kinds = [], {}, {}, set()
    for i in range(24):
        options = {"max_tokens": 3 + 5 * i % 37, "stop": list(STOPS[i % len(STOPS)]), "logprobs": i % 3 == 0}
        if i % 4:
            options |= {"temperature": 1.0, "seed": i, "top_k": 40}
        prompt = [5] * (1 + i % 5) + [9]
        wanted.append((prompt, options, md.generate(engine, prompt, **options)))
    with md.Batch(engine, slots=slots, ctx=256, verify=verify) as batch:
        for prompt, options, _ in wanted:
            asked[handle := batch.submit(prompt, **options)] = len(asked)
            found[handle] = []
        for one in batch:
            assert one.error is None
            found[one.handle].append(one.round)
    for handle, i in asked.items():
        alone, rounds = wanted[i][2], found[handle]
        text = "".join(one.text for one in rounds)
        assert [token for one in rounds for token in one.tokens] == alone.tokens
        assert (text, rounds[-1].finish_reason) == (alone.text, alone.finish_reason)
        assert [pair for one in rounds for pair in one.logprobs or ()] == (alone.logprobs or [])
        assert all(one.finish_reason is None for one in rounds[:-1])
        if alone.finish_reason == "stop" and wanted[i][1]["stop"]:
            whole = engine.tokenizer.decode(alone.tokens)
            kinds.add("at a token" if text == whole else "inside a token")
        kinds.add(alone.finish_reason)
    assert kinds == {"at a token", "inside a token", "stop", "length"}
