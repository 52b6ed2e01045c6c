"""What a caller may rely on: prompts and keywords as they are meant, refusals at the call, reasons, times,
sizes."""

import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import minidflash as md
from minidflash.errors import UserError
from minidflash.loop import rounds_of
from minidflash.request import Request
from minidflash.stats import Timing
from tests import automaton

P = [9] * 8 + [5]


def load(folder, backend="oracle", **options):
    target, drafter = automaton.build(folder, "FX-B")
    return md.load(str(target), drafter=str(drafter), backend=backend, warm=False, **options)


@pytest.fixture
def engine(tmp_path):
    return load(tmp_path)


def edit(file, **keys):
    """Set keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def with_token(target, number, text="<pad>"):
    """Give a checkpoint's tokenizer one more token, as fine-tuning does; its embedding stays as it is."""
    file = target / "tokenizer.json"
    known = json.loads(file.read_text())
    known["model"]["vocab"][text] = number
    token = {"id": number, "content": text, "special": True}
    known["added_tokens"] = [token | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)]
    file.write_text(json.dumps(known))


# Ids of a prompt


@pytest.mark.parametrize("backend", ["oracle", "numba"])
@pytest.mark.parametrize("number", [64, 71, 10**6])
def test_f98_an_id_without_a_row_is_refused_by_both_doors(tmp_path, backend, number):
    target, drafter = automaton.build(tmp_path, "FX-B")
    with_token(target, number)
    edit(target / "tokenizer_config.json", chat_template="{{ messages[0].content }} <pad>")
    engine = md.load(str(target), drafter=str(drafter), backend=backend, warm=False, ctx=64)
    chat = [{"role": "user", "content": "t5"}]
    for prompt, options in (("t9 t5 <pad>", {"raw": True}), ("t5", {}), (chat, {}), ([9, number, 5], {})):
        for use in (True, False):
            with pytest.raises(UserError, match=f"token {number} '<pad>' is outside 0 to 63") as refusal:
                md.generate(engine, prompt, max_tokens=4, drafter=use, **options)
            assert "leave it out" in refusal.value.hint
    assert engine.state is None  # nothing ran
    assert md.generate(engine, "t9 t5", raw=True, max_tokens=2).tokens == [20, 20]
    (note,) = engine.notes
    assert f"knows an id that the model has no row for, {number} '<pad>'" in note


def test_f98_the_command_line_tells_of_ids_without_a_row(tmp_path, mdf):
    target, _ = automaton.build(tmp_path, "FX-B")
    with_token(target, 64, "<a\n\x1b>")
    flags = "generate", "--target", target, "--backend", "oracle", "--raw", "-n", 2, "--drafter", "none", "t5"
    code, out, err = mdf(*flags)
    assert (code, out) == (0, "t20 t20\n")
    assert err == (
        "minidflash: the tokenizer knows an id that the model has no row for, 64 '<a\\n\\x1b>': "
        "refused when used\n"
    )
    assert mdf(*flags, "-q")[2] == ""


def test_stop_ids_of_a_tokenizer_without_a_row_are_no_stop_ids(tmp_path):
    target, drafter = automaton.build(tmp_path, "FX-B")
    with_token(target, 2**31 + 7)
    edit(target / "tokenizer_config.json", eos_token="<pad>")
    engine = md.load(str(target), drafter=str(drafter), backend="oracle", warm=False, ctx=64)
    assert engine.tokenizer.stop_ids == {2**31 + 7} and engine.stop_ids == {automaton.EOS}
    assert md.generate(engine, P, max_tokens=3).tokens == [20] * 3


def test_prompts_of_every_kind_that_means_one(engine):
    want = [20] * 3
    for prompt in (tuple(P), np.array(P), np.array(P, np.uint8), list(np.array(P)), range(9, 10), "t9 t5"):
        raw = {"raw": True} if isinstance(prompt, str) else {}
        assert md.generate(engine, prompt, max_tokens=3, **raw).tokens == want


def test_a_chat_is_any_sequence_of_messages(tmp_path):
    target, _ = automaton.build(tmp_path, "FX-B")
    edit(target / "tokenizer_config.json", chat_template="t9 {{ messages[0].content }}")
    engine = md.load(str(target), backend="oracle", warm=False, ctx=64)
    chat = [{"role": "user", "content": "t5"}]
    for prompt in (chat, tuple(chat), "t5"):
        assert md.generate(engine, prompt, max_tokens=2).prompt_tokens == 2
    with pytest.raises(UserError, match="message 0 has no role"):
        md.generate(engine, [9, *chat])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "of type NoneType"), (b"t9", "of type bytes"), ({9}, "of type set"),
        ({"a": 9}, "of type dict"),
        (5, "of type int"), (np.array([9.0, 5.0]), "array of float64"),
        (np.array([[9, 5]]), r"shape \(1, 2\)"), (np.array([True]), "array of bool"),
        ([9, "t5"], "holds 't5' of type str"), ([9, 5.0], "of type float"), ([9, True], "of type bool"),
        ([[9], [5]], "of type list"), ([9, None], "of type NoneType"), ([-1], "token -1 is outside"),
        ([10**4000], "is outside"), ([], "is empty"), ("", "is empty"), (np.array([], int), "is empty"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_named(engine, prompt, words):
    with pytest.raises(UserError, match=words) as refusal:
        md.generate(engine, prompt, max_tokens=3, raw=isinstance(prompt, str))
    assert len(str(refusal.value).splitlines()) == 1 and len(str(refusal.value)) < 300


# Keywords


def test_f105_none_is_not_given_and_numpy_numbers_are_numbers(engine):
    usual = md.generate(engine, P, max_tokens=5)
    names = [
        "stop", "ignore_eos", "block", "verify", "raw", "system", "template_args", "temperature", "top_k",
        "top_p",
        "min_p", "seed", "samples", "accept", "logprobs",
    ]  # fmt: skip
    result = md.generate(engine, P, max_tokens=5, **dict.fromkeys(names))
    assert (result.tokens, result.options) == (usual.tokens, {"max_tokens": 5})
    numbers = {
        "max_tokens": np.int64(5), "verify": np.uint8(4), "block": np.array(4),
        "temperature": np.float32(0.5),
        "top_k": np.int32(3), "seed": np.uint64(2**64 - 1), "ignore_eos": np.True_, "stop": ("never",),
    }  # fmt: skip
    result = md.generate(engine, P, **numbers)
    assert result.tokens == usual.tokens
    told = json.loads(json.dumps(result.to_json()))["options"]
    assert told == {name: list(v) if name == "stop" else v for name, v in numbers.items()}


def test_a_drafter_may_be_left_out_in_words(tmp_path):
    engine = load(tmp_path)
    for value in (None, False, "none", np.False_):
        assert md.generate(engine, P, max_tokens=9, drafter=value).stats.block is None
    for value in (True, np.True_):
        assert md.generate(engine, P, max_tokens=9, drafter=value).stats.block == 8
    for value in (None, False, "none"):
        assert md.load(engine.target_name, drafter=value, backend="oracle", warm=False).drafter is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", ("5", 5.0, -1, True, np.array([5, 6]), b"5")),
        ("stop", ("x", 5, [5], [None], {"x"}, [""], b"x")), ("ignore_eos", ("no", 1, [])),
        ("raw", (1, "yes")), ("system", (5, ["x"])), ("logprobs", (1, "yes")),
        ("template_args", ([("a", 1)], "a=1", {5: 1})), ("drafter", ("default", 1, 0, "path")),
        ("verify", ("some", 0, 2.0, [4], np.array([4, 4]))), ("block", ("8", 0, 65, 8.0, np.array([8, 8]))),
        ("accept", ("maybe", 1, np.array(["match", "match"]))), ("temperature", (10**400, "1", True, np.nan)),
        ("top_p", (10**5000, [0.5])), ("samples", (2**31 - 1, 10**5000)), ("seed", (np.array([1, 2]), 2**64)),
        ("top_k", (np.array([1, 2]), np.float64(2))), ("min_p", (np.array([0.1]), None.__class__)),
    ],
)  # fmt: skip
def test_values_of_a_wrong_kind_are_refused_by_name(engine, name, values):
    for value in values:
        others = {} if name == "temperature" else {"temperature": 1.0}
        with pytest.raises(UserError, match=f"^{name.replace('_', '-')} |^a stop") as refusal:
            md.stream(engine, "t5", **{name: value}, **others)  # at the call
        assert len(str(refusal.value).splitlines()) == 1 and len(str(refusal.value)) < 250


@pytest.mark.parametrize("name", ["ctx", "prefill_chunk"])
def test_load_refuses_numbers_of_a_wrong_kind(tmp_path, name):
    for value in ("512", 0, 1.5, True, [64]):
        with pytest.raises(UserError, match=name.replace("_", "-")):
            load(tmp_path, **{name: value})
    with pytest.raises(UserError, match="the target allows 1 to 4096"):
        load(tmp_path, ctx=10**5000)


def test_load_takes_numpy_numbers_and_no_larger_chunk_than_the_context(tmp_path):
    engine = load(tmp_path, ctx=np.int64(64), prefill_chunk=np.int64(10**9))
    assert (engine.ctx, engine.chunk) == (64, 64)
    assert md.generate(engine, [9] * 60, max_tokens=3).tokens == [20] * 3


# Errors at the call, streams that were never begun


def test_stream_refuses_at_the_call(engine):
    for prompt, options, words in (
        (P, {"stop": "x"}, "a list is needed"), (P, {"stop": [""]}, "a stop string is empty"),
        (P, {"max_tokens": 5000}, "positions"), ([], {}, "empty"), ([64], {}, "outside"),
        (P, {"top_k": 3}, "top-k"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            md.stream(engine, prompt, **options)
    running = md.stream(engine, P, max_tokens=60)
    next(running)
    with pytest.raises(UserError, match="already"):
        md.stream(engine, P)
    running.close()


def test_a_stream_that_was_never_begun_holds_nothing(engine):
    idle, other = md.stream(engine, P, max_tokens=5), md.stream(engine, P, max_tokens=5)
    assert md.generate(engine, P, max_tokens=5).tokens == [20] * 5
    next(other)
    with pytest.raises(UserError, match="already"):
        next(idle)
    assert sum(len(r.tokens) for r in other) == 4
    idle.close()


# How a run ends


def interrupt_after(engine, count, **options):
    """Rounds of a stream whose engine is told to stop when `count` of them have been given out."""
    found = []
    for r in md.stream(engine, P, verify=1, **options):
        found.append(r)
        if len(found) == count:
            engine.is_interrupted = True
    return found


def test_a_stream_that_is_interrupted_says_so_in_its_last_round(engine):
    for stop in (
        None,
        ["t20 t9"],
    ):  # a round that may be part of a stop string is held, and given out all the same
        found = interrupt_after(engine, 3, max_tokens=60, stop=stop)
        assert [r.finish_reason for r in found[:-1]] == [None] * (len(found) - 1)
        assert found[-1].finish_reason == "interrupted"
        assert 4 <= sum(len(r.tokens) for r in found) <= 6
        assert "".join(r.text for r in found) == " ".join(["t20"] * sum(len(r.tokens) for r in found))
    assert md.generate(engine, P, max_tokens=5).finish_reason == "length"


def test_answers_that_have_not_begun_are_left_out(engine, monkeypatch):
    from minidflash import request

    monkeypatch.setattr(request, "SIDE_BY_SIDE", 2)
    options = {"max_tokens": 3, "temperature": 1.0, "samples": 6}
    found = interrupt_after(engine, 1, **options)
    ends = [[(0, None), (0, "interrupted")], [(1, None), (1, "interrupted")]]
    assert [(r.sample, r.finish_reason) for r in found] == ends[0] + ends[1]
    found = interrupt_after(engine, 5, **options)  # three rounds of the first answer, two of the second
    whole = [(number, reason) for number in (0, 1) for reason in (None, None, "length")]
    assert [(r.sample, r.finish_reason) for r in found] == [*whole, (2, "interrupted"), (3, "interrupted")]
    assert len(interrupt_after(engine, 16, **options)) == 18  # the last two were whole


def test_generate_tells_of_an_interruption_from_another_thread(engine):
    launch, count = engine.ops.backend.start, [0]

    def start(*args):
        count[0] += 1
        if count[0] == 4:
            thread = threading.Thread(target=setattr, args=(engine, "is_interrupted", True))
            thread.start()
            thread.join()
        return launch(*args)

    engine.ops.start = start
    result = md.generate(engine, P, max_tokens=60, verify=1)
    assert (result.finish_reason, len(result.tokens)) == ("interrupted", 5)
    count[0] = 0
    result = md.generate(engine, P, max_tokens=60, verify=1, temperature=1.0, samples=3)
    assert [(s["finish_reason"], len(s["tokens"])) for s in result.samples] == [("interrupted", 5)] * 3


def test_an_interruption_before_the_first_round_ends_with_the_first_token(engine, monkeypatch):
    from minidflash import loop

    def prefill(*args, do=loop.prefill):
        firsts = do(*args)
        engine.is_interrupted = True
        return firsts

    monkeypatch.setattr(loop, "prefill", prefill)
    result = md.generate(engine, P, max_tokens=60)
    assert (result.finish_reason, result.tokens) == ("interrupted", [20])
    assert md.generate(engine, P, max_tokens=1).finish_reason == "length"  # it was the last one anyway


def test_nothing_asked_for_is_as_many_answers_of_nothing(engine):
    result = md.generate(engine, P, max_tokens=0, temperature=1.0, samples=3)
    assert [s["tokens"] for s in result.samples] == [[], [], []] and result.finish_reason == "length"


def test_ttft_is_counted_from_the_call(engine, monkeypatch):
    from minidflash import loop, request

    def slowly(do, seconds):
        def call(*args):
            time.sleep(seconds)
            return do(*args)

        return call

    monkeypatch.setattr(request, "prompt_ids", slowly(request.prompt_ids, 0.05))  # a template, an encoder
    monkeypatch.setattr(loop, "prepare", slowly(loop.prepare, 0.07))  # kernels that compile, widths
    since = time.perf_counter()
    timing = md.generate(engine, P, max_tokens=3, verify=1).timing
    whole = time.perf_counter() - since
    assert timing.prefill_s + 0.12 <= timing.ttft_s <= whole
    since, timing = time.perf_counter(), Timing()
    rounds = rounds_of(engine, Request.of(engine, P, {"max_tokens": 3, "verify": 1}), timing)
    next(rounds)
    assert 0.12 <= timing.ttft_s <= time.perf_counter() - since
    rounds.close()


# A drafter with a shorter context


def test_f108_a_drafter_made_for_fewer_positions(tmp_path, mdf):
    target, drafter = automaton.build(tmp_path, "FX-B")
    edit(drafter / "config.json", max_position_embeddings=256)
    flags = "generate", "--target", target, "--backend", "oracle", "-q", "-n", 3, "--tokens"
    long = " ".join(["9"] * 300 + ["5"])
    code, out, err = mdf(*flags, long, "--drafter", drafter)
    assert (code, out) == (2, "") and "need 304 positions, the drafter was made for 256" in err
    assert "--drafter none" in err and "--ctx" not in err
    assert mdf(*flags, long, "--drafter", "none")[:2] == (0, "t20 t20 t20\n")
    engine = md.load(str(target), drafter=str(drafter), backend="oracle", warm=False, ctx=512)
    config = engine.drafter.config
    assert (engine.ctx, config.context(512), config.context(100)) == (512, 256, 100)
    assert replace(config, max_positions=0).context(70) == 70  # not stated: the target's
    cos, _ = engine.target.tables[0]
    assert len(cos) == 512 + 64 and engine.drafter.tables[0][0] is cos  # one kind of rope
    assert md.generate(engine, [9] * 300 + [5], max_tokens=3, drafter=False).tokens == [20] * 3
    with pytest.raises(UserError, match="made for 256"):
        md.stream(engine, [9] * 250, max_tokens=7)
    drafted = md.generate(engine, [9] * 206 + [5], max_tokens=49)  # to the drafter's last position
    assert drafted.tokens == [20] * 49 and sum(drafted.rounds) == 48
    assert engine.state.injected.k.shape[3] == 256 + 8 and engine.state.caches[0].k.shape[2] == 512 + 8
    assert md.generate(engine, [9] * 400 + [5], max_tokens=100, drafter=False).tokens == [20] * 100
    with pytest.raises(UserError, match="512 are there") as refusal:
        md.generate(engine, [9] * 510, max_tokens=3, drafter=False)
    assert "raise --ctx" in refusal.value.hint


def test_info_and_load_agree_on_the_context(tmp_path, mdf):
    target, drafter = automaton.build(tmp_path, "FX-B")
    edit(drafter / "config.json", max_position_embeddings=256)
    pair = "--target", target, "--drafter", drafter, "--backend", "oracle"
    memory = json.loads(mdf("info", "--json", *pair)[1])["memory"]
    engine = md.load(str(target), drafter=str(drafter), backend="oracle", warm=False)
    assert memory["ctx"] == memory["limit"] == engine.ctx == 4096
    md.generate(engine, P, max_tokens=2)
    assert {name: memory["bytes"][name] for name in engine.state.memory} == engine.state.memory


def test_greedy_drafts_hold_no_ids_that_the_target_cannot_choose(tmp_path):
    """Rows of the head behind the tokenizer's ids are never drafted, as they are never drawn."""
    target, drafter = automaton.build(tmp_path, "FX-B")
    engine = md.load(str(target), drafter=str(drafter), backend="oracle", warm=False)
    assert engine.drafter.ids == engine.target.ids <= engine.target.config.vocab
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    known = dict(list(tokenizer["model"]["vocab"].items())[:40])
    tokenizer["model"]["vocab"] = known
    tokenizer["added_tokens"] = [t for t in tokenizer.get("added_tokens", []) if t["id"] < 40]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    fewer = md.load(str(target), drafter=str(drafter), backend="oracle", warm=False)
    assert fewer.target.ids == fewer.drafter.ids < engine.target.ids, "cannot_choose"
