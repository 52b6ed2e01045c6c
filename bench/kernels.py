"""Every kernel of a layer on a GPU as decoding calls it: norm, bias, heads, SwiGLU, argmax and all;
peers beside it.

    python bench/kernels.py [--rows 1,4,16,32,128] [--models qwen3-8b,qwen3-4b,llama-3.1-8b] [--replays 8]

A time is per call with dependent launch: the median over replays of one graph of many calls, each on other
weights (300 MB in all, or as much as the pool holds). "bare" is linear_add with the same weights and cut;
cuBLAS is torch's product with them; the error is the bare product's worst over sum|terms| against float64.
Attention is at 2,048 keys, as bench/attend.py times it. Writes bench/results/kernels-CARD.json (into $OUT
where that is set); the table comes last. Needs torch.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import attend
import cuts
import gemm
import record
import torch
from minidflash.kernels.gpu import fast, split
from minidflash.kernels.sizes import SIZES
from minidflash.kernels.table import SILU
from minidflash.kernels.weight import Weight
from over_torch import copy_gb_s, timed

POSITIONS, CONTEXT = 4096, 2048


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
        return [Weight((rows, cols), "bf16", layout, (w.view(torch.int16),)) for w in found]


def calls(bench, model, rows):
    """name -> (outputs, cols, function of how-manyth call) of one model's rows."""
    m = SIZES[model]
    shapes, width, heads, groups, size, layers = m.products, m.D, m.H, m.G, m.K, m.drafter.layers

    def bits(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).view(torch.int16)

    def f32(*shape):
        return torch.rand(*shape, device="cuda") + 0.5

    x, h, q = bits(rows, width), bits(rows, shapes["down"][1]), bits(rows, heads, size)
    slot, pos = (torch.zeros(rows, device="cuda", dtype=torch.int32) for _ in range(2))
    pos += torch.arange(rows, device="cuda", dtype=torch.int32) + 2000
    pick, ids = torch.arange(rows, device="cuda", dtype=torch.int32), slot.clone()
    cos, sin = f32(POSITIONS, size // 2), f32(POSITIONS, size // 2)
    caches = [bits(layers, 1, groups, POSITIONS, size) for _ in range(2)]
    norm, head_norm, layer_norms = f32(width), f32(size), f32(layers, size)
    features, tapped = bits(rows, width), bits(rows, shapes["fuse"][1])
    work, eps = bench.work, 1e-6
    wq, wkv = bench.packed(heads * size, width), bench.packed(2 * groups * size, width)
    wg = bench.packed(*shapes["gate_up"], fast.PAIRED)
    wo, wd, wh, wf, wi = (bench.packed(*shapes[name]) for name in ("o", "down", "head", "fuse", "inject"))
    turn = cos, sin, slot, pos, pos

    def qkv(i):
        weights = wq[i % len(wq)], wkv[(i + 1) % len(wkv)]
        cache = caches[0][0], caches[1][0]
        norms = head_norm, head_norm, None
        fast.qkv(bench, x, norm, eps, *weights, None, None, *norms, *turn, *cache, work, q)

    def inject(i):
        fast.inject(bench, features, wi[i % len(wi)], None, layer_norms, eps, *turn, *caches, work)

    def o(i):
        fast.linear_add(
            bench, q.view(rows, -1), wo[i % len(wo)], None, None, eps, None, None, 0, x, None, work
        )

    def down(i):
        fast.linear_add(bench, h, wd[i % len(wd)], None, None, eps, None, None, 0, x, None, work)

    ways = {
        "qkv": qkv, "o": o, "down": down, "inject": inject,
        "gate_up": lambda i: fast.gate_up(bench, x, norm, eps, SILU, wg[i % len(wg)], work, h),
        "head": lambda i: fast.head(bench, x, pick, norm, eps, wh[i % len(wh)], m.V, ids, None, work),
        "fuse": lambda i: fast.fuse(bench, tapped, wf[i % len(wf)], norm, eps, work, features),
    }  # fmt: skip
    return {name: (*shape, ways[name]) for name, shape in shapes.items()}


def products(bench, models, row_counts, replays):
    """One dict a row, model and number of token rows."""
    for model in models:
        for rows in row_counts:
            for name, (outputs, cols, call) in calls(bench, model, rows).items():
                count = max(16, min(256, int(gemm.ROTATED / (2 * outputs * cols))))
                bench.dependent, bench.spills = True, False
                us = timed([lambda i=i, call=call: call(i) for i in range(count)], replays)
                assert not bench.spills, name
                cut = split.choose(outputs, cols, bench.sms, whole=name == "head")
                yield {
                    "model": model, "row": name, "outputs": outputs, "cols": cols, "rows": rows, "us": us,
                    "bytes": 2 * outputs * cols,
                    "bare_us": bench.product(cut, rows, outputs, cols, replays, True),
                    "cublas_us": bench.cublas(rows, outputs, cols, replays), "cut": cuts.words(cut),
                    "error_over_terms": bench.error(cut, rows, outputs, cols) if rows <= 32 else None,
                }  # fmt: skip


def attention(bench, models, row_counts, replays):
    """The same of attend."""
    pool = torch.randn(2**28, device="cuda", dtype=torch.bfloat16)
    for model in models:
        m = SIZES[model]
        heads = m.H, m.G, m.K
        for rows in row_counts:
            case = attend.Case(bench, pool, heads, rows, CONTEXT)
            us = case.ours({}, replays)
            yield {
                "model": model, "row": "attend", "heads": heads, "rows": rows, "us": us,
                "bytes": 2 * 2 * CONTEXT * heads[1] * heads[2], "error_over_terms": case.error({}),
            }  # fmt: skip


def line(found, copy):
    size = "x".join(str(found[key]) for key in ("outputs", "cols")) if "cols" in found else "2048 keys"
    peers = ""
    if found.get("bare_us"):  # None where the bare product's cut does not fit so many rows
        bare = found["bare_us"]
        peers = f"{found['us'] / bare:5.2f} x bare, cuBLAS {found['cublas_us'] / bare:5.2f} x bare"
    return (
        f"{found['model']:12} {found['row']:8} {size:13} {found['rows']:3} rows {found['us']:8.2f} us "
        f"{found['of_copy']:5.2f} of copy {peers} {found.get('cut', '')}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="1,4,16,32,128")
    parser.add_argument("--models", default="qwen3-8b,qwen3-4b,llama-3.1-8b")
    parser.add_argument("--replays", type=int, default=8)
    args = parser.parse_args()
    bench, results, copy = Rows(), [], copy_gb_s()
    models, row_counts = args.models.split(","), [int(rows) for rows in args.rows.split(",")]
    bench.wanted = set()
    for model in models:
        for rows in row_counts:
            for outputs, cols, call in calls(bench, model, rows).values():
                call(0)
                cut = split.choose(outputs, cols, bench.sms)
                for _, count in cut.passes(cols, rows):
                    bench.wanted.add(cuts.kernel_of(cut, cut.token_tiles(count)))
    cuts.compile_all(bench.device.arch, bench.wanted)
    bench.wanted = None
    for kind in (products, attention):
        for found in kind(bench, models, row_counts, args.replays):
            found["of_copy"] = found["bytes"] / found["us"] / 1e3 / copy
            results.append(found)
            print(line(found, copy), flush=True)
    name = re.sub(r"\W+", "-", bench.name).strip("-").lower()
    out = record.write(f"kernels-{name}", {"results": results}, card=bench.name, copy_gb_s=copy)
    print(f"\n{bench.name}, copy {copy:.0f} GB/s; {out}")
    print("\n".join(line(found, copy) for found in results))


if __name__ == "__main__":
    main()
