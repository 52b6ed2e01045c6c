"""The cuda backend: CuPy arrays on one stream, weights through pinned memory,
a round captured once as a graph."""

import itertools
import weakref
from collections import deque
from functools import partial

import numpy as np

from ...errors import UserError
from ..host import Replay, between
from ..launch import CudaDevice
from ..ops import DTYPES, storage
from . import GpuBackend, as_stored, host_arrays, stored_shape, stored_type
from .staging import HostArray, Staging

AHEAD = 512 << 20  # bytes of weights that are read before they are asked for, at least one weight


def _cupy():
    try:
        import cupy
    except ImportError as error:
        raise UserError(
            "CuPy is not installed", "pip install 'cupy-cuda13x>=14', or use --backend numba", code=3
        ) from error
    except Exception as error:  # a CuPy that is there and breaks: no driver, another CUDA (F89)
        words = " ".join(str(error).split())[:200]
        raise UserError(
            f"CuPy does not start: {words}", "repair it, or use --backend numba", code=3
        ) from error
    return cupy


def is_stored_as(part, dtype):
    """Whether a file holds a checkpoint tensor as it is wanted, so that its bytes go to the GPU unseen."""
    return hasattr(part, "read_into") and {"BF16": np.uint16, "F32": np.float32}.get(part.dtype) == dtype


class _Failures:
    """Turns what CUDA and CuPy raise inside a with into a UserError of one line, code 3."""

    def __init__(self, backend):
        self.backend = backend

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, UserError) or not isinstance(error, (RuntimeError, MemoryError)):
            return
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "OutOfMemory" in kind.__name__ or "OUT_OF_MEMORY" in text:
            free = self.backend.free_memory() / 2**30
            raise UserError(
                f"the GPU is out of memory ({free:.1f} GiB free)", "lower --ctx, or free the GPU", code=3
            ) from error
        raise UserError(f"the GPU failed: {text[:200]}", "run again; -v shows where", code=3) from error


class CudaBackend(GpuBackend):
    """The CUDA kernels on a GPU.

    device: which GPU. graph: replay recorded calls as a CUDA graph, or launch them one by one. dependent: a
    kernel may start while the one before it ends, and loads weights meanwhile (H100, 6144 x 4096 at 16 rows:
    21.4 -> 19.6 us).
    Errors: UserError, code 3, for a missing package, driver or card.
    """

    name = "cuda"
    # At 2,048 tokens every product has whole waves of its largest tile, and the GPU takes longer than the
    # host, whose 65 us a launch were all the time of passes of 256 (H100, Qwen3-8B: 3,168 launches, 220 ms).
    # Shorter passes are recorded, of so many rows.
    prefill_chunk = 2048
    prompt_passes = 16, 32, 64, 128, 256, 384, 512, 768, 1024
    chunk_between_rounds = 512  # 14 ms for 55, so that a prompt of 2,048 takes 63 (H200, Qwen3-8B)
    lost_by_fork = "CUDA"
    rounds_ahead = 1  # the host reads a round's record while the next one runs
    buckets = 576, 1152, 2304  # 4, 8 and 16 leaves of attention; behind them its grid is what the card holds

    def __init__(self, activations, device=0, graph=True, dependent=True):
        self._cupy = cupy = _cupy()
        super().__init__(activations, CudaDevice(device))
        self.mode = "graph" if graph else "eager"
        self.prompt_passes = self.prompt_passes if graph else ()
        self.dependent = dependent
        self._failures = _Failures(self)
        self._place = cupy.cuda.Device(device)
        self._stream = cupy.cuda.ExternalStream(self.device.stream, device)
        self._forget_staging()

    def machine(self):
        """One line about the card and how rounds reach it."""
        how = "rounds as CUDA graphs" if self.mode == "graph" else "kernels launched one by one"
        return f"{self.device.name()}, {how}"

    def launch(self, *args, **how):
        with self._failures:
            super().launch(*args, **how)

    # Memory. CuPy's pool belongs to the stream, so what is freed is used again in the stream's order,
    # without a wait.

    def empty(self, shape, dtype):
        """A device array whose contents do not matter yet."""
        with self._failures, self._place, self._stream:
            return self._cupy.empty(shape, dtype)

    def array(self, shape, kind):
        """A zeroed buffer. kind: "A", "f32" or "i32"."""
        with self._failures, self._place, self._stream:
            return self._cupy.zeros(shape, storage(self.activations) if kind == "A" else DTYPES[kind])

    def upload(self, buffer, values):
        """Copy host values into a buffer of ours."""
        values = np.ascontiguousarray(np.broadcast_to(np.asarray(values, buffer.dtype), buffer.shape))
        with self._failures, self._place:
            buffer.set(values, stream=self._stream)

    def copy(self, source, target):
        """Copy rows between buffers of ours, as HostBackend's: one copy in the stream, nobody waits."""
        driver, device = self.device.driver, self.device
        how = driver.CUDA_MEMCPY2D()
        how.srcMemoryType = how.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        how.srcDevice, how.dstDevice = source.data.ptr, target.data.ptr
        how.srcPitch, how.dstPitch = source.strides[0], target.strides[0]
        how.WidthInBytes, how.Height = source.nbytes // len(source), len(source)
        with self._failures:
            device.enter()
            device.do(driver.cuMemcpy2DAsync(how, device.driver_stream))

    def download(self, buffer):
        """Host copy of a buffer, once everything before it in the stream is done."""
        fetch = self._fetch(buffer)
        with self._failures, self._place:
            self._stream.synchronize()
        return fetch()

    def _fetch(self, buffer):
        """Ask for a copy in pinned memory; returns a function that gives it,
        once the stream has come so far."""
        with self._failures, self._place, self._stream:
            pinned = self._cupy.cuda.alloc_pinned_memory(max(buffer.nbytes, 1))  # from a pool
            whole = self._cupy.ascontiguousarray(buffer)
            whole.data.copy_to_host_async(pinned.ptr, buffer.nbytes, self._stream)
        return lambda: np.frombuffer(pinned, buffer.dtype, buffer.size).reshape(buffer.shape).copy()

    def start(self, program, *buffers):
        """Launch a program; returns a function that waits and gives (its seconds on the GPU,
        host copies...)."""
        with self._failures, self._place:
            begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            begin.record(self._stream)
            program.launch()
            fetches = [self._fetch(buffer) for buffer in buffers]
            end.record(self._stream)

        def wait():
            with self._failures, self._place:
                end.synchronize()
                seconds = 1e-3 * self._cupy.cuda.get_elapsed_time(begin, end)
            return seconds, *(fetch() for fetch in fetches)

        wait.events = begin, end  # for benches
        return wait

    def clock(self):
        """What a timed program looks at, see Ops.program."""
        return EventClock(self)

    def free_memory(self):
        """Bytes that arrays can still get: the card's free memory and what the pool holds unused."""
        with self._place:
            return self._cupy.cuda.runtime.memGetInfo()[0] + self._cupy.get_default_memory_pool().free_bytes()

    def read_ahead(self, weights):
        """Announce the parts of the next calls of `weight`, in order:
        they are read while those before them are packed.

        weights: the lists of checkpoint tensors that `weight` will get.
        """
        self._coming.extend(weights)
        with self._failures:
            self._begin_next()

    def load(self, parts, dtype):
        """Device array of tensors stacked along rows, as `stored_shape` says."""
        with self._failures:
            if self._begun and self._begun[0][0] is parts:
                _, transfer = self._begun.popleft()
            else:
                transfer = self._begin(parts, dtype)
            self._begin_next()
            self._staging.wait(transfer)
        return transfer.array

    def _forget_staging(self):
        """No weight is announced or under way: threads and pinned buffers go."""
        self._staging = None  # first: then no copy is under way into what goes with the rest
        self._coming, self._begun = deque(), deque()  # lists of parts; (parts, Transfer) of the next loads

    def _begin(self, parts, dtype):
        """The Transfer of stacked tensors, whose bytes begin to come."""
        self._staging = self._staging or Staging(self.device)
        if dtype is np.uint8:
            sources = [HostArray(array) for array in host_arrays(parts, dtype)]
        else:
            sources = [p if is_stored_as(p, dtype) else HostArray(as_stored(p, dtype)) for p in parts]
        return self._staging.begin(sources, self.empty(stored_shape(parts, dtype), dtype))

    def _begin_next(self):
        """Begin what is announced, AHEAD bytes of it or at least one."""
        ahead = sum(transfer.array.nbytes for _, transfer in self._begun)
        while self._coming:
            parts = self._coming[0]
            ahead += sum(part.nbytes for part in parts)
            if self._begun and ahead > AHEAD:
                break
            self._coming.popleft()
            self._begun.append((parts, self._begin(parts, stored_type(parts))))

    def compile(self, calls, bucket=None):
        """A program that replays checked calls in order: a graph, or the calls one by one (graph=False)."""
        self._forget_staging()  # a round is being recorded: the weights are there
        program, self.prepared, self.bucket = Replay(self.in_order, calls), [], bucket
        with self._failures:
            try:
                program.launch()  # no kernel may be loaded during a capture
                launches = self.prepared
            finally:
                self.prepared = self.bucket = None
            return Graph(self, launches) if self.mode == "graph" else program


class EventClock:
    """When stages of a program began, by events: of a graph they are nodes that every launch of it records,
    so they are read before the next one."""

    def __init__(self, backend):
        self._backend, self._events = backend, {}

    def look(self, stage):
        """As a launch: what is being prepared takes it in."""
        device = self._backend.device
        if stage not in self._events:
            event = self._events[stage] = device.do(device.driver.cuEventCreate(0))
            weakref.finalize(self, device.driver.cuEventDestroy, event)
        if self._backend.prepared is None:
            self._record(stage)
        else:
            self._backend.prepared.append(partial(self._record, stage))

    def _record(self, stage):
        device = self._backend.device
        in_graph = device.driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        flags = in_graph if self._backend.mode == "graph" else 0
        device.do(device.driver.cuEventRecordWithFlags(self._events[stage], device.driver_stream, flags))

    def read(self):
        """{stage: seconds} of the last launch, in its order; it has ended."""
        device, pairs = self._backend.device, itertools.pairwise(self._events.values())
        with self._backend._failures:
            device.enter()
            lengths = [1e-3 * device.do(device.driver.cuEventElapsedTime(*pair)) for pair in pairs]
        return between(self._events, lengths)


class Graph:
    """Launches captured once; `launch` replays them with one driver call.
    launches: functions, kept for the buffers that they launch on."""

    def __init__(self, backend, launches):
        self._device, self._failures, self._launches = backend.device, backend._failures, launches
        driver, stream = self._device.driver, self._device.driver_stream
        graph = self._capture(launches)
        self._executable = self._device.do(driver.cuGraphInstantiate(graph, 0))
        self._device.do(driver.cuGraphDestroy(graph))
        self._device.do(driver.cuGraphUpload(self._executable, stream))
        weakref.finalize(self, driver.cuGraphExecDestroy, self._executable)

    def _capture(self, launches):
        """The driver's graph of the launches, on a stream of its own: no other engine's get into it."""
        device, driver, before = self._device, self._device.driver, self._device.driver_stream
        own = device.new_stream()
        device.use(own)
        try:
            device.do(
                driver.cuStreamBeginCapture(own, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            )
            try:
                for launch in launches:
                    launch()
            except BaseException:
                driver.cuStreamEndCapture(own)  # ends the capture; its graph is broken
                raise
            return device.do(driver.cuStreamEndCapture(own))
        finally:
            device.use(before)
            driver.cuStreamDestroy(own)

    def launch(self):
        with self._failures:
            self._device.enter()
            driver = self._device.driver
            self._device.do(driver.cuGraphLaunch(self._executable, self._device.driver_stream))
