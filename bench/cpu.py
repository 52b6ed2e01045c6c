"""The embedded pair on this machine's CPU: costs of a round's parts, then speed by kind of prompt.

    python bench/cpu.py [--tokens 256] [--repeat 5] [--prompts 3]

Writes bench/results/cpu.json. --prompts: how many of each kind. Costs are medians of 30 at a context of 64.
"""

import argparse
import resource
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record

import minidflash as md
from minidflash import drafter, target
from minidflash.cli import bench as measure
from minidflash.cli.prompts import read_prompts
from minidflash.state import device_ids


def costs(engine, widths=(1, 4, 8, 16), context=64):
    """Milliseconds of a verify pass by rows, of a draft with its injection, at a context."""
    ops, s, taps = engine.ops, engine.state, engine.drafter.config.taps

    def timed(fn):
        program, times = ops.program(fn), []
        for _ in range(33):
            for buffer, value in ((s.start, context), (s.fresh, 0), (s.done, 0), (s.left, 100)):
                ops.upload(buffer, np.array([value], np.int32))
            since = time.perf_counter()
            program.launch()
            times.append(time.perf_counter() - since)
        return 1e3 * median(times[3:])

    found = {
        f"verify_{v}_ms": timed(
            lambda v=v: target.verify(ops, engine.target, s, v, taps, device_ids(ops, range(v)))
        )
        for v in widths
    }
    found["draft_ms"] = timed(lambda: drafter.draft(ops, engine, s, device_ids(ops, range(1, s.block))))
    found["inject_ms"] = timed(lambda: drafter.inject_fresh(ops, engine.drafter, s))
    found["rows_16_over_1"] = found["verify_16_ms"] / found["verify_1_ms"]
    whole = found["verify_16_ms"] + found["draft_ms"] + found["inject_ms"]
    found["break_even_tau_at_16"] = whole / found["verify_1_ms"]
    found["weights_gb_per_s_at_1"] = 1e-6 * read_bytes(engine) / found["verify_1_ms"]
    return {name: round(value, 3) for name, value in found.items()}


def read_bytes(engine):
    """Bytes of weights that one pass of the target reads: all matrices;
    of a tied table, once, as the head."""
    model = engine.target
    weights = [w for layer in model.layers for w in layer.values()] + [model.head]
    return sum(w.nbytes for w in weights)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=3)
    args = parser.parse_args()
    engine = md.load(backend="numba")
    found = {"load_s": round(engine.load_s, 2), "jit_s": round(engine.jit_s, 2)}
    md.generate(engine, "hello", max_tokens=8)
    found["costs"] = costs(engine)
    print(found)
    prompts = {}
    for prompt in read_prompts():
        prompts.setdefault(prompt["kind"], []).append(prompt)
    options = SimpleNamespace(max_tokens=args.tokens, repeat=args.repeat, verify="auto", block=None)
    found["prompts"], by_kind = [], []
    for kind, some in prompts.items():
        measured = [measure.measure(engine, prompt, options) for prompt in some[: args.prompts]]
        by_kind.append(measure.summary(kind, measured))
        for prompt, one in zip(some, measured, strict=False):
            plain, auto = median(one["plain"]), median(one["drafted"])
            found["prompts"].append({
                "id": prompt["id"], "plain_tokens_per_s": round(plain, 1),
                "auto_tokens_per_s": round(auto, 1),
                "auto_over_plain": round(auto / plain, 3), "tau_auto": round(one["tau"], 2),
                "is_lossless": one["same"],
            })  # fmt: skip
            print(found["prompts"][-1], flush=True)
    found["kinds"] = by_kind
    found["full_block"] = []  # the same prompts at --verify 16: what drafting does where nothing chooses
    for kind, some in prompts.items():
        for prompt in some[: args.prompts]:
            r = md.generate(engine, prompt["prompt"], max_tokens=args.tokens, verify=16)
            found["full_block"].append({
                "id": prompt["id"], "kind": kind, "tokens_per_s": round(r.timing.tokens_per_s or 0, 1),
                "tau": round(r.stats.tau or 0, 2),
            })  # fmt: skip
    found["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(record.write("cpu", found, tokens=args.tokens, repeat=args.repeat))


if __name__ == "__main__":
    main()
