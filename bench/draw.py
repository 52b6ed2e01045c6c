"""What a draw costs by itself: the ends of sample, propose and reject on logits that are there,
16 rows of a vocabulary.

    python bench/draw.py [--rows 16] [--vocab 151936] [--backend cuda] [--name draw-h100]

Logits are normal with the spread of a language model's, or flat. Medians of back-to-back calls in one
program.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import record
from minidflash.kernels.gpu import plain

import minidflash as md

LAWS = {
    "no filter": (1.0, 0, 1.0, 0.0), "top-p 0.9": (0.7, 0, 0.9, 0.0), "top-k 50": (0.7, 50, 1.0, 0.0),
    "top-k 50, top-p 0.9": (0.7, 50, 0.9, 0.0), "min-p 0.05": (0.7, 0, 1.0, 0.05),
    "top-p 0.9 at 50": (50.0, 0, 0.9, 0.0),
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--calls", type=int, default=50, help="in one program")
    parser.add_argument("--name", default="draw-h100")
    args = parser.parse_args()
    ops, rng = md.ops(args.backend), np.random.default_rng(1)
    rows, vocab = args.rows, args.vocab
    found = {}
    for shape, spread in (("language", 3.0), ("flat", 0.02)):
        logits = put(ops, rng.standard_normal((rows, vocab)) * spread, "f32")
        mass = put(ops, np.exp(rng.standard_normal((1, rows, vocab)) * 3) * 2**30, "f32")
        for name, law in LAWS.items():
            found[f"{shape}, {name}"] = times(ops, logits, mass, args.calls, *law)
            print(shape, name, found[f"{shape}, {name}"], flush=True)
    card = ops.backend.machine() if args.backend == "cuda" else None
    print(record.write(args.name, {"rows": rows, "vocab": vocab, "us": found}, card=card))


def put(ops, values, kind):
    values = np.asarray(values)
    buffer = ops.array(values.shape, kind)
    ops.upload(buffer, values.astype(np.float32 if kind == "f32" else np.int32))
    return buffer


def times(ops, logits, mass, calls, temperature, top_k, top_p, min_p):
    """Microseconds of a call: {kernel: median}."""
    rows, vocab = logits.shape
    backend, where = ops.backend, put(ops, np.arange(rows), "i32")
    slot, ids = put(ops, np.zeros(rows), "i32"), put(ops, np.zeros(rows), "i32")
    key = put(ops, [[1, 2, 0, top_k]], "i32")
    law = put(ops, [[temperature, top_p, min_p]], "f32")
    drafts = put(ops, [np.arange(rows)], "i32")
    own = ops.array((rows, vocab), "f32")
    kinds = {
        "sample": lambda: plain.draw(
            backend, logits, vocab, where, slot, where, vocab, (1, 0), key, law, ids, None
        ),
        "propose": lambda: plain.draw(
            backend, logits, vocab, where, slot, where, vocab, (1, 0), key, law, ids, None, own, plain.DRAFT
        ),
        "reject": lambda: plain.accept_or_redraw(
            backend, logits, where, vocab, (1, 0), key, law, drafts, mass, ids, None
        ),
    }
    found = {}
    for name, call in kinds.items():
        program = backend.compile([(name, call, ())] * calls)
        taken = []
        for i in range(9):
            ops.download(ids)
            since = time.perf_counter()
            program.launch()
            ops.download(ids)
            if i > 1:
                taken.append((time.perf_counter() - since) / calls)
        found[name] = round(1e6 * median(taken), 1)
    return found


if __name__ == "__main__":
    main()
