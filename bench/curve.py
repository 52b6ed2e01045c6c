"""Many requests at once: tokens a second in all over tokens a second a user, with and without the drafter.

    python bench/curve.py [--concurrency 1 2 4 8] [--widths 1 4 8 16 auto] [--tokens 256] [--requests 16]
        [--repeat 1] [--backend numba] [--shape qwen3-8b [--accept 0.872]] [--name curve-cpu]

A closed loop: so many requests run, and one that ends is replaced by the next of bench/prompts.jsonl, kinds
by turns. Width 1 is plain decoding without the drafter, the others are rows verified. Widths run one after
the other at each concurrency, so that a busy moment meets all. The embedded pair, or random weights of a true
shape; --accept: its drafts are then made right with this chance each, at the drafter's own cost. Every text
is compared with plain decoding's of its prompt alone. Writes bench/results/NAME.json after each concurrency;
exit code 1 when a text differed.
"""

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from round import device

import minidflash as md
from minidflash.cli.prompts import read_prompts
from minidflash.run import machine_of
from tests.replay import Replay, proposing

PLAIN = "1"
SLOWEST = 5  # per cent of users
WARM = 48  # tokens of the requests before the clock runs: programs are recorded, auto has timed its widths
CPU, GPU = [1, 2, 4, 8], [1, 2, 4, 8, 16, 32, 64]


@dataclass
class User:
    """One request as its user sees it: when it was asked for, and its first and newest token came; seconds.
    rounds: tokens of each, without the prompt's."""

    prompt: int
    asked: float
    first: float = 0.0
    last: float = 0.0
    tokens: list = field(default_factory=list)
    rounds: list = field(default_factory=list)

    @property
    def speed(self):
        """Tokens a second behind the first one; None where there are too few."""
        return (len(self.tokens) - 1) / (self.last - self.first) if len(self.tokens) > 1 else None


@dataclass
class Run:
    """What a closed loop did. seconds, tokens: while every place was taken. passes: (rows verified a text,
    texts) -> how many rounds of the machine were such."""

    users: list
    seconds: float
    tokens: int
    passes: Counter


def by_turns(prompts):
    """The prompts with their kinds by turns, so that few of them are a mixture too."""
    kinds = {}
    for prompt in prompts:
        kinds.setdefault(prompt["kind"], []).append(prompt)
    return [one for one in chain(*zip_longest(*kinds.values())) if one]


def closed_loop(batch, prompts, concurrency, requests, tokens):
    """Run so many requests, `concurrency` at a time. Returns a Run."""
    users, passes, begun, ended, counted = {}, Counter(), time.perf_counter(), None, 0

    def ask():
        number = len(users) % len(prompts)
        users[batch.submit(prompts[number], max_tokens=tokens)] = User(number, time.perf_counter())

    for _ in range(min(concurrency, requests)):
        ask()
    together, before = 0, None
    for one in batch:
        now, user, found = time.perf_counter(), users[one.handle], one.round
        if one.error:
            raise one.error
        user.first, user.last = user.first or now, now
        user.tokens += found.tokens
        counted += 0 if ended else len(found.tokens)
        if found.verify:
            user.rounds.append(len(found.tokens))
            # Texts of one round of the machine come behind each other, with its seconds.
            key = found.verify, found.seconds
            together = together + 1 if key == before else 1
            passes[found.verify, together - 1] -= together > 1
            passes[found.verify, together] += 1
            before = key
        if found.finish_reason and len(users) < requests:
            ask()
        elif found.finish_reason:
            ended = ended or now
    return Run(list(users.values()), ended - begun, counted, +passes)


def told(width, concurrency, runs, wanted):
    """A point of the curve. runs: of the same requests. wanted: tokens of each prompt alone."""
    users = [user for run in runs for user in run.users]
    passes = sum((run.passes for run in runs), Counter())
    rounds = [kept for user in users for kept in user.rounds]
    speeds = [user.speed for user in users if user.speed]
    waits = [user.first - user.asked for user in users]
    by_width = Counter()
    for (rows, _), count in passes.items():
        by_width[str(rows)] += count
    return {
        "width": width, "concurrency": concurrency, "texts": len(users),
        "differing": sum(user.tokens != wanted[user.prompt] for user in users),
        "tokens_per_s": round(median(run.tokens / run.seconds for run in runs), 2),
        "runs_tokens_per_s": [round(run.tokens / run.seconds, 2) for run in runs],
        "user_tokens_per_s": round(median(speeds), 2),
        "slowest_user_tokens_per_s": round(float(np.percentile(speeds, SLOWEST)), 2),
        "first_token_ms": round(1e3 * median(waits), 1),
        "slowest_first_token_ms": round(1e3 * float(np.percentile(waits, 100 - SLOWEST)), 1),
        "tau": round(sum(rounds) / len(rounds), 3),
        "lanes": round(sum(texts * n for (_, texts), n in passes.items()) / passes.total(), 2),
        "rows_a_pass": round(sum(v * texts * n for (v, texts), n in passes.items()) / passes.total(), 2),
        "passes": passes.total(), "passes_by_width": dict(sorted(by_width.items(), key=lambda o: int(o[0]))),
    }  # fmt: skip


def alone(engine, prompts, tokens):
    """[Result] of plain decoding of each prompt, one after the other."""
    return [md.generate(engine, prompt, max_tokens=tokens, drafter=False) for prompt in prompts]


def points(engine, prompts, results, concurrency, widths, tokens, requests, repeat=1):
    """The points of one concurrency, a width after the other, `repeat` times by turns.

    prompts: as of `submit`. results: of each `alone`. widths: "1" for plain, "auto", or rows.
    Returns a list, in the order of `widths`.
    """
    wanted, longest = [one.tokens for one in results], max(one.prompt_tokens for one in results)
    runs = {width: [] for width in widths}
    for _ in range(repeat):
        for width, done in runs.items():
            how = {"drafter": False} if width == PLAIN else {"verify": rows_of(width)}
            # Prompts are repeated, and each is to cost what one costs that nobody asked before.
            how |= {"slots": concurrency, "ctx": longest + tokens, "reuse": False}
            with md.Batch(engine, **how) as batch:
                closed_loop(batch, prompts, concurrency, 2 * concurrency, min(tokens, WARM))
                done.append(closed_loop(batch, prompts, concurrency, requests, tokens))
    found = [told(width, concurrency, done, wanted) for width, done in runs.items()]
    plain = next((one["tokens_per_s"] for one in found if one["width"] == PLAIN), None)
    for one in found:
        one["plain_tokens_per_s"] = plain
        print(one, flush=True)
    return found


def rows_of(width):
    """A width of the command line as `verify` has it."""
    return width if width == "auto" else int(width)


class Right:
    """Stands in for engine.draft: the drafter runs, then the drafts are those of a replay."""

    def __init__(self, draft, replay):
        self._draft, self._replay = draft, replay

    def __call__(self, ops, engine, s, drafted_rows):
        self._draft(ops, engine, s, drafted_rows)
        self._replay(ops, engine, s, drafted_rows)


def made_right(engine, prompt, tokens, chance):
    """A context in which the drafts behind this prompt are right with a chance each."""
    block, vocab = engine.drafter.config.block, engine.target.config.vocab
    known = prompt + md.generate(engine, prompt, max_tokens=tokens, drafter=False).tokens
    plan = np.minimum(np.random.default_rng(0).geometric(1 - chance, len(known) + block) - 1, block - 1)
    return proposing(engine, Right(engine.draft, Replay(known, len(prompt), block, vocab, plan=plan)))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", nargs="+", type=int, help="default: 1 to 8, on a GPU to 64")
    parser.add_argument("--widths", nargs="+", default=[PLAIN, "4", "8", "16", "auto"])
    parser.add_argument("--tokens", type=int, default=256, help="of a text at most")
    parser.add_argument("--requests", type=int, default=16, help="of a point, at least three a place")
    parser.add_argument("--repeat", type=int, default=1, help="runs of a point, by turns; medians are told")
    parser.add_argument("--backend", choices=("numba", "cuda"), default="numba")
    parser.add_argument("--target", default="default")
    parser.add_argument("--drafter", default=...)
    parser.add_argument("--shape", help="random weights of this shape instead of a checkpoint")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt of --shape")
    parser.add_argument("--accept", type=float, help="of --shape: chance that a draft is right")
    parser.add_argument("--name", default="curve-cpu")
    args = parser.parse_args()
    if args.accept is not None and not (args.shape and 0 <= args.accept < 1):
        parser.error("--accept is a chance below 1, and for --shape: a checkpoint has drafts of its own")
    engine, prompts = opened(args)
    concurrency = args.concurrency or (GPU if args.backend == "cuda" else CPU)
    facts = {
        "backend": engine.ops.name, "activations": engine.ops.activations, "on": machine_of(engine.ops),
        "pair": called(args), "target": engine.target_name, "drafter": engine.drafter_name,
        "settings": {"max_tokens": args.tokens, "least_texts": args.requests, "repeat": args.repeat,
                     "accept": args.accept, "slowest_percent": SLOWEST},
        "load_before": os.getloadavg()[0],
    } | device(engine.ops)  # fmt: skip
    if args.accept is None:
        return measure(engine, prompts, concurrency, args, facts)
    with made_right(engine, prompts[0], args.tokens, args.accept):
        return measure(engine, prompts[:1], concurrency, args, facts)


def called(args):
    """The pair in words."""
    if args.shape:
        return f"{args.shape}'s shape, random weights"
    return "embedded pair" if args.target == "default" else args.target


def opened(args):
    """(engine, prompts) that are asked for."""
    if args.shape:
        from shapes import random_engine

        engine, _ = random_engine(md.ops(args.backend), args.shape, args.prompt + args.tokens)
        rng, vocab = np.random.default_rng(0), engine.target.config.vocab
        return engine, rng.integers(0, vocab, (50, args.prompt)).tolist()
    engine = md.load(args.target, drafter=args.drafter, backend=args.backend)
    return engine, [one.get("tokens") or one["prompt"] for one in by_turns(read_prompts())]


def measure(engine, prompts, concurrency, args, facts):
    """All points, written after each concurrency. Returns the exit code."""
    requests = {count: max(args.requests, 3 * count) for count in concurrency}
    prompts, found = prompts[: max(requests.values())], []
    results = alone(engine, prompts, args.tokens)
    for count, most in requests.items():
        found += points(engine, prompts, results, count, args.widths, args.tokens, most, args.repeat)
        differing = sum(one["differing"] for one in found)
        numbers = {"texts": sum(one["texts"] for one in found), "differing": differing, "points": found}
        print(record.write(args.name, numbers, load_after=os.getloadavg()[0], **facts))
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
