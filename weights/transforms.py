"""How the tensors of a checkpoint make a weight: exact transforms by name, done when a backend reads a part.

A transform takes Tensors and returns parts, which a backend stacks along rows: objects with dtype, shape,
nbytes, array and drop() as a Tensor has them; those of MXFP4 also have scales. Source: models.md 3, 4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
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
    "blocks and scales, de-interleave": blocks_apart,
}  # fmt: skip
