"""The skinny matrix product on a GPU: the cuts worth a try, side by side;
cuBLAS (torch) and a plain copy as peers.

    python bench/gemm.py [--shapes 6144x4096,4096x4096] [--rows 1,8,16] [--seconds 100]

A time is per launch: the median over replays of one graph of many launches, each on another of the weights
that together fill 300 MB (over twice the L2). Random weights and tokens. Cuts are compared at 16 rows with
dependent launch, by the same kernel that decoding uses (linear_add_fast); the best is then run at all row
counts, with and without it. Writes bench/results/gemm-CARD.json (into $OUT where that is set);
last come the table and lines for cuts.csv. Needs torch.
"""

import argparse
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cuts
import record
import torch
from minidflash.kernels.gpu import fast, split
from minidflash.kernels.sizes import SIZES
from over_torch import Backend, copy_gb_s, timed

# Of all models but the benches' toy, each once.
SHAPES = list(dict.fromkeys(s for name, m in SIZES.items() if name != "toy" for s in m.products.values()))
ROTATED = 300e6  # bytes of different weights between two uses of the same
COUNTERS = 4096


class Bench(Backend):
    """A device, random data on it, and the launches of one kernel under different cuts."""

    def __init__(self):
        super().__init__()
        self.name = torch.cuda.get_device_name()
        self.pool = torch.randn(640 * 1024 * 1024, device="cuda", dtype=torch.bfloat16) * 0.02
        self.work = torch.zeros(COUNTERS + 64 * 1024 * 1024, device="cuda")
        self.tokens = torch.randn(128 * 32768, device="cuda", dtype=torch.bfloat16)
        self.x = torch.zeros(128 * 160000, device="cuda", dtype=torch.bfloat16)

    def weights(self, outputs, cols):
        """How many different weights rotate, and the addresses of them."""
        size = outputs * cols
        count = max(1, min(-(-int(ROTATED) // (2 * size)), len(self.pool) // size, 256))
        return [self.pool[i * size :][:size] for i in range(count)]

    def function(self, cut, token_tiles):
        """The kernel of a cut; None when it does not keep to registers."""
        defines = fast.defines_of(cut, token_tiles)
        function = self.device.function("linear_add_fast.cu", "linear_add_fast", defines)
        return None if function.local_bytes else function

    def product_launch(self, function, cut, rows, outputs, cols, weight, x, tokens, dependent=False):
        tiles, token_tiles = fast.tiles_of(outputs), cut.token_tiles(rows)
        args = [
            weight.data_ptr(), tokens.data_ptr(), None, None, x.data_ptr(), None, self.work.data_ptr(),
            self.work.data_ptr() + 4 * COUNTERS, rows, outputs, cols, cut.slices, 0, 0,
        ]  # fmt: skip
        self.on_device(
            function, cut.grid(tiles, self.device.sms), cut.threads, cut.shared(cols, token_tiles), args,
            cluster=cut.cluster_blocks, dependent=dependent,
        )  # fmt: skip

    def product(self, cut, rows, outputs, cols, replays, dependent=False):
        """Microseconds of our product; passes of fewer rows where shared memory asks for them.
        None: spills."""
        passes = cut.passes(cols, rows)
        functions = [self.function(cut, cut.token_tiles(count)) for _, count in passes]
        if None in functions:
            return None
        weights, launches = self.weights(outputs, cols), []
        for weight in weights * (-(-16 // len(weights))):
            for function, (here, count) in zip(functions, passes, strict=True):
                at = self.x[here.start * outputs :], self.tokens[here.start * cols :]
                launches.append(
                    lambda f=function, w=weight, at=at, n=count: self.product_launch(
                        f, cut, n, outputs, cols, w, *at, dependent
                    )
                )
        return timed(launches, replays) * len(passes)

    def cublas(self, rows, outputs, cols, replays):
        tokens, out = (
            self.tokens[: rows * cols].view(rows, cols),
            self.x[: rows * outputs].view(rows, outputs),
        )
        weights = [w.view(outputs, cols).T for w in self.weights(outputs, cols)]
        launches = [lambda w=w: torch.matmul(tokens, w, out=out) for w in weights * (-(-16 // len(weights)))]
        return timed(launches, replays)

    def error(self, cut, rows, outputs, cols):
        """Worst |error| over sum|terms| against float64, on packed weights, through the whole kernel.
        None: spills."""
        outputs = min(outputs, 8192)
        plain = self.pool[: outputs * cols].view(outputs, cols)
        tiles, chunks = fast.tiles_of(outputs), -(-cols // split.CHUNK)
        packed = torch.empty(tiles * chunks * 512, device="cuda", dtype=torch.bfloat16)
        pack = self.device.function("pack.cu", "pack")
        bottom = plain.data_ptr() + 16 * cols
        args = [plain.data_ptr(), bottom, packed.data_ptr(), outputs, outputs - 8, 16, tiles, cols, 0]
        self.on_device(pack, -(-tiles * chunks * 32 // 256), 256, 0, args)
        tokens = self.tokens[: rows * cols].view(rows, cols)
        x = torch.zeros(rows * outputs, device="cuda", dtype=torch.bfloat16)
        for here, count in cut.passes(cols, rows):
            function = self.function(cut, cut.token_tiles(count))
            if function is None:
                return None
            at = x[here.start * outputs :], self.tokens[here.start * cols :]
            self.product_launch(function, cut, count, outputs, cols, packed, *at)
        torch.cuda.synchronize()
        want = tokens.double() @ plain.double().T
        terms = tokens.double().abs() @ plain.double().abs().T
        return float(((x.view(rows, outputs).double() - want).abs() / terms).max())


def table_line(result, copy):
    gbs, peer = result["bytes"] / result["dependent_us"] / 1e3, result["cublas_us"]
    return (
        f"{result['outputs']:6} x {result['cols']:5} {result['rows']:3} rows {result['us']:8.2f} us, "
        f"dependent {result['dependent_us']:8.2f} us {gbs:6.0f} GB/s {gbs / copy:5.2f} of copy "
        f"{peer / result['dependent_us']:5.2f} x cuBLAS ({peer:.2f} us)   {result['cut']}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--replays", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=100, help="stop trying cuts after this long")
    args = parser.parse_args()
    begin, bench = time.perf_counter(), Bench()
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    sms, copy = bench.device.sms, copy_gb_s()

    def tried(cut, outputs, cols):
        return bench.product(cut, 16, outputs, cols, args.replays, dependent=True)

    def is_late(share):
        return time.perf_counter() - begin > share * args.seconds

    found = cuts.search(bench.device.arch, shapes, sms, tried, is_late)
    results, table = [], []
    for (outputs, cols), times in found.items():
        best, own = min(times, key=times.get), split.choose(outputs, cols, sms)
        for rows in map(int, args.rows.split(",")):
            us, overlapped = (
                bench.product(best, rows, outputs, cols, 3 * args.replays, dependent)
                for dependent in (False, True)
            )
            results.append({
                "outputs": outputs, "cols": cols, "rows": rows, "us": us, "bytes": 2 * outputs * cols,
                "dependent_us": overlapped, "cublas_us": bench.cublas(rows, outputs, cols, 3 * args.replays),
                "cut": cuts.words(best), "error_over_terms": bench.error(best, rows, outputs, cols),
            })  # fmt: skip
            table.append(table_line(results[-1], copy))
            print(table[-1])
        ranking = {cuts.words(cut): times[cut] for cut in sorted(times, key=times.get)}
        results[-1]["cuts_at_16_rows_dependent_us"] = ranking
        print(f"  {len(times)} cuts; cuts.csv or rule: {times.get(own, 0):.2f} us {cuts.words(own)}")
        print("\n".join(f"  {us:8.2f} us {what}" for what, us in list(ranking.items())[:5]), flush=True)
    name = re.sub(r"\W+", "-", bench.name).strip("-").lower()
    out = record.write(f"gemm-{name}", {"results": results}, card=bench.name, copy_gb_s=copy)
    worst = max(result["error_over_terms"] for result in results)
    print(f"\n{bench.name}, copy {copy:.0f} GB/s; worst error {worst:.2e} of sum|terms|, output bf16; {out}")
    print("\n".join(table))
    print("\nfor kernels/gpu/cuts.csv:")
    source = bench.name, record.commit_of_run(), f"bench/results/{out.name}"
    for shape, times in found.items():
        print(cuts.line(*shape, sms, min(times, key=times.get), *source))


if __name__ == "__main__":
    main()
