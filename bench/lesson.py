"""DFlash in two pictures, drawn from rounds that the embedded pair really ran.

    python bench/lesson.py [--out docs]

round.svg is one round step by step, with a prompt of four tokens and a block of four (dflash.md 1.9's sizes);
run.svg is the beginning of an answer, a line for each round. tests/test_lesson.py draws both anew, compares,
and holds what they say beside the loop's own buffers.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from svg import LINE, WIDTH, Picture

import minidflash as md

ROOT = Path(__file__).resolve().parent.parent
BLOCK, PROMPT = 4, "The Earth goes around"
QUESTION, WIDE, ROUNDS = "Write a Python function that checks whether a number is prime.", 8, 12
COLUMN, FIRST = 62, 78  # of the step picture: a position's width, and where the first one begins
CHIP, LETTER = 24, 8.0  # a chip's height, and a letter's width in those of the run picture


@dataclass
class Step:
    """One round's bookkeeping. start: the anchor's position, and how many positions the target's cache held.
    features: positions whose context features the drafter took in. drafted: its guesses. accepted: how many
    of them the target kept. tokens: what the round added. cached: positions in the target's cache after it.
    """

    start: int
    anchor: int
    features: range
    drafted: list
    accepted: int
    tokens: list
    cached: range


def steps(prompt_length, rounds):
    """[Step] of a run's rounds, the first of which is the prompt's token."""
    found, start, fresh, anchor = [], prompt_length, prompt_length, rounds[0].tokens[-1]
    for one in rounds[1:]:
        end = start + len(one.tokens)
        features = range(start - fresh, start)
        found.append(Step(start, anchor, features, one.drafted, one.accepted, one.tokens, range(end)))
        start, fresh, anchor = end, len(one.tokens), one.tokens[-1]
    return found


def worked(engine):
    """(ids of the prompt, [Step]) of the step picture."""
    ids = engine.tokenizer.encode(PROMPT)
    rounds = list(md.stream(engine, ids, max_tokens=5, block=BLOCK, verify=BLOCK, ignore_eos=True))
    return ids, steps(len(ids), rounds)


def word(engine, token):
    """A token as a reader knows it."""
    return engine.tokenizer.decode([token]).strip(" ").replace("\n", "⏎") or "␣"


class Strip:
    """The step picture's rows of chips: a column for each position of the text."""

    def __init__(self, picture):
        self.picture, self.y = picture, 0

    def say(self, number, name, *lines):
        """A step's heading and what happens in it."""
        self.y = self.picture.height + 14
        self.picture.text(8, self.y + 16, f"{number}. {name}", "bold")
        for line in lines:
            self.y += LINE
            self.picture.text(8, self.y + 16, line, "small")
        self.y += 28

    def row(self, label, chips):
        """chips: {position: (words, css of the box, css of the words)}."""
        self.picture.text(8, self.y + 17, label, "small")
        for position, (words, box, css) in chips.items():
            x = FIRST + COLUMN * position
            self.picture.rect(x, self.y, COLUMN - 4, CHIP, box, 4)
            self.picture.text(x + (COLUMN - 4) / 2, self.y + 17, words, css, "middle")
        self.y += CHIP + 4

    def positions(self, count):
        for position in range(count):
            x = FIRST + COLUMN * position + (COLUMN - 4) / 2
            self.picture.text(x, self.y + 12, str(position), "small faint", "middle")
        self.picture.text(8, self.y + 12, "position", "small faint")
        self.y += 18


OWN, DRAFT, OLD, NOT = ("orange", "on"), ("blue", "on"), ("pale", ""), ("pale", "faint struck")


def draw_round(engine, ids, step, following):
    """The step picture's lines."""
    drafted, start = [word(engine, t) for t in step.drafted], step.start
    tokens, kept = [word(engine, t) for t in step.tokens], step.accepted
    anchor, last = word(engine, step.anchor), following.start
    picture = Picture(
        "One round of DFlash, step by step",
        f"The target has read {PROMPT!r}. The drafter guesses {drafted}; the target keeps {kept} of them and "
        f"adds a token of its own: {tokens[-1]!r}.",
    )
    picture.text(8, 22, picture.title, "bold")
    strip, size = Strip(picture), len(step.drafted) + 1
    strip.say(
        1, "The target reads the prompt and chooses the next token: the anchor.",
        f"What it thought at positions {step.features[0]} to {step.features[-1]}, hidden states of some "
        "layers, are the context features.",
    )  # fmt: skip
    strip.positions(start + 1)
    strip.row("text", {i: (word(engine, t), *OLD) for i, t in enumerate(ids)} | {start: (anchor, *OWN)})
    strip.say(
        2, f"The drafter guesses {size - 1} tokens in one pass.",
        "The features become keys and values of its own layers. Behind the anchor stand masks:",
        "it fills in all of them at once.",
    )  # fmt: skip
    masks = {start + i: ("mask", *OLD) for i in range(1, size)}
    strip.row("block", {start: (anchor, *OWN)} | masks)
    strip.row("drafts", {start + i: (w, *DRAFT) for i, w in enumerate(drafted, 1)})
    strip.say(
        3, f"The target runs the block of {size} in one pass.",
        "Each row says which token the target itself would write next. A draft is kept while it is",
        "that token; what lies behind a wrong one does not count.",
    )  # fmt: skip
    block = [anchor, *drafted]
    rows = {start + i: (w, *(OWN if i == 0 else DRAFT)) for i, w in enumerate(block)}
    strip.row("block", rows)
    says = {start + 1 + i: (f"{w} ✓", *DRAFT) for i, w in enumerate(tokens[:kept])}
    strip.row("target", says | {start + kept + 1: (tokens[-1], *OWN)})
    features = f"{following.features[0]} and {following.features[-1]}"
    strip.say(
        4, f"Kept: {kept}. With the target's own token, {len(tokens)} tokens from one pass.",
        f"The target's cache keeps positions 0 to {step.cached[-1]}, no more. Features of {features}",
        f"go to the drafter next, and '{tokens[-1]}' is the next anchor, at position {last}.",
    )  # fmt: skip
    done = dict(enumerate([word(engine, t) for t in ids] + [anchor] + tokens[:-1]))
    strip.positions(last + 1)
    strip.row("text", {i: (w, *OLD) for i, w in done.items()} | {last: (tokens[-1], *OWN)})
    picture.foot(
        "Orange: chosen by the target. Blue: guessed by the drafter. Tokens of the embedded pair, "
        f"--raw --block {BLOCK} --verify {BLOCK}: python bench/lesson.py"
    )
    return "\n".join([*picture.lines(), ""])


def draw_run(engine, rounds):
    """The run picture's lines. rounds: the prompt's token, then rounds."""
    own, drafts = sum(len(r.tokens) for r in rounds), sum(r.accepted for r in rounds)
    picture = Picture(
        f"{own} tokens in {len(rounds) - 1} rounds",
        "A line for each round: the drafts that were kept, the target's own token, the drafts thrown away.",
    )
    tau = sum(len(r.tokens) for r in rounds[1:]) / (len(rounds) - 1)
    picture.text(8, 22, f"{picture.title}, and the prompt's pass: tau {tau:.2f}", "bold")
    picture.text(8, 42, f"Blue: {drafts} drafts kept. Orange: the target's own token, one a round. "
                 "Struck out: thrown away.", "small")  # fmt: skip
    for number, one in enumerate(rounds):
        y, x = 56 + 28 * number, 60
        picture.text(8, y + 17, "prompt" if number == 0 else str(number), "small faint")
        chips = [(t, DRAFT) for t in one.tokens[: one.accepted]]
        chips += [(t, OWN) for t in one.tokens[one.accepted :]]
        chips += [(t, NOT) for t in one.drafted[one.accepted :]]
        for place, (token, (box, css)) in enumerate(chips):
            words = engine.tokenizer.decode([token]).replace("\n", "⏎")
            width = LETTER * len(words) + 10
            if x + width > WIDTH - 40:
                picture.text(x + 4, y + 17, f"+{len(chips) - place}", "small faint")
                break
            picture.rect(x, y, width, CHIP, box, 4)
            picture.text(x + 5, y + 17, words, f"code {css}".strip(), width=LETTER * len(words))
            x += width + 3
    picture.foot(f"Embedded pair, --verify {WIDE}, greedy: {QUESTION!r}. python bench/lesson.py")
    return "\n".join([*picture.lines(), ""])


def pictures(engine):
    """{file name: its text}."""
    ids, found = worked(engine)
    rounds = list(md.stream(engine, QUESTION, max_tokens=128, verify=WIDE))[: ROUNDS + 1]
    return {"round.svg": draw_round(engine, ids, *found[:2]), "run.svg": draw_run(engine, rounds)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    for name, text in pictures(md.load(backend="numba")).items():
        (args.out / name).write_text(text, encoding="utf-8")
        print(args.out / name)


if __name__ == "__main__":
    main()
