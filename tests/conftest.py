"""Fixtures of all tests: `ops` on every backend with both activation types, seeds, golden folders."""

import gc
import importlib
import os
import sys
from functools import lru_cache
from pathlib import Path

# The oracle's matrices are small, and NumPy's threads spin: two test processes on two cores took 37 s for
# what takes 14.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numba
import numpy as np
import pytest
from minidflash.kernels import has_cuda, open_ops

from minidflash.errors import UserError
from tests import golden_files

# Read when Numba first runs a parallel kernel: OpenMP threads that spin for a core which others use make tiny
# models 10 to 100 times slower on a shared machine (F92).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

gc.set_threshold(20_000)  # instead of 700: collecting tests and compiling with Numba took a seventh longer

BACKENDS = "oracle", "numba", "emulate", "cuda"
FULL = os.environ.get("MINIDFLASH_FULL") == "1"


def known_backends():
    """The backends that open_ops names in its refusal of one that does not exist."""
    with pytest.raises(UserError) as refusal:
        open_ops("none of them")
    return [name for name in BACKENDS if name in refusal.value.hint]


@lru_cache
def _opened(backend, activations, options, threads):
    try:
        return open_ops(backend, activations, **dict(options))
    except UserError as error:
        return error


def open_or_skip(backend, activations, **options):
    """Ops of a backend, opened once. Skips in words where the machine lacks it."""
    if backend == "cuda" and not has_cuda():
        pytest.skip("backend cuda cannot run here: it needs an NVIDIA GPU and pip install 'minidflash[cuda]'")
    threads = numba.get_num_threads()  # a backend keeps to what it found when it was opened
    found = _opened(backend, activations, tuple(sorted(options.items())), threads)
    if isinstance(found, UserError):
        pytest.skip(f"backend {backend} cannot run here: {found}; {found.hint}")
    return found


def parameters(backends=None, activations=("f32", "bf16")):
    """pytest parameters (backend, activations), with the mark that GPU tests carry."""
    marks = {"cuda": [pytest.mark.gpu]}
    return [
        pytest.param((name, kind), id=f"{name}-{kind}", marks=marks.get(name, []))
        for name in known_backends()
        if backends is None or name in backends
        for kind in activations
    ]


def parameters_with(values, few, backends=None, activations=("f32", "bf16"), **fewer):
    """Parameters (ops, value): every backend with all values; the emulator, which is slow, with `few` of
    them, and a backend that `fewer` names with its own, unless MINIDFLASH_FULL=1 asks for all."""
    of = {} if FULL else {"emulate": few} | fewer
    return [
        pytest.param(p.values[0], value, id=f"{p.id}-{value}", marks=p.marks)
        for p in parameters(backends, activations)
        for value in of.get(p.values[0][0], values)
    ]


def only_gpu_tests_skip(report, node):
    """In CI a skip is a failure, so that a green run has run everything:
    only tests with the mark `gpu` may skip."""
    is_skip = report.skipped and not hasattr(
        report, "wasxfail"
    )  # an expected failure is reported as skipped too
    if is_skip and os.environ.get("CI") and not any(node.iter_markers("gpu")):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where only tests marked gpu may be: {report.longrepr[2]}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return only_gpu_tests_skip((yield), item)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):  # importorskip of a whole file
    return only_gpu_tests_skip((yield), collector)


def pytest_collection_modifyitems(items):
    """f32 weights under bf16 activations are compiled by Numba with MINIDFLASH_FULL=1 alone, a quarter of a
    kernel's signatures. f32 weights are tested under f32 activations, bf16 activations with bf16 weights: a
    kernel reads the two in different places (kernels/cpu/dot.py, tiles.py); the emulator has the pair."""

    def is_left_out(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return params.get("ops") == ("numba", "bf16") and params.get("weights") == "f32"

    if not FULL:
        items[:] = [item for item in items if not is_left_out(item)]


def pytest_collection_finish():
    """Thousands of tests live as long as the process: nobody need look through them for garbage again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Processes take whole stretches of the tests, so that no two compile one file's kernels at the same
    time."""
    if config.getvalue("dist") == "load":  # what -n alone means
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)
    return None


def pytest_generate_tests(metafunc):
    """`ops`: every backend with both activation types, unless the test or its fixtures say otherwise."""
    if "ops" in metafunc.fixturenames and not any(
        mark.name == "parametrize" and "ops" in str(mark.args[0]).replace(" ", "").split(",")
        for mark in metafunc.definition.iter_markers()
    ):
        metafunc.parametrize("ops", parameters(), indirect=True)


@pytest.fixture
def ops(request):
    """Ops of one backend and activation type."""
    return open_or_skip(*request.param)


@pytest.fixture
def rng(request):
    """A generator seeded by the test's name, so that adding a test changes no other."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture
def golden():
    """name -> folder of a golden case."""
    return golden_files.golden


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other take more than half of a tiny model's time, and its bits do not depend
    on them (F92). Kernels have all of them: tests/kernels/conftest.py."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


@pytest.fixture
def mdf(capsys):
    """Run a command line in this process: (exit code, stdout, stderr)."""
    from minidflash.cli import main

    def call(*argv):
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture(scope="module")
def bench():
    """bench/NAME.py as a module, by name: they are scripts beside each other, not a package."""
    folder = str(Path(__file__).resolve().parent.parent / "bench")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)
