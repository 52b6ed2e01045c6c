"""minidflash chat: from a pipe in this process, and in a terminal as a process of its own."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.test_chat import build
from tests.test_cli_process import ROOT


@pytest.fixture
def talk(tmp_path, monkeypatch, mdf):
    """Lines from a pipe through the command: (exit code, stdout, stderr)."""
    target, drafter = build(tmp_path)

    def call(lines, *argv):
        data = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        flags = ["--target", target, "--drafter", drafter, "-n", "3", "--ctx", "128", *argv]
        return mdf("chat", *flags)

    return call


REPLY = "t20 t20 t20\n"


def test_replies_alone_go_to_stdout(talk):
    code, out, err = talk("t9\n\n t9 t9 \n/stats\n/reset\nt9", "--system", "t30", "--verify", "4")
    assert (code, out) == (0, 3 * REPLY)
    assert "18 in the prompt (10 of them reused), 3 new" in err
    assert "the conversation begins anew" in err and err.count("ended after 3 tokens: -n N") == 3
    code, out, err = talk("t9\n/reset\nt9\n/stats\n", "-q")
    assert (code, out) == (0, 2 * REPLY) and "minidflash" not in err and "tokens/s" in err
    assert talk("/stats\n/help\n")[2].startswith("minidflash: nothing was said yet\n/stats ")
    assert talk("") == (0, "", "")


def test_a_pipe_ends_at_the_first_mistake(talk):
    for lines, said in [
        ("t9\n/quit\nt9\n", "minidflash: there is no command /quit\n  hint: /help lists them"),
        (b"t9\n\xff\n", "minidflash: line 2 of stdin is not UTF-8 (byte 0)\n  hint: "),
        ("t9\n" + "t9 " * 130 + "\n", "and 3 new ones need 146 positions, 128 are there\n  hint: "),
    ]:
        code, out, err = talk(lines)
        assert (code, out) == (2, REPLY) and said in err, err
    assert talk("\ufefft9\n /quit\n")[:2] == (0, 2 * REPLY)


def test_ctrl_c_with_a_pipe_ends_with_130(talk, monkeypatch):
    pieces = []

    def interrupted(text):
        pieces.append(text)
        if len(pieces) == 2:
            raise KeyboardInterrupt
        print(text, end="")

    monkeypatch.setattr("minidflash.cli.generate.write", interrupted)
    code, out, err = talk("t9\nt9\n", "--verify", "1", "-n", "20")
    assert (code, out) == (130, "t20\n") and "stopped; what was said is kept" in err


@pytest.mark.parametrize("flag", ["--trace", "--samples", "--logprobs", "--json", "--raw", "--tokens"])
def test_flags_of_one_answer_are_refused(talk, flag):
    code, out, err = talk("t9\n", flag, "5")
    assert (code, out) == (2, "") and f"unrecognized arguments: {flag}" in err


def test_flags_reach_the_run(talk):
    assert talk("t9\n", "--stop", "t20 t20 t20")[1] == "\n"
    assert "no effect at temperature 0" in talk("t9\n", "--seed", "3")[2]
    assert "wider than the 8" in talk("t9\n", "--block", "9")[2]
    assert talk("t9\n", "--drafter", "none", "--temperature", "1", "--top-k", "1")[:2] == (0, REPLY)
    assert "does not read 'colour'" in talk("t9\n", "--chat-template-arg", "colour=red")[2]


# ---- a terminal --------------------------------------------------------------------------------------------


class Terminal:
    """The command in a terminal of its own. shown: what it shows. piped: stdout, where that is a pipe."""

    def __init__(self, argv, is_piped=False):
        self._in, end = pty.openpty()
        self.shown, self.piped = "", ""

        def controls():
            os.setsid()
            os.close(os.open(os.ttyname(end), os.O_RDWR))  # the first terminal it opens is its own
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

        environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_NUM_THREADS": "1", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minidflash", "chat", *map(str, argv)], stdin=end, stderr=end,
            stdout=subprocess.PIPE if is_piped else end, env=environment,
            preexec_fn=controls,  # noqa: PLW1509 no locks
        )  # fmt: skip
        os.close(end)

    def wait(self, pattern, again="", every=5):
        """Read until the pattern is shown behind what earlier waits found. again: typed every few seconds."""
        until, then = time.monotonic() + 100, time.monotonic() + every
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < until, self.shown[-2000:]
            if again and time.monotonic() > then:
                then += every
                self.type(again)
            if select.select([self._in], [], [], 1)[0]:
                try:
                    data = os.read(self._in, 65536)
                except OSError:  # Linux says so where the other end is closed
                    data = b""
                assert data, f"it ended: {self.shown[-2000:]}"
                self.shown += data.decode(errors="replace")
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def type(self, text):
        os.write(self._in, text.encode())

    def end(self):
        """The exit code."""
        out = self.process.communicate(timeout=100)[0]
        self.piped = (out or b"").decode()
        os.close(self._in)
        return self.process.returncode


@pytest.fixture
def endless(tmp_path):
    target, drafter = build(tmp_path)
    return ["--target", target, "--drafter", drafter, "-n", "3500", "--ctx", "4096", "--verify", "1"]


def test_ctrl_c_stops_a_reply_and_keeps_what_was_said(endless):
    terminal = Terminal(endless)
    terminal.wait("/help lists the commands")
    terminal.wait("> ")
    terminal.type(
        "\x03"
    )  # at the prompt: one that comes between it and the wait for a line is seen with the next
    terminal.wait("> ", again="\x03")
    terminal.type("t9\n")
    terminal.wait("(t20 ){5}")
    terminal.type("\x03")
    terminal.wait("stopped; what was said is kept")
    terminal.wait("> ")
    terminal.type("/nothing\n")
    terminal.wait("there is no command /nothing")
    terminal.wait("> ")
    terminal.type("t9 t9\n")
    terminal.wait("(t20 ){5}")
    terminal.type("\x03")
    terminal.wait("stopped; what was said is kept")
    terminal.wait("> ")
    terminal.type("/stats\n")
    told = terminal.wait("machine .*\n")
    total, reused = map(int, re.search(r"(\d+) in the prompt \((\d+) of them reused\)", told).groups())
    assert total - reused == 1 + 7  # the last token, and what is new
    assert "ended by interrupted" in told
    terminal.wait("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.shown


def test_stdout_that_is_piped_gets_the_text_alone(endless):
    terminal = Terminal([*endless, "-n", "4"], is_piped=True)
    terminal.wait("> ")
    terminal.type("t9\n")
    terminal.wait("> ")
    terminal.type("\x04")
    assert terminal.end() == 0 and terminal.piped == "t20 t20 t20 t20\n"
