"""Everything measured, from bench/results: python bench/report.py [--write | --check] [--results FOLDER]

Prints bench/MEASURED.md and the README's short block of it. With --write both are written and the pictures in
docs/ drawn (bench/plots.py); with --check the exit code is 1 unless they are what is there already.
A number is quoted only of a result that says its commit, command, date and machine, and that was measured on
a tree without changes; what is left out and why is said on stderr.
"""

import argparse
import sys

import plots
from measured import sections
from quote import Results, at, of, of_card, origin, table
from record import RESULTS, ROOT

README, MEASURED, DOCS = ROOT / "README.md", ROOT / "bench" / "MEASURED.md", ROOT / "docs"
MARK, END = "<!-- measured: bench/report.py -->", "<!-- end of measured -->"
HEADER = [
    "<!-- generated: python bench/report.py --write -->",
    "# What was measured",
    "",
    (
        "Every number below is computed from the file named above it, and holds for that file's commit, "
        "not for a later one."
    ),
    "What was tried, and what did not help, is in [NOTES.md](NOTES.md).",
]


def measured(results):
    """The lines of bench/MEASURED.md."""
    lines = list(HEADER)
    for heading, parts in sections(results):
        found = [results.quoted(part) for part in parts]
        for part in [["## " + heading]] * any(found) + [one for one in found if one]:
            lines += ["", *part]
    return lines


def summary(results):
    """The lines of the README's block."""
    heads = "measured", "result", "file in `bench/results`"
    parts = [cpu(results), programs(results), *(part(results, "h200") for part in (rounds, pair, same))]
    parts.append(peer(results))
    return list(table(heads, [row for part in parts for row in results.quoted(part)]))


def cpu(results):
    found = results["cpu"]
    kinds = ", ".join(f"{one['kind']} {one['speedup']:.2f} (tau {one['tau']:.2f})" for one in found["kinds"])
    where = f"{found['machine']['cores']} CPU cores, embedded pair, times plain"
    yield where, kinds, origin(found)


def programs(results):
    """The best way of each program on the CPU, ours first."""
    found, best = results["peers-cpu"], {}
    for one in found["ways"]:
        best[one["program"]] = max(one, best.get(one["program"], one), key=lambda way: way["tokens_per_s"])
    said = ", ".join(f"{name} {one['tokens_per_s']:.1f} ({one['way']})" for name, one in best.items())
    where = f"{found['threads']} CPU threads, embedded pair, {len(found['prompts'])} prompts, tok/s at best"
    yield where, said, origin(found)


def rounds(results, card):
    found = of_card(results, "round", card)
    one = at(found["qwen3-8b"], 2048)
    ms, floor = one["ms"], one["floor_ms"]

    def said(part, bound):
        return f"{ms[part]:.2f} ms ({floor[bound] / ms[part]:.0%} of it the floor)"

    what = f"plain round {said('plain_round', 'plain')}, a whole one of block 16 {said('round_16', 'round')}"
    yield f"{card.upper()}, Qwen3-8B's shape, context 2048", what, origin(found)


def pair(results, card):
    found = results[f"embedded-{card}"]
    row = next(row for row in found["rows"] if row["kind"] == "all")
    yield (
        f"{card.upper()}, embedded pair, {row['prompts']} prompts",
        f"{row['drafted_tokens_per_s']:.0f} tok/s, {row['speedup']:.2f} times plain; tau {row['tau']:.2f}",
        origin(found),
    )


def same(results, card):
    found = of_card(results, "lossless-embedded", card)
    yield (
        f"{card.upper()}, drafted runs that differ from plain ones",
        f"{of(found['differing'], found['runs'])}, {found['tokens_compared']:,} tokens",
        origin(found),
    )


def peer(results):
    found, ours = of_card(results, "peer", "h100"), of_card(results, "round", "h100")
    step, round_ = (
        found["dflash_step_ms"]["median"],
        at(ours[found["shape"]], found["context"])["ms"]["round_16"],
    )
    yield (
        f"H100, {found['shape']}'s shape, a step of the public dflash {found['dflash']} loop",
        f"{step:.1f} ms, {step / round_:.1f} times our round's {round_:.2f} ms",
        f"{origin(found)}; {origin(ours)}",
    )


def documents(results):
    """{path: text}: what the results make of MEASURED.md, of the README and of the pictures."""
    before, rest = README.read_text().split(MARK)
    block = "\n".join(summary(results))
    return {
        MEASURED: "\n".join(measured(results)) + "\n",
        README: f"{before}{MARK}\n\n{block}\n\n{END}{rest.split(END)[1]}",
        **{DOCS / name: text for name, text in plots.pictures(results).items()},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write bench/MEASURED.md, README.md and docs/")
    parser.add_argument("--check", action="store_true", help="exit 1 unless they are what would be written")
    parser.add_argument("--results", default=RESULTS, help="folder of results (default: bench/results)")
    args = parser.parse_args()
    results = Results(args.results)
    texts = documents(results)
    for line in results.left_out:
        print(f"left out: {line}", file=sys.stderr)
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if args.write:
        for path in stale:
            path.write_text(texts[path])
    elif args.check:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} is not what the results say: python bench/report.py --write",
                file=sys.stderr,
            )
        return int(bool(stale))
    else:
        print(texts[MEASURED], *summary(results), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
