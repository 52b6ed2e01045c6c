"""minidflash itself, as one of the programs of bench/peers/cpu.py. Ways: WEIGHTS VERIFY, as "file auto"."""

import sys
from pathlib import Path

import job

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import minidflash as md


def main():
    given = job.read()
    clock, (weights, verify) = job.clock_of(given), given["way"].split()
    engine = md.load(backend="numba", weights=weights, ctx=1024)  # the default pair, which the others open
    width = verify if verify == "auto" else int(verify)
    options = {"max_tokens": given["tokens"], "ignore_eos": True, "verify": width, "drafter": verify != "1"}

    def generate(ids):
        rounds = md.stream(engine, ids, **options)
        tokens, since = list(next(rounds).tokens), clock()
        found = list(rounds)
        return since, tokens + [t for r in found for t in r.tokens], len(found)

    seconds, tokens, rounds = job.timed(given, generate)
    job.answer(seconds, tokens, rounds if verify != "1" else None, ["numpy", "numba"])


if __name__ == "__main__":
    main()
