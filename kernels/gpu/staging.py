"""Staging: files to the GPU through a ring of pinned buffers, which threads fill ahead of the copies.

The GPU reads pinned memory at the full rate of PCIe, mapped files not; and no single thread copies out of the page cache
that fast. So threads read pieces of the coming tensors, each into a buffer of its own, while earlier ones are copied.
"""

import ctypes
from collections import deque
from queue import SimpleQueue
from threading import Lock, Thread

import numpy as np

PIECE = 4 << 20  # bytes of a buffer; the whole ring is best no larger than the processor's caches
THREADS = 15  # that read
SPARE = 8  # more buffers than threads: being copied, or read and waiting
COPIES = 3  # buffers under way to the GPU before the oldest is waited for


class HostArray:
    """A contiguous array as a source; the other kind is a file's Tensor (weights/safetensors_io.py)."""

    def __init__(self, values):
        self._bytes = values.reshape(-1).view(np.uint8)
        self.nbytes = values.nbytes

    def read_into(self, buffer, first):
        """Fill buffer with the bytes from `first` on."""
        np.frombuffer(buffer, np.uint8)[:] = self._bytes[first : first + len(buffer)]


class _Buffer:
    """PIECE bytes of pinned memory. is_full: held until they have been read. copied: the event that ends their copy."""

    def __init__(self, device):
        driver = device.driver
        self.address = int(device.do(driver.cuMemHostAlloc(PIECE, 0)))
        self.copied = device.do(driver.cuEventCreate(2))  # 2: without timing
        self.bytes = memoryview((ctypes.c_uint8 * PIECE).from_address(self.address)).cast("B")
        self.is_full, self.error = Lock(), None
        self.is_full.acquire()

    def wait(self):
        """Until the bytes have been read. Returns the error that a thread met, or None."""
        self.is_full.acquire()
        error, self.error = self.error, None
        return error


def _read(jobs):
    """What a thread does. jobs: (source, first byte, bytes, buffer), then None. Futures would cost half of the time."""
    while job := jobs.get():
        source, first, count, buffer = job
        try:
            source.read_into(buffer.bytes[:count], first)
        except BaseException as error:  # noqa: BLE001 it is raised where the bytes are wanted
            buffer.error = error
        buffer.is_full.release()


class Staging:
    """The ring, on a CudaDevice. Copies go to its stream, so kernels launched later see them.

    Sources have `nbytes` and `read_into(buffer, first)`, which threads call.
    """

    def __init__(self, device):
        self._device = device
        self._jobs = SimpleQueue()
        self._threads = [Thread(target=_read, args=(self._jobs,), daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()
        self._buffers = []  # made as they are needed: pinning takes longer than reading
        self._free = []
        self._coming = deque()  # (source, first byte) of pieces that no thread has got yet
        self._reading = deque()  # jobs, in order
        self._copying = deque()  # buffers, in order

    def read_ahead(self, sources):
        """Announce what `copy` gets next, in this order: threads may read it before."""
        for source in sources:
            self._coming.extend((source, first) for first in range(0, source.nbytes, PIECE))

    def copy(self, source, address):
        """Begin to copy a whole source to a device address; on return it is no longer read."""
        device, driver = self._device, self._device.driver
        if source.nbytes and not self._is_next(source):
            self._forget()
            self.read_ahead([source])
        device.enter()
        for first in range(0, source.nbytes, PIECE):
            self._keep_reading()
            _, _, count, buffer = self._reading.popleft()
            self._copying.append(buffer)
            if error := buffer.wait():
                raise error
            device.do(driver.cuMemcpyHtoDAsync(address + first, buffer.address, count, device.driver_stream))
            device.do(driver.cuEventRecord(buffer.copied, device.driver_stream))

    def _is_next(self, source):
        """Whether the next piece to copy is this source's first."""
        coming = self._reading or self._coming
        return bool(coming) and coming[0][0] is source and coming[0][1] == 0

    def _forget(self):
        """Drop what was read ahead: something else is wanted."""
        self._coming.clear()
        for *_, buffer in self._reading:
            buffer.wait()  # an error of what nobody wants is none
            self._free.append(buffer)
        self._reading.clear()

    def _keep_reading(self):
        """Give every buffer that is free to the threads, with the next piece."""
        while self._coming and (buffer := self._take()):
            source, first = self._coming.popleft()
            job = source, first, min(PIECE, source.nbytes - first), buffer
            self._reading.append(job)
            self._jobs.put(job)

    def _take(self):
        """A buffer to fill, or None while all are in use. Waits for the oldest copy when more than COPIES go on."""
        if self._free:
            return self._free.pop()
        if len(self._buffers) < THREADS + SPARE:
            self._buffers.append(_Buffer(self._device))
            return self._buffers[-1]
        if len(self._copying) <= COPIES:
            return None
        buffer = self._copying.popleft()
        self._device.do(self._device.driver.cuEventSynchronize(buffer.copied))
        return buffer

    def __del__(self):
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        try:
            self._device.synchronize()  # buffers may still be read
            for buffer in self._buffers:
                self._device.do(self._device.driver.cuMemFreeHost(buffer.address))
                self._device.do(self._device.driver.cuEventDestroy(buffer.copied))
        except RuntimeError:  # the device is lost, its memory with it
            pass
