"""The replay drafter: drafts that are the plain run's own ids with planned mistakes.

Random drafters accept almost nothing and prove little. This one makes every accepted length and every crop
occur, and says beforehand which one each round must have. It is a table,
so a backend needs one small kernel to read it.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from minidflash.cli.watch import standing_in


def copy_drafts(guess, start, drafted_rows, drafts):
    """drafts[n, i] = guess[start[n], i] for the rows n * B + i asked for;
    all others become -1, which nobody may read.

    guess: i32[P, B]. start: i32[N]. drafted_rows: i32[M]. drafts: i32[N, B], written.
    """
    drafts[...] = -1
    block = drafts.shape[1]
    for row in drafted_rows:
        n, i = divmod(int(row), block)
        drafts[n, i] = guess[min(int(start[n]), len(guess) - 1), i]


def copier(backend):
    """What a backend records: copy_drafts where its memory is the host's, else the kernel in replay.cu."""
    if not hasattr(backend, "device"):
        return copy_drafts

    def launch(guess, start, drafted_rows, drafts):
        sizes = [len(drafted_rows), drafts.shape[1], len(guess)]
        backend.launch(SOURCE, "replay", 1, 32, 0, [guess, start, drafted_rows, drafts, *sizes])

    return launch


SOURCE = str(Path(__file__).with_suffix(".cu"))


class Replay:
    """Stands in for engine.draft.

    known: all ids of the plain run, prompt first. plan[p]: how many drafts are right in a round whose anchor
    lies at position p; the slot after them is wrong, and the ones after that are right again (a trap:
    they must not count).
    asked: rows of the drafted slots of every program recorded.
    """

    def __init__(self, known, prompt_length, block, vocab, seed=0, plan=None):
        """plan: None deals decks of all lengths 0..B-1, shuffled, along the path of whole-block rounds.

        Positions off that path (short verifies lead there) get lengths at random.
        """
        rng = np.random.default_rng(seed)
        positions = len(known) + block
        if plan is None:
            plan, at, deck = rng.integers(0, block, positions), prompt_length, []
            while at < positions:
                deck = deck or rng.permutation(block).tolist()
                plan[at] = deck.pop()
                at += plan[at] + 1
        self.plan = np.broadcast_to(np.asarray(plan), (positions,))
        self.known, self.block, self.asked = len(known), block, []
        self.guess = np.zeros((positions, block), np.int32)
        right = np.concatenate([np.asarray(known), rng.integers(0, vocab, 2 * block)])
        for p in range(positions):
            self.guess[p] = right[p : p + block]
            wrong = self.plan[p] + 1
            if wrong < block:
                self.guess[p, wrong] = (self.guess[p, wrong] + rng.integers(1, vocab)) % vocab

    def __call__(self, ops, engine, s, drafted_rows):
        """Record the copy. Arguments and place as engine.draft. Errors: none."""
        table = ops.array(self.guess.shape, "i32")
        ops.upload(table, self.guess)
        self.asked.append(ops.download(drafted_rows).tolist())
        ops._recording.append(("replay", copier(ops.backend), (table, s.start, drafted_rows, s.drafts)))

    def expected(self, start, width):
        """Drafts that a round with its anchor at `start` keeps when it verifies `width` rows;
        None if unknown."""
        accepted = min(int(self.plan[start]), width - 1)
        return accepted if start + accepted + 1 < self.known else None


def proposing(engine, propose):
    """The engine drafts by `propose` inside; its recorded programs are dropped on both sides."""
    return standing_in(engine, "draft", propose)


def histogram(rounds):
    """Accepted length -> how many rounds had it. rounds: what `stream` yielded."""
    return Counter(r.accepted for r in rounds if r.verify > 0)


def check_plan(replay, prompt_length, rounds):
    """Every round accepted exactly what was planned. Errors: AssertionError naming the round."""
    start = prompt_length
    for r in rounds[1:]:
        want = replay.expected(start, r.verify)
        assert want in (None, r.accepted), f"at {start}: {r.accepted} drafts accepted, {want} planned"
        assert len(r.drafted) == r.verify - 1
        start += len(r.tokens)
