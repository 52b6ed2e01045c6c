"""Loading without a GPU (tests/fake_card.py): which copies are made, in which order,
and how failures are said."""

import gc
import os
import threading
from dataclasses import replace
from importlib import util

import numpy as np
import pytest
from minidflash.kernels.gpu import cuda, staging
from minidflash.weights.safetensors_io import open_tensors

from minidflash.errors import UserError
from tests.cases import Make

pytestmark = pytest.mark.skipif(
    not util.find_spec("cuda") or not util.find_spec("cuda.bindings"), reason="cuda-bindings is not installed"
)


@pytest.fixture(params=[0, 7000], ids=["one-ahead", "all-ahead"])
def small_buffers(request, monkeypatch):
    """Pinned buffers so few and small that each is filled many times. Returns how many threads have some."""
    for name, value in {"PIECE": 1000, "THREADS": 2, "BUFFERS": 2}.items():
        monkeypatch.setattr(staging, name, value)
    monkeypatch.setattr(cuda, "AHEAD", request.param)
    return 2


def test_weights_are_copied_piece_by_piece(opened, rng, small_buffers):
    ops, driver = opened()
    parts = [Make(rng, weights="bf16").w(50, 33), Make(rng, weights="bf16").w(7, 33)]
    found = ops.weight(parts, "matrix")
    assert (found.dtype, found.layout, found.shape) == ("bf16", "plain", (57, 33))
    assert (ops.download(found.data) == np.concatenate([p.array for p in parts])).all()
    assert driver.count("cuMemcpyHtoDAsync") == 4 + 1
    assert 1 <= driver.count("cuMemHostRegister") <= small_buffers
    mixed = ops.weight([Make(rng, weights="f32").w(5, 8), Make(rng, weights="bf16").w(3, 8)])
    assert mixed.dtype == "f32" and not (ops.download(mixed.data)[5:].view(np.uint32) & 0xFFFF).any()


def test_files_and_arrays_lie_one_behind_the_other(opened, rng, small_buffers, tmp_path):
    """Each in pieces, the last one shorter."""
    ops, driver = opened()
    (first,), (last,) = written(tmp_path, rng, 2)
    parts = [first, Make(rng, weights="bf16").w(50, 33), last]
    found = ops.download(ops.weight(parts, "matrix").data)
    assert (found == np.concatenate([p.array for p in parts])).all()
    assert driver.count("cuMemcpyHtoDAsync") == 12


def test_what_a_load_takes_is_given_back(opened, rng, small_buffers, tmp_path):
    """After an error too."""
    ops, driver = opened()
    weights = written(tmp_path, rng)
    ops.read_ahead(weights)
    ops.weight(weights[0], "matrix")
    os.truncate(weights[3][0].path, weights[2][0].start)
    for weight in weights[2:]:
        with pytest.raises(UserError):
            ops.weight(weight, "matrix")
    ops.backend._forget_staging()
    gc.collect()  # errors hold what they came through
    rings = driver.count("cuMemHostRegister")
    assert 1 <= rings == driver.count("cuMemHostUnregister") <= small_buffers
    assert driver.count("cuEventCreate") == driver.count("cuEventDestroy") == 1 + 2 * rings
    assert driver.count("cuStreamDestroy") == 1


def written(folder, rng, count=4):
    """Checkpoint tensors w0, w1 ... in a file, each alone in a list:
    50 x 33 u16, which are 4 small pieces."""
    from safetensors.numpy import save_file

    arrays = {f"w{i}": rng.integers(0, 2**16, (50, 33)).astype(np.uint16) for i in range(count)}
    save_file(arrays, folder / "model.safetensors")
    found = open_tensors(folder)[0]
    return [[replace(found[name], dtype="BF16")] for name in arrays]


@pytest.mark.parametrize("asked", [[0, 1, 2, 3], [0, 2, 3, 1], [3, 0, 0], [1]], ids=str)
def test_what_is_announced_may_be_asked_for_in_any_order(opened, rng, small_buffers, tmp_path, asked):
    ops, driver = opened()
    weights = written(tmp_path, rng)
    ops.read_ahead(weights)
    for i in asked:
        assert (ops.download(ops.weight(weights[i], "matrix").data) == weights[i][0].array).all()
    assert driver.count("cuMemHostRegister") <= small_buffers


def test_the_next_weight_is_read_before_it_is_asked_for(opened, rng, small_buffers, tmp_path):
    """And nothing is read twice."""
    ops, _ = opened()
    weights, seen, is_ahead = written(tmp_path, rng, 2), [], threading.Event()

    class Watched:
        def __init__(self, tensor):
            self.tensor = tensor

        def __getattr__(self, name):
            return getattr(self.tensor, name)

        def read_into(self, buffer, first):
            seen.append((self.tensor.name, first))
            if self.tensor.name == "w1":
                is_ahead.set()
            self.tensor.read_into(buffer, first)

    watched = [[Watched(parts[0])] for parts in weights]
    ops.read_ahead(watched)
    ops.weight(watched[0], "matrix")
    assert is_ahead.wait(10)
    ops.weight(watched[1], "matrix")
    assert sorted(seen) == [(name, first) for name in ("w0", "w1") for first in (0, 1000, 2000, 3000)]


def test_a_file_that_shrinks_while_it_is_read_is_one_line(opened, rng, small_buffers, tmp_path):
    ops, _ = opened()
    weights = written(tmp_path, rng)
    (third,), (last,) = weights[2:]
    os.truncate(third.path, third.start + 1500)
    ops.read_ahead(weights)
    ops.weight(weights[0], "matrix"), ops.weight(weights[1], "matrix")
    with pytest.raises(UserError, match="cut off while it was read, in tensor w2") as caught:
        ops.weight(weights[2], "matrix")
    assert "\n" not in str(caught.value) and caught.value.hint
    os.truncate(last.path, last.start + last.nbytes)  # and the threads live on
    assert not ops.download(ops.weight([last], "matrix").data).any()


def assert_one_line(caught, words):
    assert caught.value.code == 3 and "\n" not in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("kind", ["file", "array"])
@pytest.mark.parametrize(
    "call",
    [
        "cuCtxSetCurrent", "cuStreamCreate", "cuEventCreate", "cuMemHostRegister",
        "cuEventSynchronize", "cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamWaitEvent",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")  # nothing is left to an object's end
def test_a_driver_that_fails_is_one_line(opened, rng, small_buffers, tmp_path, call, kind):
    ops, driver = opened()
    driver.fails[call] = driver.real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    weight = written(tmp_path, rng, 1)[0] if kind == "file" else [Make(rng, weights="bf16").w(50, 33)]
    with pytest.raises(UserError, match="the GPU failed: .*ILLEGAL_ADDRESS") as caught:
        ops.weight(weight, "matrix")
    assert_one_line(caught, "CUDA driver")
    driver.fails.clear()  # and the threads live on
    assert (ops.download(ops.weight(weight, "matrix").data) == weight[0].array).all()


def test_a_read_that_fails_says_why(opened, rng, small_buffers, tmp_path):
    ops, _ = opened()
    ((tensor,),) = written(tmp_path, rng, 1)
    words = "cannot read .*model.safetensors: Bad file descriptor"
    with (tmp_path / "no reader's").open("wb") as file, pytest.raises(UserError, match=words) as caught:
        ops.weight([replace(tensor, file=file.fileno())], "matrix")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("short", range(4))
def test_a_read_that_falls_short_is_continued(opened, rng, small_buffers, tmp_path, monkeypatch, short):
    """As a signal leaves one: what is left of the piece is read before it is copied."""
    reads, preadv = [], os.preadv

    def read(file, buffers, first):
        reads.append(first)
        (buffer,) = buffers
        return preadv(file, [buffer[:10]] if len(reads) == short + 1 else buffers, first)

    ops, driver = opened()
    (weight,) = written(tmp_path, rng, 1)
    monkeypatch.setattr(os, "preadv", read)
    assert (ops.download(ops.weight(weight, "matrix").data) == weight[0].array).all()
    assert len(reads) == 4 + 1 and driver.count("cuMemcpyHtoDAsync") == 4


def test_copies_and_kernels_wait_for_each_other(opened, rng, small_buffers, tmp_path):
    """Copies have a stream of their own: behind what used the memory before,
    and what follows is behind them."""
    ops, driver = opened()
    ops.weight(written(tmp_path, rng, 1)[0], "matrix")
    mine = ops.backend.device.stream
    (own,) = {stream for name, stream in driver.order if name == "copy"}
    assert own != mine
    kept = [step for step in driver.order if step[0] == "wait" or step == ("record", mine)]
    assert kept == [("record", mine), ("wait", own), ("wait", mine)]
    last_copy = max(i for i, step in enumerate(driver.order) if step[0] == "copy")
    assert driver.order[last_copy + 1 :][-2:] == [("record", own), ("wait", mine)]
