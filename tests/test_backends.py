"""Which backend `auto` takes, what the emulate backend's options do,
and that nothing of CUDA loads unasked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minidflash import kernels
from minidflash.errors import UserError
from tests.cases import Make, put
from tests.conftest import open_or_skip

STATM = Path("/proc/self/statm")


def test_auto_takes_the_gpu_where_it_answers(monkeypatch):
    from minidflash.kernels.gpu import cuda

    class Found:
        name, activations = "cuda", "bf16"
        array = upload = download = copy = weight = start = None
        rounds_ahead = 1

        def __init__(self, activations, device, **options):
            self.activations, self.device = activations, device

    monkeypatch.setattr(cuda, "CudaBackend", Found)
    monkeypatch.setattr(kernels, "has_cuda", lambda: True)
    found = kernels.open_ops(device=1)
    assert (found.name, found.activations, found.backend.device) == ("cuda", "bf16", 1)
    monkeypatch.setattr(kernels, "has_cuda", lambda: False)
    assert (kernels.open_ops().name, kernels.open_ops().activations) == ("numba", "f32")


@pytest.mark.parametrize("name", ["auto", "oracle", "numba", "emulate"])
def test_the_cpu_has_no_device_numbers(name, monkeypatch):
    monkeypatch.setattr(kernels, "has_cuda", lambda: False)
    with pytest.raises(UserError, match="device 1: only GPUs are counted"):
        kernels.open_ops(name, device=1)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="backend 'tpu' not known") as caught:
        kernels.open_ops("tpu")
    assert caught.value.hint == "use auto, oracle, numba, emulate or cuda"
    with pytest.raises(UserError, match="activations 'f16' not known"):
        kernels.open_ops("oracle", "f16")


def test_without_cupy_the_cuda_backend_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UserError, match="CuPy is not installed") as caught:
        kernels.open_ops("cuda")
    assert caught.value.code == 3 and "cupy-cuda13x" in caught.value.hint and "numba" in caught.value.hint


@pytest.mark.parametrize("name", ["oracle", "numba", "emulate"])
def test_nothing_of_cuda_is_loaded_for_others(name):
    open_or_skip(name, "f32")
    code = (
        "import sys, minidflash as md\n"
        f"md.ops({name!r})\n"
        "print([m for m in ('cuda', 'cupy') if m in sys.modules])"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("activations", ["f32", "bf16"])
def test_the_order_of_blocks_and_warps_changes_no_bit(activations, rng, monkeypatch):
    """A pass of a layer's kernels in ascending and in three shuffled orders, on cards of other sizes too."""
    make = Make(rng, activations)
    x, w, norm = make.a(9, 77), make.w(2 * 53, 77), make.v(77, around=1)
    found = []
    for options in ({}, {"seed": 1}, {"seed": 2, "sms": 1}, {"seed": 3, "sms": 7}):
        ops = open_or_skip("emulate", activations, **options)
        h = ops.array((9, 53), "A")
        work = ops.array((ops.backend.work_size(9, 77, 106),), "f32")
        ops.gate_up(put(ops, x, "A"), put(ops, norm, "f32"), 1e-6, 0, ops.weight([w]), work, h)
        found.append(ops.download(h).tobytes())
    assert len(set(found)) == 1
    monkeypatch.setenv("MINIDFLASH_SEED", "5")
    assert kernels.open_ops("emulate").backend.device.seed == 5
    assert kernels.open_ops("emulate", seed=6).backend.device.seed == 6


def test_memory_that_does_not_suffice_names_the_context_that_fits():
    from dataclasses import replace

    from minidflash.weights import open_checkpoint

    from minidflash.config import read_target
    from minidflash.fit import check_fit, needed
    from tests.golden_files import golden

    files = open_checkpoint(str(golden("llama-tiny")), "target")
    config = replace(read_target(files.config, files.generation), max_positions=4096)
    ops = open_or_skip("emulate", "f32")

    def total(ctx):
        return sum(needed(ops, config, None, ctx, weights=1000).values())

    class Card:
        name = "cuda"
        key_cut = ops.backend.key_cut

        def __init__(self, free):
            self.work_size, self.free_memory = ops.backend.work_size, lambda: free

    class On:
        def __init__(self, free):
            self.backend, self.array = Card(free), ops.array

    check_fit(On(total(4096) / 0.94), 4096, total)
    with pytest.raises(UserError, match="4096 positions need") as caught:
        check_fit(On(total(2100) / 0.95), 4096, total)
    assert caught.value.code == 3 and caught.value.hint == "--ctx 2048 fits"
    with pytest.raises(UserError, match="512 positions need") as caught:
        check_fit(On(1500), 512, total)
    assert "smaller model" in caught.value.hint
    check_fit(ops, 4096, lambda ctx: 10**15)  # the host is not asked


@pytest.mark.skipif(not STATM.exists(), reason="needs /proc/self/statm, which Linux alone has")
@pytest.mark.parametrize("kind, is_taken", [("f32", True), ("A", False)])
def test_scratch_is_taken_at_once_and_caches_as_they_fill(kind, is_taken):
    """So a server does not grow when a wider round runs first, hours after its start."""
    ops, size = open_or_skip("numba", "f32"), 64 << 20
    before = resident()
    held = ops.array((size // 4,), kind)
    assert held.nbytes == size
    assert (resident() - before > size // 2) is is_taken


def resident():
    """Bytes of this process in memory."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
