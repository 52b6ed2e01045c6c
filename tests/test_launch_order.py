"""Dependent launch: a kernel that starts while those before it end reads nothing of theirs before its wait.

Whole runs on the emulator, which fills what a kernel's predecessors wrote with NaN bits until the kernel
waits: they say the same and leave the same caches with dependent launch as without. And no kernel escapes:
those that ran so are those that have a wait.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from minidflash.kernels import source
from minidflash.kernels.emulate import EmulatedDevice
from minidflash.kernels.gpu import split

import minidflash as md
from tests.compare import assert_same_bits
from tests.conftest import open_or_skip
from tests.random_pair import write_random

SAMPLE = Path(__file__).parent / "kernels" / "samples" / "grid.cu"
PROMPT = [5, 9, 17, 3, 70, 41, 2, 2, 60]  # three chunks
RUNS = {
    "greedy": {"verify": 4}, "plain": {"drafter": None},
    "sampled": {"verify": 3, "temperature": 0.9, "top_p": 0.9, "logprobs": True, "seed": 3},
    "reject": {"verify": 4, "temperature": 1.0, "accept": "reject"},
}  # fmt: skip
# Activations, the frame of prefill.cuh, how products are cut: the emulated card's own way, or clusters that
# meet in shared memory and let their successors start at once.
CUT = split.Split(2, 1, 4, 4, 1, 2, True, True)
WAYS = {"fast": ("bf16", "wgmma", None), "clusters": ("bf16", "mma", CUT), "plain": ("f32", None, None)}


def told(engine, name):
    """What a run says but for its times, and the caches that it leaves."""
    options = RUNS[name] if name == "plain" else {"block": 8, **RUNS[name]}
    rounds = list(md.stream(engine, PROMPT, max_tokens=6, **options))
    words = [(r.tokens, r.drafted, r.accepted, r.finish_reason, r.logprobs) for r in rounds]
    s = engine.state
    return words, [
        engine.ops.download(a) for cache in (*s.caches, *s.drafter_caches) for a in (cache.k, cache.v)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """way -> ({run: what it says}, {the same with dependent launch, or its error}, kernels launched so)."""
    open_or_skip("emulate", "f32")
    target, drafter = write_random(tmp_path_factory.mktemp("pair"), "fast", family="qwen3")

    @cache
    def run(way):
        activations, frame, cut = WAYS[way]

        def choose(outputs, cols, sms, whole=False):
            return replace(cut, slices=1 if whole else min(cut.slices, -(-cols // split.CHUNK)))

        engine = md.load(str(target), drafter=str(drafter), backend="emulate", activations=activations,
                         ctx=64, prefill_chunk=4, warm=False)  # fmt: skip
        backend, names = engine.ops.backend, set()
        backend.prefill_frame, launch = frame, backend.device.launch

        def noted(function, *args, dependent=False, **how):
            if dependent:
                names.add(function.name)
            launch(function, *args, dependent=dependent, **how)

        backend.device.launch = noted
        with pytest.MonkeyPatch.context() as patch:
            if cut:
                patch.setattr(split, "choose", choose)
            want, got = {name: told(engine, name) for name in RUNS}, {}
            assert not names
            backend.dependent = True
            for name in RUNS:
                engine.programs.clear()
                try:
                    got[name] = told(engine, name)
                except Exception as error:  # noqa: BLE001 that test's failure, the others have their own
                    got[name] = error
        return want, got, names

    return run


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("way", WAYS)
def test_dependent_launch_changes_nothing(runs, way, name):
    want, got = (found[name] for found in runs(way)[:2])
    if isinstance(got, Exception):
        raise got
    assert got[0] == want[0]
    for mine, plain in zip(got[1], want[1], strict=True):
        assert_same_bits(mine, plain, "a cache")


def test_every_kernel_that_waits_was_launched_so(runs):
    """A kernel with a wait that none of these runs launches would be tested by nobody: give it a run."""
    # In chains of their own: a bare product's in test_fast_bits.py, experts' in test_fast_experts.py.
    # Gemma's layers run in test_gemma_pair.py, reduced heads in test_golden_drafters.py,
    # traced rounds in test_trace.py, many rows in test_wide.py and test_lay_wide.py.
    elsewhere = {"linear_fast", "route_fast", "group", "experts_up_fast", "experts_down_fast", "experts_sum"}
    elsewhere |= {"route_few", "experts_up_few", "experts_down_few"}
    elsewhere |= {"join_fast", "linear_add_normed_fast", "end_rows", "widen", "head_margin_fast"}
    elsewhere |= {"lay_wide", "lay_wide_normed", "wide_sums", "wide_gate_up", "wide_head", "head_ends"}
    elsewhere |= {"end_linear", "end_linear_add", "end_gate_up", "end_qkv", "end_inject", "end_fuse"}
    elsewhere |= {"end_linear_add_normed", "end_and_lay"}
    never = {"choose_rows"}  # of the plain route, beside one that waits
    waiting = set()
    for path in source.CUDA_FOLDER.glob("*.cu"):
        texts = source.texts(path.resolve())
        if any("griddep_wait();" in source.strip_comments(text) for text in texts.values()):
            waiting.update(source.kernel_names(path.read_text(encoding="utf-8")))
    launched = set().union(*(runs(way)[2] for way in WAYS))
    assert not launched & (elsewhere | never)
    assert launched | elsewhere | never == waiting and len(waiting) > 15


@pytest.mark.parametrize("late", [0, 1])
def test_what_lets_its_successor_start_early_covers_nothing(late):
    """The third launch may start while the first one writes; behind a kernel that waits first it may not."""
    open_or_skip("emulate", "f32")
    device = EmulatedDevice()
    x, weight, other = np.arange(100, dtype=np.float32), np.ones(100, np.float32), np.zeros(32, np.float32)
    y, z = np.zeros(100, np.float32), np.zeros(100, np.float32)

    def run(name, grid, args, dependent=True, **defines):
        device.launch(device.function(SAMPLE, name, defines), grid, 32, 0, args, dependent=dependent)

    run("produce", 4, [x, y, 100], dependent=False)
    run("between", 1, [other], LATE=late)
    run("consume", 4, [weight, y, z, 100], TOO_EARLY=1)
    assert (z == 1 + 2 * x).all() if late else np.isnan(z).all()
