"""Which cuts of a skinny product are worth a try on a GPU, and the search among them:
ranked by a model, then timed."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace

from minidflash.kernels import compiler
from minidflash.kernels.gpu import fast, split

KINDS = (1, 16), (1, 15), (1, 12), (1, 8), (1, 7), (2, 8), (2, 7), (2, 4), (3, 5), (4, 4)  # blocks, warps
# chunks a step, steps ahead
DEPTHS = (4, 1), (2, 2), (1, 4), (1, 6), (1, 8), (5, 1), (8, 1), (4, 2), (2, 3), (2, 4)
GB_S = 2950 / 132  # of a multiprocessor's share of memory, B/ns
TOKENS_GB_S = 41  # the same of L2
END_US = {"alone": 1.2, "cluster": 1.7, "memory": 3.4}  # of one warp, to end a tile; the last is measured


def has_registers(cut):
    """Whether a thread has what its loads under way need: a scheduler's share of registers, in steps of 8."""
    warps = -(-cut.resident * (cut.warps + cut.finishers) // 4)
    have = min(255, 16384 // warps // 32 // 8 * 8)
    return have >= 64 + 8 * cut.chunks * cut.ahead


def model_us(cut, outputs, cols, sms):
    """A guess, for ranking: the busiest block's stream or the ends of its tiles, its tokens,
    one end and a start."""
    tiles, chunks = fast.tiles_of(outputs), -(-cols // split.CHUNK)
    rounds = -(-tiles // max(1, cut.groups(sms)))
    deepest = -(-chunks // cut.slices)
    own = -(-deepest // cut.warps) * cut.warps
    end = END_US["alone" if cut.slices == 1 else "cluster" if cut.cluster else "memory"]
    stream = rounds * (0.5 * own + 0.5 * deepest) * 1.024 * cut.blocks / GB_S
    tokens = cut.blocks * deepest / TOKENS_GB_S
    return 2 + max(stream, rounds * end / cut.finishers) + 0.3 * tokens + end


def first_cuts(outputs, cols, sms, most=10):
    """The likeliest cuts, one depth each: the rule's own first."""
    tiles, found = fast.tiles_of(outputs), {}
    for blocks, warps in KINDS:
        for slices in range(1, 9 if tiles <= split.MOST_SLICED_TILES else 2):
            for cluster in (False, True)[: 1 + (slices > 1)]:
                for finishers in (4, 2, 1):
                    cut = split.Split(slices, blocks, warps, 4, 1, finishers, cluster)
                    if has_registers(cut) and cut.fits(cols, 2) and slices * 32 <= cols:
                        break
                else:
                    continue
                found[cut] = model_us(cut, outputs, cols, sms)
    own = split.choose(outputs, cols, sms)
    ranked = sorted(found, key=found.get)
    return list(dict.fromkeys([own, *ranked[:most], *kinds_of(ranked)]))


def kinds_of(ranked):
    """The best of each kind, so that the model's mistakes do not hide one."""
    best = {}
    for cut in ranked:
        best.setdefault((cut.blocks, cut.warps, cut.cluster, cut.slices == 1), cut)
    return best.values()


def variants(best, cols):
    """What differs from cuts that did well in one thing: depth, who ends tiles, where slices meet,
    early launch."""
    found = []
    for cut in best:
        for chunks, ahead in DEPTHS:
            found.append(replace(cut, chunks=chunks, ahead=ahead))
        found += [replace(cut, finishers=count) for count in (1, 2, 4)]
        found += [replace(cut, early=True), replace(cut, early=True, finishers=1)]
        found += [replace(cut, early=True, finishers=1, chunks=chunks, ahead=1) for chunks in (6, 8)]
        found += [replace(cut, warps=cut.warps + more) for more in (-2, -1, 1)]
        if cut.slices > 1:
            found.append(replace(cut, cluster=not cut.cluster))
    return [cut for cut in dict.fromkeys(found) if has_registers(cut) and cut.fits(cols, 2)]


def kernel_of(cut, token_tiles=2):
    """(file, its defines) of the bare product."""
    return "linear_add_fast.cu", tuple(sorted(fast.defines_of(cut, token_tiles).items()))


def compile_all(arch, kernels):
    """Into the cache, on all cores: a kernel takes a second of one. kernels: set of (file, defines)."""

    def compile_one(kernel):
        compiler.compile_cubin(kernel[0], arch, {key: str(value) for key, value in kernel[1]})

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, kernels))


def search(arch, shapes, sms, timed, is_late):
    """{shape: {cut: us}}. timed(cut, outputs, cols) -> us or None; is_late(share):
    that share of the time is spent."""
    firsts = {shape: first_cuts(*shape, sms) for shape in shapes}
    compile_all(arch, {kernel_of(cut) for cuts in firsts.values() for cut in cuts})
    found = {shape: {} for shape in shapes}
    try_all(firsts, found, timed, is_late, 0.5)
    seconds = {shape: variants(sorted(tried, key=tried.get)[:3], shape[1]) for shape, tried in found.items()}
    compile_all(arch, {kernel_of(cut) for cuts in seconds.values() for cut in cuts})
    try_all(seconds, found, timed, is_late, 1.0)
    return found


def try_all(wanted, found, timed, is_late, share):
    """In rounds over the shapes, so that time runs out for all alike."""
    for at in range(max(map(len, wanted.values()))):
        for shape, cuts in wanted.items():
            if at >= len(cuts) or cuts[at] in found[shape]:
                continue
            if found[shape] and is_late(share):
                return
            us = timed(cuts[at], *shape)
            if us:
                found[shape][cuts[at]] = us


def words(cut):
    ends = f"{cut.finishers} ending" + ", cluster" * cut.cluster + ", early" * cut.early
    return f"{cut.slices} slices, {cut.blocks}x{cut.warps} warps, {cut.chunks}x{cut.ahead} chunks, {ends}"


def line(outputs, cols, sms, cut, card, commit, source, weights="bf16"):
    """A line of kernels/gpu/cuts.csv."""
    *numbers, _ = map(int, astuple(cut))  # the span is the weights'
    return ",".join(map(str, (outputs, cols, sms, weights, *numbers, card, commit, source)))
