"""Sampling: the target's filtered law exactly, and for a seed the same text with any drafter and with none.

Sample-and-match: the target's own draw at each position decides. Rejection sampling (accept="reject")
promises the law alone. The laws are known: pair FX-S of automaton.py."""

import itertools
from functools import cache

import ml_dtypes
import numpy as np
import pytest

import minidflash as md
from minidflash.drafter import draft
from minidflash.errors import UserError
from tests.automaton import TABLES, VOCAB, build
from tests.chance import LAWS, filtered, surprise
from tests.conftest import FULL, open_or_skip, parameters, parameters_with
from tests.replay import Replay, check_plan, histogram, proposing
from tests.test_field_log_limits import resident
from tests.test_lossless import GOLDEN, embedded, ids_of, load, prompt_of

FILTERS = [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}]
LAW_CASES = [{"temperature": t, **law} for t in (0.3, 1.0, 1.7) for law in FILTERS]
# Of the emulator, which is slow: every filter and every temperature. The kernel tests pair them all.
FEW_LAW_CASES = [law for law in LAW_CASES if law["temperature"] == 1.0 or len(law) == 1]
RAW = {"ignore_eos": True}
RULES = ("match", "reject")
RULED = [(accept, law) for accept in RULES for law in LAW_CASES]
FEW_RULED = [(RULES[i % 2], law) for i, law in enumerate(FEW_LAW_CASES)]
PAIRED = [(RULES[i % 2], law) for i, law in enumerate(LAW_CASES)]  # all pairs, for Numba
ON = ["numba", "emulate", "cuda"], ["f32"]
on_backends = pytest.mark.parametrize(
    "backend", [pytest.param(p.values[0][0], id=p.values[0][0], marks=p.marks) for p in parameters(*ON)]
)


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CHECK", "1")


def open_fx(folder, name="FX-S", backend="numba", changes=None, **options):
    open_or_skip(backend, "f32")  # skips where it cannot run
    target, draft = build(folder, name, **(changes or {}))
    return md.load(str(target), drafter=str(draft), backend=backend, ctx=256, warm=False, **options)


@pytest.fixture(scope="module")
def fx_of(tmp_path_factory):
    """backend -> the pair FX-S on it, opened once; on the emulator with fewer layers that add nothing."""
    small = {"layers": 2, "taps": (0,), "ffn": 16}

    @cache
    def of(backend):
        changes = small if backend == "emulate" else None
        return open_fx(tmp_path_factory.mktemp("FX-S"), backend=backend, changes=changes)

    return of


@pytest.fixture(scope="module")
def fx(fx_of):
    return fx_of("numba")


def transitions(**law):
    """P[a, b]: the chance that b follows a on FX-S under the filtered law, from the stored weights."""
    head = np.zeros((VOCAB, VOCAB))
    for token, nexts in TABLES["FX-S"]["successor"].items():
        for following, chance in (nexts if isinstance(nexts, dict) else {nexts: 1.0}).items():
            head[token, following] = (12 + np.log(chance)) / 8
    logits = head.astype(ml_dtypes.bfloat16).astype(np.float64) * 8 / np.sqrt(1 + 1e-6)
    return np.stack([filtered(row, **law) for row in logits])


def triples(engine, count, start=5, **options):
    """Counts of whole 3-token outcomes, (V, V, V)."""
    found = md.generate(engine, [start], max_tokens=3, samples=count, **RAW, **options)
    counts = np.zeros((VOCAB,) * 3)
    for one in found.samples:
        counts[tuple(one["tokens"])] += 1
    return counts, found


def joint(start=5, **law):
    p = transitions(**law)
    return p[start][:, None, None] * p[:, :, None] * p[None]


# ---- the law -----------------------------------------------------------------------------------------------


# Outcomes: usually, and with FULL.
COUNTS = {"numba": (1000, 4000), "emulate": (60, 400), "cuda": (300, 2000)}


@pytest.mark.parametrize("on, ruled", parameters_with(RULED, FEW_RULED, *ON, numba=PAIRED))
def test_the_joint_law_of_three_tokens(fx_of, on, ruled, monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CHECK", "0")
    fx, count, (accept, law) = fx_of(on[0]), COUNTS[on[0]][FULL], ruled
    counts, found = triples(fx, count, block=3, verify=3, accept=accept, **law)
    assert counts.sum() == count and surprise(counts, joint(**law)) < 4.5
    assert 0 < sum(r - 1 for one in found.samples for r in one["rounds"]), "drafts are kept"
    if accept == "match":
        few = md.generate(fx, [5], max_tokens=3, samples=10, drafter=False, **RAW, **law)
        assert [one["tokens"] for one in few.samples] == [one["tokens"] for one in found.samples[:10]]


def likeliest_as_drawn(ops, engine, s, drafted_rows):
    """Stands in for engine.draft: the drafter's likeliest tokens, under the laws that draws would come
    from."""
    draft(ops, engine, s, drafted_rows)
    w, config, target = engine.drafter.weights, engine.drafter.config, engine.target
    ops.head(
        s.draft_rows.x, drafted_rows, w["norm"], config.eps, target.weights["head"], target.ids,
        s.drafts.reshape(-1), None, s.work
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("backend", [p for p in on_backends.args[1] if p.id != "emulate"])
def test_a_biased_rule_fails_the_same_test(fx_of, backend, temperature, monkeypatch):
    """Argmax drafts accepted by u q < p as if they had been drawn from q."""
    monkeypatch.setenv("MINIDFLASH_CHECK", "0")
    fx, law = fx_of(backend), {"temperature": temperature}
    with proposing(fx, likeliest_as_drawn):
        counts, _ = triples(fx, 700, block=3, verify=3, accept="reject", **law)
    assert surprise(counts, joint(**law)) > 6


# ---- what rejection promises, and what not -----------------------------------------------------------------


def test_rejection_gives_a_seeds_text_again_and_no_other_rules_text(fx, tmp_path):
    def text(engine=fx, **options):
        options = {"max_tokens": 24, "temperature": 1.0, "seed": 7, **RAW, **options}
        return md.generate(engine, [9, 5], **options).tokens

    first = text(accept="reject", verify=4)
    assert first == text(accept="reject", verify=4) == text(accept="reject", verify=4, logprobs=True)
    assert first == text(open_fx(tmp_path, prefill_chunk=1), accept="reject", verify=4)
    assert len({tuple(text(accept="reject", verify=4, seed=seed)) for seed in range(8)}) == 8
    assert first != text(verify=4) == text(verify=3), "another rule, another text"
    assert first != text(accept="reject", verify=3), "what a seed gives depends on the rows verified"
    assert text(accept="reject", verify=1) == text() == text(accept="reject", verify=4, drafter=False)
    many = md.generate(
        fx, [9, 5], max_tokens=24, temperature=1.0, seed=7, samples=4, accept="reject", verify=4, **RAW
    )
    assert many.samples[0]["tokens"] == first and len({tuple(one["tokens"]) for one in many.samples}) == 4


def test_the_drafters_law_is_filtered_like_the_targets(fx):
    kept = {}
    for name, law in (("all", {}), ("top_k", {"top_k": 2}), ("min_p", {"min_p": 1.0})):
        md.generate(fx, [9, 9, 5], max_tokens=9, accept="reject", verify=4, temperature=1.7, **RAW, **law)
        mass = fx.ops.download(fx.state.mass)[0, 1:4]
        assert (mass.max(1) == 2.0**43).all()
        kept[name] = (mass > 0).sum(1).tolist()
    assert kept == {"all": [VOCAB] * 3, "top_k": [2] * 3, "min_p": [1] * 3}


# ---- drafted == plain --------------------------------------------------------------------------------------


def sampled_sweep(engine, prompt, seed, count, block=16, widths=(3, 64, "auto"), law=None, own=True):
    """One seed, plain, with the engine's drafter, with the replay drafter: the replay's accepted lengths."""
    options = {**RAW, "seed": seed, **(law or LAWS[seed % len(LAWS)])}
    known = md.generate(engine, prompt, max_tokens=count + block, drafter=False, **options).tokens
    seen = {}
    for verify in widths:
        replay = Replay(prompt + known, len(prompt), block, engine.target.config.vocab, seed=seed)
        for propose in [engine.draft] * own + [replay]:
            with proposing(engine, propose):
                rounds = list(
                    md.stream(engine, prompt, max_tokens=count, block=block, verify=verify, **options)
                )
            found = [token for r in rounds for token in r.tokens]
            assert found == known[:count], f"seed {seed}, verify {verify}"
        check_plan(replay, len(prompt), rounds)
        for kept, times in histogram(rounds).items():
            seen[kept] = seen.get(kept, 0) + times
    return seen


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("pair", GOLDEN)
def test_golden_pairs_sample_the_same_text_with_any_drafter(pair, activations, tmp_path):
    engine, seen, texts = load(pair, tmp_path, activations=activations), {}, set()
    prompt = prompt_of(engine, 21)
    for seed in range(200 if FULL else 8):
        widths = ((64,), (5,), ("auto",))[seed % 3]
        for kept, times in sampled_sweep(engine, prompt, seed, 40, (16, 8, 4)[seed % 3], widths).items():
            seen[kept] = seen.get(kept, 0) + times
        options = {**RAW, "seed": seed, "max_tokens": 20, "temperature": 1.5}
        texts.add(tuple(md.generate(engine, prompt, **options).tokens))
    assert len(texts) > 5 and len(seen) > 10, "seeds differ, and all kinds of rounds occur"


def test_prefill_chunks_change_no_draw(tmp_path):
    found = set()
    for chunk in (1, 7, 64):
        engine = load("dflash-llama-tiny", tmp_path, prefill_chunk=chunk)
        options = {**RAW, "temperature": 1.2, "seed": 9, "max_tokens": 24}
        found.add(tuple(md.generate(engine, prompt_of(engine, 40), verify=5, **options).tokens))
    assert len(found) == 1


@pytest.mark.parametrize("activations", ["f32", "bf16"])
def test_the_emulator_samples_the_same_text_with_any_drafter(activations, tmp_path):
    open_or_skip("emulate", activations)
    pair = {"f32": "dflash-qwen3-tiny", "bf16": "grouped"}[activations]  # of the latter, weights are bf16
    engine = load(pair, tmp_path, backend="emulate", activations=activations)
    for seed in range(4 if FULL else 2):
        sampled_sweep(engine, prompt_of(engine, 9), seed, 8, 4, (3,), own=seed == 0)
    assert engine.ops.backend.variants["sample"] == {"f32": "plain", "bf16": "fast"}[activations]


def test_the_embedded_pair_samples_the_same_text(tmp_path):
    engine = embedded()
    prompt = ids_of(engine, "Write a Python function that reverses a string.")
    seeds, count = (50, 128) if FULL else (2, 40)
    for seed in range(seeds):
        sampled_sweep(engine, prompt, seed, count, 16, ((64,), (4,), ("auto",))[seed % 3])


def test_a_draw_that_moves_with_the_round_is_caught(tmp_path):
    """What keys by the number of draws made, and not by position, forks from plain decoding."""
    engine = load("dflash-llama-tiny", tmp_path)
    prompt, options = prompt_of(engine, 21), {**RAW, "temperature": 1.0}
    known = md.generate(engine, prompt, max_tokens=60, drafter=False, **options).tokens
    sample, drawn = engine.ops.backend.sample, itertools.count()

    def moving(x, pick, slot, pos, *rest):
        sample(x, pick, slot, pos + next(drawn), *rest)

    engine.programs.clear()
    engine.ops.__dict__.pop("sample")
    engine.ops.backend.sample = moving
    replay = Replay(prompt + known, len(prompt), 8, engine.target.config.vocab)
    with pytest.raises(AssertionError), proposing(engine, replay):
        rounds = list(md.stream(engine, prompt, max_tokens=40, block=8, verify=8, **options))
        assert [t for r in rounds for t in r.tokens] == known[:40]


# ---- edges of the law (F59, F60, F07) ----------------------------------------------------------------------


@pytest.mark.parametrize("law", [{"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}], ids=str)
@pytest.mark.parametrize("accept", RULES)
@on_backends
def test_f59_filters_reach_the_verify_sampler(fx_of, backend, accept, law):
    fx, count, seeds = fx_of(backend), *((30, 20) if backend == "numba" else (12, 2))
    greedy = md.generate(fx, [9] * 10 + [5], max_tokens=count, **RAW).tokens
    for seed in range(seeds):
        options = {"seed": seed, "temperature": 1.0, "accept": accept, **RAW, **law}
        assert md.generate(fx, [9] * 10 + [5], max_tokens=count, verify=8, **options).tokens == greedy


@pytest.mark.parametrize("accept", RULES)
@on_backends
def test_f60_tiny_temperatures_are_greedy_and_none_gives_nan(fx_of, backend, accept):
    fx, prompt = fx_of(backend), [9] * 10 + [5]
    options = {
        "max_tokens": 30 if backend == "numba" else 12,
        "logprobs": True,
        "verify": 8,
        "accept": accept,
        **RAW,
    }
    greedy = md.generate(fx, prompt, max_tokens=options["max_tokens"], **RAW).tokens
    tiny = (0, 0.0, 1e-9, 1e-6, 1e-5, 1e-4, 1e-3)
    for temperature in tiny if backend != "emulate" or FULL else (0, 1e-6, 1e-3):
        found = md.generate(fx, prompt, temperature=temperature, **options)
        assert found.tokens == greedy
        assert np.isfinite(found.logprobs).all()
    for temperature in (50, 1e30, 1e300):
        found = md.generate(fx, prompt, temperature=temperature, **options)
        assert np.isfinite(found.logprobs).all() and len(set(found.tokens)) > 5


BAD = [("temperature", (-1, -1e-9, float("nan"), float("inf"), "1", True)),
       ("top_p", (0, -0.1, 1.01, float("nan"))), ("top_k", (-1, 1.5, True)),
       ("min_p", (-0.1, 1.1, float("nan"))), ("seed", (-1, 2**64, 0.5)), ("samples", (0, -1, 1.5)),
       ("accept", ("maybe", 1))]  # fmt: skip


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD for value in values])
def test_bad_values_are_refused_by_name(fx, name, value):
    with pytest.raises(UserError, match=name.replace("_", "-")):
        md.generate(fx, [5], max_tokens=1, **{"temperature": 1.0, name: value})


def test_what_has_no_effect_is_refused(fx):
    for name, value in (("top_k", 3), ("top_p", 0.5), ("min_p", 0.1), ("seed", 1), ("samples", 2),
                        ("accept", "reject")):  # fmt: skip
        with pytest.raises(UserError, match="no effect at temperature 0"):
            md.generate(fx, [5], max_tokens=1, **{name: value})
        md.generate(fx, [5], max_tokens=1, verify=4, **{"temperature": 0.0, name: value})  # said, so meant
    for verify in ({}, {"verify": "auto"}):
        with pytest.raises(UserError, match="--accept reject needs a fixed --verify") as refusal:
            md.generate(fx, [5], max_tokens=1, temperature=1.0, accept="reject", **verify)
        assert "not the text" in str(refusal.value) and "--verify N" in refusal.value.hint
    assert md.generate(fx, [5], max_tokens=1, temperature=1.0, accept="match", top_k=None).tokens


def test_f07_padding_rows_are_never_drawn(tmp_path):
    """Ids that the tokenizer does not have are not chosen: the law is the one over the ids it has."""
    engine = open_fx(tmp_path, "FX-B", changes={"pad": 8})
    assert engine.target.config.vocab == 72 and engine.target.ids == 64
    greedy = md.generate(engine, [9] * 40 + [5], max_tokens=33, verify=8, **RAW)
    assert set(greedy.tokens) == {20} and greedy.rounds == [8] * 4
    for seed in range(30):
        options = {"temperature": 50.0, "seed": seed, "max_tokens": 33, **RAW}
        found = md.generate(engine, [9] * 40 + [5], verify=8, **options).tokens
        assert max(found) < 64 and len(set(found)) > 10
        assert md.generate(engine, [9] * 40 + [5], drafter=False, **options).tokens == found


# ---- what comes out ----------------------------------------------------------------------------------------


def test_f62_a_seed_gives_its_text_again(fx):
    def text(**options):
        return md.generate(fx, [9, 5], max_tokens=24, temperature=1.0, **RAW, **options).tokens

    assert text(seed=7) == text(seed=7) == text(seed=7, verify=3) == text(seed=7, block=5)
    assert len({tuple(text(seed=seed)) for seed in (0, 1, 7, 2**32 + 7, 2**64 - 1)}) == 5


def test_samples_share_a_prefill_and_are_those_of_any_other_way(fx, monkeypatch):
    options = {"max_tokens": 20, "temperature": 1.0, "seed": 3, **RAW}
    one = md.generate(fx, [9] * 20 + [5], verify=8, **options)
    assert one.samples is None and "samples" not in one.to_json()
    many = md.generate(fx, [9] * 20 + [5], samples=5, verify=8, **options)
    plain = md.generate(fx, [9] * 20 + [5], samples=5, drafter=False, **options)
    texts = [one["tokens"] for one in many.samples]
    assert texts == [one["tokens"] for one in plain.samples]
    assert many.tokens == one.tokens == texts[0] and many.rounds == one.rounds == many.samples[0]["rounds"]
    assert len({tuple(t) for t in texts}) == 5
    rounds = list(md.stream(fx, [9] * 20 + [5], samples=3, **options))
    assert [r.sample for r in rounds if r.verify == 0] == [0, 1, 2]
    assert [t for r in rounds for t in r.tokens] == [t for text in texts[:3] for t in text]


@pytest.mark.parametrize("law", FILTERS, ids=str)
@pytest.mark.parametrize("accept", RULES)
def test_log_probabilities_are_those_of_the_law_and_of_the_model(fx, accept, law):
    kept = transitions(temperature=1.3, **law)
    law = {"temperature": 1.3, "verify": 8, "accept": accept, **law}
    found = md.generate(fx, [9, 5], max_tokens=40, logprobs=True, **RAW, **law)
    plain = md.generate(fx, [9, 5], max_tokens=40, logprobs=True, drafter=False, **RAW, **law)
    assert accept == "reject" or plain.logprobs == found.logprobs
    assert len(found.logprobs) == len(found.tokens)
    assert found.tokens == md.generate(fx, [9, 5], max_tokens=40, **RAW, **law).tokens
    before = [5, *found.tokens[:-1]]
    np.testing.assert_allclose(np.exp(found.logprobs)[:, 0], kept[before, found.tokens], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        np.exp(found.logprobs)[:, 1], transitions()[before, found.tokens], rtol=1e-4, atol=1e-6
    )


def test_greedy_log_probabilities(fx):
    found = md.generate(fx, [9, 5], max_tokens=12, logprobs=True, verify=8, **RAW)
    assert found.tokens == md.generate(fx, [9, 5], max_tokens=12, verify=8, **RAW).tokens
    before = [5, *found.tokens[:-1]]
    assert [pair[0] for pair in found.logprobs] == [0.0] * 12
    np.testing.assert_allclose(
        [p[1] for p in found.logprobs], np.log(transitions()[before, found.tokens]), rtol=1e-4
    )


def test_a_stop_text_cuts_text_ids_and_logprobs_alike(fx):
    for seed in range(10):
        options = {
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 40,
            "logprobs": True,
            "stop": ["t22 t22"],
            **RAW,
        }
        found = md.generate(fx, [9, 5], verify=8, **options)
        plain = md.generate(fx, [9, 5], drafter=False, **options)
        assert (found.text, found.tokens, found.logprobs) == (plain.text, plain.tokens, plain.logprobs)
        assert len(found.logprobs) == len(found.tokens) and "t22 t22" not in found.text
        assert not found.tokens or 1 + sum(found.rounds) == len(found.tokens)


def test_f69_many_rounds_leave_memory_as_it_was(fx, monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CHECK", "0")
    options = {"temperature": 1.0, "max_tokens": 200, "verify": 3, "top_p": 0.95, **RAW}
    rounds, marks = 0, []
    for seed in range(200 if FULL else 12):
        found = md.generate(fx, [9, 5], seed=seed, **options)
        assert all(0 <= token < VOCAB for token in found.tokens)
        rounds += len(found.rounds)
        marks.append(resident())
    assert rounds > 60 * len(marks)
    assert marks[-1] - marks[len(marks) // 3] < 2 << 20, "memory grows"
