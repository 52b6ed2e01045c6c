"""How many rows to verify: `auto` maximises tokens a second from measured costs and running acceptance."""

from itertools import accumulate
from math import inf
from operator import mul

# Drafting may lose this many plain rounds to learn whether it pays, and this share of the time so far; what
# it earned in the text before counts too, up to EARNED plain rounds. So a text of 50 tokens is at most 5 %
# slower than plain decoding, or 10 % behind one whose drafts were good, and one of 17 is at most 10 %. About
# one round is what a first draft may lose: with a CREDIT of 0.3, texts whose drafts are good began to draft
# after a dozen tokens, and a fixed 4 was faster (bench/NOTES.md).
CREDIT, PROBE, EARNED = 1.1, 0.028, 2.5
DECAY = 0.9  # weight of a round's acceptance, from one round to the next
KEPT = 0.25  # weight of the last text's acceptance in the next
PRIOR, WEIGHT = (
    0.75,
    1.0,
)  # acceptance of a position before anything is known, and how many rounds that counts for
LEARN = 0.2  # weight of a new time
# After so many rounds that drafted, a plain one is timed again, and of a number of lanes the width that ran
# longest ago: its time may have been another program's fault or that of shorter contexts.
LOOK = 64
# Of a width that all lanes share: what share of its rounds drafting may lose, and how many plain rounds of a
# lane more with each new text, which may be one of another kind; with how many it begins, and how many it may
# have; and how many first times of a kind the best is taken of.
SHARED_PROBE, FIRST, START, MOST, BEST_OF = 0.01, 0.25, 1.0, 4.0, 2


def widths(block):
    """The widths auto chooses from: 1, powers of two from 4 on, the whole block."""
    return sorted({1, block} | {w for w in (4, 8, 16, 32) if w < block})


class Schedule:
    """Chooses v for every round of a run; costs are kept from run to run.

    seconds: {v: time of a whole round that verifies v rows}, measured, then followed. kept, seen: by position
    in the block, decayed counts of accepted and reached drafts. lost: seconds that drafting rounds took
    beyond what plain rounds would have taken for the same tokens; bounded by the allowance, which is what
    makes auto safe to leave on.
    """

    def __init__(self, block):
        self.block = block
        self.seconds = {}
        self.kept, self.seen = [0.0] * block, [0.0] * block
        self.lost, self.tokens = 0.0, 0
        self._totals = None  # `expected` of each width, until a draft is learned from
        self._drafted = 0  # rounds since a plain one

    def begin(self):
        """A new text: most of what was learned about the last one does not hold for it."""
        self.kept, self.seen = ([KEPT * value for value in counts] for counts in (self.kept, self.seen))
        self._totals = None
        self.lost = max(min(0.0, self.lost), -EARNED * self.seconds.get(1, 0.0))
        self.tokens = 0

    def measure(self, run):
        """Time a round of every width, the better of two after one to warm up.
        run: width -> seconds of a round."""
        # All or none: what Ctrl-C cut short is measured again.
        self.seconds = {width: min([run(width) for _ in range(3)][1:]) for width in widths(self.block)}

    def choose(self, request):
        """v of the next round: what was asked for, or the best that the allowance permits."""
        if request.verify != "auto":
            return request.verify
        if self._drafted >= LOOK:
            return 1
        plain = self.seconds[1]
        allowance = plain * (CREDIT + PROBE * self.tokens) - self.lost
        affordable = [width for width, cost in self.seconds.items() if cost - plain <= allowance]
        best = max(affordable, key=lambda width: self.expected(width) / self.seconds[width], default=1)
        if best > 1:
            return best
        # Drafting seems not to pay: look again with the cheapest draft whenever it is affordable.
        return min((width for width in affordable if width > 1), key=self.seconds.get, default=1)

    def expected(self, width):
        """Tokens that a round of this width is expected to commit."""
        if self._totals is None:
            counts = zip(self.kept[1:], self.seen[1:], strict=True)
            right = ((kept + PRIOR * WEIGHT) / (seen + WEIGHT) for kept, seen in counts)
            self._totals = list(accumulate(accumulate(right, mul, initial=1.0)))
        return self._totals[width - 1]

    def learn(self, width, accepted, emitted, seconds):
        """Take in what a round did."""
        self.tokens += emitted
        if width in self.seconds:
            known = self.seconds[width]
            self.seconds[width] = known + LEARN * (min(seconds, 2 * known) - known)
            if width == 1 and self._drafted >= LOOK and seconds < known:  # what it cost before is long ago
                self.seconds[1], self.lost = seconds, max(self.lost, -EARNED * seconds)
        if width == 1:
            self._drafted = 0
            return
        self._drafted += 1
        self._totals = None
        self.lost += seconds - emitted * self.seconds.get(1, 0.0)
        for i in range(1, width):
            if i > accepted + 1:
                break
            self.kept[i] = DECAY * self.kept[i] + (i <= accepted)
            self.seen[i] = DECAY * self.seen[i] + 1.0


class SharedWidth:
    """One v a round for all lanes: the most tokens a second, from what rounds of so many lanes took.

    Plain rounds come first, then small widths, then larger ones: what a width may cost is judged before it
    runs. seconds: {(lanes, v): time of a round}. credit: how many plain rounds drafting may lose; it grows
    with every round and text, and by what drafting earns, up to MOST. Debts keep a width that was timed
    from running only where it expects to gain less than START. No text depends on it.
    """

    def __init__(self, block):
        self.widths, self.seconds, self.credit = widths(block), {}, START
        self._runs, self._rounds = {}, {}  # by (lanes, v), the one that ran longest ago first; by lanes
        self._look = None  # (lanes, v) that runs to be timed again

    def begin(self, lanes):
        """A text comes, one of so many then."""
        self.credit = min(MOST, self.credit + FIRST / lanes)

    def choose(self, lanes, schedules):
        """v of the next round. schedules: of the texts that decode, for what they expect to commit. May be
        asked again, and before the rounds under way are learned from."""
        if not self._is_sure(lanes, 1):
            return 1
        plain, rates = self.seconds[lanes, 1], {}
        is_look = self._rounds.get(lanes, 0) % LOOK == LOOK - 1
        for width, cost in self._costs(lanes).items():
            expected = sum(one.expected(width) for one in schedules) / len(schedules)
            if width == 1 or cost / plain - expected <= self._most(lanes, width, is_look):
                rates[width] = expected / cost
        if is_look:
            order = [width for n, width in self._runs if n == lanes]
            oldest = min(rates, key=lambda width: order.index(width) if width in order else -1)
            self._look = lanes, oldest
            return oldest
        return max(rates, key=rates.get)

    def learn(self, lanes, width, seconds, tokens):
        """Take in what a round took, not the first of its kind, which is recorded then, and what it brought:
        tokens a lane. However it was disturbed: v rows and a draft cost no more than a plain round each, and
        what is known to be cheap not twice that.
        """
        kind, lost = (lanes, width), 0.0
        runs = self._runs[kind] = self._runs.pop(kind, 0) + 1
        self._rounds[lanes] = self._rounds.get(lanes, 0) + 1
        if runs > 1:
            known = self.seconds.setdefault(kind, seconds)
            is_new = runs <= 1 + BEST_OF or self._look == kind
            followed = known + LEARN * (min(seconds, 2 * known) - known)
            self.seconds[kind] = min(known, seconds) if is_new else followed
        self._look = None if self._look == kind else self._look
        if width > 1:
            plain = self.seconds.get((lanes, 1), seconds)
            cost = min(seconds, 2 * self.seconds.get(kind, seconds))
            lost = min(width + 1, cost / plain) - tokens
        self.credit = min(MOST, self.credit + SHARED_PROBE - lost)

    def _most(self, lanes, width, is_look):
        """Plain rounds that a round of this width may be expected to lose."""
        if not self._is_sure(lanes, width):
            return min(self.credit, 0.0)  # it will hardly cost less than was reckoned
        if is_look and self.credit == MOST:
            return inf  # enough to see whether a dear width still is
        return max(self.credit, -START)

    def _is_sure(self, lanes, width):
        """Whether a time was measured often enough."""
        return self._runs.get((lanes, width), 0) > BEST_OF

    def _costs(self, lanes):
        """{v: time of a round of so many lanes}, of what was timed and the next width beyond.

        Of one that was not timed at least: more rows cost no less, and a drafting round costs many lanes no
        fewer plain rounds than few, whose rows hide behind the reading of the weights. A single time is
        doubted, the more so where there is credit to try again.
        """
        plain = least = self.seconds[lanes, 1]
        costs = {1: plain}
        for width in self.widths[1:]:
            fewer = [n for n, v in self.seconds if v == width and n < lanes and (n, 1) in self.seconds]
            if fewer:
                near = max(fewer)
                least = max(least, plain * self.seconds[near, width] / self.seconds[near, 1])
            timed = self.seconds.get((lanes, width))
            doubted = (timed or 0.0) / 2 if self.credit < START else 0.0
            costs[width] = timed if self._is_sure(lanes, width) else max(least, doubted)
            if timed is None and not fewer:
                break
            least = max(least, timed or least)
        return costs
