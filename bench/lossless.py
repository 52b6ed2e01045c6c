"""The full lossless run: the embedded pair, drafted ids against plain ids, no exceptions allowed.

    python bench/lossless.py [--prompts 20] [--tokens 256] [--backend numba] [--activations f32] [--name lossless-cpu]

Every prompt with its own and the replay drafter (tests/replay.py), blocks 4, 8, 16, verify 3, all, auto, two prefill
chunks. Writes bench/results/NAME.json after each prompt and goes on from there when it was stopped (same commit, same
words). Exit code 1 when a token differs.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record

import minidflash as md
from minidflash.measure import read_prompts
from minidflash.request import OPTIONS, prompt_ids
from tests.replay import Replay, check_plan, histogram, proposing

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
    parser.add_argument("--name", default="lossless-cpu")
    args = parser.parse_args()
    settings = {**vars(args), "blocks": BLOCKS}
    done = earlier(args.name, settings)
    engines = {
        chunk: md.load(backend=args.backend, activations=args.activations, prefill_chunk=chunk, ctx=1024)
        for chunk in args.chunks
    }
    for number, prompt in enumerate(read_prompts()[: args.prompts]):
        name = prompt.get("id", str(number))
        if name in done:
            continue
        begun = time.perf_counter()
        done[name] = one_prompt(engines, prompt.get("tokens") or prompt["prompt"], args, number)
        done[name]["seconds"] = round(time.perf_counter() - begun, 1)
        path = write(args.name, settings, done)
        print(name, {key: done[name][key] for key in ("runs", "tokens", "differing", "seconds")}, flush=True)
    path = write(args.name, settings, done)
    found = json.loads(path.read_text())
    print(path.name, found["runs"], "runs,", found["differing"], "differ")
    is_short = args.tokens < 136  # what one deck of all lengths at block 16 takes
    return 0 if not found["differing"] and (is_short or found["is_every_length_seen"]) else 1


def one_prompt(engines, prompt, args, seed):
    """All runs of one prompt. Returns counts, the plain ids' number, and the first difference of each differing run."""
    runs, compared, differing, tau, tokens = 0, 0, [], {}, args.tokens
    seen = {"own": Counter(), "replay": Counter()}
    known = None
    for chunk, engine in engines.items():
        vocab, ids = engine.target.config.vocab, prompt_ids(engine, prompt, OPTIONS)
        # Past the end of the answer too: what is compared is arithmetic, not text.
        plain = md.generate(
            engine, ids, max_tokens=tokens + max(BLOCKS), drafter=None, ignore_eos=True
        ).tokens
        known = known or plain
        if plain != known:
            differing.append({"chunk": chunk, "drafter": None, "at": first_difference(plain, known)})
        for block, verify, drafter in itertools.product(BLOCKS, args.verify, ("own", "replay")):
            replay = Replay(ids + known, len(ids), block, vocab, seed)
            with proposing(engine, replay if drafter == "replay" else engine.propose):
                width = {"all": block, "auto": "auto"}.get(verify) or int(verify)
                options = {"max_tokens": tokens, "block": block, "verify": width, "ignore_eos": True}
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
            if block == max(BLOCKS):
                seen[drafter] += histogram(rounds)
            if drafter == "own" and verify == "all":
                tau[block] = round(sum(len(r.tokens) for r in rounds[1:]) / len(rounds[1:]), 3)
    return {
        "runs": runs, "tokens": compared, "prompt_tokens": len(ids), "differing": differing, "tau_own": tau,
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


def write(name, settings, done):
    accepted = total(done, "accepted_replay")
    return record.write(
        name,
        {
            "runs": sum(row["runs"] for row in done.values()),
            "tokens_compared": sum(row["tokens"] for row in done.values()),
            "differing": sum(len(row["differing"]) for row in done.values()),
            "accepted_at_block_16_replay": accepted,
            "accepted_at_block_16_own": total(done, "accepted_own"),
            "is_every_length_seen": list(map(int, accepted)) == list(range(max(BLOCKS))),
            "prompts": done,
        },
        settings=settings,
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
