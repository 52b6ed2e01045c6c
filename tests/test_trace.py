"""Traces: what they say is what happened, tracing changes nothing, a check finds what is not so."""

import json

import numpy as np
import pytest

import minidflash as md
from minidflash.errors import UserError, printable
from minidflash.trace import read as reading
from minidflash.trace.check import load_keywords
from minidflash.trace.read import read
from minidflash.trace.tell import tell_rows, tell_text
from minidflash.trace.write import Trace, identity_of
from tests import automaton
from tests.conftest import open_or_skip
from tests.models import engine_of
from tests.traces import HEADER, LINES, NASTY, line_of, save

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [5, 9, 17, 3, 70, 41]
CASES = {
    "greedy": {"verify": 8}, "auto": {}, "plain": {"drafter": False},
    "scored": {"verify": 4, "logprobs": True},
    "drawn": {"verify": 5, "temperature": 0.8, "seed": 4, "samples": 2},
    "rejected": {"verify": 4, "temperature": 1.0, "accept": "reject"},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    return engine_of("qwen3-tiny", "dflash-qwen3-trained", "numba", "f32")


def rounds_of(engine, **options):
    return list(md.stream(engine, PROMPT, **{"max_tokens": 24, "trace": True, **options}))


def flat(rounds, what):
    return [item for r in rounds for item in what(r)]


@pytest.mark.parametrize("case", CASES)
def test_tracing_changes_no_token_and_tells_every_row(engine, case):
    options = CASES[case]
    plain = rounds_of(engine, trace=False, **options)
    traced = rounds_of(engine, **options)
    assert all(r.detail is None for r in plain)
    if case != "auto":  # whose widths are measured
        assert [(r.tokens, r.drafted, r.accepted) for r in plain] == [
            (r.tokens, r.drafted, r.accepted) for r in traced
        ]
    for sample in range(options.get("samples", 1)):
        rounds = [r for r in traced if r.sample == sample]
        assert flat(rounds, lambda r: r.tokens) == flat(
            [r for r in plain if r.sample == sample], lambda r: r.tokens
        )
        at, anchor = len(PROMPT), rounds[0].tokens[-1]
        assert (rounds[0].detail.anchor, rounds[0].detail.start) == (PROMPT[-1], len(PROMPT) - 1)
        for r in rounds[1:]:
            assert (r.detail.anchor, r.detail.start) == (anchor, at)
            assert len(r.detail.choice) == r.verify
            assert r.detail.choice[: len(r.tokens)] == r.tokens, "kept drafts, and the target's own"
            assert list(r.detail.stages)[-2:] == ["verify", "accept"]
            before = list(r.detail.stages)[:-2]
            assert before == ["inject", "draft"] if r.verify > 1 else before in ([], ["inject"])
            assert 0 < sum(r.detail.stages.values()) <= r.seconds
            at, anchor = at + len(r.tokens), r.tokens[-1]
        greedy = case in ("greedy", "auto", "plain")
        assert all((r.detail.margins is not None) == greedy for r in rounds)


def test_margins_are_those_of_plain_decoding_bit_for_bit(engine):
    """Of rows whose drafts were kept; and they are what the logits say."""
    drafted, plain = rounds_of(engine, verify=8), rounds_of(engine, drafter=False)
    by_position = {r.detail.start: r.detail.margins[0] for r in plain}
    seen = 0
    for r in drafted:
        for row in range(len(r.tokens)):
            assert r.detail.margins[row] == by_position[r.detail.start + row]
            seen += 1
    assert seen == 24 and len({*by_position.values()}) > 20
    ops, s, model = engine.ops, engine.state, engine.target
    logits, last = ops.array((1, model.config.vocab), "f32"), plain[-1].detail
    ops.head_logits(
        s.rows.x[:1], model.weights["norm"], model.config.eps, model.head, 1.0, 0.0, s.work, logits
    )
    top = np.sort(ops.download(logits)[0, : model.ids])
    assert np.float32(last.margins[0]) == top[-1] - top[-2]


def test_the_emulated_card_is_traced_alike():
    """Margins of a round do not depend on its rows there either."""
    open_or_skip("emulate", "bf16")
    engine = engine_of("qwen3-tiny", "dflash-qwen3-trained", "emulate", "bf16")
    options = {"max_tokens": 4, "verify": 4}
    drafted, plain = rounds_of(engine, **options), rounds_of(engine, max_tokens=4, drafter=False)
    untraced = rounds_of(engine, trace=False, **options)
    assert [r.tokens for r in untraced] == [r.tokens for r in drafted]
    margins = [margin for r in drafted for margin in r.detail.margins[: len(r.tokens)]]
    assert margins == [r.detail.margins[0] for r in plain]
    assert all(set(r.detail.stages) == {"inject", "draft", "verify", "accept"} for r in drafted[1:])


def test_times_of_rounds_under_way_are_not_mixed(engine, monkeypatch):
    """Rounds started ahead have clocks of their own, which are read before they are used again."""
    monkeypatch.delenv("MINIDFLASH_CHECK", raising=False)
    monkeypatch.setattr(engine.ops, "rounds_ahead", 1)
    monkeypatch.setattr(engine, "programs", {})
    used, under_way, start = [], [], engine.ops.start

    def reading_of(clock):
        def read():
            under_way.remove(clock)
            return type(clock).read(clock)

        return read

    def noted(program, *buffers):
        if program.clock is not None:
            assert all(program.clock is not clock for clock in under_way), "its times are still to be read"
            under_way.append(program.clock)
            used.append(program.clock)
            program.clock.read = reading_of(program.clock)
        return start(program, *buffers)

    monkeypatch.setattr(engine.ops, "start", noted)
    rounds = rounds_of(engine, verify=4)
    assert len({id(clock) for clock in used}) == 2
    assert all(set(r.detail.stages) == {"inject", "draft", "verify", "accept"} for r in rounds[1:])


# ---- a file, re-told and checked --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return automaton.build(tmp_path_factory.mktemp("FX-A"), "FX-A")


@pytest.fixture(scope="module")
def traced(folders, tmp_path_factory):
    """A trace file of a run whose drafts are right, wrong, and right again."""
    from minidflash.cli import main

    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    pair = ["--target", str(folders[0]), "--drafter", str(folders[1])]
    ids = ["--tokens", "9 " * 20 + "5", "-n", "20", "--ignore-eos"]
    assert main(["generate", *pair, *ids, "--trace", str(path)]) == 0
    return path


def test_every_context_feature_is_injected_once(traced):
    """Prefill injects the prompt's; a round those that wait, its own then wait for the next one."""
    lines, waiting = read(traced).lines, 0
    assert lines[0]["injected"] == 21 and len({line["injected"] for line in lines}) > 2
    for line in lines[1:]:
        if "inject" in line["stages"]:
            assert line["injected"] == waiting
            waiting = 0
        else:
            assert line["injected"] == 0
        waiting += len(line["ids"])


def test_a_header_says_what_to_run(traced, folders):
    header = read(traced).header
    assert (header["target"], header["drafter"]) == tuple(map(str, folders))
    assert header["prompt"] == [9] * 20 + [5] and header["options"]["block"] == 8
    assert set(header["files"]["target"]) >= {"config.json", "model.safetensors"}
    assert header["plain_seconds"] > 0, "measured before the run"
    engine = md.load(str(folders[0]), drafter=None, warm=False)
    assert identity_of(engine.origins["target"]) == header["files"]["target"]


def test_a_check_confirms_a_run_and_finds_another(traced, mdf, tmp_path):
    code, out, err = mdf("trace", traced, "--check", "-q")
    count = len(read(traced).lines)
    assert (code, err) == (0, "") and f"{count} rounds run again: every line is so" in out
    lines = [json.loads(line) for line in traced.read_text().splitlines()]

    def checked(number, **change):
        changed = [line | change if i == number else line for i, line in enumerate(lines)]
        path = tmp_path / "changed.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
        return mdf("trace", path, "--check", "-q")

    last = lines[-1]
    margins = [*last["margins"][:-1], last["margins"][-1] + 2.0**-20]
    for words, value in {"margins": margins, "ids": [63] * len(last["ids"]), "start": 7, "text": "x",
                         "injected": 2 + last["injected"]}.items():  # fmt: skip
        change = {words: value}
        code, out, _ = checked(len(lines) - 1, **change)
        assert code == 1 and f"FAILED: round {count - 1}: {words} " in out and len(out.splitlines()) == 1
    assert checked(1, seconds=5.0, stages={"prefill": 0.1})[0] == 0, "times are not compared"
    options = lines[0]["options"] | {"verify": 3}
    assert checked(0, options=options)[0] == 0, "rounds are as wide as they were"
    code, out, err = checked(0, files={"target": {"config.json": "0" * 64}}, machine="another\x1b[1m")
    assert code == 1 and "FAILED: target config.json: '0000" in out
    assert "the trace was made on another\\x1b[1m" in err


def test_a_check_counts_the_rounds(traced, mdf, tmp_path):
    lines, path = traced.read_text().splitlines(), tmp_path / "t"
    path.write_text("\n".join(lines[:-1]) + "\n")
    assert "rounds then, more now" in mdf("trace", path, "--check")[1]
    path.write_text("\n".join([*lines, lines[-1]]) + "\n")
    assert f"{len(lines)} rounds then, {len(lines) - 1} now" in mdf("trace", path, "--check")[1]
    cut = json.loads(lines[-2]) | {"finish_reason": "interrupted", "text": "held back"}
    path.write_text("\n".join([*lines[:-2], json.dumps(cut)]) + "\n")
    assert mdf("trace", path, "--check")[0] == 0, "an interrupted run is so as far as it went"


def test_a_check_needs_a_header_that_can_be_run(traced, mdf, tmp_path):
    code, _, err = mdf("trace", save(tmp_path / "t", header=None), "--check")
    assert code == 2 and "no header" in err
    header, first, *rest = map(json.loads, traced.read_text().splitlines())
    for change, words in (
        ({"verify": -1}, "verify"),
        ({"top_p": 7.0}, "top-p"),
        ({"stop": 5}, "stop"),
    ):
        options = header | {"options": header["options"] | change}
        code, _, err = mdf("trace", save(tmp_path / "t", [first, *rest], options), "--check")
        assert code == 2 and words in err and len(err.splitlines()) <= 2
    code, _, err = mdf("trace", save(tmp_path / "t", [first | {"sample": 3}], header), "--check")
    assert code == 2 and "has a sample 3, its header asks for 1" in err
    wide = line_of(1, 16, 2)
    code, _, err = mdf("trace", save(tmp_path / "t", [first, wide], header), "--check")
    assert code == 2 and "a round of 16 rows, its block is 8" in err


def test_a_strangers_file_chooses_nothing_to_fetch():
    header = HEADER | {"target": "someone/model", "drafter": "other/drafter"}
    assert load_keywords(header)["offline"]
    assert load_keywords(header, "here", None)["offline"]
    found = load_keywords(header, "here", "there")
    assert (found["target"], found["drafter"], found["offline"]) == ("here", "there", False)
    assert (found["revision"], found["drafter_revision"]) == (None, None)
    assert load_keywords(header)["drafter_revision"] == "1" * 40
    assert not load_keywords(HEADER | {"target": "default", "drafter": "default"})["offline"]


def test_flags_of_a_check_need_one(mdf, tmp_path):
    code, _, err = mdf("trace", save(tmp_path / "t"), "--target", "x")
    assert code == 2 and "--target says what --check runs" in err


def test_a_round_is_told_position_by_position(mdf, tmp_path):
    path = save(tmp_path / "t", [LINES[0], line_of(1, 4, 1, [" x", " y"]), line_of(2, 4, 3), LINES[4]])
    out = mdf("trace", path, "--round", 1, "-q")[1].splitlines()
    assert "kept 1 of 3" in out[0] and "anchor 7 at position 4, 1 context features injected" in out[1]
    assert out[2].split() == [
        "inject",
        "1.0",
        "ms,",
        "draft",
        "5.0",
        "ms,",
        "verify",
        "11.0",
        "ms,",
        "accept",
        "0.1",
        "ms",
    ]
    assert [row.split()[:4] for row in out[4:]] == [
        ["1", "·x", "·x", "0.5"], ["2", "·d1", "·y", "1.5"], ["3", "·d2", "·c2", "2.5"],
        ["4", "·c3", "3.5", "not"],
    ]  # fmt: skip
    verdicts = [row.split("  ")[-1] for row in out[4:]]
    assert verdicts[0] == "kept" and verdicts[1].startswith("rejected: the target wanted another")
    assert verdicts[2].startswith("not looked at")
    whole = mdf("trace", path, "--round", 2, "-q")[1].splitlines()
    assert [row.split("  ")[-1] for row in whole[4:7]] == ["kept"] * 3 and "all drafts were kept" in whole[7]
    cut = line_of(3, 4, 3, finish_reason="length") | {"ids": [100, 101], "id_texts": ["a", "b"]}
    assert [row.split("  ")[-1] for row in tell_rows(cut, lambda _, text: text)[3:]] == [
        "kept", "kept", "kept, and cut off: the run ended (length)", "cut off: the run ended (length)",
    ]  # fmt: skip


def test_the_text_is_told_by_who_produced_it():
    def paint(style, text):
        return f"<{style}>{text}</>"

    paint.is_on = True
    lines = [line_of(0, 0, 0, ["A"]), line_of(1, 4, 1, ["b\n", "c\x1b"])]
    assert tell_text(lines, paint) == "<own>A</><kept>b\n</><own>c\\x1b</>"


@pytest.mark.parametrize("flags", [[], ["-q"], *(["--round", n] for n in range(len(LINES)))], ids=str)
def test_no_text_of_a_trace_reaches_a_terminal_that_obeys_it(flags, mdf, tmp_path):
    path = save(tmp_path / "t", [line | {"choice_texts": NASTY[: len(line["choice"])]} for line in LINES])
    code, out, err = mdf("trace", path, *flags)
    assert (code, err) == (0, "") and printable(out, keep="\n\t") == out and "\x1b" not in out


# ---- bounds -----------------------------------------------------------------------------------------------

DEEP = json.loads("[" * 50 + "]" * 50)


@pytest.mark.parametrize("wrong", [
    {"choice": None}, {"choice": [1]}, {"choice": [-1, 1, 1, 1]}, {"choice": [2**40] * 4},
    {"choice": ["a"] * 4},
    {"margins": [1.0]}, {"margins": [-1.0] * 4}, {"margins": [float("inf")] * 4}, {"margins": [1e300] * 4},
    {"margins": [True] * 4}, {"margins": "1111"}, {"stages": []}, {"stages": {"\x1b[1m": 1}},
    {"stages": {"draft": -1}},
    {"stages": {"draft": float("nan")}}, {"stages": {"draft": DEEP}}, {"anchor": -1}, {"anchor": None},
    {"start": 2**31},
    {"injected": 0.5}, {"sample": -1}, {"round": "1"}, {"logprobs": [1]}, {"logprobs": [[1, float("nan")]]},
    {"choice_texts": ["a"]}, {"choice_texts": [DEEP] * 4}, {"id_texts": ["a" * 70000, "b"]},
    {"text": "a" * 70000},
    {"ids": DEEP}, {"experts": float("nan")},
])  # fmt: skip
def test_lines_out_of_bounds_are_refused(wrong, tmp_path):
    path = save(tmp_path / "t", [LINES[0], line_of(1, 4, 1) | wrong])
    with pytest.raises(UserError, match="line 3: this is no line of a trace") as refused:
        read(str(path))
    assert "\x1b" not in str(refused.value) and refused.value.code == 2


def test_a_detail_is_whole(tmp_path):
    for name in reading.DETAIL:
        line = line_of(1, 4, 1)
        del line[name]
        with pytest.raises(UserError, match=f"it has no {name}"):
            read(str(save(tmp_path / "t", [line])))


@pytest.mark.parametrize("wrong", [
    {"trace": 2}, {"trace": True}, {"target": 5}, {"target": ""}, {"target": "x" * 5000}, {"drafter": []},
    {"files": {"\x1b": {}}}, {"files": {"target": {"a": 5}}}, {"files": DEEP}, {"backend": "tpu"},
    {"activations": "f16"},
    {"ctx": -1}, {"ctx": 2**40}, {"prefill_chunk": None}, {"plain_seconds": float("inf")}, {"prompt": []},
    {"prompt": [-1]}, {"prompt": "abc"}, {"options": HEADER["options"] | {"os": "rm"}}, {"options": []},
    {"weights": "x"},
    {"options": {}},
    {"options": HEADER["options"] | {"block": 10**6}},
    {"options": HEADER["options"] | {"temperature": 1e300}},
    {"version": None}, {"machine": None},
])  # fmt: skip
def test_headers_out_of_bounds_are_refused(wrong, tmp_path, mdf):
    code, out, err = mdf("trace", save(tmp_path / "t", header=HEADER | wrong))
    assert (code, out) == (2, "") and "t, line 1: this is no header of a trace: " in err
    assert "\x1b" not in err and len(err.splitlines()) == 2


def test_a_header_stands_first_and_alone(tmp_path):
    path = save(tmp_path / "t")
    path.write_text(path.read_text() + json.dumps(HEADER) + "\n")
    with pytest.raises(UserError, match=f"line {len(LINES) + 2}: this is no line of a trace: it has no ids"):
        read(str(path))


def test_sizes_are_bounded(tmp_path, monkeypatch):
    path = save(tmp_path / "t")
    for name, value, words in (("LARGEST", 300, "is larger than"),
                               ("MOST_LINES", 3, "line 4: .* more than 3 lines"),
                               ("LONGEST_LINE", 99, "line 1: .* more than 99 characters")):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(reading, name, value)
            with pytest.raises(UserError, match=words):
                read(str(path))
    with pytest.raises(UserError, match="not JSON"):
        (tmp_path / "n").write_text('{"trace": ' + "9" * 10000 + "}")
        read(str(tmp_path / "n"))


def test_what_cannot_be_read_says_so(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read(str(tmp_path))


def test_a_run_without_rounds_has_a_header(folders, tmp_path):
    from minidflash.request import Request

    engine = md.load(str(folders[0]), drafter=None, warm=False)
    request = Request.of(engine, [5], {"max_tokens": 0, "trace": True})
    with Trace(tmp_path / "t") as trace:
        trace.begin(engine, request)
    found = read(tmp_path / "t")
    assert found.header["prompt"] == [5] and found.lines == []


def test_a_page_is_written_or_refused(mdf, tmp_path):
    path, out = save(tmp_path / "t"), tmp_path / "t.html"
    assert mdf("trace", path, "--html", out) == (0, "", "")
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    code, _, err = mdf("trace", path, "--html", tmp_path)
    assert code == 3 and "cannot be written" in err
