"""What trace, bench and statistics tell is what happened: beside the rounds themselves,
or a run made wrong."""

import json

import pytest

import minidflash as md
from minidflash.cli import bench as measure
from minidflash.errors import UserError
from minidflash.stats import Round, Stats
from minidflash.trace.read import read
from minidflash.trace.write import Trace
from tests import automaton


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Target and drafter of a pair whose drafts are right, wrong, and right again."""
    return automaton.build(tmp_path_factory.mktemp("FX-A"), "FX-A")


@pytest.fixture(scope="module")
def pair(folders):
    return ["--target", str(folders[0]), "--drafter", str(folders[1])]


PROMPT = [9] * 20 + [5]
RUN = {"max_tokens": 20, "verify": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def traced(folders, pair, tmp_path_factory):
    """(file, its lines, the same rounds out of the library)."""
    from minidflash.cli import main

    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    argv = ["--tokens", " ".join(map(str, PROMPT)), "-n", "20", "--verify", "8", "--ignore-eos"]
    assert main(["generate", *pair, *argv, "--trace", str(path)]) == 0
    engine = md.load(str(folders[0]), drafter=str(folders[1]), warm=False)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return path, lines, list(md.stream(engine, PROMPT, **RUN))


def test_a_round_names_the_drafts_that_were_verified(traced):
    _, _, rounds = traced
    assert sum(r.accepted < len(r.drafted) for r in rounds), "no draft was rejected"
    assert sum(0 < r.accepted for r in rounds), "no draft was kept"
    for r in rounds:
        kept = r.drafted[: r.accepted][: len(r.tokens)]
        assert r.tokens[: len(kept)] == kept
        if r.accepted < min(len(r.drafted), len(r.tokens)):
            assert r.drafted[r.accepted] != r.tokens[r.accepted]


def test_a_trace_holds_the_rounds(traced):
    _, lines, rounds = traced
    for line, r in zip(lines, rounds, strict=True):
        told = [line[name] for name in ("ids", "drafts", "accepted", "verify", "text", "finish_reason")]
        assert told == [r.tokens, r.drafted, r.accepted, r.verify, r.text, r.finish_reason]
    assert [line["round"] for line in lines] == list(range(len(lines)))


def test_a_line_of_a_trace_keeps_the_order_of_drafts(tmp_path):
    with Trace(tmp_path / "t.jsonl") as trace:
        trace.write(Round([5, 9], drafted=[5, 6, 7], accepted=1, verify=4))
    (line,) = read(tmp_path / "t.jsonl").lines
    assert (line["ids"], line["drafts"], line["accepted"], line["verify"]) == ([5, 9], [5, 6, 7], 1, 4)


def test_a_trace_is_retold_as_it_was(traced, mdf):
    path, lines, rounds = traced
    out = mdf("trace", path, "-q")[1].splitlines()
    for number, (line, r) in enumerate(zip(lines, rounds, strict=True)):
        words = out[number].split()
        assert words[0] == str(number) and out[number] in mdf("trace", path, "-q", "--round", number)[1]
        if r.verify > 1:
            assert words[1:5] == ["kept", str(r.accepted), "of", str(len(r.drafted))]
            texts = [[t.replace(" ", "·") for t in line[key]] for key in ("id_texts", "draft_texts")]
            kept = min(r.accepted, len(r.tokens))
            own = [f"[{t}]" for t in texts[0][kept:]]
            lost = [f"~{t or i}~" for t, i in list(zip(texts[1], r.drafted, strict=True))[r.accepted :]]
            told = [w for w in words[7:] if not w.startswith("(")]
            assert told == [t or str(i) for t, i in zip(texts[0][:kept], r.tokens, strict=False)] + own + lost
    stats = Stats.of(rounds, 8)
    assert f"{stats.accepted} of {stats.drafted} drafts accepted" in out[-2]
    assert out[-1].split()[-7:] == ["-" if a is None else f"{a:.2f}" for a in stats.acceptance_by_position]


def test_stats_tell_kept_of_verified(traced, pair, mdf):
    stats = Stats.of(traced[2], 8)
    argv = ["--tokens", " ".join(map(str, PROMPT)), "-n", 20, "--verify", 8, "--ignore-eos", "--stats"]
    assert f"{stats.accepted} of {stats.drafted} verified drafts" in mdf("generate", *pair, *argv)[2]


@pytest.fixture
def bench(mdf, pair, tmp_path):
    """Rows of `bench` by kind, and what it prints."""
    prompts = (
        {"kind": "a", "tokens": [9, 9, 9, 5]},
        {"kind": "b", "prompt": "t9 t9 t5"},
        {"kind": "b", "tokens": [9, 5]},
    )
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    argv = ["bench", *pair, "--prompts", tmp_path / "p.jsonl", "-n", 12, "-r", 1, "--verify", 8]

    def call():
        code, out, _ = mdf(*argv, "-o", "json")
        assert code == 0
        return {row["kind"]: row for row in json.loads(out)["rows"]}, mdf(*argv)[1]

    return call


def test_bench_compares_plain_with_drafted_runs(bench, monkeypatch):
    run, given = measure.run, []

    def watched(engine, prompt, options):
        found = run(engine, prompt, options)
        given.append(found[1].drafter is not None)
        found[1].timing.tokens_per_s = 30.0 if given[-1] else 10.0
        return found

    monkeypatch.setattr(measure, "run", watched)
    rows, text = bench()
    assert given[:6] == [False, True] * 3
    for kind, count in (("a", 1), ("b", 2), ("all", 3)):
        row = rows[kind]
        found = [row[name] for name in ("prompts", "plain_tokens_per_s", "drafted_tokens_per_s", "speedup")]
        assert found == [count, 10.0, 30.0, 3.0]
    assert "Drafting pays here: 3.00 times" in text


def test_bench_says_where_drafted_text_is_another(bench, monkeypatch):
    run, calls = measure.run, []

    def one_wrong(engine, prompt, options):
        found = run(engine, prompt, options)
        if found[1].drafter is not None:
            calls.append(prompt)
            if len(calls) % 3 == 2:  # the first of kind b
                found[1].tokens[-1] += 1
        return found

    monkeypatch.setattr(measure, "run", one_wrong)
    rows, text = bench()
    assert {kind: row["is_lossless"] for kind, row in rows.items()} == {"a": True, "b": False, "all": False}
    assert "DRAFTED TEXT DIFFERS FROM PLAIN TEXT." in text


@pytest.mark.parametrize("samples", [1, 2])
def test_text_comes_round_by_round_or_at_once(pair, mdf, monkeypatch, samples):
    from minidflash.cli import generate as run

    written = []
    monkeypatch.setattr(run, "write", written.append)
    law = ["--temperature", 1, "--samples", samples] if samples > 1 else []
    argv = ["generate", *pair, "--tokens", "9 9 5", "-n", 9, "--verify", 2, "--ignore-eos", *law]
    assert mdf(*argv)[0] == 0
    pieces, written[:] = list(written), []
    assert mdf(*argv, "--no-stream")[0] == 0
    assert len(written) == 1 and "".join(pieces) == written[0]
    assert len(pieces) > 4 * samples and written[0].count(run.BETWEEN) == samples - 1


def test_info_says_why_a_backend_cannot_run_and_refuses_a_target_that_is_not_there(
    pair, mdf, monkeypatch, tmp_path
):
    import minidflash.kernels

    open_ops = minidflash.kernels.open_ops

    def without_emulate(name, *rest, **more):
        if name == "emulate":
            raise UserError("no compiler here", "install one", code=3)
        return open_ops(name, *rest, **more)

    monkeypatch.setattr(minidflash.kernels, "open_ops", without_emulate)
    found = json.loads(mdf("info", *pair, "--json")[1])["backends"]
    assert found["emulate"] == "no compiler here (install one)"
    assert found["numba"] is None
    assert "no: no compiler here" in mdf("info", *pair)[1]
    code, out, err = mdf("info", "--target", tmp_path / "none")
    assert (code, out) == (2, "") and "none" in err
