"""The full lossless run: drafted ids against plain ids, no exceptions allowed;
greedy, or with --seeds sampled.

    python bench/lossless.py [--prompts 20] [--tokens 256] [--backend numba] [--activations f32]
        [--name lossless-cpu]
    python bench/lossless.py --seeds 50 --tokens 128 --blocks 16 --chunks 256 --name lossless-sampled-cpu
    python bench/lossless.py --seeds 200 --tokens 40 --blocks 16 --chunks 64 --pairs dflash-llama-tiny ...
        --name ...

Every prompt of the embedded pair, with its own and the replay drafter (tests/replay.py), blocks 4, 8, 16,
verify 3, all, auto, two prefill chunks. --seeds N: N sampled texts of each pair (embedded, or a name of
tests/test_lossless.py), by turns with three laws. Writes bench/results/NAME.json after each prompt and goes
on from there when it was stopped (same commit, same words). Exit code 1 when a token differs.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import record
from round import device

import minidflash as md
from minidflash.cli.prompts import read_prompts
from minidflash.request import OPTIONS, prompt_ids
from tests.chance import LAWS
from tests.golden_files import golden
from tests.replay import Replay, check_plan, histogram, proposing
from tests.test_lossless import GOLDEN, load, prompt_of

BLOCKS, VERIFY, CHUNKS = (4, 8, 16), (3, "all", "auto"), (256, 7)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=20, help="how many of bench/prompts.jsonl")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--backend", default="numba")
    parser.add_argument("--activations", default="f32")
    parser.add_argument("--verify", nargs="+", choices=list(map(str, VERIFY)), default=list(map(str, VERIFY)))
    parser.add_argument("--chunks", nargs="+", type=int, default=list(CHUNKS), help="prefill chunks")
    parser.add_argument("--blocks", nargs="+", type=int, default=list(BLOCKS))
    parser.add_argument(
        "--seeds", type=int, default=0, help="sampled texts of each pair; 0: greedy, all prompts"
    )
    parser.add_argument("--pairs", nargs="+", choices=["embedded", *GOLDEN], default=["embedded"])
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no further text after this"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--name", default="lossless-cpu")
    args = parser.parse_args()
    try:  # here: a worker that cannot find its pair is replaced by the next one, for ever
        for pair in set(args.pairs) - {"embedded"}:
            golden(pair), golden(GOLDEN[pair])
    except pytest.skip.Exception as error:
        parser.error(str(error))
    settings = {key: value for key, value in vars(args).items() if key not in ("seconds", "jobs")}
    facts = device(md.ops(args.backend))
    done, written = earlier(args.name, settings), time.perf_counter()
    wanted = [
        (pair, name, number)
        for pair in args.pairs
        for number, name in enumerate(names(args, pair))
        if name not in done and number not in done.get(pair, {}).get("texts", [])
    ]
    for pair, name, row in rows_of(args, wanted):
        print(name, {key: row[key] for key in ("runs", "tokens", "differing", "seconds")}, flush=True)
        if args.seeds:
            done[pair] = together(done.get(pair), row)
        else:
            done[name] = row
        if time.perf_counter() - written > 5:
            write(args.name, settings, done, facts)
            written = time.perf_counter()
    path = write(args.name, settings, done, facts)
    found = json.loads(path.read_text())
    print(path.name, found["runs"], "runs,", found["differing"], "differ")
    is_short = args.tokens * max(1, args.seeds) < 136  # what one deck of all lengths at block 16 takes
    return 0 if not found["differing"] and (is_short or found["is_every_length_seen"]) else 1


@cache
def open_pair(pair, backend, activations, chunk):
    options = {"backend": backend, "activations": activations, "prefill_chunk": chunk}
    return md.load(ctx=1024, **options) if pair == "embedded" else load(pair, None, **options)


@cache
def first_prompts(count):
    return read_prompts()[:count]


def names(args, pair):
    """What the texts are called, by number: the prompts, or seeds."""
    if args.seeds:
        return [f"{pair} seed {number}" for number in range(args.seeds)]
    return [prompt.get("id", str(number)) for number, prompt in enumerate(first_prompts(args.prompts))]


def rows_of(args, wanted):
    """(pair, name, row) of these texts as they are done, until the time is over."""
    end = time.time() + args.seconds  # the clock that processes share
    if args.jobs == 1:
        yield from filter(None, (one_text(args, end, text) for text in wanted))
        return
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:  # CUDA does not survive a fork
        yield from filter(None, pool.imap_unordered(partial(one_text, args, end), wanted))


def one_text(args, end, text):
    """(pair, name, row) of a text; None after the time's end."""
    pair, name, number = text
    if time.time() > end:
        return None
    engines = {chunk: open_pair(pair, args.backend, args.activations, chunk) for chunk in args.chunks}
    prompts = first_prompts(args.prompts)
    prompt = prompts[number % len(prompts)]
    given = prompt.get("tokens") or prompt["prompt"]
    if pair != "embedded":
        given = prompt_of(engines[args.chunks[0]], 12 + number % 40, number)
    law = {**LAWS[number % len(LAWS)], "seed": number} if args.seeds else {}
    begun = time.perf_counter()
    row = one_prompt(engines, given, args, number, law)
    row["seconds"] = round(time.perf_counter() - begun, 1)
    return pair, name, row | ({"texts": [number]} if args.seeds else {})


def together(known, row):
    """One row of two: what a pair's texts found so far, and one more."""
    if known is None:
        return row
    for key in ("runs", "tokens", "unlike_greedy", "seconds"):
        known[key] = round(known[key] + row[key], 1)
    known["differing"] += row["differing"]
    known["texts"] = sorted(known["texts"] + row["texts"])
    known["tau_own"] |= row["tau_own"]
    for key in ("accepted_own", "accepted_replay"):
        known[key] = total({"known": known, "row": row}, key)
    return known


def one_prompt(engines, prompt, args, seed, law):
    """All runs of one prompt. Returns counts, the plain ids' number,
    and the first difference of each differing run."""
    runs, compared, differing, tau, tokens = 0, 0, [], {}, args.tokens
    seen = {"own": Counter(), "replay": Counter()}
    known = None
    for chunk, engine in engines.items():
        vocab, ids = engine.target.config.vocab, prompt_ids(engine, prompt, OPTIONS)
        # Past the end of the answer too: what is compared is arithmetic, not text.
        plain = md.generate(
            engine, ids, max_tokens=tokens + max(args.blocks), drafter=None, ignore_eos=True, **law
        ).tokens
        known = known or plain
        if plain != known:
            differing.append({"chunk": chunk, "drafter": None, "at": first_difference(plain, known)})
        for block, verify, drafter in itertools.product(args.blocks, args.verify, ("own", "replay")):
            replay = Replay(ids + known, len(ids), block, vocab, seed)
            with proposing(engine, replay if drafter == "replay" else engine.draft):
                width = {"all": block, "auto": "auto"}.get(verify) or int(verify)
                options = {"max_tokens": tokens, "block": block, "verify": width, "ignore_eos": True, **law}
                rounds = list(md.stream(engine, ids, **options))
            found = [token for r in rounds for token in r.tokens]
            runs, compared = runs + 1, compared + len(found)
            if found != known[:tokens]:
                at = first_difference(found, known[:tokens])
                differing.append(
                    {"chunk": chunk, "block": block, "verify": verify, "drafter": drafter, "at": at}
                )
            elif drafter == "replay":
                check_plan(replay, len(ids), rounds)
            if block == max(args.blocks):
                seen[drafter] += histogram(rounds)
            if drafter == "own" and verify == "all":
                tau[block] = round(sum(len(r.tokens) for r in rounds[1:]) / len(rounds[1:]), 3)
    sampled = {}
    if law:
        greedy = md.generate(engine, ids, max_tokens=tokens, drafter=None, ignore_eos=True).tokens
        sampled["unlike_greedy"] = int(greedy != known[:tokens])
    return {
        "runs": runs, "tokens": compared, "prompt_tokens": len(ids), "differing": differing, **sampled,
        "tau_own": tau,
        "accepted_own": counts(seen["own"]), "accepted_replay": counts(seen["replay"]),
    }  # fmt: skip


def first_difference(found, known):
    """Index of the first token that differs, or the shorter length."""
    pairs = enumerate(zip(found, known, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(found), len(known)))


def counts(histogram):
    """JSON keys are strings: accepted length -> rounds, in order."""
    return {str(length): histogram[length] for length in sorted(histogram)}


def total(done, which):
    found = Counter()
    for row in done.values():
        found.update({int(length): count for length, count in row[which].items()})
    return counts(found)


def write(name, settings, done, facts):
    accepted = total(done, "accepted_replay")
    return record.write(
        name,
        {
            "runs": sum(row["runs"] for row in done.values()),
            "tokens_compared": sum(row["tokens"] for row in done.values()),
            "differing": sum(len(row["differing"]) for row in done.values()),
            "accepted_at_block_16_replay": accepted,
            "accepted_at_block_16_own": total(done, "accepted_own"),
            "is_every_length_seen": list(map(int, accepted)) == list(range(max(settings["blocks"]))),
            "prompts": done,
        },
        settings=settings,
        **facts,
    )


def earlier(name, settings):
    """Prompts already done by the same commit with the same settings."""
    path = Path(os.environ.get("OUT") or record.RESULTS) / f"{name}.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    is_same = found.get("commit") == record.commit() and found.get("settings") == json.loads(
        json.dumps(settings)
    )
    return found["prompts"] if is_same else {}


if __name__ == "__main__":
    raise SystemExit(main())
