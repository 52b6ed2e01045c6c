"""Staging: host memory to the GPU through a few pinned buffers that threads fill while others are copied.

A checkpoint is a mapped file, which the GPU cannot read at full speed; pinned memory can be, and one thread does not
fill it as fast as PCIe empties it.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np

PIECE = 32 << 20  # bytes of a buffer
BUFFERS = 3  # one is filled, one is copied, one is ready
THREADS = 8  # that fill a buffer, each a share of it


class Staging:
    """Pinned buffers on a CudaDevice. Copies go to its stream, so kernels launched later see them."""

    def __init__(self, device):
        self._device, driver = device, device.driver
        device.enter()
        self._buffers = [int(device.do(driver.cuMemHostAlloc(PIECE, 0))) for _ in range(BUFFERS)]
        self._events = [device.do(driver.cuEventCreate(2)) for _ in range(BUFFERS)]  # 2: without timing
        self._turn = 0
        self._pool = ThreadPoolExecutor(THREADS, "staging")

    def copy(self, values, address):
        """Begin to copy a contiguous host array to a device address; on return the host array is no longer read."""
        device, driver = self._device, self._device.driver
        source = values.reshape(-1).view(np.uint8)
        device.enter()
        for first in range(0, len(source), PIECE):
            piece = source[first : first + PIECE]
            turn = self._turn
            self._turn = (turn + 1) % BUFFERS
            device.do(driver.cuEventSynchronize(self._events[turn]))  # at once for one never recorded
            self._fill(self._buffers[turn], piece)
            device.do(
                driver.cuMemcpyHtoDAsync(
                    address + first, self._buffers[turn], len(piece), device.driver_stream
                )
            )
            device.do(driver.cuEventRecord(self._events[turn], device.driver_stream))

    def _fill(self, buffer, piece):
        """Copy piece to pinned memory, a share a thread (NumPy lets go of the interpreter's lock)."""
        target = np.frombuffer((ctypes.c_uint8 * len(piece)).from_address(buffer), np.uint8)
        step = max(1 << 20, -(-len(piece) // THREADS))

        def fill(first):
            target[first : first + step] = piece[first : first + step]

        list(self._pool.map(fill, range(0, len(piece), step)))

    def __del__(self):
        pool = getattr(self, "_pool", None)
        if pool is None:
            return
        pool.shutdown()
        try:
            self._device.synchronize()  # buffers may still be read
            for buffer, event in zip(self._buffers, self._events, strict=True):
                self._device.driver.cuMemFreeHost(buffer)
                self._device.driver.cuEventDestroy(event)
        except RuntimeError:  # the device is lost, its memory with it
            pass
