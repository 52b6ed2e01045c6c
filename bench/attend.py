"""Attention on a GPU: variants of attend_fast side by side at each context; torch's attention and a plain copy as peers.

    python bench/attend.py [--heads 32/8/128,9/3/64] [--rows 1,4,16] [--contexts 128,2048,8192,32768] [--seconds 420]

A time is per call (both launches where a second one merges): the median over replays of one graph of many calls, each
on another cache of those that together fill 150 MB. Rows see `context` keys and those of their block before them.
Errors are against float64 on the same bits. Peers: scaled_dot_product_attention without a mask, as it is called
(enable_gqa) and with the query heads of a kv head folded into its rows. Writes bench/results/attend-CARD.json (into
$OUT where that is set); the table comes last. Needs torch.
"""

import argparse
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
import torch
from minidflash.kernels.gpu import attend_fast
from over_torch import Backend, Buffer, copy_gb_s, timed

from minidflash.errors import UserError

ROTATED = 150e6  # bytes of different caches between two uses of the same
VARIANTS = {  # name: tuning of attend_fast.Shape; the first is the default
    "default": {},
    "1 term": {"terms": 1},
    "1 term, ring 5, 1 block": {"terms": 1, "ring": 5, "blocks": 1},
    "ring 6, 1 block": {"ring": 6, "blocks": 1},
    "3 blocks": {"blocks": 3},
    "leaves up to 2 a block": {"leaf_limit": 2},
    "leaves up to 4 a block": {"leaf_limit": 4},
    "chains only": {"leaf_limit": -1},
    "last block merges": {"merge_rows": 64},
    "a launch merges": {"merge_rows": 0},
    "chains of 8": {"chain": 8, "span": 8},
    "chains of 2": {"chain": 2, "span": 32},
}


class Case:
    """Rows at one context of one head layout, with caches that rotate."""

    def __init__(self, backend, pool, heads, rows, context):
        self.backend, self.heads, self.rows = backend, heads, rows
        H, G, K = heads
        self.room = context + rows
        size = G * self.room * K
        self.bytes = 2 * 2 * size
        count = min(-(-int(ROTATED) // self.bytes), len(pool) // (2 * size), 256)
        self.caches = [
            [pool[(2 * i + j) * size :][:size].view(1, G, self.room, K) for j in range(2)]
            for i in range(count)
        ]
        self.q = torch.randn(rows, H, K, device="cuda", dtype=torch.bfloat16)
        self.o = torch.zeros_like(self.q)
        i32 = {"device": "cuda", "dtype": torch.int32}
        self.pos = torch.arange(context, context + rows, **i32)
        self.slot, self.end = torch.zeros(rows, **i32), self.pos + 1
        self.work = torch.zeros(attend_fast.COUNTERS + attend_fast.work_size(backend), device="cuda")

    def call(self, cache, tuning):
        tuning = dict(tuning)
        if "leaf_limit" in tuning:
            tuning["leaf_limit"] *= tuning.get("blocks", 2) * self.backend.sms
        k, v, q, o, pos, slot, end, work = map(
            Buffer, (*cache, self.q, self.o, self.pos, self.slot, self.end, self.work)
        )
        args = [q, k, v, slot, pos, pos, end, 0, 1, self.heads[2] ** -0.5, work, o]
        assert attend_fast.attend(self.backend, *args, **tuning)

    def calls(self, make):
        """At least 16 calls that go round the caches."""
        return [lambda c=c: make(c) for c in self.caches * -(-16 // len(self.caches))]

    def ours(self, tuning, replays, dependent=False):
        """Microseconds; None where a kernel spills or does not fit."""
        self.backend.dependent, self.backend.spills = dependent, False
        try:
            self.call(self.caches[0], tuning)
            torch.cuda.synchronize()
        except (RuntimeError, UserError) as error:
            print(f"  {tuning}: {str(error).splitlines()[0]}")
            return None
        return None if self.backend.spills else timed(self.calls(lambda c: self.call(c, tuning)), replays)

    def peers(self, replays):
        """Microseconds of torch: {"gqa", "folded"}."""
        H, G, K = self.heads
        plain, folded = (
            self.q.view(1, self.rows, H, K).transpose(1, 2),
            self.q.view(1, self.rows, G, H // G, K),
        )
        folded = folded.transpose(1, 2).reshape(1, G, -1, K).contiguous()
        attention = torch.nn.functional.scaled_dot_product_attention
        ways = {
            "gqa": lambda c: attention(plain, *c, enable_gqa=True),
            "folded": lambda c: attention(folded, *c),
        }
        found = {}
        for name, way in ways.items():
            try:
                found[name] = timed(self.calls(way), replays)
            except (RuntimeError, UserError) as error:
                print(f"  torch {name}: {str(error).splitlines()[0]}")
        return found

    def error(self, tuning):
        """Worst |error| over sum p|v| against float64, on the first cache."""
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
            p = torch.softmax(scores.masked_fill(unseen, float("-inf")), -1)
            want, terms = p @ v, p @ v.abs()
            got = self.o.view(self.rows, G, H // G, K)[:, g].double()
            worst = max(worst, float(((got - want).abs() / terms).nan_to_num(float("inf")).max()))
        return worst

    def bits(self, tunings):
        """Whether all these give the same bits, and each row alone those of the rows together."""
        found = set()
        for tuning in tunings:
            self.call(self.caches[0], tuning)
            torch.cuda.synchronize()
            found.add(self.o.view(torch.int16).cpu().numpy().tobytes())
        together, rows = self.o.clone(), (self.q, self.o, self.pos, self.slot, self.end)
        is_alone_same = True
        for t in range(self.rows):
            self.q, self.o, self.pos, self.slot, self.end = (a[t : t + 1] for a in rows)
            self.call(self.caches[0], tunings[0])
            torch.cuda.synchronize()
            is_alone_same &= bool((self.o.view(torch.int16) == together[t : t + 1].view(torch.int16)).all())
        self.q, self.o, self.pos, self.slot, self.end = rows
        return len(found) == 1 and is_alone_same


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", default="32/8/128,9/3/64")
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--contexts", default="128,2048,8192,32768")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=420, help="defaults only, after this long")
    args = parser.parse_args()
    begun, backend, name = time.perf_counter(), Backend(), torch.cuda.get_device_name()
    pool = torch.randn(160 * 2**20, device="cuda", dtype=torch.bfloat16)
    copy = copy_gb_s(pool)
    results, table = [], []
    for heads in [tuple(map(int, word.split("/"))) for word in args.heads.split(",")]:
        for context in map(int, args.contexts.split(",")):
            for rows in map(int, args.rows.split(",")):
                case, tried = Case(backend, pool, heads, rows, context), {}
                for what, tuning in VARIANTS.items():
                    if tried and time.perf_counter() - begun > args.seconds:
                        break
                    us = case.ours(tuning, args.replays)
                    if us:
                        tried[what] = us
                best = min(tried, key=tried.get)
                us, peers = tried["default"], case.peers(args.replays)
                same = [VARIANTS[what] for what in tried if not {"terms", "chain"} & set(VARIANTS[what])]
                results.append({
                    "heads": heads, "rows": rows, "context": context, "bytes": case.bytes, "us": us,
                    "dependent_us": case.ours({}, args.replays, dependent=True),
                    "of_copy": case.bytes / us / 1e3 / copy, "torch_us": peers, "variants_us": tried,
                    "error_over_terms": case.error({}), "error_1_term": case.error({"terms": 1}),
                    "same_bits": case.bits(same),
                })  # fmt: skip
                last = results[-1]
                table.append(
                    f"{heads!s:13} {context:6} {rows:3} rows {us:8.2f} us {last['of_copy']:5.2f} of copy "
                    f"{last['dependent_us']:8.2f} us dependent {min(peers.values(), default=0) / us:6.2f} x torch  "
                    f"error {last['error_over_terms']:.1e}  bits {'same' if last['same_bits'] else 'DIFFER'}  "
                    f"best {tried[best]:.2f} us: {best}"
                )
                print(table[-1], flush=True)
                print(
                    "  " + "; ".join(f"{tried[what]:.2f} {what}" for what in sorted(tried, key=tried.get)),
                    flush=True,
                )
    card = re.sub(r"\W+", "-", name).strip("-").lower()
    out = record.write(f"attend-{card}", {"results": results}, card=name, copy_gb_s=copy)
    print(f"\n{name}, copy {copy:.0f} GB/s; {out}")
    print("\n".join(table))


if __name__ == "__main__":
    main()
