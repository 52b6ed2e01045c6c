"""Staging: files to the GPU through pinned buffers. Threads read pieces, each into buffers of its own,
and copy from there.

The GPU reads pinned memory at the full rate of PCIe, mapped files not; and no single thread copies out of the
page cache that fast. A thread hands nothing to another. Measured from the page cache to packed weights (H200,
16 cores, 16.4 GB of Qwen3-8B's shape, bench/results/load-ways-h200.json, a tree with changes): 38.7 GB/s, 70
% of the rate of pinned memory alone, 32.7 in pieces of 16 MB. The same loop as machine code, which takes no
lock of the interpreter's, had 49.7 in pieces of 4 MB; of a load in a process of its own (medians of two) it
saved 0.06 s of 0.75, and it wanted a compiler. bench/NOTES.md has what else was tried.
"""

import ctypes
import mmap
from queue import SimpleQueue
from threading import Lock, Thread, current_thread

import numpy as np

PIECE = 8 << 20  # bytes of a buffer, and of a job
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
        """By a thread: the copy of one job is in the stream, or never will be."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if not self._left:
                self._is_done.release()


class Staging:
    """The threads and their buffers, on a CudaDevice. Kernels launched on its stream after a `wait` see the
    copies.

    Sources have `nbytes` and `read_into(buffer, first)`, which threads call.
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
        jobs, address = [], array.data.ptr
        for source in sources:
            for first in range(0, source.nbytes, PIECE):
                jobs.append((source, first, min(PIECE, source.nbytes - first), address + first))
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
        # Filled here and then pinned: what the driver allocates it fills for one thread after the other (24
        # buffers of 4 MB, H100: 48 ms, 14 this way). Last, so that nothing stays pinned after an error.
        ctypes.memset(self._first, 0, size)
        device.do(device.driver.cuMemHostRegister(self._first, size, 0))

    def copy(self, source, first, count, address):
        """Bytes of a source, from `first` on, a piece at most, to the device."""
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
