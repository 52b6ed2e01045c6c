"""Field log 5 (limits, memory, long runs), 4's exactness, 6's pass counts, and what installs break (7)."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import minidflash as md
from minidflash.errors import UserError
from tests.automaton import build
from tests.conftest import FULL
from tests.random_pair import write_random
from tests.replay import Replay, proposing

ROOT = Path(__file__).resolve().parent.parent
WHOLE = 64
P = [9] * 40 + [5]
GUARD = 4096  # elements on either side of a cache


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CHECK", "1")


def open_pair(folders, **options):
    target, drafter = folders
    return md.load(str(target), drafter=str(drafter), **{"warm": False, **options})


def resident():
    """Bytes of memory this process holds now."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("block, activations", [(4, "f32"), (16, "bf16")])
def test_f68_the_edges_of_the_context(tmp_path, block, activations):
    """prompt + budget = capacity, capacity - 1, capacity - block, with guards around every buffer left
    unchanged."""
    ctx = 70
    engine = open_pair(write_random(tmp_path, "grouped", max_pos=ctx), activations=activations)
    guards, array = [], engine.ops.array

    def guarded(shape, kind):
        whole = array((2 * GUARD + int(np.prod(shape)),), kind)
        middle = whole[GUARD : len(whole) - GUARD]
        for guard in (whole[:GUARD], whole[len(whole) - GUARD :]):
            guard[...] = 77
            guards.append(guard)
        return middle.reshape(shape)

    engine.ops.array = guarded
    assert engine.ctx == ctx
    plans = None, 0, block - 1
    for total in (ctx, ctx - 1, ctx - block):
        ends = total - block - 1, total - block, total - 2, total - 1
        for i, length in enumerate((1, 2, block - 1, block, block + 1, *ends)):
            prompt = np.random.default_rng([total, length]).integers(0, 97, length).tolist()
            known = md.generate(engine, prompt, max_tokens=total - length, drafter=None).tokens
            assert len(known) == total - length
            for plan in plans if total == ctx or FULL else [plans[i % 3]]:
                replay = Replay(prompt + known, length, block, 97, seed=length, plan=plan)
                with proposing(engine, replay):
                    options = {"max_tokens": total - length, "block": block, "verify": WHOLE}
                    assert md.generate(engine, prompt, **options).tokens == known
            own = md.generate(engine, prompt, max_tokens=total - length, block=block)
            assert own.tokens == known
            with pytest.raises(UserError, match="positions"):
                md.generate(engine, prompt, max_tokens=ctx - length + 1)
    assert len(guards) > 50 and all((guard == 77).all() for guard in guards)


def test_f69_thousands_of_rounds(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CHECK", "0")  # what it allocates is nobody's
    engine = open_pair(build(tmp_path, max_pos=4096))
    options = {"max_tokens": 2000, "block": 2, "verify": 2}
    count, before = 0, None
    runs = 6 if FULL else 4
    for i in range(runs):
        prompt = P if i % 2 else [10] * 30 + P
        rounds = list(md.stream(engine, prompt, **options))
        assert all(token == 20 for r in rounds for token in r.tokens)
        count += len(rounds)
        del rounds
        before = before or (i == 1 and resident())
    assert count > 850 * runs and resident() - before < (runs - 2) << 19


def test_100_calls_take_no_memory(tmp_path):
    """A leak shows in every part of the calls; a worker that ran much before may jump once."""
    engine, marks = open_pair(build(tmp_path)), []
    for i in range(101):
        options = ({"verify": WHOLE}, {"drafter": None}, {"block": 4, "verify": 3}, {"verify": "auto"})[i % 4]
        assert md.generate(engine, P, max_tokens=17, **options).tokens == [20] * 17
        if i in (20, 60, 100):
            marks.append(resident())
    assert min(marks[1] - marks[0], marks[2] - marks[1]) < 1 << 20


def test_f70_the_end_of_the_context_is_said_at_the_call(tmp_path):
    engine = open_pair(build(tmp_path), ctx=64)
    assert len(md.generate(engine, P, max_tokens=23).tokens) == 23
    with pytest.raises(UserError) as error:
        md.stream(engine, P, max_tokens=24)
    assert "64" in str(error.value) and "--ctx" in error.value.hint
    with pytest.raises(UserError, match="context"):
        open_pair(build(tmp_path), ctx=5000)


@pytest.mark.parametrize("activations, size", [("f32", 4), ("bf16", 2)])
def test_f71_cache_bytes_are_reported_and_follow_the_formula(tmp_path, activations, size):
    windows = ["full_attention"] * 3, None, None
    engine = open_pair(
        write_random(tmp_path, "grouped", windows=windows, max_pos=300), activations=activations
    )
    memory = md.generate(engine, [1, 2, 3], max_tokens=4, block=8).memory_bytes
    rows = engine.state.injected.k.shape[3]
    assert engine.ctx <= rows <= engine.ctx + 2 * WHOLE
    assert memory.drafter_cache == 3 * 2 * 3 * 8 * rows * size  # layers, k and v, kv heads, head size
    assert memory.target_cache == 2 * 2 * 3 * 8 * rows * size
    assert md.generate(engine, [1, 2, 3], max_tokens=4).to_json()["memory_bytes"]["drafter_cache"] > 0


def test_f72_time_is_split(tmp_path):
    engine = open_pair(build(tmp_path))
    begun = time.perf_counter()
    timing = md.generate(engine, [9] * 400 + [5], max_tokens=33).timing
    wall = time.perf_counter() - begun
    assert timing.prefill_s > 0 and timing.decode_s > 0 and timing.ttft_s >= timing.prefill_s
    assert timing.prefill_s + timing.decode_s <= wall


@pytest.mark.parametrize("name, value", [
    ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "9"), ("verify", 0),
    ("verify", -3), ("verify", "all"), ("block", 65), ("temperature", "0.7"), ("temperature", -1.0),
    ("top_k", 3), ("samples", 2),
])  # fmt: skip
def test_f74_bad_numbers_are_one_line(tmp_path, name, value):
    with pytest.raises(UserError) as error:
        md.stream(open_pair(build(tmp_path)), P, **{name: value})
    assert name.split("_")[0] in str(error.value) and "\n" not in str(error.value)


def test_f74_edges_of_prompt_and_budget(tmp_path):
    engine = open_pair(build(tmp_path))
    for options in ({}, {"drafter": None}):
        nothing = md.generate(engine, P, max_tokens=0, **options)
        assert nothing.tokens == [] and nothing.rounds == [] and nothing.finish_reason == "length"
        assert list(md.stream(engine, P, max_tokens=0, **options)) == []
    for empty in ([], "", ()):
        with pytest.raises(UserError, match="empty"):
            md.generate(engine, empty)
    for outside in ([64], [-1], [1.5], ["5"], [True], [None]):
        with pytest.raises(UserError):
            md.generate(engine, outside)
    with pytest.raises(TypeError, match="unknown keyword 'max_token'"):
        md.generate(engine, P, max_token=3)
    assert md.generate(engine, np.array(P).tolist(), max_tokens=3).tokens == [20] * 3


@pytest.mark.parametrize("budget, verifies", [(1, 0), (2, 1), (9, 1), (10, 2), (33, 4), (34, 5)])
def test_f78_one_target_pass_a_round(tmp_path, budget, verifies):
    engine = open_pair(build(tmp_path))
    first, passes, qkv = engine.target.layers[0]["q"], [], engine.ops.backend.qkv

    def counting(x, norm, eps, wq, *rest):
        if wq is first:
            passes.append(len(x))
        qkv(x, norm, eps, wq, *rest)

    engine.ops.backend.qkv = counting
    result = md.generate(engine, P, max_tokens=budget, verify=WHOLE)
    assert passes == [41] + [8] * verifies and len(result.tokens) == budget


def test_f56_verify_widths_leave_the_same_bits(tmp_path):
    """The last row's stream, k and v after verifying it in company of 0, 1, 6 and 15 others (F56)."""
    for activations in ("f32", "bf16"):
        for name in ("odd", "grouped"):
            engine = open_pair(write_random(tmp_path / name, name), activations=activations)
            prompt = np.random.default_rng(5).integers(0, 97, 37).tolist()
            known = md.generate(engine, prompt, max_tokens=60, drafter=None).tokens
            bits = set()
            for width in (1, 2, 7, 16):
                replay = Replay(prompt + known, 37, 16, engine.target.config.vocab, plan=15)
                with proposing(engine, replay):
                    ids = md.generate(engine, prompt, max_tokens=50, block=16, verify=width).tokens
                assert ids == known[:50]
                parts = [part for cache in engine.state.caches for part in (cache.k, cache.v)]
                bits.add(b"".join(part[:, :, : 37 + 40].tobytes() for part in parts))
            assert len(bits) == 1, (activations, name)


def test_f91_two_threads_with_an_engine_each(tmp_path):
    results, errors = {}, []
    folders = [build(tmp_path / "b"), write_random(tmp_path / "random", "grouped")]
    want = []
    for pair in folders:
        want.append(md.generate(open_pair(pair), P, max_tokens=200, drafter=None).tokens)

    def work(i):
        try:
            engine = open_pair(folders[i])
            results[i] = [md.generate(engine, P, max_tokens=200, verify=WHOLE).tokens for _ in range(3)]
        except BaseException as error:  # noqa: BLE001  reported by the test, in its own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and results == {i: [want[i]] * 3 for i in range(2)}


RUN = """
import sys
import minidflash as md
engine = md.load(sys.argv[1], drafter=sys.argv[2], backend="numba", warm=False)
print(md.generate(engine, [9] * 40 + [5, 9, 17, 3], max_tokens=40, verify=16).tokens)
"""


def run(code, *words, **options):
    """What a fresh interpreter prints. Errors: AssertionError with its stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **options.pop("env", {})}
    env = {key: value for key, value in env.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        env=env,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_f92_the_number_of_threads_changes_no_bit(tmp_path):
    folders = write_random(tmp_path, "odd")
    found = {
        threads: run(RUN, *folders, env={"NUMBA_NUM_THREADS": threads, "OMP_NUM_THREADS": "1"})
        for threads in "12"
    }
    assert found["1"] == found["2"] and len(found["1"]) > 80


def test_f89_a_broken_cupy_is_never_touched(tmp_path):
    (tmp_path / "cupy.py").write_text("raise RuntimeError('no driver')\n")
    folders = build(tmp_path / "pair")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    assert run(RUN, *folders, env={"PYTHONPATH": path}).startswith("[")
    code = (
        "import sys, minidflash as md\n"
        "try: md.load(sys.argv[1], drafter=sys.argv[2], backend='cuda')\n"
        "except md.UserError as error: print(error.code, len(str(error).splitlines()), bool(error.hint))"
    )
    assert run(code, *folders, env={"PYTHONPATH": path}).split()[1:] == ["1", "True"]


def test_f90_no_home_and_nothing_may_be_written():
    """A read-only install run by somebody without a home folder: without a cache,
    and nothing is written anywhere."""
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        install = place / "site"
        for folder in ("minidflash", "kernels", "weights"):
            ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "cuda", "emulate")
            shutil.copytree(ROOT / folder, install / folder, ignore=ignored)
        folders = build(place / "pair", "FX-A")
        for path in (place, *place.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = sorted(place.rglob("*"))
        env = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "MINIDFLASH_CACHE", "NUMBA_CACHE_DIR"))
        env |= {"PYTHONPATH": str(install), "HOME": os.devnull + "/none", "TMPDIR": str(place)}
        # The oracle runs everything but the compiler; that kernels compile uncached is seen by one of them.
        code = (
            "import sys, numpy as np, minidflash as md\n"
            "from minidflash.kernels.cpu import jit, control\n"
            "engine = md.load(sys.argv[1], drafter=sys.argv[2], backend='oracle')\n"
            "one = np.zeros(1, np.int32); control._stage_context(one, one, one.copy(), one.copy())\n"
            "print(md.generate(engine, [9] * 40 + [5], max_tokens=9).tokens, jit.CACHE_FOLDER)"
        )
        other = {"user": 65534, "group": 65534} if os.geteuid() == 0 and readable_by_all() else {}
        assert run(code, *folders, env=env, cwd="/", **other).strip() == "[6, 7, 2] None"
        assert sorted(place.rglob("*")) == before
        for path in (place, *place.rglob("*")):
            path.chmod(0o755)


def readable_by_all():
    """Whether another user could start this interpreter."""
    places = [Path(sys.executable), Path(np.__file__)]
    return all(p.stat().st_mode & 0o005 == 0o005 for place in places for p in place.resolve().parents)
