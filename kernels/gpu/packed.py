"""Packed weights, and what the kernels that read them hold: facts that the families share."""

from . import split

PAIRED = "packed pairs"  # a tile holds 8 gate rows and the 8 up rows that go with them


def tiles_of(rows, is_paired=False):
    """16-row tiles of a packed weight."""
    return split.tiling(rows, is_paired)[0]


def are_packed(*weights):
    """Whether one kernel reads them all."""
    return all(w.layout == "packed" and w.dtype == weights[0].dtype for w in weights)


def has_room(heads, size):
    """Whether skinny_heads.cuh holds the heads of one launch."""
    return heads <= 512 and size <= 512


def head_size_define(size):
    """-D of skinny_heads.cuh for heads that are larger than usual: a lane has more of them."""
    return {} if size <= 128 else {"MOST_HEAD_SIZE": 256 if size <= 256 else 512}


def fits_a_block(width):
    """Whether whole_rows.cuh holds a row."""
    return width % 4 == 0 and width <= 8192


def rows_of(array, here):
    """Those rows of an argument that may be absent."""
    return None if array is None else array[here]
