"""Products of 17 to 512 token rows on a GPU (kernels/gpu/wide.py): every tile side by side, the skinny
family's passes and torch's matmul (cuBLAS) as peers, and whether a row has the skinny family's bits.

    python bench/wide.py [--products qkv o ...] [--rows 32 64 128 256 512] [--seconds 300]
        [--name wide-h200]

A time is per launch: the median over replays of one graph of at least 8 launches, each on another of the
weights that together fill 200 MB, with dependent launch. `product`: from laid tokens to sums, or to what ends
in the product; `row`: with the laying of tokens and the end of rows, which cuBLAS has not. Products are
Qwen3-8B's and its drafter's. Writes bench/results/NAME.json (into $OUT where that is set); the table comes
last. Needs torch.
"""

import argparse
import sys
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
import torch
from minidflash.kernels.gpu import fast, split, wide
from minidflash.kernels.gpu.laid import Wanted
from minidflash.kernels.sizes import SIZES
from minidflash.kernels.table import SILU
from over_torch import Backend, Buffer, copy_gb_s, packed_weights, rotated, timed, timed_over

MODEL = SIZES["qwen3-8b"]


class Bench:
    """A device, random weights and tokens, and launches over them."""

    def __init__(self, most):
        self.backend = Backend()
        self.backend.wide, self.backend.dependent = True, True
        self.pool = torch.randn(640 * 2**20, device="cuda", dtype=torch.bfloat16) * 0.02
        self.tokens = torch.randn(most * 20480, device="cuda", dtype=torch.bfloat16)
        self.x = torch.zeros(most * 152000, device="cuda", dtype=torch.bfloat16)
        self.work = torch.zeros(2**28, device="cuda")

    def weights(self, outputs, cols, layout="packed"):
        return packed_weights(self.pool, outputs, cols, layout)

    def timed(self, weights, call, replays):
        return timed_over(self.backend, weights, call, replays)

    def buffers(self, name, rows):
        outputs, cols = MODEL.products[name]
        tokens = Buffer(self.tokens[: rows * cols].view(rows, cols))
        out = Buffer(self.x[: rows * outputs].view(rows, outputs))
        return tokens, out, Buffer(torch.ones(max(cols, outputs), device="cuda"))

    def product(self, name, rows, tile, replays):
        """(microseconds, the sums or what came of them)."""
        outputs, cols = MODEL.products[name]
        tokens, out, norm = self.buffers(name, rows)
        cut = split.choose(outputs, cols, self.backend.sms, name == "head")
        norm = norm if name in ("gate_up", "head", "qkv") else None
        laid = wide.lay(self.backend, Wanted(tokens, norm, 1e-6, cut, Buffer(self.work), 0))
        shared = laid.tokens, laid.scale
        if name == "gate_up":

            def call(w):
                args = [w.data, *shared, out, laid.counters, laid.handed, rows, cols, outputs // 2]
                wide.frame(
                    self.backend, laid, tile, "wide_gate_up.cu", "wide_gate_up", args, [outputs], w,
                    {"ACT": SILU},
                )  # fmt: skip
        elif name == "head":
            seconds, sizes = (
                laid.rest[2 * rows * wide.groups_of(tile, outputs) :],
                (rows, cols, outputs, outputs),
            )

            def call(w):
                args = [w.data, *shared, laid.rest, seconds, laid.counters, laid.handed, *sizes]
                wide.frame(
                    self.backend, laid, tile, "wide_head.cu", "wide_head", args, [outputs], w,
                    {"WITH_MARGIN": 0},
                )  # fmt: skip
        else:

            def call(w):
                wide.product(self.backend, laid, w)

        weights = self.weights(outputs, cols, "packed pairs" if name == "gate_up" else "packed")
        us = self.timed(weights, call, replays)
        out.tensor.zero_()
        call(weights[0])
        torch.cuda.synchronize()
        if name == "gate_up":
            return us, out.tensor.clone()
        if name == "head":  # groups differ by tile
            return us, None
        return us, laid.rest.tensor[: cut.slices * rows * outputs].clone()

    def row(self, family, name, rows, replays):
        """(microseconds, what it wrote) of a whole row of the table."""
        outputs, cols = MODEL.products[name]
        tokens, out, norm = self.buffers(name, rows)
        work, ids = Buffer(self.work), Buffer(torch.zeros(rows, device="cuda", dtype=torch.int32))
        pick = Buffer(torch.arange(rows, device="cuda", dtype=torch.int32))
        h = Buffer(self.x[: rows * outputs // 2].view(rows, outputs // 2))

        def call(w):
            if name == "gate_up":
                return family.gate_up(self.backend, tokens, norm, 1e-6, SILU, w, work, h)
            if name == "head":
                return family.head(self.backend, tokens, pick, norm, 1e-6, w, outputs, ids, None, work)
            if name == "fuse":
                return family.fuse(self.backend, tokens, w, norm, 1e-6, work, out)
            return family.linear_add(self.backend, tokens, w, None, None, 0.0, None, None, 0, out, None, work)

        weights = self.weights(outputs, cols, "packed pairs" if name == "gate_up" else "packed")
        out.tensor.zero_(), self.work.zero_()
        torch.cuda.synchronize()
        if call(weights[0]) is None:
            return None, None
        torch.cuda.synchronize()
        seen = {"gate_up": h, "head": ids}.get(name, out).tensor.clone()
        return self.timed(weights, call, replays), seen

    def cublas(self, name, rows, replays):
        outputs, cols = MODEL.products[name]
        tokens, out, _ = self.buffers(name, rows)
        weights = [w.data.tensor[: outputs * cols].view(outputs, cols).T for w in self.weights(outputs, cols)]
        calls = [lambda w=w: torch.matmul(tokens.tensor, w, out=out.tensor) for w in rotated(weights)]
        return timed(calls, replays)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--products", nargs="+", default=list(MODEL.products))
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 64, 128, 256, 512])
    parser.add_argument("--replays", type=int, default=12)
    parser.add_argument(
        "--seconds", type=float, default=300, help="only the tile of the rule, after this long"
    )
    parser.add_argument("--name", default="wide")
    args = parser.parse_args()
    begun, bench, card = time.perf_counter(), Bench(max(args.rows)), torch.cuda.get_device_name()
    copy, results, table = copy_gb_s(bench.pool), [], []
    for name in args.products:
        outputs, cols = MODEL.products[name]
        cut = split.choose(outputs, cols, bench.backend.sms, name == "head")
        for rows in args.rows:
            own = wide.choose(bench.backend.sms, rows, outputs, cut, cols)
            tried, sums = {}, None
            for tile in dict.fromkeys([own, *wide.tiles_for("wgmma", "bf16", rows)]):
                if own in tried and time.perf_counter() - begun > args.seconds:
                    break
                with patch.object(wide, "choose", lambda *_, tile=tile: tile):
                    us, found = bench.product(name, rows, tile, args.replays)
                if us:
                    tried[tile] = us
                    sums = found if sums is None else sums
                    assert found is None or torch.equal(found, sums), f"{name}, {rows} rows, tile {tile}"
            peer, (skinny, wanted) = bench.cublas(name, rows, args.replays), bench.row(fast, name, rows, 5)
            row, got = bench.row(wide, name, rows, args.replays)
            is_same = None if got is None else torch.equal(got, wanted)
            best = min(tried, key=tried.get)
            results.append({
                "product": name, "outputs": outputs, "cols": cols, "rows": rows, "tile": own,
                "product_us": tried.get(own), "row_us": row, "skinny_row_us": skinny, "cublas_us": peer,
                "best": best, "best_us": tried[best], "same_bits_as_skinny": is_same,
                "tiles_us": {str(tile): us for tile, us in tried.items()},
            })  # fmt: skip
            mine = tried.get(own) or float("nan")
            table.append(
                f"{name:8} {rows:4} rows: product {mine:7.2f} us {own}, {peer / mine:.2f} x cuBLAS "
                f"({peer:.2f}); best {tried[best]:7.2f} {best} {peer / tried[best]:.2f}; "
                f"row {row or 0:.2f}, skinny's {skinny:.2f}; bits {is_same}"
            )
            print(table[-1], flush=True)
            print("  " + "; ".join(f"{tried[t]:.1f} {t}" for t in sorted(tried, key=tried.get)), flush=True)
    out = record.write(args.name, {"results": results}, card=card, copy_gb_s=copy)
    print(f"\n{card}, copy {copy:.0f} GB/s; {out}")
    print("\n".join(table))
    return int(any(one["same_bits_as_skinny"] is False for one in results))


if __name__ == "__main__":
    raise SystemExit(main())
