"""The pictures in docs/ of what was measured, drawn from bench/results alone.

    python bench/plots.py [--results FOLDER] [--out docs]

bench/report.py --write draws them too, and --check compares: a picture is never older than its numbers.
A picture whose result is refused (bench/quote.py) is not drawn.
"""

import argparse
from collections import Counter
from math import ceil, log10
from pathlib import Path

from quote import Refused, Results, at, of, of_card
from record import RESULTS, ROOT
from svg import LINE, WIDTH, Picture

DOCS = ROOT / "docs"
LEFT, RIGHT = 150, WIDTH - 120  # where bars begin and the longest ends
LAST = 15  # drafts of a block of 16


def bars(picture, rows, unit):
    """Horizontal bars, longest to RIGHT. rows: (label, value, css, value's words, mark or None); of a label
    alone, a heading. A mark is a bound: an upright stroke over the bar."""
    scale = (RIGHT - LEFT) / max(row[1] for row in rows if len(row) > 1)
    for row in rows:
        y = picture.height + 6
        if len(row) == 1:
            picture.text(8, y + LINE, row[0], "bold")
            continue
        label, value, css, words, mark = row
        picture.text(LEFT - 8, y + 14, label, anchor="end")
        picture.rect(LEFT, y, scale * value, 18, css, 2)
        picture.text(LEFT + scale * value + 6, y + 14, f"{words} {unit}".rstrip(), "small")
        if mark is not None:
            picture.line([(LEFT + scale * mark, y - 2), (LEFT + scale * mark, y + 20)], "line edge")


def begin(title, description, *lines):
    """A picture with its heading, and lines of what to see in it."""
    picture = Picture(title, description)
    picture.text(8, 22, title, "bold")
    for number, line in enumerate(lines, 1):
        picture.text(8, 22 + LINE * number, line, "small")
    return picture


def source(*found):
    return "; ".join(f"bench/results/{one['name']}.json: {one['commit']}, {one['date']}" for one in found)


def round_and_floor(results, card):
    """A plain and a drafting round of Qwen3-8B's shape by context, and the floor of each."""
    found = of_card(results, "round", card)
    rows = []
    for part, floor, css, name in (
        ("plain_round", "plain", "grey", "plain round: one token"),
        ("round_16", "round", "blue", "drafting round, block 16: tau tokens"),
    ):
        rows.append((name,))
        for one in found["qwen3-8b"]["contexts"]:
            ms, bound = one["ms"][part], one["floor_ms"][floor]
            words = f"{ms:.2f} ms, {bound / ms:.0%}"
            rows.append((f"{one['context']:,} tokens", ms, css, words, bound))
    picture = begin(
        f"A round's time and its floor: {card.upper()}, Qwen3-8B's shape",
        "Bars: milliseconds of a round by context. Stroke: the time that reading the bytes alone takes.",
        f"Stroke and per cent: the floor, the bytes that must be read over the copy's "
        f"{found['copy_tb_per_s']:.2f} TB/s.",
    )
    bars(picture, rows, "")
    picture.foot(source(found))
    yield from picture.lines()


def speed(results, name, where):
    """Tokens a second with and without the drafter, by kind of prompt."""
    found = results[name]
    kinds = found.get("rows") or found["kinds"]
    rows = []
    for kind in kinds:
        rows.append((f"{kind['kind']}: {kind['speedup']:.2f} times, tau {kind['tau']:.2f}",))
        for label, which, css in (("plain", "plain", "grey"), ("with drafter", "drafted", "blue")):
            rate = kind[f"{which}_tokens_per_s"]
            rows.append((label, rate, css, f"{rate:.0f}", None))
    picture = begin(
        f"Tokens a second by kind of prompt: {where}",
        "Two bars for each kind of prompt: plain decoding, and with the drafter; the text is the same.",
        "The embedded pair (SmolLM2-135M), greedy, one sequence; the text of both ways is the same.",
    )
    bars(picture, rows, "tok/s")
    picture.foot(source(found))
    yield from picture.lines()


def peer_steps(results, card):
    """Milliseconds of a step of the public loop and of transformers, beside our rounds."""
    found, ours = of_card(results, "peer", card), of_card(results, "round", card)
    ms = at(ours[found["shape"]], found["context"])["ms"]
    rows = [
        ("a drafting round of block 16",),
        ("minidflash", ms["round_16"], "blue", f"{ms['round_16']:.2f} ms", None),
        (f"dflash {found['dflash']}", found["dflash_step_ms"]["median"], "blue",
         f"{found['dflash_step_ms']['median']:.2f} ms", None),
        ("a token without a drafter",),
        ("minidflash", ms["plain_round"], "grey", f"{ms['plain_round']:.2f} ms", None),
        ("transformers", found["transformers_token_ms"]["median"], "grey",
         f"{found['transformers_token_ms']['median']:.2f} ms", None),
    ]  # fmt: skip
    picture = begin(
        f"The same step in other programs: {card.upper()}, {found['shape']}'s shape",
        "Bars: milliseconds of a drafting round, and of a plain token, of each program.",
        f"Context {found['context']}, batch 1, bf16; shorter is better.",
    )
    bars(picture, rows, "")
    picture.foot(source(found, ours))
    yield from picture.lines()


def peers(results):
    """Tokens a second of this and of other programs on the same prompts, one after the other."""
    found = results["peers-cpu"]
    best = {}
    for way in found["ways"]:
        best.setdefault(way["program"], []).append(way)
    rows = []
    for program, ways in best.items():
        rows.append((program,))
        for way in ways:
            css = "grey" if way["tau"] is None else "blue"
            words = f"{way['tokens_per_s']:.1f}" + ("" if way["tau"] is None else f", tau {way['tau']:.2f}")
            rows.append((way["way"], way["tokens_per_s"], css, words, None))
    picture = begin(
        f"The same prompts, other programs: {found['threads']} CPU cores",
        "Bars: tokens a second of each program and way. Blue ones draft, grey ones do not.",
        f"Tokens a second: {len(found['prompts'])} prompts, {found['tokens']} tokens each. Blue ones draft.",
    )
    bars(picture, rows, "")
    picture.foot(source(found))
    yield from picture.lines()


SERIES = {  # kind of prompt -> (line, dash)
    "code": ("line line-blue", None), "maths": ("line line-orange", "7 3"), "chat": ("line edge", "2 3"),
    "languages": ("line line-grey", "9 3 2 3"),
}  # fmt: skip


def kept_by_kind(found):
    """{kind: [share of rounds that kept at least 1, 2, ... LAST drafts]}."""
    counts = {}
    for name, one in found["prompts"].items():
        mine = counts.setdefault(name.rsplit("-", 1)[0], Counter())
        mine.update({int(kept): rounds for kept, rounds in one["accepted_own"].items()})
    return {
        kind: [sum(n for kept, n in mine.items() if kept >= i) / mine.total() for i in range(1, LAST + 1)]
        for kind, mine in counts.items()
    }


def acceptance(results, card):
    """How far into the block drafts are kept, by kind of prompt."""
    found = of_card(results, "lossless-embedded", card)
    kinds = kept_by_kind(found)
    if set(kinds) - set(SERIES):
        raise Refused(f"{found['name']}: kinds without a line: {sorted(set(kinds) - set(SERIES))}")
    picture = begin(
        f"How deep into a block drafts are kept: {card.upper()}, embedded pair, block 16",
        "Lines by kind of prompt: the share of rounds that keep the drafts up to a position of the block.",
        "Share of rounds that keep this draft and all before it. tau is 1 and the sum of a line.",
        f"{found['settings']['tokens']} tokens of each prompt, whether or not the answer ended before.",
    )
    left, right, top, bottom = 50, WIDTH - 30, 90, 330

    def x(i):
        return left + (right - left) * (i - 1) / (LAST - 1)

    def y(share):
        return bottom - (bottom - top) * share

    for share in (0, 0.25, 0.5, 0.75, 1):
        picture.line([(left, y(share)), (right, y(share))], "axis", None if share == 0 else "1 5")
        picture.text(left - 6, y(share) + 4, f"{share:.0%}", "small", "end")
    for i in range(1, LAST + 1, 2):
        picture.text(x(i), bottom + 18, str(i), "small", "middle")
    picture.text((left + right) / 2, bottom + 36, "draft's position in the block", "small", "middle")
    for number, (kind, shares) in enumerate(sorted(kinds.items(), key=lambda one: -sum(one[1]))):
        css, dash = SERIES[kind]
        picture.line([(x(i), y(share)) for i, share in enumerate(shares, 1)], css, dash)
        row = top + 8 + LINE * number
        picture.line([(right - 210, row), (right - 170, row)], css, dash)
        picture.text(right - 160, row + 5, f"{kind}: tau {1 + sum(shares):.2f}")
    picture.foot(source(found))
    yield from picture.lines()


def timeline(results, name):
    """When each kernel of one drafting round ran: a lane a kernel."""
    found = results[name]
    round_, places = found["round_16"], found["round_16"]["places"]
    total = round_["us"]
    left, right, top = 150, WIDTH - 90, 66
    scale = (right - left) / total
    picture = begin(
        f"One round of {name.removeprefix('timeline-')}: {total / 1e3:.2f} ms, {round_['launches']} launches",
        "A lane for each kernel; a bar where it ran; its share of the round at the right.",
        "Time runs to the right; the drafter's layers come first, then the target's.",
    )
    for number, one in enumerate(round_["kernels"]):
        y = top + 22 * number
        own = [place for place in places if place["kernel"] == one["kernel"] and place["adds"] is not None]
        picture.text(left - 8, y + 13, one["kernel"].removesuffix("_fast"), anchor="end")
        picture.rect(left, y, right - left, 16, "pale")
        picture.path("".join(f"M{left + scale * p['at']:.2f} {y}h{scale * p['adds']:.2f}v16h"
                             f"{-scale * p['adds']:.2f}z" for p in own), "blue")  # fmt: skip
        picture.text(right + 6, y + 13, f"{one['adds_us'] / 1e3:.2f} ms", "small")
    head = next(place for place in places if place["kernel"].startswith("head"))
    ends = left + scale * (head["at"] + head["adds"])
    picture.line([(ends, top - 6), (ends, picture.height + 4)], "edge", "4 3")
    words = f"draft {(head['at'] + head['adds']) / 1e3:.2f} ms, then verify"
    picture.text(left, picture.height + LINE, words, "small")
    picture.foot(source(found))
    yield from picture.lines()


WAYS = {  # width of a curve -> (how it is called, line, dash)
    "1": ("plain", "line line-grey", None), "4": ("4 rows", "line line-orange", "7 3"),
    "8": ("8 rows", "line edge", "2 3"), "16": ("16 rows", "line line-grey", "9 3 2 3"),
    "auto": ("auto", "line line-blue", None),
}  # fmt: skip


AXES = "user_tokens_per_s", "tokens_per_s"  # of a curve: across, up


def ticks(values):
    """Round numbers from 0 to the largest value or just beyond, about five."""
    most = max(values)
    power = 10.0 ** (ceil(log10(most / 5)) - 1)
    step = next(power * n for n in (1, 2, 5, 10) if power * n * 5 >= most)
    return [step * n for n in range(ceil(most / step) + 1)]


def curve(results, name):
    """Tokens a second of all texts over those of one, a line a width, a point a load."""
    found = results[name]
    lines = {}
    for one in found["points"]:
        if one["width"] not in WAYS:
            raise Refused(f"{found['name']}: a width without a line: {one['width']}")
        lines.setdefault(one["width"], []).append(one)
    picture = begin(
        f"Many requests at once: {found.get('card') or found['machine']['processor']}",
        "Lines by width: tokens a second of all requests over those of one; a point for each load.",
        f"{found['pair']}, {found['settings']['max_tokens']} tokens a text; "
        f"{of(found['differing'], found['texts'], 'texts')} differ from plain ones.",
        "Numbers at points: requests at a time. Higher and further right is better.",
    )
    left, right, top, bottom = 60, WIDTH - 30, 100, 400
    across, up = (ticks(one[key] for one in found["points"]) for key in AXES)

    def place(one):
        x, y = (one[key] / marks[-1] for key, marks in zip(AXES, (across, up), strict=True))
        return left + (right - left) * x, bottom - (bottom - top) * y

    for value in up:
        y = place({AXES[0]: 0, AXES[1]: value})[1]
        picture.line([(left, y), (right, y)], "axis", "1 5" if value else None)
        picture.text(left - 6, y + 4, f"{value:,.0f}", "small", "end")
    for value in across[1:]:
        x = place({AXES[0]: value, AXES[1]: 0})[0]
        picture.text(min(x, right - 6), bottom + 18, f"{value:,.0f}", "small", "middle")
    picture.text(left, top - 12, "tokens a second of all", "small")
    picture.text((left + right) / 2, bottom + 36, "tokens a second of one request, median", "small", "middle")
    for number, (width, points) in enumerate(lines.items()):
        called, css, dash = WAYS[width]
        picture.line(list(map(place, points)), css, dash)
        for one in points:
            x, y = place(one)
            picture.line([(x - 3, y), (x + 3, y)], css)
            if width in ("1", "auto"):
                below = 16 if width == "1" else -8
                picture.text(x, y + below, str(one["concurrency"]), "small", "middle")
        row = top + 8 + LINE * number
        picture.line([(right - 130, row), (right - 90, row)], css, dash)
        picture.text(right - 80, row + 5, called)
    picture.foot(source(found))
    yield from picture.lines()


def pictures(results):
    """{file name: its text} of all that can be drawn."""
    drawn = {"speed-cpu": speed(results, "cpu", "2 CPU cores"), "peers-cpu": peers(results)}
    for card in ("h200", "h100"):
        drawn[f"round-{card}"] = round_and_floor(results, card)
        drawn[f"speed-{card}"] = speed(results, f"embedded-{card}", card.upper())
        drawn[f"acceptance-{card}"] = acceptance(results, card)
    drawn["peers-h100"] = peer_steps(results, "h100")
    drawn |= {name: timeline(results, name) for name in results.names("timeline-*")}
    drawn |= {name: curve(results, name) for name in results.names("curve-*")}
    lines = {name: results.quoted(parts) for name, parts in drawn.items()}
    return {f"{name}.svg": "\n".join([*found, ""]) for name, found in lines.items() if found}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", default=RESULTS, help="folder of results (default: bench/results)")
    parser.add_argument("--out", type=Path, default=DOCS)
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    for name, text in pictures(Results(args.results)).items():
        (args.out / name).write_text(text, encoding="utf-8")
        print(args.out / name)


if __name__ == "__main__":
    main()
