"""attend on tensor cores: bf16, heads of 64 and 128 (kernels/cuda/attend_fast.cu); other shapes stay plain.

Nothing chosen here changes a bit of any row: how rows are grouped, how keys are shared out among blocks and which
launch merges only decide the time (kernels/cuda/attend_plan.cuh).
"""

from . import attend_cluster

COUNTERS, RECORDS = 4096, 512  # as in attend_plan.cuh
MOST_ROWS, LEAF, CHAIN, SPAN = 128, 128, 4, 16
LEVEL_AT = 3 * MOST_ROWS  # i32 of the records that says what a unit was
TERMS = 2  # bf16 numbers a probability: one keeps 8 bits of it, two 16
# Head sizes that attend_cluster.py takes; its bits differ. Measured on an H100, us a call in a chain, 1 and 16 rows at
# 512 and 2,048 keys: heads of 64, one launch 6.6 7.7 8.6 9.3, two 8.9 11.3 11.9 12.6; heads of 128 at 2,048 keys and 16
# rows, one launch 24.4, two 19.7.
ONE_LAUNCH = (64,)
MERGE_ROWS = 0  # up to so many rows times query heads the last block merges; a second launch is faster: 12.6 against 19.0


def work_size(backend):
    """f32 of partial results, behind the counters: two units of 64 rows a block, chains of 32k keys on an H100."""
    return RECORDS + 4 * backend.sms * 64 * (128 + 2)


def attend(backend, q, cache_k, cache_v, slot, pos, begin, end, window, causal, scale, work, o, one_launch=None,
           **tuning):  # fmt: skip
    """Row `attend` of the table; None declines. one_launch: default by ONE_LAUNCH. tuning: of `Shape`, for benchmarks."""
    if q.shape[2] in ONE_LAUNCH if one_launch is None else one_launch:
        args = q, cache_k, cache_v, slot, pos, begin, end, window, causal, scale, work, o
        return attend_cluster.attend(backend, *args, **tuning)
    if backend.activations != "bf16":
        return None
    rows, heads, size = q.shape
    slots, groups, room, _ = cache_k.shape
    shape = Shape(rows, heads, groups, size, slots, room, **tuning)
    if not shape.fits(backend.sms):
        return None
    if not shape.rows_a_pass(work.size):  # many slots in a group, long caches: a set for each row
        shape = Shape(rows, heads, groups, size, slots, room, group=1, **tuning)
    capacity, count = shape.capacity(work.size), shape.rows_a_pass(work.size)
    dependent = getattr(backend, "dependent", False)
    grid = shape.blocks * backend.sms
    for first in range(0, rows, count):
        here = slice(first, min(first + count, rows))
        part, out = [a[here] for a in (q, slot, pos, begin, end)], o[here]
        total = len(part[0])
        args = [
            part[0], cache_k, cache_v, *part[1:], window, causal, scale, work, out, total, heads, groups, room,
            shape.group, shape.leaf_limit or grid, capacity, int(shape.merges_here),
        ]  # fmt: skip
        backend.launch(
            "attend_fast.cu", "attend_fast", grid, 128, shape.shared, args, shape.defines, dependent=dependent
        )
        if not shape.merges_here:
            args = [work, out, heads, groups, shape.group]
            blocks = total, -(-heads * size // 128)
            backend.launch(
                "attend_fast.cu", "attend_merge", blocks, 128, 0, args, shape.defines, dependent=dependent
            )
    return True


class Shape:
    """How one call is cut. rows: T. Tuning: ring, terms, blocks, chain, span as the macros; merge_rows; leaf_limit."""

    def __init__(self, rows, heads, groups, size, slots, room, group=None, ring=None, terms=TERMS, blocks=2,
                 chain=CHAIN, span=SPAN, merge_rows=MERGE_ROWS, leaf_limit=0):  # fmt: skip
        self.size, self.ratio, self.groups = size, heads // groups, groups
        # A set ends where its slot does: the rows of a slot are taken in equal parts.
        width = rows // slots if rows % slots == 0 else rows
        most = max(1, 64 // self.ratio)
        self.group = group or -(-width // -(-width // most))
        self.tiles = next(t for t in (1, 2, 4, 1 << 30) if self.group * self.ratio <= 16 * t)
        self.slot = 16 * self.tiles * (size + 2)
        ring = ring or (3 if self.tiles * size * terms > 512 else 4)  # what leaves room for two blocks an SM
        self.shared = 128 * size * ring + 32 * self.tiles * size + 4096 * self.tiles * terms
        self.defines = {
            "HEAD": size, "TILES": self.tiles, "RING": ring, "TERMS": terms, "BLOCKS": blocks, "CHAIN": chain,
            "SPAN": span,
        }  # fmt: skip
        self.blocks, self.leaf_limit = blocks, leaf_limit
        self.merges_here = self.group * self.ratio <= merge_rows
        self.sets_a_group = min(slots, self.group)
        self.units_a_set = groups * -(-room // (LEAF * chain * span))  # spans: the fewest units there can be

    def fits(self, sms):
        """Whether the kernel takes these sizes; no matter of rows. The workspace holds the spans of one set at least."""
        is_size = self.size in (64, 128) and self.ratio <= 64 and self.groups <= 32
        return is_size and self.units_a_set <= 4 * sms

    def capacity(self, work):
        """Partial results that a workspace of so many f32 holds."""
        return (work - COUNTERS - RECORDS) // self.slot

    def rows_a_pass(self, work):
        """Rows of one launch: what a block plans, and what leaves a slot of the workspace for every span. 0: none."""
        sets = self.capacity(work) // self.units_a_set
        return min(MOST_ROWS // self.group, sets // self.sets_a_group) * self.group
