"""How a skinny matrix product is cut over a GPU: a function of (N, K, multiprocessors) alone,
never of the rows.

The cut fixes in which order a row's sum is taken (kernels/cuda/skinny.cuh), so it must not change with the
number of token rows: plain and verify rounds would rank near-ties differently.
"""

import csv
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

from ..weight import TILE

CHUNK = 32  # inputs of a chunk
SQUARES = 64  # f32 a slice, as in skinny.cuh
SHARED_PER_SM, SHARED_PER_BLOCK = 233472, 232448  # H100 and newer; a block costs 1 KB more than it asks for
STATIC = 2048  # shared bytes that kernels of the family declare themselves
TOKEN_TILES = 1, 2, 4  # groups of 8 token rows that kernels are compiled for
ROWS = 8 * TOKEN_TILES[-1]  # of one pass; more rows are more passes
MOST_SLICED_TILES = 4000  # one counter a tile when there is more than one slice


def tiling(rows, is_paired=False):
    """How a matrix's output rows lie in row tiles: (tiles, half, stride, sizes) for the packing kernels.

    is_paired: a tile has 8 rows of gate and, behind them, the same 8 of up. half: how far a tile's second
    half lies behind its first in the file. stride: rows from a tile to the next. sizes: rows that the two
    halves' tiles may have.
    """
    half = rows // 2 if is_paired else min(rows, TILE // 2)
    stride = TILE // 2 if is_paired else TILE
    sizes = [half if is_paired else rows, rows - half]
    return -(-sizes[0] // stride), half, stride, sizes


@dataclass(frozen=True)
class Split:
    """slices of K; blocks a multiprocessor; streaming warps a block; chunks a step and steps ahead of a warp.

    finishers: warps that end tiles. cluster: the slices of a tile are one cluster and meet in shared memory.
    early: the next kernel's blocks may take their place at once, beside these. asked: chunks of a warp that
    are asked for in L2 before the kernel ahead has ended, behind those on their way to registers. These four
    do not show in the bits. span: chunks side by side that are one warp's.
    """

    slices: int
    blocks: int
    warps: int
    chunks: int = 4
    ahead: int = 1
    finishers: int = 1
    cluster: bool = False
    early: bool = False
    asked: int = 4
    span: int = 1

    def groups(self, sms):
        """Tiles that the card has under way at once. Clusters of more than 2 reach 120 of an H100's 132
        multiprocessors."""
        if self.cluster and self.slices > 2:
            return max(1, self.blocks * (sms - sms // 11) // self.slices)
        return self.blocks * sms // self.slices

    def grid(self, tiles, sms):
        """Blocks of a launch: a multiple of slices."""
        return self.slices * max(1, min(tiles, self.groups(sms)))

    @property
    def cluster_blocks(self):
        return self.slices if self.cluster else 1

    @property
    def threads(self):
        return 32 * (self.warps + self.finishers)

    @property
    def resident(self):
        """Blocks a multiprocessor that registers are kept for: the next kernel's too,
        where that leaves enough."""
        return self.blocks * (2 if self.early and 2 * self.blocks * self.threads <= 24 * 32 else 1)

    def shared(self, cols, token_tiles, is_normed=False):
        """Dynamic shared bytes: two sets of the warps' sums, the cluster's, the token rows,
        a norm's scales and squares."""
        spans = -(-cols // (CHUNK * self.span))
        deepest = self.span * -(-spans // self.slices)
        sums = 2 * self.warps + (self.finishers * self.slices if self.cluster else 0)
        normed = 128 * (deepest + token_tiles * self.warps) if is_normed else 0
        return 512 * token_tiles * (sums + deepest) + normed

    def fits(self, cols, token_tiles, is_normed=False):
        need = self.shared(cols, token_tiles, is_normed) + STATIC
        return need <= SHARED_PER_BLOCK and self.blocks * (need + 1024) <= SHARED_PER_SM

    def most_rows(self, cols, is_normed=False):
        """Token rows of the widest pass that shared memory holds."""
        return 8 * max(tiles for tiles in TOKEN_TILES if self.fits(cols, tiles, is_normed))

    def token_tiles(self, rows):
        """Groups of 8 rows of a pass with this many rows."""
        return next(tiles for tiles in TOKEN_TILES if 8 * tiles >= rows)

    def passes(self, cols, rows, is_normed=False):
        """(slice, count) of the passes over `rows` token rows: a row's bits are the same in each."""
        most = self.most_rows(cols, is_normed)
        return [(slice(at, min(at + most, rows)), min(most, rows - at)) for at in range(0, rows, most)]

    def work(self, tiles):
        """f32 of workspace: sums of squares, then every slice's sums of every tile."""
        return self.slices * (SQUARES + tiles * TILE * ROWS)


def read(text, weights="bf16", span=1):
    """(N, K, multiprocessors) -> Split, of text in the form of cuts.csv what is said of such weights, whose
    span is theirs."""
    found, told = {}, [field for field in fields(Split) if field.name != "span"]
    for row in csv.DictReader(text.splitlines()):
        if row["weights"] != weights:
            continue
        numbers = {field.name: field.type(int(row[field.name])) for field in told}
        found[int(row["N"]), int(row["K"]), int(row["sms"])] = Split(**numbers, span=span)
    return found


# cuts.csv, a line a cut: the best of bench/gemm.py at 16 rows with dependent launch, or of bench/variants.py
# in whole passes; on which card, at which commit, and where its numbers are written down.
CUTS = (resources.files(__package__) / "cuts.csv").read_text(encoding="utf-8")
MEASURED = read(CUTS)


@cache
def choose(outputs, cols, sms, whole=False):
    """The Split of a product with `outputs` x `cols` weights.

    whole: K may not be cut (the head: logits are compared where they are made). Errors: ValueError when K is
    too long for shared memory at 8 rows.
    """
    measured = MEASURED.get((outputs, cols, sms))
    if measured and (measured.slices == 1 or not whole):
        return measured
    tiles, chunks = -(-outputs // TILE), -(-cols // CHUNK)
    most = 1 if whole or tiles > MOST_SLICED_TILES else min(chunks, 64)
    for token_tiles in (2, 1):  # room for 16 rows, or at least 8
        best = None
        for blocks, warps in ((1, 16), (2, 7), (2, 4)):
            for slices in range(1, most + 1):
                split = Split(slices, blocks, warps)
                if not split.fits(cols, token_tiles, is_normed=True):
                    continue
                # A slice more costs a merge: measured, cutting 6144 x 4096 in two took 31.6 us against 21.3.
                score = efficiency(split, tiles, chunks, sms) - 0.1 * (slices - 1)
                if best is None or score > best[0] + 1e-9:
                    best = score, split
        if best:
            return best[1]
    raise ValueError(f"no split of K = {cols} fits shared memory")


def efficiency(split, tiles, chunks, sms):
    """Weights over what the busiest warp of the busiest block could have streamed in its time."""
    groups = split.grid(tiles, sms) // split.slices
    rounds = -(-tiles // groups)
    deepest = -(-chunks // split.slices)
    own = -(-deepest // split.warps)  # chunks of the busiest warp a tile
    return tiles * chunks / (rounds * own * split.warps * split.blocks * sms)
