"""Files and names of strangers: nothing that a terminal obeys gets out,
sizes are counted before they are believed."""

import json
import os
import struct
import sys
import time
import tracemalloc
from io import StringIO

import pytest
from minidflash.weights import safetensors_io
from minidflash.weights.gguf_io import read_gguf
from minidflash.weights.safetensors_io import parse_object, read_file, read_json

from minidflash.cli import main, terminal
from minidflash.cli.generate import read_prompt
from minidflash.cli.prompts import read_prompts
from minidflash.cli.terminal import Paint, Progress, json_line, say, write_lines
from minidflash.encoding import decoded
from minidflash.errors import LONGEST, UserError, printable
from minidflash.tokenizer import open_tokenizer
from minidflash.trace.read import read
from minidflash.trace.write import Trace
from tests.automaton import build
from tests.test_tokenizer import byte_fallback, byte_level, save

ESCAPE = "\x1b]0;owned\x07\x9b2J\nnext\r\u202e\u2028\ud800"
ORDINARY = "é 漢 👩‍👩‍👧 \u00a0 \ufeff \\ ~"


def test_printable_escapes_what_a_terminal_obeys_and_nothing_else():
    obeyed = [chr(c) for c in [*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]]
    for c in [*obeyed, "\u061c", "\u200e", "\u200f", "\u2028", "\u2029", "\ud800", "\udfff"]:
        assert (
            printable(f"a{c}b") == f"a{repr(c)[1:-1]}b" and printable(c).isascii() and len(printable(c)) > 1
        )
    assert printable(ORDINARY) == ORDINARY
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


def test_errors_are_one_printable_line_of_sane_length():
    error = UserError(f"tensor {ESCAPE}", hint=f"--tokens {ESCAPE}")
    for text in (str(error), error.hint):
        assert text == printable(text) and text.isascii() and "owned" in text
    error = UserError("begin " + "9" * 10**6 + " end", hint="h" * 10**6)
    assert str(error).startswith("begin 9") and str(error).endswith("9 end")
    assert len(str(error)) <= LONGEST and len(error.hint) <= LONGEST
    assert str(UserError("x" * LONGEST)) == "x" * LONGEST and UserError("x").hint is None


def test_nothing_that_a_terminal_obeys_is_said(capsys, monkeypatch):
    say(f"two\nlines {ESCAPE}")
    write_lines([f"name {ESCAPE}"])
    out, err = capsys.readouterr()
    assert err == "two\nlines " + printable(ESCAPE, "\n") + "\n" and out == f"name {printable(ESCAPE)}\n"
    stream = StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(True) as show:
        show(f"load {ESCAPE}", 1, 2)
    assert "\x1b" not in stream.getvalue() and "\n" not in stream.getvalue() and "owned" in stream.getvalue()


def test_the_last_resort_and_its_traceback_are_printable(mdf, monkeypatch, capsys):
    def broken(args, interrupt):
        raise RuntimeError(f"so {ESCAPE}")

    monkeypatch.setattr("minidflash.cli.trace.trace", broken)
    assert main(["trace", "x", "-v"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "owned" in err and not set(err) & set("\x1b\x07\x9b\r\u202e")


def test_names_in_checkpoints_reach_a_terminal_escaped(mdf, tmp_path):
    target, drafter = build(tmp_path)
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": f"t9 {ESCAPE[:-1]}"}))
    code, _, err = mdf("generate", "--target", target, "--drafter", drafter, "-n", 1, "--show-prompt", "t5")
    assert code == 0 and "t9 \\x1b]0;owned" in err and "\x1b" not in err
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {ESCAPE: 1}))
    code, out, err = mdf("info", "--target", target)
    assert code == 2 and "owned" in err and len(err.splitlines()) <= 2 and "\x1b" not in out + err


def test_json_is_strict():
    assert json.loads(json_line({"a": [1.5, None]})) == {"a": [1.5, None]}
    for number in (float("nan"), float("inf")):
        with pytest.raises(UserError, match="NaN or infinite") as error:
            json_line({"logprobs": [[number]]})
        assert error.value.code == 1


# -- encodings


def test_marks_are_dropped_and_other_encodings_named():
    assert decoded(b"\xef\xbb\xbft9\r\n\xef\xbb\xbf", "x") == "t9\r\n\ufeff"
    for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(name, b"")
        with pytest.raises(UserError, match=rf"prompt is {name[:6].upper()}, need UTF-8"):
            decoded(mark + "t9".encode(name), "prompt")
    with pytest.raises(UserError, match=r"not UTF-8 \(byte 1\)"):
        decoded(b"a\xff", "x")


def test_marks_in_prompts_and_json_files(tmp_path):
    class Args:
        tokens, prompt = None, f"@{tmp_path / 'p.txt'}"

    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbft9 t5")
    assert read_prompt(Args) == "t9 t5"
    (tmp_path / "p.txt").write_bytes("t9".encode("utf-16"))
    with pytest.raises(UserError, match=r"p\.txt is UTF-16"):
        read_prompt(Args)
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "t9"}')
    assert read_prompts(tmp_path / "p.jsonl") == [{"kind": "all", "prompt": "t9"}]
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "config.json") == {"a": 1}
    (tmp_path / "config.json").write_bytes('{"a": 1}'.encode("utf-16"))
    with pytest.raises(UserError, match=r"config\.json .* is UTF-16"):
        read_json(tmp_path / "config.json")
    save(tmp_path / "t", byte_level(), eos_token="<|e|>")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / "t" / name
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert open_tokenizer(tmp_path / "t").stop_ids
    path = tmp_path / "t" / "tokenizer.json"
    path.write_bytes(path.read_text(encoding="utf-8-sig").encode("utf-16"))
    with pytest.raises(UserError, match=r"tokenizer\.json is UTF-16"):
        open_tokenizer(tmp_path / "t")


# -- sizes


def test_a_key_that_is_there_twice_is_found_in_linear_time():
    def seconds(count):
        text = "{" + ",".join(f'"t{i}":0' for i in range(count)) + f',"t{count - 1}":0}}'
        since = time.thread_time()
        with pytest.raises(UserError, match=f"key 't{count - 1}' is there twice"):
            parse_object(text, "x")
        return time.thread_time() - since

    assert seconds(200_000) < 3  # 20,000 took 4 s when each key was counted


def test_more_values_than_a_checkpoint_has_are_refused_before_they_are_read(tmp_path):
    entry = '"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(entry % i for i in range(300_000)) + "}"
    tracemalloc.start()
    try:
        for bad in (text, '{"a":[' + "1," * 2_100_000 + "1]}", '{"a":' + "[" * 10**6):
            with pytest.raises(UserError, match=r"at most 2000000 are read|not valid JSON"):
                parse_object(bad, "x")
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    header = ("{" + ",".join(entry % i for i in range(20_000)) + "}").encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    assert len(read_file(tmp_path / "x")) == 20_000  # many, but not absurd
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(safetensors_io.MAX_HEADER + 1)
    with pytest.raises(UserError, match="at most"):
        read_json(tmp_path / "large.json")


def test_values_of_headers_are_cut_in_messages(tmp_path):
    def refused(header, words):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        with pytest.raises(UserError, match=words) as error:
            read_file(tmp_path / "x")
        assert len(str(error.value)) <= LONGEST and printable(str(error.value)) == str(error.value)

    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    refused({ESCAPE: entry | {"shape": [1]}}, "owned")
    refused({"a": entry | {"shape": [10**4000]}}, "not a list of whole numbers")
    refused({"a": entry | {"shape": ["x" * 10**5]}}, "not a list of whole numbers")
    refused({"a": entry | {"dtype": "x" * 10**5}}, "unknown")
    refused({"n" * 10**5: entry | {"shape": [1]}}, "needs 4 bytes, data_offsets give 8")
    refused({"a": entry | {"shape": [2**61, 2**61, 0]}}, "larger than any memory")


def test_pipes_and_devices_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        for reader in (read_file, read_gguf):
            with pytest.raises(UserError, match="no regular file"):
                reader(path)
    with pytest.raises(UserError, match="no regular file"):
        read_json(tmp_path / "fifo")


def text(value):
    return struct.pack("<Q", len(value)) + value


def u32(*values):
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values):
    return struct.pack(f"<{len(values)}Q", *values)


def info(name, shape=(4,), kind=0, offset=0):
    return text(name) + u32(len(shape)) + u64(*shape) + u32(kind) + u64(offset)


STRINGS = text(b"a") + u32(9, 8)  # an array of texts


@pytest.mark.parametrize("body, words", [
    (u64(0, 2**63), "cut off"), (u64(2**40, 0), "cut off"), (u64(0, 1, 2**63), "cut off"),
    (u64(0, 1) + STRINGS + u64(2**40), "cut off"),
    (u64(0, 1) + text(b"a") + u32(9, 0) + u64(2**62), "cut off"),
    (u64(0, 1) + text(b"a") + u32(9, 0) + u64(4_100_000) + bytes(4_100_000), "at most 4000000"),
    (u64(1, 0) + text(b"a") + u32(2**32 - 1) + bytes(99), "4294967295 dimensions"),
    (u64(1, 0) + info(b"a", ()) + bytes(99), "0 dimensions"),
    (u64(1, 0) + info(b"a", (1,) * 5) + bytes(99), "5 dimensions"),
    (u64(1, 0) + info(b"a", (2**62,) * 4) + bytes(99), "cut off"),
    (u64(1, 0) + info(b"a", offset=3) + bytes(99), "multiple of 32"),
    (u64(2, 0) + info(b"a") + info(b"b") + bytes(99), "tensor . overlaps ."),
    (u64(2, 0) + info(b"a") + info(b"a", offset=32) + bytes(99), "twice"),
    (u64(0, 2) + (text(b"a") + u32(4, 0)) * 2, "key 'a' is there twice"),
    (u64(0, 1) + text(b"general.alignment") + u32(4, 0), "power of two"),
    (u64(0, 1) + text(b"general.alignment") + u32(4, 24), "power of two"),
    (u64(0, 1) + text(b"general.alignment") + u32(7) + b"\1", "power of two"),
    (u64(1, 0) + info(b"\x1b[2Jowned\x07", kind=77) + bytes(99), r"x1b\[2Jowned\\x07 is of ggml type 77"),
])  # fmt: skip
def test_counts_of_gguf_files_are_checked_before_they_are_used(body, words, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + u32(3) + body)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=words) as error:
            read_gguf(tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 2e6 and printable(str(error.value)) == str(error.value)
    finally:
        tracemalloc.stop()


# -- text as it comes


@pytest.mark.parametrize("kind, ids", [
    (byte_fallback, [3 + b for b in "漢".encode()]),  # F109: a run of byte tokens without an end
    (byte_level, [byte_level().token_to_id("ł")]),  # bytes that never make a character
])  # fmt: skip
def test_text_of_bytes_alone_takes_linear_time(kind, ids, tmp_path):
    tokenizer, work = save(tmp_path, kind()), 0
    decode, is_byte = tokenizer.decode, tokenizer.is_byte

    def decode_counted(window):
        nonlocal work
        work += len(window)
        return decode(window)

    def is_byte_counted(token):
        nonlocal work
        work += 1
        return is_byte(token)

    tokenizer.decode, tokenizer.is_byte = decode_counted, is_byte_counted
    stream, given = tokenizer.stream(), ids * 2000
    found = "".join(stream.push([i]) for i in given) + stream.finish()
    assert found == decode(given) and work < 200 * len(given)


# -- traces

LINE = {"round": 0, "ids": [5], "drafts": [], "accepted": 0, "verify": 0, "seconds": 0.1, "text": "x",
        "finish_reason": None}  # fmt: skip


@pytest.mark.parametrize("wrong", [
    {"seconds": "1"}, {"seconds": None}, {"seconds": 1e308}, {"seconds": float("nan")}, {"seconds": -1},
    {"verify": None},
    {"verify": 10**7, "drafts": [1], "accepted": 1}, {"verify": 2}, {"verify": True}, {"id_texts": []},
    {"id_texts": ["a", "b"]}, {"id_texts": [5]}, {"draft_texts": ["a"]}, {"ids": ESCAPE[:5]},
    {"ids": [ESCAPE[:5]]},
    {"ids": []}, {"ids": [-1]}, {"finish_reason": ESCAPE[:9]},
    {"drafts": [1, 2], "accepted": -1, "verify": 3},
    {"drafts": [1, 2], "accepted": 1.0, "verify": 3}, {"accepted": 1}, {"text": 5}, {"drafts": None},
])  # fmt: skip
def test_lines_that_are_no_trace_are_refused(wrong, tmp_path, mdf):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | wrong) + "\n")
    code, out, err = mdf("trace", path)
    assert (code, out) == (2, "") and "t.jsonl, line 2: this is no line of a trace: " in err
    assert "\x1b" not in err and len(err.splitlines()) == 2


def test_other_files_are_no_trace(tmp_path):
    for content, words in ((b"[1]\n", "it is a list"), (b"null\n", "line 1"), (b"[" * 10**5, "not JSON"),
                           (b"{}", "no ids"), (b"", "is empty"), (b"\xff\xfe{\0", "UTF-16"),
                           (b"\xff", "not UTF-8")):  # fmt: skip
        (tmp_path / "t").write_bytes(content)
        with pytest.raises(UserError, match=words):
            read(str(tmp_path / "t"))


def test_texts_of_a_trace_are_told_escaped(tmp_path, mdf):
    line = LINE | {"ids": [5, 6], "drafts": [7], "verify": 2, "accepted": 1, "id_texts": [ESCAPE[:-1], " a"]}
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbf" + json.dumps(line).encode())
    code, out, _ = mdf("trace", tmp_path / "t", "-q")
    assert code == 0 and printable(ESCAPE[:-1]) in out and "[·a]" in out and "\x1b" not in out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_a_trace_with_one_line(tmp_path, mdf):  # F110
    target, drafter = build(tmp_path)
    code, _, err = mdf(
        "generate", "--target", target, "--drafter", drafter, "--tokens", "9 9 5", "--trace", "/dev/full"
    )
    assert code == 3 and err.startswith("minidflash: trace file '/dev/full' cannot be written: No space left")
    assert len(err.splitlines()) == 1


def test_a_trace_needs_a_file_of_its_own(tmp_path, monkeypatch):  # F136
    monkeypatch.chdir(tmp_path)
    for name in ("", "-"):
        with pytest.raises(UserError, match="needs a file of its own"):
            Trace(name)
    assert not list(tmp_path.iterdir())


def test_generated_text_is_not_escaped(capsys):
    terminal.write("a\x1b[1mb")
    assert capsys.readouterr().out == "a\x1b[1mb" and Paint(sys.stdout)("kept", "x") == "x"
