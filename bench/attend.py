"""Attention on a GPU, as a layer calls it: its cuts side by side at each context, and a prompt's rows.

    python bench/attend.py [--heads 32/8/128,9/3/64] [--rows 1,4,16] [--contexts 128,512,2048,8192,32768]
        [--peers] [--sinks]

A time is what a call adds to a graph in which calls and a small kernel that reads their output take turns,
all with dependent launch, each call on another cache of those that together fill 150 MB: the median over
replays, less that of the small kernels alone. Rows see `context` keys and those of their block before them. A
prompt's rows are timed at the end of 2,048 positions. Errors are against float64 on the same bits. --peers:
scaled_dot_product_attention without a mask, query heads of a kv head folded into its rows or not
(enable_gqa). --sinks: one for every query head, as gpt-oss (64/8/64) has them; torch goes without. Writes
bench/results/attend-CARD.json, with sinks attend-sinks-CARD.json (into $OUT where that is set); tables come
last. Needs torch.
"""

import argparse
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from minidflash.kernels import compiler, source
from minidflash.kernels.gpu import COUNTERS, attend_fast
from minidflash.kernels.sizes import SIZES

from minidflash.errors import UserError

HEADS = [f"{m.H}/{m.G}/{m.K}" for m in map(SIZES.get, ("qwen3-8b", "smollm2-135m"))]
ROTATED = 150e6  # bytes of different caches between two uses of the same
VARIANTS = {  # name: tuning
    "the default": {},
    "the last block merges": {"waits": False},
    "half the units": {"splits": 0.5},
    "twice the units": {"splits": 2},
    "no wgmma": {"wgmma": False},
}
UNCUT = {"splits": 0}
PROMPT = {"uncut": UNCUT, "uncut, no wgmma": UNCUT | {"wgmma": False}}


def tuned(heads, rows, tuning, sms):
    """The tuning with splits, a factor here, as the number of units that `Shape` takes."""
    if not tuning.get("splits"):
        return tuning
    usual = attend_fast.Shape(rows, *heads, 1, sms).splits
    return tuning | {"splits": max(1, int(usual * tuning["splits"]))}


class Case:
    """Rows at one context of one head layout, with caches that rotate."""

    def __init__(self, backend, pool, heads, rows, context, has_sinks=False):
        import torch

        self.backend, self.heads, self.rows = backend, heads, rows
        H, G, K = heads
        self.room = context + rows
        size = G * self.room * K
        self.bytes = 2 * 2 * size
        count = min(-(-int(ROTATED) // self.bytes), len(pool) // (2 * size), 128)
        self.caches = [
            [pool[(2 * i + j) * size :][:size].view(1, G, self.room, K) for j in range(2)]
            for i in range(count)
        ]
        self.q = torch.randn(rows, H, K, device="cuda", dtype=torch.bfloat16)
        self.o = torch.zeros_like(self.q)
        i32 = {"device": "cuda", "dtype": torch.int32}
        self.pos = torch.arange(context, context + rows, **i32)
        self.slot, self.end = torch.zeros(rows, **i32), self.pos + 1
        self.work = torch.zeros(COUNTERS + attend_fast.work_size(backend), device="cuda")
        self.norm = torch.ones(H * K, device="cuda")
        self.laid, self.scale = torch.zeros_like(self.q), torch.zeros(rows, device="cuda")
        self.sinks = torch.randn(H, device="cuda") if has_sinks else None
        self.small_us = None

    def call(self, cache, tuning):
        from over_torch import Buffer

        k, v, q, o, pos, slot, end, work = map(
            Buffer, (*cache, self.q, self.o, self.pos, self.slot, self.end, self.work)
        )
        sinks = None if self.sinks is None else Buffer(self.sinks)
        args = [q, k, v, slot, pos, pos, end, 0, 1, self.heads[2] ** -0.5, sinks, work, o]
        assert attend_fast.attend(self.backend, *args, **tuning)

    def small(self):
        """A kernel that reads o, as the next product of a layer does."""
        from over_torch import Buffer

        args = [
            Buffer(self.o),
            Buffer(self.norm),
            1e-6,
            Buffer(self.laid),
            Buffer(self.scale),
            len(self.norm),
        ]
        self.backend.launch(
            "linear_prefill.cu", "norm_prefill", self.rows, 256, 0, args, dependent=self.backend.dependent
        )

    def ours(self, tuning, replays):
        """Microseconds that a call adds; None where it does not run."""
        import torch
        from over_torch import timed

        self.backend.dependent = True
        caches = self.caches * -(-16 // len(self.caches))
        try:
            self.small()
            self.call(caches[0], tuning)
            torch.cuda.synchronize()
        except (RuntimeError, UserError) as error:
            print(f"  {tuning}: {str(error).splitlines()[0]}")
            return None
        if self.small_us is None:
            self.small_us = timed([self.small] * 64, replays)
        calls = [call for c in caches for call in (lambda c=c: self.call(c, tuning), self.small)]
        return 2 * timed(calls, replays) - self.small_us

    def peers(self, replays):
        """Microseconds of torch: {"gqa", "folded"}."""
        import torch
        from over_torch import timed

        H, G, K = self.heads
        plain = self.q.view(1, self.rows, H, K).transpose(1, 2)
        folded = self.q.view(1, self.rows, G, H // G, K).transpose(1, 2).reshape(1, G, -1, K).contiguous()
        attention = torch.nn.functional.scaled_dot_product_attention
        ways = {
            "gqa": lambda c: attention(plain, *c, enable_gqa=True),
            "folded": lambda c: attention(folded, *c),
        }
        found = {}
        for name, way in ways.items():
            try:
                found[name] = timed([lambda c=c, way=way: way(c) for c in self.caches[:16]], replays)
            except (RuntimeError, UserError) as error:
                print(f"  torch {name}: {str(error).splitlines()[0]}")
        return found

    def error(self, tuning):
        """Worst |error| over sum p|v| against float64, on the first cache."""
        import torch

        self.backend.dependent = False
        self.o.fill_(float("nan"))
        self.call(self.caches[0], tuning)
        torch.cuda.synchronize()
        (H, G, K), worst = self.heads, 0.0
        for g in range(G):
            k, v = (c[0, g].double() for c in self.caches[0])
            q = self.q.view(self.rows, G, H // G, K)[:, g].double()
            scores = torch.einsum("thk,sk->ths", q, k) * K**-0.5
            unseen = torch.arange(self.room, device="cuda") > self.pos[:, None, None]
            scores = scores.masked_fill(unseen, float("-inf"))
            if self.sinks is not None:  # a key more, which has no value
                sink = self.sinks.double().view(G, H // G)[g].expand(self.rows, -1)
                scores = torch.cat([scores, sink[..., None]], -1)
            p = torch.softmax(scores, -1)[..., : self.room]
            want, terms = p @ v, p @ v.abs()
            got = self.o.view(self.rows, G, H // G, K)[:, g].double()
            worst = max(worst, float(((got - want).abs() / terms).nan_to_num(float("inf")).max()))
        return worst

    def has_own_bits(self, tuning):
        """Whether each row alone has the bits of the rows together, twenty times."""
        import torch

        same, rows = True, (self.q, self.o, self.pos, self.slot, self.end)
        self.call(self.caches[0], tuning)
        torch.cuda.synchronize()
        together = self.o.clone()
        for i in range(20):
            t = i % self.rows
            self.q, self.o, self.pos, self.slot, self.end = (a[t : t + 1] for a in rows)
            self.call(self.caches[0], tuning)
            torch.cuda.synchronize()
            same &= bool((self.o.view(torch.int16) == together[t : t + 1].view(torch.int16)).all())
        self.q, self.o, self.pos, self.slot, self.end = rows
        return same


def compile_one(file, arch, defines):
    compiler.compile_cubin(source.find(file), arch, defines)


def compile_all(arch, sms, layouts, rows_list, has_sinks):
    """Every kernel into the disk cache, on all cores: one after the other they would take longer than the
    runs."""
    jobs = {}
    for heads in layouts:
        todo = [(rows, tuning) for rows in rows_list for tuning in VARIANTS.values()]
        for rows, tuning in [*todo, *((256, tuning) for tuning in PROMPT.values())]:
            how = {key: value for key, value in tuned(heads, rows, tuning, sms).items() if key != "waits"}
            shape = attend_fast.Shape(rows, *heads, 1, sms, has_sinks=has_sinks, **how)
            defines = {key: str(value) for key, value in shape.defines.items()}
            jobs[str(defines)] = ("attend_fast.cu", arch, defines)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*jobs.values(), strict=True)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--contexts", default="128,512,2048,8192,32768")
    parser.add_argument("--replays", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=90, help="the first two variants only, after this long"
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--sinks", action="store_true")
    args = parser.parse_args()
    begun = time.perf_counter()
    import torch
    from over_torch import Backend, copy_gb_s

    backend, name = Backend(), torch.cuda.get_device_name()
    layouts = [tuple(map(int, word.split("/"))) for word in args.heads.split(",")]
    rows_list = [int(rows) for rows in args.rows.split(",")]
    compile_all(backend.device.arch, backend.sms, layouts, rows_list, args.sinks)
    print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    pool = torch.randn(160 * 2**20, device="cuda", dtype=torch.bfloat16)
    copy, results, table, sums = copy_gb_s(pool), [], [], {}
    cases = [(heads, rows, int(context), VARIANTS) for heads in layouts
             for context in args.contexts.split(",") for rows in rows_list]  # fmt: skip
    cases += [(heads, rows, 2048 - rows, PROMPT) for heads in layouts for rows in (256, 1024, 2048)]
    for heads, rows, context, variants in cases:
        case, tried = Case(backend, pool, heads, rows, context, args.sinks), {}
        for what, tuning in variants.items():
            if len(tried) > 1 and time.perf_counter() - begun > args.seconds:
                break
            us = case.ours(tuned(heads, rows, tuning, backend.sms), args.replays)
            if us:
                tried[what] = us
        how = {what: tuned(heads, rows, variants[what], backend.sms) for what in tried}
        best = min(tried, key=tried.get)
        results.append({
            "heads": heads, "rows": rows, "context": context, "bytes": case.bytes, "best": best,
            "us": tried[best],
            "of_copy": case.bytes / tried[best] / 1e3 / copy, "variants_us": tried, "small_us": case.small_us,
            "torch_us": case.peers(args.replays) if args.peers else None,
            "error_over_terms": {what: case.error(how[what]) for what in tried if rows <= 16},
            "own_bits": {what: case.has_own_bits(how[what]) for what in tried if rows <= 16},
        })  # fmt: skip
        last = results[-1]
        worst = max((last["error_over_terms"][what] for what in tried if rows <= 16), default=0)
        bits = "same" if all(last["own_bits"].values()) else f"DIFFER {last['own_bits']}"
        table.append(
            f"{heads!s:13} {context:6} {rows:4} rows {tried[best]:8.2f} us {last['of_copy']:5.2f} of copy: "
            f"{best}  error {worst:.1e}  bits {bits}"
        )
        times = "; ".join(f"{tried[what]:.2f} {what}" for what in sorted(tried, key=tried.get))
        print(f"{table[-1]}\n  {times}  {last['torch_us'] or ''}", flush=True)
        if rows <= 16:
            for what, us in tried.items():
                sums.setdefault(what, []).append(us / tried[best])
    full = max(map(len, sums.values()))
    means = {what: sum(s) / len(s) for what, s in sums.items() if len(s) == full}
    advice = min(means, key=means.get)
    card = re.sub(r"\W+", "-", name).strip("-").lower()
    found = {"results": results, "over_best": means, "suggested": advice}
    out = record.write(f"attend-{'sinks-' * args.sinks}{card}", found, card=name, copy_gb_s=copy)
    print(f"\n{name}, copy {copy:.0f} GB/s; {out}; {time.perf_counter() - begun:.0f} s")
    print("\n".join(table))
    print(
        "mean time over the best of its case: "
        + "; ".join(f"{means[w]:.3f} {w}" for w in sorted(means, key=means.get))
    )
    print(f"suggested default: {advice}")


if __name__ == "__main__":
    main()
