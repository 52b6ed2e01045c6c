"""bench/peers/cpu.py: every way takes its turn in a process of its own, and one that fails is told of."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).resolve().parent.parent / "bench" / "peers"
GIVEN = {"prompts": [[1, 2], [3]], "tokens": 4, "threads": 1, "clock": "wall"}
CHILD = """import sys; sys.path.insert(0, {folder!r})
import job
given = job.read()
{body}
"""


@pytest.fixture
def cpu(monkeypatch):
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("peers_cpu", PEERS / "cpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


@pytest.fixture
def programs(cpu, monkeypatch, tmp_path):
    """write(name, ways, body): a program whose process runs these lines."""
    monkeypatch.setattr(cpu, "PROGRAMS", {})

    def write(name, ways, body):
        (tmp_path / f"{name}.py").write_text(CHILD.format(folder=str(PEERS), body=body))
        cpu.PROGRAMS[name] = str(tmp_path / f"{name}.py"), (), ways

    return write


WORKS = """
def generate(ids):
    return job.clock_of(given)(), [*ids, len(given["way"])], 2
job.answer(*job.timed(given, generate), ["numpy"])
"""


def test_what_fails_is_told_and_the_others_go_on(cpu, programs):
    programs("works", ("a", "bb"), WORKS)
    programs("fails", ("c",), "raise ValueError('no such model')")
    programs("mute", ("e",), "print('not JSON')")
    answers, failed = cpu.all_turns(GIVEN, list(cpu.PROGRAMS), 2, 60, say=lambda words: None)
    assert set(answers) == {("works", "a"), ("works", "bb")}
    assert [len(found) for found in answers.values()] == [2, 2]
    assert answers["works", "bb"][0]["tokens"] == [[1, 2, 2], [3, 2]]
    assert failed["fails c"].startswith("exit code 1: ValueError: no such model")
    assert failed["mute e"].startswith("gave no answer: ")


def test_what_does_not_end_is_ended_and_told(cpu, programs):
    programs("hangs", ("d",), "import time; time.sleep(10)")
    answers, failed = cpu.all_turns(GIVEN, ["hangs"], 1, 0.5, say=lambda words: None)
    assert (answers, failed) == ({}, {"hangs d": "did not end within 0.5 s"})


def test_a_row_counts_tokens_behind_the_first(cpu):
    answers = [
        {
            "tokens": [[1, 2, 3], [4, 5, 6]],
            "rounds": [1, 1],
            "seconds": [1.0, seconds],
            "versions": {"x": "1"},
        }
        for seconds in (1.0, 3.0, 0.6)
    ]
    row = cpu.summary("dflash", "float32 drafted", answers, [[1, 2, 3], [4, 5, 7]])
    assert row["tokens_per_s"] == 2.0 and row["spread"] == 0.75
    assert row["tau"] == 2.0 and row["same_as_reference"] == 1
    text = "\n".join(
        cpu.table({"ways": [row], "prompts": ["a", "b"], "failed": {"llama.cpp q8_0": "no words"}})
    )
    assert "| dflash | float32 drafted | 2.0 ± 0.8 | 2.00 | 1 of 2 |" in text
    assert "| llama.cpp q8_0 | failed: no words |" in text


def test_what_cannot_be_installed_is_told(cpu, monkeypatch):
    def environment(installs):
        if installs:
            raise cpu.subprocess.CalledProcessError(1, "pip", stderr="no such package\n")
        return sys.executable

    monkeypatch.setattr(cpu, "environment", environment)
    programs, failed = cpu.installed(["minidflash", "llama.cpp"])
    assert programs == ["minidflash"]
    assert failed == {"llama.cpp": "cannot be installed: exit code 1: no such package"}


def test_the_first_prompts_of_each_kind_are_asked(cpu, tmp_path):
    rows = [{"kind": kind, "prompt": f"{kind}{i}"} for i in range(3) for kind in "ab"]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = [prompt["prompt"] for prompt in cpu.prompts_of(str(tmp_path / "p.jsonl"), 2)]
    assert asked == ["a0", "a1", "b0", "b1"]
