"""Token rows as a wide product reads them (lay_wide.cu), and what the next call of a program wants of rows
that a kernel has just ended: it may lay them itself, and saves a launch and a way to L2 and back."""

from dataclasses import dataclass, replace
from typing import Any

from . import COUNTERS, split

STAGE_K = 64  # inputs of a step
MOST_SUMS = 128 * 12 * split.TILE  # f32 that a block hands over


@dataclass(frozen=True)
class Wanted:
    """Rows x as a product reads them: times a norm's weights or None, by the cut's tree, in this workspace.
    outputs: of the product."""

    x: Any
    norm: Any
    eps: float
    cut: split.Split
    work: Any
    outputs: int

    def is_like(self, other):
        """Whether both are the same rows, laid in the same way."""

        def key(want):
            arrays = [address_of(array) for array in (want.x, want.norm, want.work)]
            return *arrays, want.x.shape, want.eps, want.cut

        return key(self) == key(other)

    def rows(self, x):
        """The same of other rows: a pass."""
        return replace(self, x=x)


@dataclass(frozen=True)
class Laid:
    """Token rows of a pass as the frame reads them, in the workspace. of: what was wanted; squares: of each
    slice, and scale, 1 / rms, of rows that have a norm; handed: what blocks hand over; rest: what is free
    behind."""

    of: Wanted
    rows: int
    tokens: Any
    squares: Any
    scale: Any
    handed: Any
    rest: Any

    @property
    def cut(self):
        return self.of.cut

    @property
    def cols(self):
        return self.of.x.shape[1]

    @property
    def counters(self):
        return self.of.work


def address_of(array):
    """Address of a device array, None of None."""
    return None if array is None else getattr(array.data, "ptr", None) or array.ctypes.data


def up(count):
    """To whole 16 bytes of f32."""
    return -(-count // 4) * 4


def steps(cols, cut):
    """Steps of two chunks of 32 inputs in which the tree's warps take theirs, as tree.cuh's Walk."""
    chunks, found = -(-cols // split.CHUNK), 0
    spans = -(-chunks // cut.span)
    for slice_ in range(cut.slices):
        count = spans * (slice_ + 1) // cut.slices - spans * slice_ // cut.slices
        each, more = divmod(count, cut.warps)
        found += more * -(-(each + 1) * cut.span // 2) + (cut.warps - more) * -(-each * cut.span // 2)
    return found - (spans * cut.span - chunks) // 2


def sizes(rows, cut, sms, count):
    """f32 of tokens as they are laid in so many steps, of squares, of scales and of what blocks hand over."""
    laid = -(-rows // 8) * 8 * count * STAGE_K // 2
    return laid, up(cut.slices * rows), up(rows), sms * MOST_SUMS


def place(backend, want, rows, at=COUNTERS, handed=None):
    """The Laid of so many rows in the workspace, from `at` on. handed: of the product before, which will have
    ended."""
    work, places = want.work, []
    *own, last = sizes(rows, want.cut, backend.sms, steps(want.x.shape[1], want.cut))
    for size in (*own, last if handed is None else 0):
        places.append(work[at : at + size])
        at += size
    tokens, squares, scale, new = places
    handed = new if handed is None else handed
    if want.norm is None:
        squares = scale = None
    return Laid(want, rows, tokens, squares, scale, handed, work[at:])


def next_wanted(backend, wants, x, work):
    """What the call behind this one in a program wants, where it reads x and has this workspace; else None.

    wants: row -> function(backend, *args) -> Wanted, or None where the row is not a wide product.
    """
    row, function, args = backend.following[0] if backend.following else (None, None, ())
    if row not in wants or function is not getattr(backend, row):
        return None
    want = wants[row](backend, *args)
    if want is None or address_of(want.work) != address_of(work):
        return None
    return want if (address_of(want.x), want.x.shape) == (address_of(x), x.shape) else None


def is_written_again(backend, h):
    """Whether behind the next call of a program a gate_up writes h before any other call has any of it: then
    nobody sees what h holds meanwhile."""
    for row, _, args in backend.following[1:]:
        sharing = [a for a in args if getattr(a, "ndim", 0) and share_memory(a, h)]
        if sharing:
            is_whole = (address_of(args[-1]), args[-1].shape) == (address_of(h), h.shape)
            return row == "gate_up" and len(sharing) == 1 and is_whole
    return False


def share_memory(a, b):
    """Whether two contiguous arrays have bytes in common."""
    return address_of(a) < address_of(b) + b.nbytes and address_of(b) < address_of(a) + a.nbytes
