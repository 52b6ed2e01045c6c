"""Staging: files to the GPU through pinned buffers. Threads read pieces, each into buffers of its own, and copy from there.

The GPU reads pinned memory at the full rate of PCIe, mapped files not; and no single thread copies out of the page cache
that fast. A thread hands nothing to another: in a ring that one thread fed and emptied, the readers were idle half of the
time (H100, 16 cores). It has a stream of its own, so that no copy waits behind another thread's; the device's stream waits
for every copy.
"""

import ctypes
import weakref
from queue import SimpleQueue
from threading import Lock, Thread

import numpy as np

PIECE = 4 << 20  # bytes of a buffer
THREADS = 16
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
    """Sources on their way into an array, one behind the other. `wait` before what uses it is launched.

    is_free: the event after which the array is written.
    """

    def __init__(self, array, pieces, is_free):
        self.array = array  # kept while threads have pieces of it, whatever becomes of who asked
        self.is_free = is_free
        self._left, self._lock, self._is_done, self._error = pieces, Lock(), Lock(), None
        if pieces:
            self._is_done.acquire()

    def wait(self):
        """Until the device's stream waits for every copy. Errors: what a thread met."""
        with self._is_done:
            if self._error:
                raise self._error

    def end_piece(self, error=None):
        """By a thread: one piece is on its way, or there will be none of it."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if not self._left:
                self._is_done.release()


class Staging:
    """The threads and their buffers, on a CudaDevice, whose stream's kernels see what was waited for.

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
        device, driver = self._device, self._device.driver
        device.enter()
        is_free = device.do(driver.cuEventCreate(2))  # 2: without timing
        device.do(driver.cuEventRecord(is_free, device.driver_stream))
        transfer = Transfer(array, len(jobs), is_free)
        weakref.finalize(transfer, driver.cuEventDestroy, is_free)
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
    driver, ring, turn, stream = device.driver, [], 0, None
    while job := jobs.get():
        transfer, source, first, count, address = job
        try:
            if not ring:
                device.enter()
                stream = stream or device.do(driver.cuStreamCreate(1))  # 1: not behind the default stream
            if len(ring) < BUFFERS:
                ring.append(_pinned(device))  # when it is needed: pinning is slower than reading
            buffer, view, copied = ring[turn % len(ring)]
            turn += 1
            device.do(driver.cuEventSynchronize(copied))  # at once for one never recorded
            source.read_into(view[:count], first)
            device.do(driver.cuStreamWaitEvent(stream, transfer.is_free, 0))
            device.do(driver.cuMemcpyHtoDAsync(address, buffer, count, stream))
            device.do(driver.cuEventRecord(copied, stream))
            device.do(driver.cuStreamWaitEvent(device.driver_stream, copied, 0))
        except BaseException as error:  # noqa: BLE001 it is raised where the bytes are waited for
            transfer.end_piece(error)
        else:
            transfer.end_piece()
    for buffer, _, copied in ring:
        driver.cuEventSynchronize(copied)  # a lost device has lost its memory too: no code is asked for
        driver.cuEventDestroy(copied)
        driver.cuMemFreeHost(buffer)
    if stream:
        driver.cuStreamDestroy(stream)


def _pinned(device):
    """(address, its bytes, event of the last copy from there)."""
    buffer = int(device.do(device.driver.cuMemHostAlloc(PIECE, 0)))
    view = memoryview((ctypes.c_uint8 * PIECE).from_address(buffer)).cast("B")
    return buffer, view, device.do(device.driver.cuEventCreate(3))  # no timing, wait asleep: others read
