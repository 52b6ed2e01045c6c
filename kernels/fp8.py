"""FP8 weights: an e4m3 byte a number, a scale for each block of a file, and the f32 numbers they stand for.

The dequantised model is f32: a number is e4m3(byte) * scale, rounded once, never to bf16. A file has a scale
for 128 x 128 numbers; here a scale is kept for 8 rows of such a block, so that rows of several tensors are
joined whose blocks do not line up. Source: models.md 11.
"""

import numpy as np

BLOCK = 128  # rows, and inputs, of a file's block; inputs of a kept one
SCALE_ROWS = 8  # rows of a kept block
MOST_SCALE = 256.0  # a number would be 114,688: no weight is
NAN_BITS = 0x7F  # of a byte without its sign: it stands for no number


def _numbers():
    """f32 of every byte: sign, 4 bits of exponent (bias 7; 0: subnormal), 3 of mantissa; no infinities."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    size[(byte & NAN_BITS) == NAN_BITS] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)


NUMBERS = _numbers()


def scale_shape(rows, cols, block_rows):
    """Of the scales of a matrix, one for so many rows and 128 inputs."""
    return -(-rows // block_rows), -(-cols // BLOCK)


def row_scales(scales, rows):
    """f32 (ceil(rows/8), ceil(cols/128)) of a file's scales, f32 (ceil(rows/128), ceil(cols/128))."""
    return np.repeat(scales, BLOCK // SCALE_ROWS, axis=0)[: -(-rows // SCALE_ROWS)]


def joined_scales(parts):
    """The row_scales of matrices stacked along rows. parts: with shape and scales.

    Errors: ValueError where rows of two would share a scale.
    """
    for part in parts[:-1]:
        if part.shape[0] % SCALE_ROWS:
            raise ValueError(f"FP8 rows {part.shape[0]} end within the {SCALE_ROWS} that share a scale")
    return np.concatenate([part.scales for part in parts])


def widened(codes, scales):
    """f32 (rows, cols) of codes u8 (rows, cols) and their row_scales."""
    found = NUMBERS[codes]
    for chunk in range(scales.shape[1]):
        part = slice(chunk * BLOCK, (chunk + 1) * BLOCK)
        found[:, part] *= np.repeat(scales[:, chunk], SCALE_ROWS)[: len(codes), None]
    return found


def has_nan(codes):
    """Whether a code stands for no number. codes: u8, contiguous; read a piece at a time."""
    flat, size = codes.reshape(-1), 1 << 18
    pieces = (flat[first : first + size] & NAN_BITS for first in range(0, flat.size, size))
    return any(piece.max() == NAN_BITS for piece in pieces)
