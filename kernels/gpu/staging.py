"""Staging: files to the GPU through pinned buffers. Threads read pieces, each into buffers of its own,
and copy from there.

The GPU reads pinned memory at the full rate of PCIe, mapped files not; and no single thread copies out of the
page cache that fast. A thread's buffers stay in its core's cache, and it hands nothing to another. Measured
from the page cache to packed weights (H100, 16 cores, 7.1 GB of Qwen3-8B's shape): 46.7 GB/s, 85 % of the
rate of pinned memory alone. With Python's loop in place of pump.py's, buffers that the driver allocates, one
weight read ahead and copies in the engine's stream it was 30.6; bench/NOTES.md has the steps between,
of which none alone gave over 34.7.
"""

import ctypes
import mmap
from queue import SimpleQueue
from threading import Lock, Thread, current_thread

import numpy as np

from . import pump

IS_COMPILED = (
    True  # files go through the loop of pump.py, not through Python's (bench/load.py has both side by side)
)
PIECE = 4 << 20  # bytes of a buffer
THREADS = 12
BUFFERS = 2  # of a thread: one is copied while the other is read into
RUN = 2  # pieces of a job, for which a thread takes the interpreter's lock once


def prepare():
    """Begin what the first load would wait for."""
    if IS_COMPILED:
        pump.prepare()


class HostArray:
    """A contiguous array as a source; the other kind is a file's Tensor (weights/safetensors_io.py)."""

    def __init__(self, values):
        self._bytes = values.reshape(-1).view(np.uint8)
        self.nbytes = values.nbytes

    def read_into(self, buffer, first):
        """Fill buffer with the bytes from `first` on."""
        np.frombuffer(buffer, np.uint8)[:] = self._bytes[first : first + len(buffer)]


class Transfer:
    """Sources on their way into an array, one behind the other, in so many jobs."""

    def __init__(self, array, jobs):
        self.array = array  # kept while threads have jobs of it, whatever becomes of who asked
        self.error = None  # of a thread
        self._left, self._lock, self._is_done = jobs, Lock(), Lock()
        if jobs:
            self._is_done.acquire()

    def wait(self):
        """Until every copy is in the staging's stream, or there was an error."""
        with self._is_done:
            pass

    def end_job(self, error=None):
        """By a thread: the copies of one job are in the stream, or some never will be."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if not self._left:
                self._is_done.release()


class Staging:
    """The threads and their buffers, on a CudaDevice. Kernels launched on its stream after a `wait` see the
    copies.

    Sources have `nbytes` and `read_into(buffer, first)`, which threads call;
    files also `file` and `start`, see Tensor.
    """

    def __init__(self, device):
        self._device, self._jobs, self._threads = device, SimpleQueue(), []
        self._open = []  # transfers begun: their memory serves nobody else while copies may be under way
        self._event = device.do(device.driver.cuEventCreate(2))  # 2: without timing
        self._stream = device.new_stream()  # the copies go on while kernels pack
        for _ in range(THREADS):
            thread = Thread(target=_work, args=(device, self._stream, self._jobs), daemon=True)
            thread.start()
            self._threads.append(thread)

    def begin(self, sources, array):
        """The `Transfer` of sources into a device array, in turn with those begun before."""
        self._order(self._device.driver_stream, self._stream)  # a kernel may still use the array's memory
        jobs, address, step = [], array.data.ptr, PIECE * RUN
        for source in sources:
            for first in range(0, source.nbytes, step):
                jobs.append((source, first, min(step, source.nbytes - first), address + first))
            address += source.nbytes
        transfer = Transfer(array, len(jobs))
        self._open.append(transfer)
        for job in jobs:
            self._jobs.put((transfer, *job))
        return transfer

    def wait(self, transfer):
        """Until kernels that are launched from now on see the whole array. Errors: what a thread met."""
        transfer.wait()
        # After an error too: the array's memory may come to serve others, behind copies that are under way.
        self._order(self._stream, self._device.driver_stream)
        self._open.remove(transfer)
        if transfer.error:
            raise transfer.error

    def _order(self, before, after):
        """What comes into stream `after` from now on waits for what is in `before`."""
        device, driver = self._device, self._device.driver
        device.enter()
        device.do(driver.cuEventRecord(self._event, before))
        device.do(driver.cuStreamWaitEvent(after, self._event, 0))

    def __del__(self):
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not current_thread():  # garbage is collected in any thread
                thread.join()
        if self._threads:
            self._device.driver.cuEventDestroy(self._event)
            self._device.driver.cuStreamDestroy(self._stream)


def _work(device, stream, jobs):
    """What a thread does until the job is None."""
    ring = None
    while job := jobs.get():
        transfer, *what = job
        try:
            if ring is None:
                device.enter()
                ring = Ring(device, stream)
            ring.copy(*what)
        except BaseException as error:  # noqa: BLE001 it is raised where the bytes are waited for
            transfer.end_job(error)
        else:
            transfer.end_job()
        del job, transfer, what  # an idle thread keeps no array
    if ring is not None:
        ring.close()


class Ring:
    """A thread's pinned buffers, which take turns."""

    def __init__(self, device, stream):
        self._device, self._stream, self._turn = device, stream, 0
        size = PIECE * BUFFERS
        self._memory = mmap.mmap(-1, size)
        self._first = ctypes.addressof(ctypes.c_uint8.from_buffer(self._memory))
        self._buffers = []  # (address, its bytes, event of the last copy from there)
        for i in range(0, size, PIECE):
            view = memoryview(self._memory)[i : i + PIECE]
            self._buffers.append((self._first + i, view, device.do(device.driver.cuEventCreate(2))))
        pairs = [(address, event) for address, _, event in self._buffers]
        self._state = pump.state_of(device, stream, PIECE, pairs) if IS_COMPILED else None
        # Filled here and then pinned: what the driver allocates it fills for one thread after the other (48
        # ms for all, 14 this way). Last, so that nothing stays pinned after an error.
        ctypes.memset(self._first, 0, size)
        device.do(device.driver.cuMemHostRegister(self._first, size, 0))

    def copy(self, source, first, count, address):
        """Bytes of a source, from `first` on, to the device."""
        done, file = 0, getattr(source, "file", None)
        if file is not None and self._state is not None:
            done = pump.pump()(file, source.start + first, count, address, self._turn, self._state)
            self._turn += -(-done // PIECE)
            if code := self._state[pump.CODE]:
                self._device.do((self._device.driver.CUresult(code),))
        while done < count:  # in Python's loop; or a read fell short, and `read_into` goes on or says why
            step = min(PIECE, count - done)
            self._copy_piece(source, first + done, step, address + done)
            done += step

    def _copy_piece(self, source, first, count, address):
        device, driver = self._device, self._device.driver
        buffer, view, copied = self._buffers[self._turn % len(self._buffers)]
        self._turn += 1
        device.do(driver.cuEventSynchronize(copied))  # at once for one never recorded
        source.read_into(view[:count], first)
        device.do(driver.cuMemcpyHtoDAsync(address, buffer, count, self._stream))
        device.do(driver.cuEventRecord(copied, self._stream))

    def close(self):
        driver = self._device.driver
        for _, _, copied in self._buffers:
            driver.cuEventSynchronize(copied)  # a lost device has lost its memory too: no code is asked for
            driver.cuEventDestroy(copied)
        driver.cuMemHostUnregister(self._first)
