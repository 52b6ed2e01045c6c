"""The products of a prompt on a GPU: every frame and tile side by side, torch's matmul (cuBLAS) as the peer.

    python bench/prefill_gemm.py [--shapes 6144x4096,...] [--rows 64,256,1024,2048] [--frames wgmma,mma]
        [--seconds 300]
                                 [--name prefill-gemm-h100]

A time is per launch: the median over replays of one graph of at least 8 launches, each on another of the
weights that together fill 200 MB. linear_add_prefill is timed for every shape (its end reads and adds the
residual), without the pass that lays tokens for wgmma; gate_up and qkv's f32 product with it, once at the
largest number of rows, and the laying of h alone. The last line adds up the products of a Qwen3-8B prompt of
that many rows, under the rule's tiles. Writes bench/results/NAME.json (into $OUT where that is set; without
--name prefill-gemm-CARD); the table comes last. Needs torch.
"""

import argparse
import re
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
import torch
from minidflash.kernels.gpu import fast, prefill
from minidflash.kernels.sizes import SIZES
from minidflash.kernels.table import SILU
from minidflash.kernels.weight import Weight
from over_torch import Backend, Buffer, copy_gb_s, packed_weights, rotated, timed, timed_over

MODEL, SMALL = SIZES["qwen3-8b"], SIZES["smollm2-135m"].products
QKV, _, GATE_UP, _ = LAYER = [MODEL.products[name] for name in ("qkv", "o", "gate_up", "down")]
SHAPES = [*LAYER, MODEL.products["fuse"], SMALL["qkv"], SMALL["inject"]]
MORE = {
    "mma": ((64, 8, 6), (128, 8, 4), (128, 16, 3), (256, 8, 3), (128, 4, 4)),
    "wgmma": ((64, 8, 6), (64, 8, 8), (128, 8, 4), (256, 8, 3)),
}


class Bench:
    """A device, random weights and tokens, and launches over them."""

    def __init__(self):
        self.backend = Backend()
        self.pool = torch.randn(300 * 2**20, device="cuda", dtype=torch.bfloat16) * 0.02
        self.tokens = torch.randn(2048 * 20480, device="cuda", dtype=torch.bfloat16)
        self.x = torch.zeros(2048 * 24576, device="cuda", dtype=torch.bfloat16)
        self.work = torch.zeros(2048 * 24576 + 2**24, device="cuda")

    def weights(self, outputs, cols, layout="packed"):
        return packed_weights(self.pool, outputs, cols, layout)

    def timed(self, weights, call, replays):
        return timed_over(self.backend, weights, call, replays)

    def laid(self, rows, cols):
        tokens = Buffer(self.tokens[: rows * cols].view(rows, cols))
        return prefill.tokens(self.backend, tokens, None, 0.0, Buffer(self.work))[0]

    def linear_add(self, rows, outputs, cols, tile, replays):
        a, x = self.laid(rows, cols), Buffer(self.x[: rows * outputs].view(rows, outputs))

        def call(w):
            args = [w.data, a, None, None, x, None, rows, outputs, cols, 0, 0]
            file = "linear_add_prefill"
            prefill.launch(self.backend, f"{file}.cu", file, rows, outputs, args, w, tile=tile)

        return self.timed(self.weights(outputs, cols), call, replays)

    def others(self, rows, replays):
        """Microseconds of gate_up with its norm, of qkv's norm and product, and of laying what down reads."""
        D, F = MODEL.D, MODEL.F
        work, norm = Buffer(self.work), Buffer(torch.ones(D, device="cuda"))
        x, h = Buffer(self.tokens[: rows * D].view(rows, D)), Buffer(self.x[: rows * F].view(rows, F))

        def gate_up(w):
            assert prefill.gate_up(self.backend, x, norm, 1e-6, SILU, w, work, h)

        def qkv(w):
            laid, scale, y = prefill.tokens(self.backend, x, norm, 1e-6, work)
            prefill.product(self.backend, rows, w, laid, scale, y)

        found = {
            "gate_up_us": self.timed(self.weights(*GATE_UP, "packed pairs"), gate_up, replays),
            "qkv_product_us": self.timed(self.weights(*QKV), qkv, replays),
        }
        if prefill.frame_of(self.backend) == "wgmma":
            lay = partial(prefill.tokens, self.backend, h, None, 0.0)
            found["lay_h_us"] = self.timed([work], lay, replays)
        return found

    def cublas(self, rows, outputs, cols, replays):
        tokens, out = (
            self.tokens[: rows * cols].view(rows, cols),
            self.x[: rows * outputs].view(rows, outputs),
        )
        weights = [w.data.tensor[: outputs * cols].view(outputs, cols).T for w in self.weights(outputs, cols)]
        calls = [lambda w=w: torch.matmul(tokens, w, out=out) for w in rotated(weights)]
        return timed(calls, replays)

    def error(self, rows, outputs, cols, tile):
        """Worst |error| over sum|terms| against float64 of packed weights,
        and whether row 0 alone has its bits."""
        outputs = min(outputs, 2048)
        plain = self.pool[: outputs * cols].view(outputs, cols)
        tiles, chunks = fast.tiles_of(outputs), -(-cols // 32)
        packed = torch.empty(tiles * chunks * 512, device="cuda", dtype=torch.bfloat16)
        args = [Buffer(plain), Buffer(plain[8:]), Buffer(packed), outputs, outputs - 8, 16, tiles, cols, 0]
        self.backend.launch("pack.cu", "pack", -(-tiles * chunks * 32 // 256), 256, 0, args)
        weight = Weight((outputs, cols), "bf16", "packed", (Buffer(packed),))
        y, alone = (torch.zeros(count, outputs, device="cuda") for count in (rows, 1))
        prefill.product(self.backend, rows, weight, self.laid(rows, cols), None, Buffer(y), tile=tile)
        prefill.product(self.backend, 1, weight, self.laid(1, cols), None, Buffer(alone))
        torch.cuda.synchronize()
        tokens = self.tokens[: rows * cols].view(rows, cols)
        want, terms = tokens.double() @ plain.double().T, tokens.double().abs() @ plain.double().abs().T
        return float(((y.double() - want).abs() / terms).max()), bool((alone[0] == y[0]).all())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--rows", default="64,256,1024,2048")
    parser.add_argument("--frames", default="wgmma,mma")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, default=300, help="only the tile of the rule, after this long"
    )
    parser.add_argument("--name", help="of the file of results")
    args = parser.parse_args()
    begun, bench, name = time.perf_counter(), Bench(), torch.cuda.get_device_name()
    copy, results, table, sums = copy_gb_s(bench.pool), [], [], {}
    rows_list, frames = [int(rows) for rows in args.rows.split(",")], args.frames.split(",")
    for outputs, cols in (tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")):
        for rows in rows_list:
            tried, owns = {}, []
            for frame in frames:
                bench.backend.prefill_frame = frame
                owns.append((frame, *prefill.choose(bench.backend.sms, rows, outputs, frame)))
                for tile in dict.fromkeys([owns[-1][1:], *prefill.TILES[frame], *MORE[frame]]):
                    if owns[-1] in tried and time.perf_counter() - begun > args.seconds:
                        break
                    us = bench.linear_add(rows, outputs, cols, tile, args.replays)
                    if us:
                        tried[frame, *tile] = us
            own, best = owns[0], min(tried, key=tried.get)
            peer = bench.cublas(rows, outputs, cols, args.replays)
            bench.backend.prefill_frame = best[0]
            error, is_same = bench.error(rows, outputs, cols, best[1:])
            flops = 2 * rows * outputs * cols
            results.append({
                "outputs": outputs, "cols": cols, "rows": rows, "us": tried[own],
                "tflop_s": flops / tried[own] / 1e6,
                "cublas_us": peer, "tile": own, "best": best, "best_us": tried[best],
                "error_over_terms": error,
                "same_bits_alone": is_same, "tiles_us": {str(tile): us for tile, us in tried.items()},
            })  # fmt: skip
            table.append(
                f"{outputs:6} x {cols:5} {rows:5} rows {tried[own]:9.2f} us {flops / tried[own] / 1e6:6.0f} "
                f"TFLOP/s {peer / tried[own]:5.2f} x cuBLAS  error {error:.1e}  bits "
                f"{'same' if is_same else 'DIFFER'}  {own}; best {tried[best]:.2f} us {best}"
            )
            print(table[-1], flush=True)
            print(
                "  " + "; ".join(f"{tried[tile]:.2f} {tile}" for tile in sorted(tried, key=tried.get)),
                flush=True,
            )
            sums[rows, outputs, cols] = tried[own], peer
    most, bench.backend.prefill_frame = max(rows_list), frames[0]
    others = bench.others(most, args.replays)
    if all((most, *shape) in sums for shape in LAYER):
        ours, peer = (MODEL.layers * sum(sums[most, *shape][i] for shape in LAYER) / 1e3 for i in (0, 1))
        table.append(
            f"{MODEL.layers} layers of products at {most} rows: {ours:.1f} ms, cuBLAS {peer:.1f} ms; {others}"
        )
    card = re.sub(r"\W+", "-", name).strip("-").lower()
    found = {"results": results, "others": others}
    out = record.write(args.name or f"prefill-gemm-{card}", found, card=name, copy_gb_s=copy)
    print(f"\n{name}, copy {copy:.0f} GB/s; {out}")
    print("\n".join(table))


if __name__ == "__main__":
    main()
