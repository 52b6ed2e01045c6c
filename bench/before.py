"""Rounds of two checkouts in turn, each in a process of its own: is the newer one slower?

    python bench/before.py OLD [--backend cuda] [--shapes qwen3-8b ...] [--context 2048] [--times 24]
        [--name before]

OLD: folder of another checkout (git worktree add OLD COMMIT). A shape is one of bench/shapes.py with random
weights, or
`embedded`: the default pair. Every part is timed --times times in each checkout, old and new in turn, after
warming up, in each of --processes pairs of processes: where a process lies in memory moves SmolLM2's times by
1 %. Writes medians, ranges and the median of the ratios, pair by pair, to bench/results/NAME.json.
Exit code 1 when a part's median ratio is above --allowed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
PARTS = "plain_round", "verify_16", "draft", "round_16"
TOGETHER = {"cuda": 10, "numba": 2}  # launches a timing


def work(tree, backend, shape, context):
    """The process of one checkout: answers every name of a part on stdin with its milliseconds."""
    sys.path[:1] = [str(Path(tree) / "bench"), str(tree)]  # its own benches and package, not this file's
    from round import copy_bandwidth, passes
    from shapes import fill_caches, random_engine, set_context

    import minidflash as md
    from minidflash.request import Request, reserve

    assert Path(md.__file__).is_relative_to(tree), f"{md.__file__} is not of {tree}"
    ops = md.ops(backend)
    if shape == "embedded":
        engine = md.load(backend=backend)
        ops = engine.ops
    else:
        engine = random_engine(ops, shape, context + 256)[0]
    s = reserve(engine, Request.of(engine, list(range(1, 65)), {"max_tokens": 8}))
    if shape != "embedded":
        fill_caches(ops, s)
    programs = {
        name: ops.program(call, ops.bucket(context + 2 * s.block)) for name, call in passes(engine, s).items()
    }
    print(f"{copy_bandwidth(ops):.6g}", flush=True)
    for line in sys.stdin:
        set_context(ops, s, context)
        together, since = TOGETHER.get(backend, 1), time.perf_counter()
        for _ in range(together):
            programs[line.strip()].launch()
        ops.download(s.start)
        print(f"{1e3 * (time.perf_counter() - since) / together:.6g}", flush=True)


class Worker:
    """A process of `work`. ask: part -> milliseconds."""

    def __init__(self, tree, args, shape):
        words = ["--work", str(tree), args.backend, shape, str(args.context)]
        self.process = subprocess.Popen([sys.executable, __file__, *words], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, cwd=tree)  # fmt: skip

    def answer(self):
        return float(self.process.stdout.readline())

    def ask(self, part):
        self.process.stdin.write(part + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(args, shape):
    """{part: old and new medians and ranges in ms, and their ratio}."""
    copies, times = [], {part: {"old": [], "new": []} for part in PARTS}
    for _ in range(args.processes):
        workers = {
            name: Worker(tree, args, shape)
            for name, tree in (("old", Path(args.old).resolve()), ("new", ROOT))
        }
        copies += [worker.answer() for worker in workers.values()]  # when both are ready
        for part, found in times.items():
            for i in range(-3, args.times):  # who comes first changes too
                for name in ("old", "new")[:: 1 if i % 2 else -1]:
                    ms = workers[name].ask(part)
                    found[name] += [ms] if i >= 0 else []
        for worker in workers.values():
            worker.close()
    found = {"copy_tb_per_s": round(max(copies) / 1e12, 4)}
    for part, ms in times.items():
        ratios = [n / o for o, n in zip(ms["old"], ms["new"], strict=True)]
        found[part] = {f"{name}_ms": spread(values) for name, values in ms.items()} | {
            "ratio": spread(ratios)
        }
        print(f"{shape} {part:<12} old {median(ms['old']):.3f} new {median(ms['new']):.3f} ms, ratio "
              f"{median(ratios):.4f}", flush=True)  # fmt: skip
    return found


def spread(values):
    return {"median": round(median(values), 4), "least": round(min(values), 4), "most": round(max(values), 4)}


def main():
    if sys.argv[1:2] == ["--work"]:
        tree, backend, shape, context = sys.argv[2:]
        return work(Path(tree), backend, shape, int(context))
    import record

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--shapes", nargs="+", default=["qwen3-8b", "qwen3-4b", "smollm2-135m"])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--times", type=int, default=24)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--allowed", type=float, default=1.01, help="ratio new / old (default %(default)s)")
    parser.add_argument("--old-commit", help="of OLD, where it travels without its history")
    parser.add_argument("--name", default="before")
    args = parser.parse_args()
    of_old = args.old_commit or subprocess.run(
        [sys.executable, str(Path(args.old) / "bench" / "record.py")], capture_output=True, text=True,
        check=False
    ).stdout.strip()  # fmt: skip
    found = {
        "old_commit": of_old or None,
        "backend": args.backend,
        "context": args.context,
        "times": args.times,
    }
    found["shapes"] = {shape: compare(args, shape) for shape in args.shapes}
    facts = {}
    if args.backend == "cuda":
        from round import device

        import minidflash as md

        facts = device(md.ops("cuda"))
    print(record.write(args.name, found, **facts))
    worst = max(one[part]["ratio"]["median"] for one in found["shapes"].values() for part in PARTS)
    print(f"the slowest part takes {worst:.4f} times as long as before, allowed {args.allowed}")
    return int(worst > args.allowed)


if __name__ == "__main__":
    sys.exit(main())
