"""The command line: streams, exit codes, refusals, JSON against its schema, traces,
Ctrl-C and closed pipes."""

import io
import json
import sys
from importlib import resources

import jsonschema
import pytest

import minidflash as md
from minidflash.cli import generate as run_module
from minidflash.cli import main
from minidflash.cli.terminal import Paint, Progress, amount
from minidflash.errors import UserError
from tests import automaton
from tests.golden_files import golden

PROMPT = "9 " * 40 + "5"  # P(9x40,5) of the field log: the pair FX-B then says 20 for ever
SCHEMA = json.loads((resources.files("minidflash") / "result.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Name -> the flags that run this automaton pair."""
    found = {}
    for name in ("FX-A", "FX-B"):
        target, draft = automaton.build(tmp_path_factory.mktemp(name), name)
        found[name] = ["--target", str(target), "--drafter", str(draft)]
    return found


@pytest.fixture
def generate(mdf, pairs):
    def call(*argv, pair="FX-B"):
        return mdf("generate", *pairs[pair], *argv)

    return call


def checked(out):
    """The JSON object on stdout, validated."""
    found = json.loads(out)
    jsonschema.validate(found, SCHEMA)
    assert not found["tokens"] or not found["drafter"] or 1 + sum(found["rounds"]) == len(found["tokens"])
    return found


class Typed(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


def stdin(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_text_alone_is_on_stdout_and_stats_are_on_stderr(generate):
    code, out, err = generate("--tokens", PROMPT, "-n", 33, "--verify", 8, "--stats")
    assert code == 0
    assert out == " ".join(["t20"] * 33) + "\n"
    for words in (
        "tau         8.00",
        "28 of 28",
        "8 rows x 4",
        "break-even  tau ",
        "tokens/s",
        "context 4096",
    ):
        assert words in err
    assert generate("--tokens", PROMPT, "-n", 33, "--no-stream")[1] == out
    plain = generate("--tokens", PROMPT, "-n", 33, "--drafter", "none", "--stats")
    assert plain[1] == out
    assert "plain decoding" in plain[2]


def test_json_is_one_object_that_fits_the_schema(generate):
    code, out, err = generate("--tokens", PROMPT, "-n", 33, "--verify", 8, "--json")
    found = checked(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert found["rounds"] == [8, 8, 8, 8]
    assert found["stats"] | {"verify": None} == {
        "tau": 8.0, "round_count": 4, "drafted": 28, "accepted": 28, "acceptance_by_position": [1.0] * 7,
        "verify": None, "block": 8, "rows_reused": 0, "rows_run": 41,
    }  # fmt: skip
    assert found["timing"]["jit_s"] > 0
    assert found["options"]["max_tokens"] == 33
    assert found["options"]["ctx"] == 4096


def test_json_of_plain_decoding_no_tokens_and_an_end_token(generate):
    plain = checked(generate("--tokens", PROMPT, "-n", 5, "--json", "--drafter", "none")[1])
    assert (plain["drafter"], plain["rounds"], plain["stats"]["tau"]) == (None, [], None)
    assert len(plain["tokens"]) == 5
    code, out, _ = generate("--tokens", PROMPT, "-n", 0, "--json")
    nothing = checked(out)
    assert (code, nothing["tokens"], nothing["text"], nothing["finish_reason"]) == (0, [], "", "length")
    assert generate("--tokens", PROMPT, "-n", 0)[:2] == (0, "")
    ended = checked(generate("--tokens", PROMPT, "-n", 64, "--json", pair="FX-A")[1])
    assert (ended["tokens"], ended["finish_reason"]) == ([6, 7, 2], "stop")
    longer = checked(generate("--tokens", PROMPT, "-n", 9, "--json", "--ignore-eos", pair="FX-A")[1])
    assert longer["tokens"] == [6, 7] + [2] * 7


def test_a_checkpoint_without_tokenizer_takes_and_prints_ids(mdf):
    folder = golden("llama-tiny")
    code, out, err = mdf("generate", "--target", folder, "--tokens", "5 9 9", "-n", 4)
    assert code == 0
    assert "plain decoding" in err
    assert "token ids are printed" in err
    found = checked(mdf("generate", "--target", folder, "--tokens", "5 9 9", "-n", 4, "--json")[1])
    assert found["text"] is None
    assert out == " ".join(map(str, found["tokens"])) + "\n"
    assert mdf("generate", "--target", folder, "--tokens", "5 9 9", "-n", 4, "-q")[2] == ""
    assert mdf("generate", "--target", folder, "hello")[0] == 2


def test_prompts_from_words_stdin_and_file(generate, monkeypatch, tmp_path):
    wanted = "t6 t7 t2\n"
    assert generate("t9 t5", pair="FX-A")[1] == wanted
    for given in (["-"], []):
        stdin(monkeypatch, b"t9\r\nt5\n")
        assert generate(*given, pair="FX-A")[1] == wanted
    (tmp_path / "prompt.txt").write_bytes(b"t9 t5\n")
    assert generate(f"@{tmp_path / 'prompt.txt'}", pair="FX-A")[1] == wanted
    err = generate("t9 t5", "--show-prompt", pair="FX-A")[2]
    assert "t9 t5" in err
    assert "2 prompt ids: 9 5" in err


def test_stdin_reaches_the_model_as_it_was_written(monkeypatch):
    arguments = type("Args", (), {"tokens": None, "prompt": "-"})
    stdin(monkeypatch, b"a\r\nb\n\n")
    assert run_module.read_prompt(arguments) == "a\r\nb\n\n"


def test_no_prompt_on_a_terminal_is_wrong_use_with_an_example(mdf, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Typed())
    code, out, err = mdf("generate")
    assert (code, out) == (2, "")
    assert 'minidflash generate "' in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tokens", "5", "hello"], "two prompts"),
        (["--tokens", "5 x"], "'x' is no token id"),
        (["--tokens", ""], "the prompt is empty"),
        (["--tokens", "5 64"], "token 64 is outside 0 to 63"),
        (["--tokens", "5", "-n", "-1"], "need a whole number from 0 up"),
        (["--tokens", "5", "-n", "5000", "--ctx", "64"], "raise --ctx or lower --max-tokens"),
        (["--tokens", "5", "-n", "5000"], "hint: lower --max-tokens"),
        (["--tokens", "5", "--ctx", "5000"], "the target allows 1 to 4096"),
        (["--tokens", "5", "--block", "65"], "from 1 to 64"),
        (["--tokens", "5", "--block", "0"], "from 1 to 64"),
        (["--tokens", "5", "--verify", "some"], "need auto or a whole number"),
        (["--tokens", "5", "--stop", ""], "stop string is empty"),
        (["--tokens", "5", "--device", "1"], "device 1"),
        (["--tokens", "5", "--chat-template-arg", "x"], "NAME=VALUE"),
        (["--tokens", "5", "--system", "x"], "--system has no effect here"),
        (["t5", "--chat-template-arg", "a=1"], "--chat-template-arg has no effect here"),
        (["t5", "--raw", "--system", "x"], "the prompt is raw"),
        (["--tokens", "5", "--temperature", "nan"], "need a number from 0 up"),
        (["--tokens", "5", "--unknown"], "--unknown"),
        (["@no such file"], "cannot be read"),
        (["--tokens", "5", "--trace", "no/such/folder/t"], "cannot be written"),
    ],
)
def test_wrong_use_is_refused_in_one_line(generate, argv, words):
    code, out, err = generate(*argv)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("minidflash: ")
    assert len(err.splitlines()) <= 2


def test_empty_and_foreign_bytes_on_stdin_are_refused(generate, monkeypatch):
    for data, words in ((b"", "the prompt from stdin is empty"), (b"\xff", "not UTF-8")):
        stdin(monkeypatch, data)
        code, out, err = generate()
        assert (code, out) == (2, "")
        assert words in err


def test_rejection_sampling_wants_a_temperature_and_a_fixed_verify(generate):
    for flags, words in (((), "no effect at temperature 0"), (("--temperature", 1), "needs a fixed --verify"),
                         (("--temperature", 1, "--verify", "auto"), "needs a fixed --verify")):  # fmt: skip
        code, out, err = generate("--tokens", "5", "--accept", "reject", *flags)
        assert (code, out) == (2, "") and words in err
    assert "not the text of plain decoding" in err and "add --verify N" in err
    flags = ("--tokens", PROMPT, "-n", 2, "--accept", "reject", "--verify", 4, "--temperature")
    assert generate(*flags, 1e-9)[:2] == (0, "t20 t20\n")
    assert generate(*flags, 0.5)[0] == 0


def test_sampling_flags_at_their_defaults_are_no_wish(generate):
    usual = {"temperature": 0, "top-k": 0, "top-p": 1, "min-p": 0, "seed": 0, "samples": 1, "accept": "match"}
    flags = [word for name, value in usual.items() for word in (f"--{name}", value)]
    assert generate("--tokens", PROMPT, "-n", 2, *flags)[:2] == (0, "t20 t20\n")


def test_a_drafter_that_is_none_or_bad_never_falls_back(mdf, pairs):
    flags = pairs["FX-B"]
    for target, drafter in ((flags[1], "no/such/folder"), (flags[3], flags[1]), (flags[1], flags[1])):
        code, out, err = mdf("generate", "--target", target, "--drafter", drafter, "--tokens", "5")
        assert (code, out) == (2, "")
        assert len(err.splitlines()) <= 2


def test_blocks_above_the_trained_width_warn_once_and_change_nothing(generate):
    texts = set()
    for block in (1, 2, 8, 9, 64):
        code, out, err = generate("--tokens", PROMPT, "-n", 20, "--block", block)
        assert code == 0
        assert err.count("wider than the 8") == (block > 8)
        texts.add(out)
    assert len(texts) == 1


def test_stop_texts_end_ids_and_text_alike(generate):
    argv = ["--tokens", PROMPT, "-n", 64, "--stop", "never", "--stop", " t7"]
    found = checked(generate(*argv, "--json", pair="FX-A")[1])
    assert (found["text"], found["tokens"], found["finish_reason"]) == ("t6", [6], "stop")
    assert generate(*argv, pair="FX-A")[1] == "t6\n"


def test_a_trace_is_written_and_retold(generate, mdf, tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    argv = ["--tokens", PROMPT, "-n", 20, "--verify", 8, "--ignore-eos", "--trace", path]
    assert generate(*argv, pair="FX-A")[0] == 0
    header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert header["trace"] == 1
    assert [line["verify"] for line in lines][:2] == [0, 8]
    assert [i for line in lines for i in line["ids"]] == [6, 7] + [2] * 18
    assert all({"ids", "drafts", "accepted", "verify", "seconds", "text"} <= set(line) for line in lines)
    code, out, _ = mdf("trace", path)
    assert code == 0
    assert "\033" not in out
    assert "[t6]" in out
    assert f"20 tokens in {len(lines) - 1} rounds" in out
    assert mdf("trace", path, "--round", 0, "-q")[1].count("\n") == 5, "its line, and those of one row"
    assert mdf("trace", path, "--round", 99)[0] == 2
    path.write_text('{"ids": [1]}\n')
    assert mdf("trace", path)[0] == 2
    assert mdf("trace", tmp_path / "none")[0] == 2


def test_rejected_drafts_are_shown_and_colour_is_for_terminals(monkeypatch):
    from minidflash.trace.tell import tell_round

    line = {"ids": [20, 9], "id_texts": ["t20", "a b"], "drafts": [20, 7], "draft_texts": ["t20", ""],
            "accepted": 1,
            "verify": 3, "seconds": 0.01, "text": "", "finish_reason": "length"}  # fmt: skip
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert tell_round(3, line, Paint(io.StringIO())).split() == [
        "3", "kept", "1", "of", "2", "10.0", "ms", "t20", "[a·b]", "~7~", "(length)",
    ]  # fmt: skip
    assert "\033[9;33m~7~" in tell_round(3, line, Paint(Typed()))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in tell_round(3, line, Paint(Typed()))


def test_unforeseen_errors_are_one_line_without_v(monkeypatch, capsys):
    def broken(args, interrupt):
        raise RuntimeError("a bug\nof two lines")

    monkeypatch.setattr(run_module, "generate", broken)
    assert main(["generate", "x"]) == 1
    assert capsys.readouterr().err.startswith(
        "minidflash: internal error: RuntimeError: a bug of two lines; run with -v"
    )
    assert main(["generate", "x", "-v"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setattr(
        run_module, "generate", lambda args, interrupt: [0][1:] or (_ for _ in ()).throw(MemoryError)
    )
    assert main(["generate", "x"]) == 3
    assert "not enough memory" in capsys.readouterr().err


def test_exit_code_of_a_user_error_is_its_own(monkeypatch, capsys):
    def poor(args, interrupt):
        raise UserError("no GPU", "buy one", code=3)

    monkeypatch.setattr(run_module, "generate", poor)
    assert main(["generate", "x"]) == 3
    assert capsys.readouterr().err == "minidflash: no GPU\n  hint: buy one\n"


def test_help_has_examples_groups_and_defaults(capsys):
    assert main(["generate", "--help"]) == 0
    out = capsys.readouterr().out
    for words in ("examples:", "what to run:", "how:", "sampling:", "output:", "machine:", "default 256"):
        assert words in out
    assert main(["--version"]) == 0
    assert main([]) == 2


def test_progress_is_shown_on_terminals_only(monkeypatch):
    stream = Typed()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(is_shown=False) as show:
        assert show is None
    with Progress(is_shown=True) as show:
        show("weights", 1, 2)
        show("weights", 2, 2)
    assert stream.getvalue().startswith("\rweights 50 %\rweights 100 %")
    assert stream.getvalue().endswith("\r" + " " * len("weights 100 %") + "\r")
    assert amount(437_632) == "437.6 kB"


def test_ctrl_c_during_prefill_gives_an_empty_result(generate, monkeypatch):
    from minidflash import loop

    def pressed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "prefill", pressed)  # the warm-up has its own name for it
    code, out, _ = generate("--tokens", PROMPT, "--json")
    found = checked(out)
    assert (code, found["tokens"], found["finish_reason"]) == (130, [], "interrupted")
    assert generate("--tokens", PROMPT)[:2] == (130, "\n")


def test_an_engine_told_to_stop_ends_after_its_round_and_runs_again(pairs):
    flags = pairs["FX-B"]
    engine = md.load(flags[1], drafter=flags[3])
    rounds = []
    for r in md.stream(engine, [9, 9, 5], max_tokens=100, verify=1, stop=["t20 t9"]):
        rounds.append(r)
        engine.is_interrupted = len(rounds) == 3
    assert 3 <= len(rounds) < 10
    assert "".join(r.text for r in rounds) == " ".join(["t20"] * sum(len(r.tokens) for r in rounds))
    assert md.generate(engine, [9, 9, 5], max_tokens=9).tokens == [20] * 9
