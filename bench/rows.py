"""The rows of a layer on a GPU as decoding calls them: norm, bias, heads, SwiGLU, argmax and all; beside the bare product.

    python bench/rows.py [--rows 1,16] [--models qwen3-8b,qwen3-4b,smollm2] [--replays 30]

A time is per call: the median over replays of one graph of many calls, each on other weights (300 MB in all, or as much
as the pool holds). "bare" is linear_add with the same weights and cut, in the same run. Writes
bench/results/rows-CARD.json (into $OUT where that is set); the table comes last. Needs torch.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cuts
import gemm
import record
import torch
from minidflash.kernels.gpu import fast, split
from minidflash.kernels.weight import Weight
from over_torch import copy_gb_s, timed

MODELS = {  # width, heads, kv heads, head size, ffn, vocab, drafter layers, taps
    "qwen3-8b": (4096, 32, 8, 128, 12288, 151936, 5, 5),
    "qwen3-4b": (2560, 32, 8, 128, 9728, 151936, 5, 5),
    "smollm2": (576, 9, 3, 64, 1536, 49152, 4, 4),
}
POSITIONS = 4096


class Rows(gemm.Bench):
    """Weights for the row functions of kernels/gpu/fast.py."""

    wanted = None  # a set: launches are noted there and do not happen

    def launch(self, file, kernel, grid, block, shared, args, defines=None, **how):
        if self.wanted is not None:
            self.wanted.add((file, tuple(sorted((defines or {}).items()))))
        else:
            super().launch(file, kernel, grid, block, shared, args, defines, **how)

    def packed(self, rows, cols, layout="packed"):
        """Weights that rotate: slices of the pool as they are, since any numbers are a packing of some."""
        tiles = fast.tiles_of(rows, layout == fast.PAIRED)
        found = self.weights(16 * tiles, cols)
        return [Weight(rows, cols, "bf16", layout, w.view(torch.int16)) for w in found]


def calls(bench, model, rows):
    """name -> (outputs, cols, function of how-manyth call) of one model's rows."""
    width, heads, groups, size, ffn, vocab, layers, taps = MODELS[model]

    def bits(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).view(torch.int16)

    def f32(*shape):
        return torch.rand(*shape, device="cuda") + 0.5

    x, h, q = bits(rows, width), bits(rows, ffn), bits(rows, heads, size)
    slot, pos = (torch.zeros(rows, device="cuda", dtype=torch.int32) for _ in range(2))
    pos += torch.arange(rows, device="cuda", dtype=torch.int32) + 2000
    pick, ids = torch.arange(rows, device="cuda", dtype=torch.int32), slot.clone()
    cos, sin = f32(POSITIONS, size // 2), f32(POSITIONS, size // 2)
    caches = [bits(layers, 1, groups, POSITIONS, size) for _ in range(2)]
    norm, head_norm, layer_norms = f32(width), f32(size), f32(layers, size)
    features, tapped = bits(rows, width), bits(rows, taps * width)
    work, eps = bench.work, 1e-6
    wq, wkv = bench.packed(heads * size, width), bench.packed(2 * groups * size, width)
    wo, wg = bench.packed(width, heads * size), bench.packed(2 * ffn, width, fast.PAIRED)
    wd, wh = bench.packed(width, ffn), bench.packed(vocab, width)
    wf, wi = bench.packed(width, taps * width), bench.packed(layers * 2 * groups * size, width)
    turn = cos, sin, slot, pos

    def qkv(i):
        weights = wq[i % len(wq)], wkv[(i + 1) % len(wkv)]
        cache = caches[0][0], caches[1][0]
        norms = head_norm, head_norm
        fast.qkv(bench, x, norm, eps, *weights, None, None, *norms, *turn, *cache, work, q)

    def inject(i):
        fast.inject(bench, features, wi[i % len(wi)], None, layer_norms, eps, *turn, *caches, work)

    def o(i):
        fast.linear_add(bench, q.view(rows, -1), wo[i % len(wo)], None, None, 0, x, None, work)

    def down(i):
        fast.linear_add(bench, h, wd[i % len(wd)], None, None, 0, x, None, work)

    return {
        "qkv": ((heads + 2 * groups) * size, width, qkv),
        "o": (width, heads * size, o),
        "gate_up": (2 * ffn, width, lambda i: fast.gate_up(bench, x, norm, eps, wg[i % len(wg)], work, h)),
        "down": (width, ffn, down),
        "head": (
            vocab, width, lambda i: fast.head(bench, x, pick, norm, eps, wh[i % len(wh)], vocab, ids, work)
        ),
        "fuse": (
            width, taps * width, lambda i: fast.fuse(bench, tapped, wf[i % len(wf)], norm, eps, work, features)
        ),
        "inject": (layers * 2 * groups * size, width, inject),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--replays", type=int, default=15)
    args = parser.parse_args()
    bench, results, table = Rows(), [], []
    copy, bench.wanted = copy_gb_s(), set()
    models, row_counts = args.models.split(","), [int(rows) for rows in args.rows.split(",")]
    for model in models:
        for rows in row_counts:
            for outputs, cols, call in calls(bench, model, rows).values():
                call(0)
                cut = split.choose(outputs, cols, bench.sms)
                bench.wanted.add(cuts.kernel_of(cut, cut.token_tiles(rows)))
    cuts.compile_all(bench.device.arch, bench.wanted)
    bench.wanted = None
    for model in models:
        for rows in row_counts:
            for name, (outputs, cols, call) in calls(bench, model, rows).items():
                count = max(16, min(256, int(gemm.ROTATED / (2 * outputs * cols))))
                launches = [lambda i=i, call=call: call(i) for i in range(count)]
                bench.dependent = bench.spills = False
                us = timed(launches, args.replays)
                bench.dependent = True
                overlapped = timed(launches, args.replays)
                assert not bench.spills, name
                cut = split.choose(outputs, cols, bench.sms, whole=name == "head")
                bare, bare_overlapped = (
                    bench.product(cut, rows, outputs, cols, args.replays, dependent)
                    for dependent in (False, True)
                )
                gbs = 2 * outputs * cols / overlapped / 1e3
                table.append(
                    f"{model:9} {name:8} {outputs:6} x {cols:5} {rows:3} rows {us:8.2f} us {us / bare:5.2f} x bare, "
                    f"dependent {overlapped:8.2f} us {overlapped / bare_overlapped:5.2f} x bare {gbs:6.0f} GB/s "
                    f"{gbs / copy:5.2f} of copy  {cuts.words(cut)}"
                )
                print(table[-1], flush=True)
                results.append({
                    "model": model, "row": name, "outputs": outputs, "cols": cols, "rows": rows, "us": us,
                    "dependent_us": overlapped, "bare_us": bare, "bare_dependent_us": bare_overlapped, "gb_s": gbs, "of_copy": gbs / copy,
                    "cut": cuts.words(cut),
                })  # fmt: skip
    name = re.sub(r"\W+", "-", bench.name).strip("-").lower()
    out = record.write(f"rows-{name}", {"results": results}, card=bench.name, copy_gb_s=copy)
    print(f"\n{bench.name}, copy {copy:.0f} GB/s; {out}")
    print("\n".join(table))


if __name__ == "__main__":
    main()
