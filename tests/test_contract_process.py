"""What a process may rely on: forks, Numba's own switches, a limit on its memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import minidflash as md
from minidflash import fit
from minidflash.errors import UserError
from tests import automaton

ROOT = Path(__file__).resolve().parent.parent
P = [9] * 8 + [5]


def python(code, *args, **env):
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], check=False, capture_output=True, text=True,
        timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", **env},
    )  # fmt: skip


FORK = """
import multiprocessing as mp, sys, minidflash as md
load = lambda: md.load(sys.argv[1], drafter=sys.argv[2], backend="numba", warm=False, ctx=64)
how, e = sys.argv[3], None
if how != "import":
    e = load()
if how == "run":
    md.generate(e, [9, 5], max_tokens=3)
def child(q, e):
    for make in (lambda: md.generate(e or load(), [9, 5], max_tokens=3).tokens, lambda: load().ctx):
        try: q.put(str(make()))
        except md.UserError as error: q.put(f"{error.code} {error} {error.hint}")
context = mp.get_context("fork")
q = context.Queue(); p = context.Process(target=child, args=(q, e)); p.start()
p.join(200); print(p.exitcode)
for _ in range(2): print(q.get(timeout=5))
if e: print(md.generate(e, [9, 5], max_tokens=3).tokens)  # the parent's are as before
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("how", ["run", "load", "import"])
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_f101_a_forked_process_works_or_says_spawn(tmp_path, how, layer):
    done = python(FORK, *automaton.build(tmp_path, "FX-B"), how, NUMBA_THREADING_LAYER=layer)
    said = done.stdout.splitlines()
    assert said[0] == "0", done.stderr
    if layer == "omp" and how != "import":
        for line in said[1:3]:
            assert line.startswith("3 this process was forked") and "spawn" in line
    else:
        assert said[1:3] == ["[20, 20, 20]", "64"]
    assert said[3:] == ([] if how == "import" else ["[20, 20, 20]"])


def test_f101_what_a_backend_says_it_loses_is_refused_in_the_child_only(tmp_path, monkeypatch):
    from minidflash.kernels import fork

    target, drafter = automaton.build(tmp_path, "FX-B")
    engine = md.load(str(target), drafter=str(drafter), backend="oracle", warm=False)
    monkeypatch.setattr(fork, "_started", set())
    monkeypatch.setattr(fork, "_lost", set())
    assert fork.started("CUDA") == "CUDA" and fork.started("CUDA") == "CUDA"
    engine.ops.backend.lost_by_fork = "CUDA"
    assert md.generate(engine, P, max_tokens=2).tokens == [20, 20]
    monkeypatch.setattr(fork, "_lost", {"CUDA"})  # what a child finds
    s = engine.state
    row = s.drafts, s.choice[:1], s.stop, s.start, s.anchor, s.fresh, s.left, s.done, s.record, s.kept
    for call in (
        lambda: md.generate(engine, P), lambda: fork.started("CUDA"), lambda: engine.ops.accept(*row)
    ):  # fmt: skip
        with pytest.raises(UserError, match="forked from one that had started CUDA") as refusal:
            call()
        assert "spawn" in refusal.value.hint and refusal.value.code == 3


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("NUMBA_NUM_THREADS", "0", 3), ("NUMBA_NUM_THREADS", "-1", 3), ("NUMBA_NUM_THREADS", "1000000", 3),
        ("NUMBA_NUM_THREADS", "1", 0), ("NUMBA_NUM_THREADS", "abc", 0), ("NUMBA_NUM_THREADS", "", 0),
        ("NUMBA_THREADING_LAYER", "nonsense", 3), ("NUMBA_THREADING_LAYER", "workqueue", 0),
    ],
)  # fmt: skip
def test_f106_thread_variables_that_cannot_be_honoured_give_one_line(tmp_path, name, value, code):
    target, drafter = automaton.build(tmp_path, "FX-B")
    program = "from minidflash.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    flags = "--target", target, "--drafter", drafter, "--tokens", "9 9 5", "-n", 3, "--ctx", 64, "--backend"
    done = python(program, "generate", *flags, "numba", **{name: value})
    assert done.returncode == code, done.stderr
    if code:
        assert name in done.stderr and value in done.stderr and len(done.stderr.splitlines()) == 2
        if value == "nonsense":  # the oracle has no threads
            assert python(program, "generate", *flags, "oracle", **{name: value}).returncode == 0
    else:
        assert done.stdout == "t20 t20 t20\n"


def test_the_context_that_memory_holds_knows_a_limit_on_the_process(tmp_path):
    target, drafter = automaton.build(tmp_path, "FX-B", max_pos=2**20)
    code = (
        "import resource, sys, minidflash as md\n"
        "from minidflash import fit\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "assert 0 < fit.free_memory() < 2 << 30\n"
        "e = md.load(sys.argv[1], drafter=sys.argv[2], backend='oracle', warm=False, prefill_chunk=10**9)\n"
        "print(e.ctx, e.chunk, md.generate(e, [9, 5], max_tokens=2).tokens)\n"
    )
    done = python(code, target, drafter)
    ctx, chunk, tokens = done.stdout.split(" ", 2)
    assert int(chunk) <= int(ctx) < 2**20 and tokens.strip() == "[20, 20]", done.stderr


def test_no_limit_on_the_process_is_no_limit(monkeypatch):
    monkeypatch.setattr(fit, "_system_memory", lambda: 10**15)
    monkeypatch.setattr(fit, "_room_under_limit", lambda: None)
    assert fit.free_memory() == 10**15
