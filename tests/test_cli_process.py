"""The command line as a process: Ctrl-C, closed pipes, full disks, what is loaded."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from tests import automaton

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads((resources.files("minidflash") / "result.schema.json").read_text(encoding="utf-8"))
PROMPT = "9 " * 40 + "5"  # P(9x40,5) of the field log: the pair FX-B then says 20 for ever


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target, draft = automaton.build(tmp_path_factory.mktemp("FX-B"), "FX-B")
    return ["--target", str(target), "--drafter", str(draft)]


def start(*argv, **environment):
    """A started process whose SIGINT is as a terminal's, whatever the test runner did to it."""

    def unblock():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, *map(str, argv)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=environment, preexec_fn=unblock, bufsize=0,  # noqa: PLW1509 no locks
    )  # fmt: skip


ENDLESS = ["--tokens", PROMPT, "-n", "4000", "--verify", "1"]


def test_ctrl_c_ends_after_the_round_and_prints_what_is_there(pair):
    process = start("-m", "minidflash", "generate", *pair, *ENDLESS, "--stats")
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    text = (first + out).decode()
    assert set(text.split()) == {"t20"}
    assert text.endswith("t20\n")
    assert 1 <= len(text.split()) < 4000
    assert b"ended by interrupted" in err
    assert b"Traceback" not in err


def test_ctrl_c_with_json_gives_the_object(pair, tmp_path):
    trace = tmp_path / "t.jsonl"
    process = start("-m", "minidflash", "generate", *pair, *ENDLESS, "--json", "--trace", trace)
    while process.poll() is None and not (trace.exists() and trace.stat().st_size):
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    found = json.loads(out)
    jsonschema.validate(found, SCHEMA)
    assert 1 + sum(found["rounds"]) == len(found["tokens"])
    assert found["finish_reason"] == "interrupted"
    assert 0 < len(found["tokens"]) < 4000
    assert len(trace.read_text().splitlines()) == 1 + len(found["tokens"])


def test_the_first_ctrl_c_interrupts_loading_the_second_ends_at_once():
    code = """
import signal, sys, time
from minidflash.cli.terminal import Interrupt
class Engine: pass
with Interrupt() as interrupt:
    interrupt.engine = Engine() if sys.argv[1] == "2" else None
    try:
        print("ready", flush=True)
        for _ in range(600): time.sleep(0.1)
    except KeyboardInterrupt:
        raise SystemExit(5)
"""
    for presses, wanted in (("1", 5), ("2", 130)):
        process = start("-c", code, presses)
        process.stdout.readline()
        for _ in range(int(presses)):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)  # two at once would count as one
        process.communicate(timeout=60)
        assert process.returncode == wanted


def test_a_closed_pipe_is_141_without_a_word(pair):
    process = start("-m", "minidflash", "generate", *pair, *ENDLESS)
    process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert err == b""


def test_a_full_disk_is_said(pair):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs the device /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "minidflash", "kernels"], stdout=full, stderr=subprocess.PIPE, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr.startswith(b"minidflash: stdout cannot be written")


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from minidflash.cli import main; main(['--help']); print([m for m in ('numba', "
        "'tokenizers', " + ("'jinja2', 'cupy') if m in sys.modules], file=sys.stderr)")
    )
    process = start("-c", code)
    assert process.communicate(timeout=60)[1].decode().strip() == "[]"


def test_words_are_utf8_whatever_the_locale(pair):
    code = (
        "from minidflash import cli; from minidflash.cli import generate as run;"
        "run.generate = lambda a, i: print(ascii(a.prompt)); cli.main()"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = start("-c", code, "generate", "\u00e9t\u00e9", **environment)
    assert process.communicate(timeout=60)[0] == b"'\\xe9t\\xe9'\n"
