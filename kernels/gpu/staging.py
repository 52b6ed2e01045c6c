"""Staging: files to the GPU through pinned buffers. Threads read pieces, each into buffers of its own, and copy from there.

The GPU reads pinned memory at the full rate of PCIe, mapped files not; and no single thread copies out of the page cache
that fast. A thread's buffers stay in its core's cache, and it hands nothing to another: in a ring that one thread fed and
emptied, the readers were idle half of the time (H100, 16 cores); a stream for each thread cost a fifth.
"""

import ctypes
from queue import SimpleQueue
from threading import Lock, Thread

import numpy as np

PIECE = 4 << 20  # bytes of a buffer: 2 MB make Python the limit, 8 MB leave the caches
THREADS = 12
BUFFERS = 2  # of a thread: one is copied while the other is read into


class HostArray:
    """A contiguous array as a source; the other kind is a file's Tensor (weights/safetensors_io.py)."""

    def __init__(self, values):
        self._bytes = values.reshape(-1).view(np.uint8)
        self.nbytes = values.nbytes

    def read_into(self, buffer, first):
        """Fill buffer with the bytes from `first` on."""
        np.frombuffer(buffer, np.uint8)[:] = self._bytes[first : first + len(buffer)]


class Transfer:
    """Sources on their way into an array, one behind the other. `wait` before what uses it is launched."""

    def __init__(self, array, pieces):
        self.array = array  # kept while threads have pieces of it, whatever becomes of who asked
        self._left, self._lock, self._is_done, self._error = pieces, Lock(), Lock(), None
        if pieces:
            self._is_done.acquire()

    def wait(self):
        """Until every copy is in the stream. Errors: what a thread met."""
        with self._is_done:
            if self._error:
                raise self._error

    def end_piece(self, error=None):
        """By a thread: one piece is in the stream, or there will be none of it."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if not self._left:
                self._is_done.release()


class Staging:
    """The threads and their buffers, on a CudaDevice. Copies go to its stream, so kernels launched later see them.

    Sources have `nbytes` and `read_into(buffer, first)`, which threads call.
    """

    def __init__(self, device):
        self._device, self._jobs = device, SimpleQueue()
        self._threads = [Thread(target=_work, args=(device, self._jobs), daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def begin(self, sources, array):
        """The `Transfer` of sources into a device array, in turn with those begun before."""
        jobs, address = [], array.data.ptr
        for source in sources:
            for first in range(0, source.nbytes, PIECE):
                jobs.append((source, first, min(PIECE, source.nbytes - first), address + first))
            address += source.nbytes
        transfer = Transfer(array, len(jobs))
        for job in jobs:
            self._jobs.put((transfer, *job))
        return transfer

    def __del__(self):
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


def _work(device, jobs):
    """What a thread does until the job is None."""
    driver, ring, turn = device.driver, [], 0
    while job := jobs.get():
        transfer, source, first, count, address = job
        try:
            if not ring:
                device.enter()
            if len(ring) < BUFFERS:
                ring.append(_pinned(device))  # when it is needed: pinning is slower than reading
            buffer, view, copied = ring[turn % len(ring)]
            turn += 1
            device.do(driver.cuEventSynchronize(copied))  # at once for one never recorded
            source.read_into(view[:count], first)
            device.do(driver.cuMemcpyHtoDAsync(address, buffer, count, device.driver_stream))
            device.do(driver.cuEventRecord(copied, device.driver_stream))
        except BaseException as error:  # noqa: BLE001 it is raised where the bytes are waited for
            transfer.end_piece(error)
        else:
            transfer.end_piece()
    for buffer, _, copied in ring:
        driver.cuEventSynchronize(copied)  # a lost device has lost its memory too: no code is asked for
        driver.cuEventDestroy(copied)
        driver.cuMemFreeHost(buffer)


def _pinned(device):
    """(address, its bytes, event of the last copy from there)."""
    buffer = int(device.do(device.driver.cuMemHostAlloc(PIECE, 0)))
    view = memoryview((ctypes.c_uint8 * PIECE).from_address(buffer)).cast("B")
    return buffer, view, device.do(device.driver.cuEventCreate(2))  # 2: without timing
