"""attend on tensor cores (kernels/cuda/attend_fast.cu, attend_whole.cu): bf16, heads of SIZES; other shapes
stay plain.

How rows are grouped and how many share a launch change no bit of any row. What does: the units that a row's
keys are cut into at most (a matter of the card and of G alone), and whether wgmma makes the products (of the
arch).
"""

import math

from ..table import WIDEST
from . import COUNTERS, HAS_WGMMA
from .split import SHARED_PER_SM

SIZES = 64, 128, 256, 512
LEAF, TILE_ROWS = 144, 64
LARGE_LEAF = 48  # of heads above 128: a divisor of LEAF, so rings are whole ones of these too
BLOCK = 16  # rows of a pass for which heads above 128 are cut
CLUSTERS = 4, 8, 16  # blocks whose pieces meet in shared memory
ALONE = 114 << 10  # dynamic shared bytes of which a multiprocessor has no room for two


def work_size(backend):
    """f32 of pieces, behind the counters: twice what two blocks a multiprocessor leave."""
    return 4 * backend.sms * piece_size(128)


def piece_size(size):
    """f32 of a piece: o of every tile row, then m and l."""
    return TILE_ROWS * (size + 2)


def leaf_of(size):
    """Keys of a leaf."""
    return LEAF if size <= 128 else LARGE_LEAF


def threads_of(size):
    """Of a block."""
    return 128 if size <= 256 else 256


class Shape:
    """How one call is cut. rows: T. keys: that any row sees. Tuning: splits: units of a row at most;
    wgmma: products of four warps together, where the arch has them.
    """

    def __init__(self, rows, heads, groups, size, slots, sms, window=0, has_sinks=False, group=None,
                 splits=None, keys=None, wgmma=True):  # fmt: skip
        self.size, self.ratio, self.groups, self.sms = size, heads // groups, groups, sms
        # A set ends where its slot does: the rows of a slot are taken in equal parts. Of a prompt, whose keys
        # are not cut, one slot may have any number of them.
        width = rows // slots if splits != 0 and rows % slots == 0 else rows
        self.most = 16 if size == 128 else 32  # rows of a group: room for two blocks a multiprocessor
        most = min(self.most, max(1, 64 // self.ratio))
        self.group = group or -(-width // -(-width // most))
        self.shared = 2 * TILE_ROWS * size + 4 * leaf_of(size) * size + 24 * self.most + 4 * TILE_ROWS + 64
        self.shared += 4 * TILE_ROWS * has_sinks
        if splits is None:
            splits = self.most_splits(sms)
        self.splits = splits
        # Of the longest row: of a leaf at least. A window may begin within one.
        seen = [keys] * (keys is not None) + [2 * (window + WIDEST)] * (window > 0)
        units = min(splits, -(-min(seen) // leaf_of(size))) if seen else splits
        self.units = max(1, units) + (window > 0 and splits > 0)
        self.defines = {"HEAD": size, "GROUP": self.most} | ({"RING": 1} if window else {})
        self.defines |= {"SINKS": 1} if has_sinks else {}
        if wgmma:
            self.defines["WGMMA"] = 1
        # Of attend_fast alone: attend_whole would spill.
        self.own_defines = self.defines | ({"SIDES": 1} if self.group * self.ratio <= 8 else {})
        self.cluster = next((blocks for blocks in CLUSTERS if self.units <= blocks), 0)
        owned = -(-self.group * self.ratio // self.cluster) if self.cluster else 0
        self.inbox = 4 * owned * self.units * (size + 4)

    def most_splits(self, sms):
        """Two blocks a multiprocessor, with one for a window, which may begin within a unit. Large heads:
        one, or two, for all groups of a block's rows, so that they may wait for each other."""
        if self.size <= 128:
            return max(1, 2 * sms // self.groups - 1)
        together = self.groups * -(-BLOCK * self.ratio // TILE_ROWS)
        return max(1, (2 if self.size <= 256 else 1) * sms // together - 1)

    def clustered(self, backend, rows, held):
        """-D of the kernel whose pieces meet in a cluster, a block a unit, or None: one unit, too many,
        or no room on the card for all clusters at once."""
        blocks = self.groups * -(-rows // self.group) * self.cluster
        shared = self.shared + self.inbox
        if self.units < 2 or not 0 < blocks <= held or self.size > 128:
            return None
        if 2 * (shared + 2048) > SHARED_PER_SM:
            return None
        defines = self.own_defines | {"CLUSTER": self.cluster}
        function = backend.device.function("attend_fast.cu", "attend_fast", defines)
        in_clusters = backend.device.holds(function, threads_of(self.size), shared, self.cluster)
        return defines if blocks <= in_clusters else None

    def rows_a_pass(self, work, held):
        """Rows of one launch: what a workspace of so many f32 holds, and counters, where units of a row are
        several blocks'. 0: none."""
        pieces = (work - COUNTERS) // (self.groups * self.units * piece_size(self.size))
        return (pieces if held else min(pieces, self.counted)) * self.group

    @property
    def counted(self):
        """Groups of rows that there are counters for."""
        return COUNTERS // (32 * self.groups)

    def is_whole(self, rows, held):
        """Whether a block takes all units of a group and kv head, and keeps their sums in registers: where it
        would be alone with them, and where such blocks fill the card (H200, 32/8/128, 2,048 keys; us of 8, 12
        and 16 sequences of 8 rows: 45 for 43, 64 and 85; a step of 12 and 16 plain rows: 5.61 ms for 5.72,
        5.62 for 5.86)."""
        if self.size > 128:
            return False
        fills = 10 * self.groups * -(-rows // self.group) >= 7 * self.sms
        return not self.splits or (self.units > 1 and (fills or held > 0 and self.blocks(rows, held) == 1))

    def blocks(self, rows, held):
        """Blocks that share the units of a group and kv head. held: blocks that the card holds, 0: nobody may
        wait. One that has them all need not wait for others, nor count."""
        groups = -(-rows // self.group)
        if not held:
            return self.units
        if groups > self.counted:
            return 1
        most = min(self.units, max(1, held // (self.groups * groups)))
        return -(-self.units // -(-self.units // most))  # as many units each


def attend(backend, q, cache_k, cache_v, slot, pos, begin, end, window, causal, scale, sinks, work, o,
           waits=True, early=True, whole=None, meets=True, **tuning):  # fmt: skip
    """Row `attend` of the table; None declines. waits: blocks may wait for each other. early: old keys may be
    asked for before the kernel ahead has ended. whole: a block takes all units of its rows or not, None:
    whichever is faster; the bits are the same. meets: pieces may meet in a cluster. tuning: of `Shape`.
    """
    rows, heads, size = q.shape
    slots, groups, cached, _ = cache_k.shape
    if backend.activations != "bf16" or size not in SIZES or heads // groups > 64:
        return None
    keys = min(backend.bucket or cached, cached)
    how = {"keys": keys, "wgmma": backend.device.arch in HAS_WGMMA} | tuning
    shape = Shape(rows, heads, groups, size, slots, backend.sms, window, sinks is not None, **how)
    held = 0  # blocks that may wait for each other
    if waits and shape.splits:
        function = backend.device.function("attend_fast.cu", "attend_fast", shape.own_defines)
        held = backend.device.holds(function, threads_of(size), shape.shared)
    whole = shape.is_whole(rows, held) if whole is None else whole
    clustered = shape.clustered(backend, rows, held) if meets and not whole else None
    # A block that cuts nothing needs no workspace.
    count = rows if whole or not shape.splits else shape.rows_a_pass(work.size, held)
    if not count:
        return None
    # qkv, which writes the newest keys, lets its successor start late (fast.py):
    # what came before it is there.
    early = (cache_k, cache_v) if early and shape.splits and count >= rows and not whole else ()
    for first in range(0, rows, count):
        here = slice(first, min(first + count, rows))
        part = [a[here] for a in (q, slot, pos, begin, end)]
        total = len(part[0])
        grid = groups, -(-total // shape.group), 1 if whole else shape.blocks(total, held)
        args = [part[0], cache_k, cache_v, *part[1:], window, causal, scale, sinks]
        sizes = [o[here], total, heads, groups, cached, shape.ratio, shape.group, shape.splits]
        block = threads_of(size), shape.shared
        if whole:
            # While blocks of the kernel ahead hold multiprocessors, two would come to one that is free.
            is_few = math.prod(grid) <= backend.sms
            block = threads_of(size), max(shape.shared, ALONE) if is_few else shape.shared
            backend.launch(
                "attend_whole.cu", "attend_whole", grid, *block, args + sizes, shape.defines,
                dependent=backend.dependent,
            )  # fmt: skip
            continue
        sizes += [shape.units, grid[2] > 1 and math.prod(grid) <= held, bool(early)]
        cluster = 1
        if clustered:
            cluster, grid = shape.cluster, (shape.cluster, *grid[:2])
            block = threads_of(size), shape.shared + shape.inbox
        backend.launch(
            "attend_fast.cu", "attend_fast", grid, *block, [*args, work, *sizes],
            clustered or shape.own_defines, cluster=cluster, dependent=backend.dependent, early=early,
        )  # fmt: skip
    return True


def attend_prompt(backend, *args):
    """The same for the many rows of a prompt: they fill the card, so their keys stay uncut and nothing is
    merged."""
    return attend(backend, *args, splits=0)
