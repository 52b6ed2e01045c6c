"""attend on tensor cores (kernels/cuda/attend_fast.cu): bf16, heads of 64 and 128; other shapes stay plain.

How rows are grouped and how many share a launch change no bit of any row. What does: the cluster's size, the units that
a row's keys are cut into at most (a matter of the card and of G alone), the terms of a probability, the keys of a step.
"""

COUNTERS = 4096  # as in attend_pieces.cuh
LEAF, THREADS = 128, 256
CLUSTER = 8
TERMS = 2  # bf16 numbers a probability: one keeps 8 bits of it, two 16


def work_size(backend):
    """f32 of partial results, behind the counters: twice what two blocks of 64 rows a multiprocessor leave."""
    return 4 * backend.sms * 64 * (128 + 2)


class Shape:
    """How one call is cut. rows: T. keys: that any row sees. Tuning: cluster, terms as the macros; splits: units a row at most."""

    def __init__(self, rows, heads, groups, size, slots, sms, is_windowed=False, group=None, cluster=CLUSTER, terms=TERMS,
                 steps=None, splits=None, keys=None):  # fmt: skip
        self.size, self.ratio, self.groups, self.cluster = size, heads // groups, groups, cluster
        steps = steps or (8 if size == 64 else 4)  # 64 keys a step: 7 % faster, but spills with heads of 128
        # A set ends where its slot does: the rows of a slot are taken in equal parts.
        width = rows // slots if rows % slots == 0 else rows
        self.most = 16 if size == 128 else 32  # rows of a group: room for two blocks a multiprocessor
        most = min(self.most, max(1, 64 // self.ratio))
        self.group = group or -(-width // -(-width // most))
        self.tiles = next(t for t in (1, 2, 4, 1 << 30) if self.group * self.ratio <= 16 * t)
        tile = 32 * size + 64 * size + 128  # bytes: q, what the cluster sends, its sums
        self.shared = self.tiles * tile + 4 * LEAF * size + 24 * self.most + 96
        if splits is None:  # so many clusters as two blocks on each of 120 of 132 multiprocessors are
            splits = max(1, max(1, 2 * (sms - sms // 11) // cluster) // groups) * cluster
        self.splits = splits
        units = (
            min(splits, -(-keys // LEAF)) if keys else splits
        )  # of the longest row: a leaf is a unit at least
        self.clusters = max(1, -(-units // cluster)) + (
            is_windowed and splits > 0
        )  # a window begins anywhere
        self.defines = {
            "HEAD": size, "TILES": self.tiles, "GROUP": self.most, "CLUSTER": cluster, "TERMS": terms,
            "COLUMN_TILES": steps,
        }  # fmt: skip

    def rows_a_pass(self, work):
        """Rows of one launch: what counters and a workspace of so many f32 hold. 0: none."""
        slot = 16 * self.tiles * (self.size + 2)
        pieces = (work - COUNTERS) // (self.groups * self.clusters * slot)
        return min(pieces, COUNTERS // (self.groups * self.cluster)) * self.group


def attend(backend, q, cache_k, cache_v, slot, pos, begin, end, window, causal, scale, work, o, **tuning):
    """Row `attend` of the table; None declines. tuning: of `Shape`."""
    rows, heads, size = q.shape
    slots, groups, room, _ = cache_k.shape
    if backend.activations != "bf16" or size not in (64, 128) or heads // groups > 64:
        return None
    keys = min(backend.bucket or room, room)
    shape = Shape(rows, heads, groups, size, slots, backend.sms, bool(window), **{"keys": keys} | tuning)
    count = shape.rows_a_pass(work.size) if shape.splits else rows  # uncut needs no workspace
    if not count:
        return None
    for first in range(0, rows, count):
        here = slice(first, min(first + count, rows))
        part = [a[here] for a in (q, slot, pos, begin, end)]
        total = len(part[0])
        args = [
            part[0], cache_k, cache_v, *part[1:], window, causal, scale, work, o[here], total, heads, groups, room,
            shape.group, shape.splits, shape.clusters,
        ]  # fmt: skip
        grid = -(-total // shape.group) * groups * shape.clusters * shape.cluster
        backend.launch(
            "attend_fast.cu", "attend_fast", grid, THREADS, shape.shared, args, shape.defines,
            cluster=shape.cluster, dependent=backend.dependent,
        )  # fmt: skip
    return True


def attend_prompt(backend, *args):
    """The same for the many rows of a prompt: they fill the card, so their keys stay uncut and nothing is merged."""
    return attend(backend, *args, cluster=1, splits=0)
