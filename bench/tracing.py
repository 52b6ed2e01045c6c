"""What `--trace` costs: runs with and without it, alternating, on one engine.

    python bench/tracing.py [--target T --drafter D] [--backend auto] [--verify 16] [--tokens 128]
        [--repeat 15] [--name tracing-cpu]

Seconds are those of decoding, the writing of the lines counted. Every other pair of runs is in the other
order. Writes bench/results/NAME.json, or into $OUT.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record

import minidflash as md
from minidflash.loop import rounds_of
from minidflash.request import Request
from minidflash.run import machine_of
from minidflash.stats import Timing
from minidflash.trace.write import Trace

PROMPT = "Write a Python function that checks whether a number is prime, and explain it."


def decode(engine, options, path):
    """(seconds of wall and of the processor from the first token on, ids). path: of a trace, or None."""
    request = Request.of(engine, PROMPT, options | {"trace": path is not None})
    with Trace(path or "/dev/null") as trace:
        if path:
            trace.begin(engine, request)
        rounds, ids = rounds_of(engine, request, Timing()), []
        for number, r in enumerate(rounds):
            if path:
                trace.write(r)
            ids += r.tokens
            if not number:
                begun = time.perf_counter(), time.process_time()
        return time.perf_counter() - begun[0], time.process_time() - begun[1], ids


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="default")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--verify", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--name", default="tracing-cpu")
    args = parser.parse_args()
    engine = md.load(args.target, drafter=args.drafter, backend=args.backend)
    options = {"max_tokens": args.tokens, "verify": args.verify, "ignore_eos": True}
    found = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        paths = {False: None, True: f"{folder}/t.jsonl"}
        for path in paths.values():  # programs are recorded, kernels compiled
            decode(engine, options, path)
        for number in range(args.repeat):
            for is_traced in (False, True) if number % 2 else (True, False):
                found[is_traced].append(decode(engine, options, paths[is_traced]))
    assert len({tuple(ids) for runs in found.values() for *_, ids in runs}) == 1, "tracing changed the text"
    numbers = {"tokens": args.tokens, "verify": args.verify, "runs": args.repeat}
    for column, kind in enumerate(("wall", "processor")):
        off, on = ([run[column] for run in found[is_traced]] for is_traced in (False, True))
        ratios = [b / a for a, b in zip(off, on, strict=True)]
        numbers[f"{kind}_ms"] = {"without": 1e3 * median(off), "with": 1e3 * median(on)}
        numbers[f"{kind}_percent_more"] = {
            "of_pairs_median": 100 * (median(ratios) - 1), "of_the_fastest": 100 * (min(on) / min(off) - 1),
        }  # fmt: skip
    print(record.write(args.name, numbers, on=machine_of(engine.ops)))


if __name__ == "__main__":
    main()
