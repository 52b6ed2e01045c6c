"""Memory of weights, cut from large pieces, which have huge pages.

NumPy asks for these where an array has 4 MB, and a weight of a small model has less. Measured with AVX2, one
row of 66 MB in Q4_1: products with pages of 4 KB take 5 % longer.
"""

import numpy as np

from ..host import aligned_zeros

PIECE, LINE = 1 << 26, 64  # bytes


class Arena:
    """Zeros that start on a cache line. A piece's memory goes back when all arrays in it are gone."""

    def __init__(self):
        self._left = aligned_zeros(0, np.uint8)

    def zeros(self, shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size > PIECE // 8:
            return aligned_zeros(shape, dtype)
        if size > len(self._left):
            self._left = aligned_zeros(PIECE, np.uint8)
        found, self._left = self._left[:size], self._left[-(-size // LINE) * LINE :]
        return found.view(dtype).reshape(shape)
