"""Would block verification keep more drafts than rejection row by row? Expected lengths of both on the same
drafts.

    python bench/block_rule.py [--texts 12] [--tokens 120] [--name block-rule]

Rounds of --accept reject on the embedded pair; after each one the target's and the drafter's laws are read
back and the expected number of kept drafts is computed exactly, for both rules, from the round's own drafts.
Beside them what a round of sample-and-match keeps, where drafts are the likeliest tokens.
Source of the block rule: arXiv 2403.10444 (dflash.md 4.2).
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import record

import minidflash as md
from minidflash.cli.prompts import read_prompts
from tests.chance import filtered

LAWS = [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 20}]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--verify", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--name", default="block-rule")
    args = parser.parse_args()
    engine, prompts, found = md.load(ctx=1024), read_prompts(), []
    for law in LAWS:
        for verify in args.verify:
            lengths, kept = [], {"match": [], "reject": []}
            for text in range(args.texts):
                prompt = prompts[text * len(prompts) // args.texts]["prompt"]
                options = {
                    "max_tokens": args.tokens,
                    "verify": verify,
                    "seed": text,
                    "ignore_eos": True,
                    **law,
                }
                for r in md.stream(engine, prompt, accept="reject", **options):
                    if r.verify > 1:
                        lengths.append(expected(*laws_of(engine, r.verify, law), r.drafted))
                        kept["reject"].append(r.accepted)
                kept["match"] += [r.accepted for r in md.stream(engine, prompt, **options) if r.verify > 1]
            row, block = np.mean(lengths, axis=0)
            found.append({
                "law": law, "verify": verify, "rounds": len(lengths), "kept_row_by_row": round(float(row), 3),
                "kept_block_rule": round(float(block), 3),
                "kept_measured": {k: round(float(np.mean(v)), 3) for k, v in kept.items()},
            })  # fmt: skip
            print(found[-1], flush=True)
    print(record.write(args.name, {"results": found}))


def laws_of(engine, width, law):
    """(p, q) of the last round, (width, V) each; q[0] is not used."""
    ops, s, w, config = engine.ops, engine.state, engine.target.weights, engine.target.config
    logits = ops.array((width, config.vocab), "f32")
    work = ops.array((ops.backend.work_size(width, config.width, config.vocab),), "f32")
    ops.head_logits(s.rows.x[:width], w["norm"], config.eps, engine.target.head, *config.curve, work, logits)
    p = np.stack([filtered(row[: engine.target.ids], **law) for row in ops.download(logits)])
    mass = ops.download(s.mass)[0, :width, : engine.target.ids].astype(float)
    mass[0] = 1
    return p, mass / mass.sum(1, keepdims=True)


def expected(p, q, drafts):
    """(row by row, block rule): the expected number of kept drafts, given the drafts."""
    ratio = [p[i, draft] / q[i + 1, draft] for i, draft in enumerate(drafts)]
    row = np.cumprod(np.minimum(ratio, 1)).sum()
    reach, chances = 1.0, []
    for i, r in enumerate(ratio, 1):
        reach = min(1.0, reach * r)
        if i == len(ratio):
            chances.append(reach)
        else:
            left = np.maximum(reach * p[i] - q[i + 1], 0).sum()
            chances.append(left / (left + 1 - reach) if left + 1 - reach > 0 else 1.0)
    none_from = np.cumprod(1 - np.array(chances)[::-1])[::-1]  # none of the lengths i.. is taken
    return row, (1 - none_from).sum()


if __name__ == "__main__":
    main()
