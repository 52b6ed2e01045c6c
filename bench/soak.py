"""Many sampled rounds in one process: memory stays as it is, ids stay in range.

    python bench/soak.py [--rounds 20000] [--backend numba] [--seconds 600] [--name soak-cpu]

The embedded pair, prompts and seeds by turns, both acceptance rules. Memory is read after every text: the
process's resident bytes, on cuda the card's used bytes too. Writes bench/results/NAME.json; exit code 1 when
memory grew by more than --grow MiB after the first tenth, or an id was out of range.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record

import minidflash as md
from minidflash.cli.prompts import read_prompts

LAW = {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "min_p": 0.001, "ignore_eos": True}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20000, help="of each run; the last text is finished")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no further text after this"
    )
    parser.add_argument("--backend", default="numba")
    parser.add_argument("--tokens", type=int, default=250, help="of a text")
    parser.add_argument("--verify", type=int, default=8)
    parser.add_argument("--accept", nargs="+", choices=("match", "reject"), default=["match", "reject"])
    parser.add_argument("--grow", type=float, default=8.0, help="MiB that memory may grow by")
    parser.add_argument("--name", default="soak-cpu")
    args = parser.parse_args()
    engine = md.load(backend=args.backend, ctx=1024)
    found = {accept: soak(engine, accept, args) for accept in args.accept}
    is_flat = all(one["grown_mib"] <= args.grow for one in found.values())
    is_in_range = all(one["out_of_range"] == 0 for one in found.values())
    path = record.write(
        args.name,
        {"backend": engine.ops.name, "on": engine.ops.backend.machine() if args.backend == "cuda" else None,
         "is_flat": is_flat, "is_in_range": is_in_range, **found},
    )  # fmt: skip
    print(path)
    return 0 if is_flat and is_in_range else 1


def soak(engine, accept, args):
    """Run texts of one rule until there were enough rounds. Returns counts and what memory did."""
    prompts, vocab = read_prompts(), engine.target.ids
    rounds = tokens = bad = kept = texts = 0
    marks, begun = [], time.perf_counter()
    while rounds < args.rounds / len(args.accept) and time.perf_counter() - begun < args.seconds:
        prompt = prompts[texts % len(prompts)]
        r = md.generate(
            engine, prompt.get("tokens") or prompt["prompt"], max_tokens=args.tokens, verify=args.verify,
            accept=accept, seed=texts, **LAW,
        )  # fmt: skip
        texts, rounds, tokens = texts + 1, rounds + len(r.rounds), tokens + len(r.tokens)
        kept += r.stats.accepted
        bad += sum(not 0 <= token < vocab for token in r.tokens)
        marks.append((rounds, resident(), on_card(engine)))
    settled = marks[len(marks) // 10]
    seconds = time.perf_counter() - begun
    grown = [max(m[i] for m in marks) - settled[i] for i in (1, 2)]
    result = {
        "rounds": rounds, "texts": texts, "tokens": tokens, "accepted_a_round": round(kept / rounds, 3),
        "out_of_range": bad, "seconds": round(seconds, 1), "rounds_per_s": round(rounds / seconds, 1),
        "resident_mib": [round(m[1] / 2**20, 1) for m in some(marks)],
        "card_mib": [round(m[2] / 2**20, 1) for m in some(marks)] if marks[-1][2] else None,
        "grown_mib": round(max(grown) / 2**20, 2),
    }  # fmt: skip
    print(accept, result, flush=True)
    return result


def some(marks, count=10):
    """About `count` of them, evenly, the last one included."""
    return marks[:: max(1, len(marks) // count)] + marks[-1:]


def resident(process="self"):
    """Bytes of a process in memory. process: its id, or "self"."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def on_card(engine):
    """Bytes of the card in use, by anyone; 0 without one."""
    if engine.ops.name != "cuda":
        return 0
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return total - free


if __name__ == "__main__":
    raise SystemExit(main())
