"""The cuda backend without a GPU (tests/fake_card.py); loading is in test_loading.py.

What kernels compute is not seen here (they do not run), but every call the backend makes is: copies land, a
round is captured once with its kernels loaded before, and failures are one line.
"""

import types

import numpy as np
import pytest
from minidflash.kernels import source
from minidflash.kernels.gpu import cuda
from minidflash.kernels.ops import Ops

from minidflash.errors import UserError
from tests.cases import Make
from tests.kernels.test_compile import needs_nvrtc

pytestmark = needs_nvrtc


def embedding(ops, rng):
    """A call of embed: (table, ids, x)."""
    ids = ops.array((2,), "i32")
    ops.upload(ids, np.array([3, 8], np.int32))
    return ops.weight([Make(rng).w(9, 24)]), ids, ops.array((2, 24), "A")


def test_engines_share_a_stream_and_capture_on_one_of_their_own(opened, monkeypatch, rng):
    """Kernels whose blocks wait for each other must not run side by side;
    what one records must not get into another's."""
    ops, driver = opened()
    other = Ops(cuda.CudaBackend("f32"))
    mine = ops.backend.device.stream
    assert other.backend.device.stream == mine
    table, ids, x = embedding(ops, rng)
    driver.launched_on.clear()
    ops.program(lambda: ops.embed(ids, table, 1.0, x))
    (captured,) = driver.launched_on
    assert captured != mine and ops.backend.device.stream == mine
    driver.fails["cuLaunchKernelEx"] = driver.real.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(UserError, match="the GPU failed"):
        ops.program(lambda: ops.embed(ids, table, 1.0, x))
    assert ops.backend.device.stream == mine


def test_start_times_a_program_and_fetches_what_it_left(opened):
    ops, _ = opened()
    record, scores = ops.array((2, 3), "i32"), ops.array((2, 0), "f32")
    ops.upload(record, np.arange(6, dtype=np.int32).reshape(2, 3))
    launched = []
    result = ops.start(types.SimpleNamespace(launch=lambda: launched.append(1)), record, scores)
    ops.upload(record, np.zeros((2, 3), np.int32))  # the next round may begin: what was fetched stays
    seconds, found, none = result()
    assert (seconds, launched, none.shape) == (1.0, [1], (2, 0))
    assert (found == np.arange(6).reshape(2, 3)).all() and found.flags.writeable


def test_buffers_come_back_as_they_were_put(opened, rng):
    ops, _ = opened("bf16")
    values = rng.integers(0, 65536, (3, 5)).astype(np.uint16)
    buffer = ops.array((3, 5), "A")
    ops.upload(buffer, values)
    assert (ops.download(buffer) == values).all() and (ops.download(buffer[1:, 2:4]) == values[1:, 2:4]).all()
    assert ops.download(ops.array((0,), "i32")).shape == (0,)
    assert ops.backend.free_memory() == 1005


def test_a_card_copies_rows_of_buffers_in_one_call(opened, rng):
    ops, driver = opened("bf16")
    values = rng.integers(0, 65536, (4, 3, 7, 5)).astype(np.uint16)
    buffer, key = ops.array((4, 3, 7, 5), "A"), ops.array((4,), "i32")
    ops.upload(buffer, values)
    ops.upload(key, np.arange(4, dtype=np.int32))
    ops.copy(buffer[0, :, :6], buffer[2, :, :6])
    ops.copy(key[3:4], key[1:2])
    assert driver.count("cuMemcpy2DAsync") == 2
    values[2, :, :6] = values[0, :, :6]
    assert (ops.download(buffer) == values).all() and ops.download(key).tolist() == [0, 3, 2, 3]


def test_a_program_is_captured_once_with_its_kernels_loaded_before(opened, rng):
    ops, driver = opened()
    table, ids, x = embedding(ops, rng)
    program = ops.program(lambda: [ops.embed(ids, table, 1.0, x) for _ in range(3)])
    began, ended = (driver.calls.index(f"cuStream{what}Capture") for what in ("Begin", "End"))
    assert "cuModuleLoadData" in driver.calls[:began]
    assert not {"cuModuleLoadData", "cuMemHostRegister", "cuMemcpyHtoDAsync"} & set(driver.calls[began:])
    launches = [i for i, name in enumerate(driver.calls) if name == "cuLaunchKernelEx"]
    assert len(launches) == 3 and began < launches[0] and launches[-1] < ended
    before = driver.count("cuGraphLaunch")
    program.launch(), program.launch()
    assert driver.count("cuGraphLaunch") == before + 2 and driver.count("cuLaunchKernelEx") == 3
    assert ops.backend.machine() == "NVIDIA H100 80GB HBM3, rounds as CUDA graphs"
    assert ops.backend.mode == "graph" and ops.backend.variants["embed"] == "plain"


def test_without_graph_the_calls_are_launched(opened, rng):
    ops, driver = opened(graph=False)
    table, ids, x = embedding(ops, rng)
    program = ops.program(lambda: ops.embed(ids, table, 1.0, x))
    assert driver.count("cuLaunchKernelEx") == 0
    program.launch(), program.launch()
    assert driver.count("cuLaunchKernelEx") == 2 and "cuStreamBeginCapture" not in driver.calls
    assert ops.backend.mode == "eager"


@pytest.mark.parametrize("graph", [True, False])
def test_a_timed_program_records_events_between_its_stages(opened, rng, graph, monkeypatch):
    """In a graph they are its nodes; nothing waits for them, and they are read when the round has ended."""
    ops, driver = opened(graph=graph)
    table, ids, x = embedding(ops, rng)
    recorded, events = [], iter(range(100, 200))
    monkeypatch.setattr(driver, "cuEventCreate", lambda flags: (0, (next(events), flags)), raising=False)

    def record(event, stream, flags):
        recorded.append((event[0], driver.count("cuLaunchKernelEx"), int(flags)))
        return (0,)

    monkeypatch.setattr(driver, "cuEventRecordWithFlags", record, raising=False)
    monkeypatch.setattr(
        driver, "cuEventElapsedTime", lambda a, b: (0, 10.0 * a[0] + (b[0] - a[0])), raising=False
    )

    def stages():
        for stage in ("draft", "verify"):
            ops.mark(stage)
            ops.embed(ids, table, 1.0, x)
        ops.mark(None)

    plain = ops.program(stages)
    assert plain.clock is None and not recorded
    waits = driver.count("cuEventSynchronize")
    launches = driver.count("cuLaunchKernelEx")
    timed = ops.program(stages, is_timed=True)
    timed.launch()
    external = int(driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)
    flag = external if graph else 0
    assert recorded == [(100, launches, flag), (101, launches + 1, flag), (102, launches + 2, flag)]
    assert timed.clock.read() == pytest.approx({"draft": 1.001, "verify": 1.011})
    assert external == 1 and driver.count("cuEventSynchronize") == waits
    other = ops.program(stages, is_timed=True)
    other.launch()
    assert recorded[3][0] == 103, "another program has events of its own"
    ops.mark("verify")  # outside of a timed program: nothing
    assert len(recorded) == 6


def test_a_failed_capture_is_ended(opened, rng):
    ops, driver = opened()
    table, ids, x = embedding(ops, rng)
    driver.fails["cuLaunchKernelEx"] = driver.real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(
        UserError, match="the GPU failed: launch of embed.*CUDA_ERROR_INVALID_VALUE"
    ) as caught:
        ops.program(lambda: ops.embed(ids, table, 1.0, x))
    assert caught.value.code == 3 and "cuStreamEndCapture" in driver.calls


def test_failures_are_one_line(opened, rng):
    ops, driver = opened()
    table, ids, x = embedding(ops, rng)
    program = ops.program(lambda: ops.embed(ids, table, 1.0, x))
    for code, words in (
        ("CUDA_ERROR_ILLEGAL_ADDRESS", "the GPU failed"),
        ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    ):
        driver.fails["cuGraphLaunch"] = getattr(driver.real.CUresult, code)
        with pytest.raises(UserError, match=words) as caught:
            program.launch()
        assert caught.value.code == 3 and "\n" not in str(caught.value)

    def refuse(*_):
        raise MemoryError("no room")

    ops.backend._cupy.empty = ops.backend._cupy.zeros = refuse
    with pytest.raises(UserError, match="out of memory .0.0 GiB free.") as caught:
        ops.array((1 << 40,), "f32")
    assert caught.value.code == 3 and "--ctx" in caught.value.hint


@pytest.mark.parametrize("activations", ["f32", "bf16"])
def test_a_tiny_model_loads_and_records_a_round(opened, activations, tmp_path, monkeypatch):
    """The whole of load() and of a round's launches: arguments and types of every kernel are checked on the
    way."""
    import minidflash as md
    from tests.random_pair import write_random

    ops, driver = opened(activations)
    monkeypatch.setattr("minidflash.kernels.open_ops", lambda *_, **__: ops)
    monkeypatch.setattr(ops.backend, "free_memory", lambda: 10**9)
    target, drafter = write_random(tmp_path, "odd")
    engine = md.load(str(target), drafter=str(drafter), backend="cuda", ctx=64)
    assert set(ops.backend.variants) >= {
        "embed",
        "qkv",
        "attend",
        "linear_add",
        "gate_up",
        "head",
        "accept",
        "inject",
    }
    assert driver.count("cuGraphInstantiate") == 2 == driver.count("cuGraphLaunch"), (
        "a plain and a drafted round"
    )
    assert engine.jit_s > 0
    monkeypatch.setattr(ops.backend, "free_memory", lambda: 10**6)
    with pytest.raises(UserError, match="64 positions need .* GB with the weights") as caught:
        md.load(str(target), drafter=str(drafter), backend="cuda", ctx=64)
    assert caught.value.code == 3


def test_no_source_names_a_stream_of_its_own():
    """All work is on the device's stream: a kernel elsewhere would not be captured."""
    for path in (source.CUDA_FOLDER.parent / "gpu").glob("*.py"):
        assert "stream=" not in path.read_text().replace("stream=self._stream", ""), path.name
