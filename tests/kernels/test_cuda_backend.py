"""The cuda backend without a GPU: CuPy is NumPy in disguise, the driver writes down what it is asked.

What kernels compute is not seen here (they do not run), but every call the backend makes is: copies land, a round is
captured once with its kernels loaded before, and failures are one line.
"""

import ctypes
import gc
import os
import threading
import types
from dataclasses import replace
from importlib import util

import numpy as np
import pytest
from minidflash.kernels import launch, source
from minidflash.kernels.gpu import cuda, staging
from minidflash.kernels.ops import Ops
from minidflash.weights.safetensors_io import open_tensors

from minidflash.errors import UserError
from tests.cases import Make

pytestmark = pytest.mark.skipif(
    not util.find_spec("cuda") or not util.find_spec("cuda.bindings"), reason="cuda-bindings is not installed"
)


class Array(np.ndarray):
    """A CuPy array in what the backend uses of it."""

    @property
    def data(self):
        whole = self

        class Pointer:
            ptr = whole.ctypes.data

            def copy_to_host_async(self, target, count, stream):
                ctypes.memmove(target, self.ptr, count)

        return Pointer()

    def set(self, values, stream):
        assert values.flags.c_contiguous and values.dtype == self.dtype and values.shape == self.shape
        self[...] = values


class Pinned(bytearray):
    """Pinned memory."""

    @property
    def ptr(self):
        return ctypes.addressof((ctypes.c_char * len(self)).from_buffer(self))


class Context:
    """A Device or a Stream: something to be inside of."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self):
        pass


class Event:
    """An event that knows which it was."""

    count = 0

    def record(self, stream):
        Event.count += 1
        self.recorded = Event.count

    def synchronize(self):
        assert self.recorded


def fake_cupy():
    pool = types.SimpleNamespace(free_bytes=lambda: 5)
    return types.SimpleNamespace(
        empty=lambda shape, dtype: np.full(shape, 77, dtype).view(Array),
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Array),
        ascontiguousarray=lambda a: np.ascontiguousarray(a).view(Array),
        get_default_memory_pool=lambda: pool,
        cuda=types.SimpleNamespace(
            Device=Context, ExternalStream=Context, alloc_pinned_memory=Pinned, Event=Event,
            get_elapsed_time=lambda begin, end: 1e3 * (end.recorded - begin.recorded),
            runtime=types.SimpleNamespace(memGetInfo=lambda: (1000, 2000)),
        ),
    )  # fmt: skip


class Driver:
    """The driver's types, and calls that are written down. fails: name of a call -> the code it answers."""

    def __init__(self):
        from cuda.bindings import driver

        self.real, self.calls, self.kept, self.fails, self.launched_on = driver, [], [], {}, []
        self.order = []  # (what, stream) of copies, records and waits
        self.compiled, self.fails_compiled = [], {}  # calls by compiled code, and what they answer

    def __getattr__(self, name):
        if not name.startswith("cu") or not name[2].isupper():
            return getattr(self.real, name)
        return lambda *args: self.answer(name, args)

    def answer(self, name, args):
        self.calls.append(name)
        if name in self.fails:
            return (self.fails[name],)
        if name in ("cuMemcpyHtoDAsync", "cuEventRecord"):
            self.order.append(("copy" if "Memcpy" in name else "record", int(args[-1])))
        if name == "cuStreamWaitEvent":
            self.order.append(("wait", int(args[0])))
        code = self.real.CUresult.CUDA_SUCCESS
        if name == "cuGetProcAddress":
            return code, self.address(args[0].decode()), 0
        if name == "cuLaunchKernelEx":
            self.launched_on.append(int(args[0].hStream))
            return (code,)
        if name == "cuStreamCreate":
            return code, self.real.CUstream(7 + self.count(name))
        if name == "cuMemcpyHtoDAsync":
            ctypes.memmove(int(args[0]), int(args[1]), int(args[2]))
        if name == "cuDeviceGetAttribute":
            short = args[0].name.removeprefix("CU_DEVICE_ATTRIBUTE_")
            known = {
                "COMPUTE_CAPABILITY_MAJOR": 9,
                "COMPUTE_CAPABILITY_MINOR": 0,
                "MULTIPROCESSOR_COUNT": 132,
            }
            return code, known.get(short, 232448)
        if name == "cuDeviceGetName":
            return code, b"NVIDIA H100 80GB HBM3\0\0"
        answers = {
            "cuDeviceGetCount": 1, "cuFuncGetAttribute": 24,
            "cuOccupancyMaxActiveClusters": 132,
        }  # fmt: skip
        return code, answers.get(name, 3)

    def address(self, name):
        """Of a function for compiled code, which passes on what it is asked."""

        def call(*args):
            self.compiled.append(name)
            return int(self.fails_compiled.get(name) or self.answer(name, args)[0])

        count = {"cuEventSynchronize": 1, "cuEventRecord": 2, "cuMemcpyHtoDAsync": 4}[name]
        self.kept.append(ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * count)(call))
        return ctypes.cast(self.kept[-1], ctypes.c_void_p).value

    def count(self, name):
        return self.calls.count(name)


@pytest.fixture
def opened(monkeypatch):
    """(activations, options) -> (Ops, Driver) of a cuda backend on nothing."""

    def open_it(activations="f32", **options):
        driver = Driver()
        monkeypatch.setattr(launch, "_driver", lambda: driver)
        monkeypatch.setattr(launch, "compile_cubin", lambda *_: (b"cubin", ""))
        monkeypatch.setattr(cuda, "_cupy", fake_cupy)
        return Ops(cuda.CudaBackend(activations, **options)), driver

    return open_it


def embedding(ops, rng):
    """A call of embed: (table, ids, x)."""
    ids = ops.array((2,), "i32")
    ops.upload(ids, np.array([3, 8], np.int32))
    return ops.weight([Make(rng).w(9, 24)]), ids, ops.array((2, 24), "A")


def test_engines_share_a_stream_and_capture_on_one_of_their_own(opened, monkeypatch, rng):
    """Kernels whose blocks wait for each other must not run side by side; what one records must not get into another's."""
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


@pytest.fixture(params=[0, 7000], ids=["one-ahead", "all-ahead"])
def small_buffers(request, monkeypatch):
    """Pinned buffers so few and small that each is filled many times. Returns how many threads have some."""
    for name, value in {"PIECE": 1000, "THREADS": 2, "BUFFERS": 2, "RUN": 3}.items():
        monkeypatch.setattr(staging, name, value)
    monkeypatch.setattr(cuda, "AHEAD", request.param)
    return 2


def test_weights_are_copied_piece_by_piece(opened, rng, small_buffers):
    ops, driver = opened()
    parts = [Make(rng, weights="bf16").w(50, 33), Make(rng, weights="bf16").w(7, 33)]
    found = ops.weight(parts, "q")
    assert (found.dtype, found.layout, found.shape) == ("bf16", "plain", (57, 33))
    assert (ops.download(found.data) == np.concatenate([p.array for p in parts])).all()
    assert driver.count("cuMemcpyHtoDAsync") == 4 + 1
    assert 1 <= driver.count("cuMemHostRegister") <= small_buffers
    mixed = ops.weight([Make(rng, weights="f32").w(5, 8), Make(rng, weights="bf16").w(3, 8)])
    assert mixed.dtype == "f32" and not (ops.download(mixed.data)[5:].view(np.uint32) & 0xFFFF).any()


def test_files_and_arrays_lie_one_behind_the_other(opened, rng, small_buffers, tmp_path):
    """Bytes of files go through the compiled loop, others through `read_into`; both in pieces, the last one shorter."""
    ops, driver = opened()
    (first,), (last,) = written(tmp_path, rng, 2)
    parts = [first, Make(rng, weights="bf16").w(50, 33), last]
    found = ops.download(ops.weight(parts, "q").data)
    assert (found == np.concatenate([p.array for p in parts])).all()
    assert len(driver.compiled) == 3 * 8 and driver.count("cuMemcpyHtoDAsync") == 12


def test_what_a_load_takes_is_given_back(opened, rng, small_buffers, tmp_path):
    """After an error too."""
    ops, driver = opened()
    weights = written(tmp_path, rng)
    ops.read_ahead(weights)
    ops.weight(weights[0], "q")
    driver.fails_compiled["cuEventRecord"] = driver.real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    os.truncate(weights[3][0].path, weights[3][0].start)
    for weight in weights[2:]:
        with pytest.raises(UserError):
            ops.weight(weight, "q")
    ops.backend._forget_staging()
    gc.collect()  # errors hold what they came through
    rings = driver.count("cuMemHostRegister")
    assert 1 <= rings == driver.count("cuMemHostUnregister") <= small_buffers
    assert driver.count("cuEventCreate") == driver.count("cuEventDestroy") == 1 + 2 * rings
    assert driver.count("cuStreamDestroy") == 1


def written(folder, rng, count=4):
    """Checkpoint tensors w0, w1 ... in a file, each alone in a list: 50 x 33 u16, which are 4 small pieces."""
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
        assert (ops.download(ops.weight(weights[i], "q").data) == weights[i][0].array).all()
    assert driver.count("cuMemHostRegister") <= small_buffers


def test_the_next_weight_is_read_before_it_is_asked_for(opened, rng, small_buffers, tmp_path):
    """And nothing is read twice."""
    ops, _ = opened()
    weights, seen, is_ahead = written(tmp_path, rng, 2), [], threading.Event()

    class Watched:
        file = None  # it is read by `read_into`, always

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
    ops.weight(watched[0], "q")
    assert is_ahead.wait(10)
    ops.weight(watched[1], "q")
    assert sorted(seen) == [(name, first) for name in ("w0", "w1") for first in (0, 1000, 2000, 3000)]


def test_a_file_that_shrinks_while_it_is_read_is_one_line(opened, rng, small_buffers, tmp_path):
    ops, _ = opened()
    weights = written(tmp_path, rng)
    (third,), (last,) = weights[2:]
    os.truncate(third.path, third.start + 1500)
    ops.read_ahead(weights)
    ops.weight(weights[0], "q"), ops.weight(weights[1], "q")
    with pytest.raises(UserError, match="cut off while it was read, in tensor w2") as caught:
        ops.weight(weights[2], "q")
    assert "\n" not in str(caught.value) and caught.value.hint
    os.truncate(last.path, last.start + last.nbytes)  # and the threads live on
    assert not ops.download(ops.weight([last], "q").data).any()


def assert_one_line(caught, words):
    assert caught.value.code == 3 and "\n" not in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("kind", ["file", "array"])
@pytest.mark.parametrize(
    "call",
    [
        "cuCtxSetCurrent", "cuStreamCreate", "cuEventCreate", "cuGetProcAddress", "cuMemHostRegister",
        "cuEventSynchronize", "cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamWaitEvent",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")  # nothing is left to an object's end
def test_a_driver_that_fails_is_one_line(opened, rng, small_buffers, tmp_path, call, kind):
    ops, driver = opened()
    driver.fails[call] = driver.real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    weight = written(tmp_path, rng, 1)[0] if kind == "file" else [Make(rng, weights="bf16").w(50, 33)]
    with pytest.raises(UserError, match="the GPU failed: .*ILLEGAL_ADDRESS") as caught:
        ops.weight(weight, "q")
    assert_one_line(caught, "CUDA driver")


@pytest.mark.parametrize("call", ["cuEventSynchronize", "cuMemcpyHtoDAsync", "cuEventRecord"])
def test_a_driver_that_fails_in_the_compiled_loop_is_one_line(opened, rng, small_buffers, tmp_path, call):
    ops, driver = opened()
    weights = written(tmp_path, rng, 2)
    driver.fails_compiled[call] = driver.real.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(UserError, match="the GPU failed") as caught:
        ops.weight(weights[0], "q")
    assert_one_line(caught, "CUDA driver: CUDA_ERROR_LAUNCH_FAILED")
    driver.fails_compiled.clear()  # and the threads live on
    assert (ops.download(ops.weight(weights[1], "q").data) == weights[1][0].array).all()


def test_a_driver_without_a_call_is_one_line(opened, rng, small_buffers, tmp_path, monkeypatch):
    ops, driver = opened()
    monkeypatch.setattr(driver, "address", lambda name: 0)
    with pytest.raises(UserError) as caught:
        ops.weight(written(tmp_path, rng, 1)[0], "q")
    assert_one_line(caught, "it has no cuEventSynchronize")


def test_a_read_that_fails_says_why(opened, rng, small_buffers, tmp_path):
    ops, _ = opened()
    ((tensor,),) = written(tmp_path, rng, 1)
    words = "cannot read .*model.safetensors: Bad file descriptor"
    with (tmp_path / "no reader's").open("wb") as file, pytest.raises(UserError, match=words) as caught:
        ops.weight([replace(tensor, file=file.fileno())], "q")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("short", [0, 1, 2, 3])
def test_a_read_that_falls_short_goes_on_where_it_ended(
    opened, rng, small_buffers, tmp_path, monkeypatch, short
):
    """As a signal leaves one: the compiled loop gives up, and what is left of its job is read here."""
    reads, make_state = [], staging.state_of

    def read(file, buffer, count, first):
        reads.append(first)
        data = os.pread(file, 10 if len(reads) == short + 1 else count, first)
        ctypes.memmove(buffer, data, len(data))
        return len(data)

    i64 = ctypes.c_int64
    pread = ctypes.CFUNCTYPE(i64, ctypes.c_int, ctypes.c_void_p, i64, i64)(read)

    def changed(*args):
        state = make_state(*args)
        state[0] = ctypes.cast(pread, ctypes.c_void_p).value
        return state

    monkeypatch.setattr(staging, "state_of", changed)
    ops, driver = opened()
    (weight,) = written(tmp_path, rng, 1)
    assert (ops.download(ops.weight(weight, "q").data) == weight[0].array).all()
    assert short < len(reads) and driver.count("cuMemcpyHtoDAsync") == 4


def test_copies_and_kernels_wait_for_each_other(opened, rng, small_buffers, tmp_path):
    """Copies have a stream of their own: behind what used the memory before, and what follows is behind them."""
    ops, driver = opened()
    ops.weight(written(tmp_path, rng, 1)[0], "q")
    mine = ops.backend.device.stream
    (own,) = {stream for name, stream in driver.order if name == "copy"}
    assert own != mine
    kept = [step for step in driver.order if step[0] == "wait" or step == ("record", mine)]
    assert kept == [("record", mine), ("wait", own), ("wait", mine)]
    last_copy = max(i for i, step in enumerate(driver.order) if step[0] == "copy")
    assert driver.order[last_copy + 1 :][-2:] == [("record", own), ("wait", mine)]


def test_buffers_come_back_as_they_were_put(opened, rng):
    ops, _ = opened("bf16")
    values = rng.integers(0, 65536, (3, 5)).astype(np.uint16)
    buffer = ops.array((3, 5), "A")
    ops.upload(buffer, values)
    assert (ops.download(buffer) == values).all() and (ops.download(buffer[1:, 2:4]) == values[1:, 2:4]).all()
    assert ops.download(ops.array((0,), "i32")).shape == (0,)
    assert ops.backend.free_memory() == 1005


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
    """The whole of load() and of a round's launches: arguments and types of every kernel are checked on the way."""
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
