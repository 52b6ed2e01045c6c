"""How the tensors of a checkpoint make a weight: exact transforms by name, done when a backend reads a part.

A transform takes Tensors and returns parts, which a backend stacks along rows: objects with dtype, shape,
nbytes, array and drop() as a Tensor has them; those of MXFP4 and FP8 also have scales. Source: models.md 3, 4
and 11.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from minidflash.kernels import fp8
from minidflash.kernels.oracle import real
from minidflash.kernels.weight import stored_bytes

from minidflash.errors import UserError

NAN_SCALE = 255  # of MXFP4: it stands for no number


@dataclass(frozen=True)
class Part:
    """Rows (rows, cols) of one expert, or of all a vector's numbers, made of a tensor whenever they are asked
    for."""

    tensor: Any
    shape: tuple
    make: Callable

    @property
    def dtype(self):
        return self.tensor.dtype

    @property
    def nbytes(self):
        return prod(self.shape) * self.tensor.nbytes // prod(self.tensor.shape)

    @property
    def array(self):
        return self.make(self.tensor.array)

    def drop(self):
        self.tensor.drop()


@dataclass(frozen=True)
class BlockPart:
    """The MXFP4 rows of one expert. array: blocks u8 (rows, cols/32, 16); scales: u8 (rows, cols/32)."""

    blocks: Any
    scale: Any
    expert: int
    order: Callable
    dtype: str = "MXFP4"

    @property
    def shape(self):
        _, rows, groups = self.scale.shape
        return rows, 32 * groups

    @property
    def nbytes(self):
        return stored_bytes(self.shape, "mxfp4")

    @property
    def array(self):
        return self.order(self.blocks.array[self.expert])

    @property
    def scales(self):
        """Errors: UserError for a scale that stands for no number."""
        found = self.scale.array[self.expert]
        if (found == NAN_SCALE).any():
            raise UserError(
                f"tensor {self.scale.name} holds the scale {NAN_SCALE}, which stands for no number"
            )
        return self.order(found)

    def drop(self):
        self.blocks.drop()
        self.scale.drop()


@dataclass(frozen=True)
class Fp8Part:
    """An FP8 matrix. array: its codes, u8 (rows, cols); scales: f32 (ceil(rows/8), ceil(cols/128)).

    codes, scale: Tensors, one scale for 128 x 128 codes. Errors of array and scales: UserError for what
    stands for no number.
    """

    codes: Any
    scale: Any
    dtype: str = "FP8"

    @property
    def shape(self):
        return self.codes.shape

    @property
    def nbytes(self):
        return stored_bytes(self.shape, "fp8")

    @property
    def array(self):
        found = self.codes.array
        if fp8.has_nan(found):
            raise UserError(f"tensor {self.codes.name} holds a NaN, 0x7F or 0xFF, which is no weight")
        return found

    @property
    def scales(self):
        """Below MOST_SCALE, so that kernels may multiply them by the powers of two that codes are too small
        by."""
        found = real(self.scale.array).astype(np.float32)
        if not (np.abs(found) < fp8.MOST_SCALE).all():
            limit = f"need finite ones below {fp8.MOST_SCALE:.0f}"
            raise UserError(f"tensor {self.scale.name} holds {np.abs(found).max()} as a scale, {limit}")
        return fp8.row_scales(found, self.shape[0])

    def drop(self):
        self.codes.drop()
        self.scale.drop()


def apart(rows):
    """Rows 0, 2, 4 ..., then 1, 3, 5 ...: of interleaved gate and up rows, gate and then up."""
    return np.concatenate([rows[0::2], rows[1::2]])


def stack(tensors):
    """As they are, one below the other."""
    return tensors


def transpose(tensors):
    """Of (E, inputs, outputs), every expert's (outputs, inputs)."""
    return _experts(tensors, lambda matrix: np.ascontiguousarray(matrix.T))


def transpose_apart(tensors):
    """The same where outputs are interleaved."""
    return _experts(tensors, lambda matrix: apart(matrix.T))


def _experts(tensors, make):
    (tensor,) = tensors
    count, inputs, outputs = tensor.shape
    return [Part(tensor, (outputs, inputs), lambda array, e=e: make(array[e])) for e in range(count)]


def columns_apart(tensors):
    """Of (E, outputs), interleaved, each expert's gate and then up."""
    (tensor,) = tensors
    return [Part(tensor, tensor.shape, lambda array: np.ascontiguousarray(apart(array.T).T))]


def fp8_parts(tensors):
    """Of matrices, then as many scales of theirs, one below the other."""
    half = len(tensors) // 2
    return [Fp8Part(*pair) for pair in zip(tensors[:half], tensors[half:], strict=True)]


def each(tensors):
    """Of (E, rows, cols), every expert's (rows, cols)."""
    (tensor,) = tensors
    count, *shape = tensor.shape
    return [Part(tensor, tuple(shape), lambda array, e=e: array[e]) for e in range(count)]


def over_root(tensors):
    """A vector over the root of its size."""
    (tensor,) = tensors
    return [Part(tensor, tensor.shape, lambda array: np.float32(real(array) * array.size**-0.5))]


def blocks(tensors):
    """Of blocks (E, rows, groups, 16) and scales (E, rows, groups), every expert's."""
    return [BlockPart(*tensors, e, np.ascontiguousarray) for e in range(tensors[0].shape[0])]


def blocks_apart(tensors):
    """The same where rows are interleaved."""
    return [BlockPart(*tensors, e, apart) for e in range(tensors[0].shape[0])]


TRANSFORMS = {
    "stack": stack, "transpose": transpose, "transpose, de-interleave": transpose_apart,
    "de-interleave": columns_apart, "each": each, "over root": over_root, "blocks and scales": blocks,
    "blocks and scales, de-interleave": blocks_apart, "fp8": fp8_parts,
}  # fmt: skip
