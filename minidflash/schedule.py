"""How many rows to verify: `auto` maximises tokens a second from measured costs and running acceptance."""

from collections import Counter

# Drafting may lose this many plain rounds to learn whether it pays, and this share of the time so far; what
# it earned in the text before counts too, up to EARNED plain rounds. So a text of 50 tokens is at most 5 %
# slower than plain decoding, one of 17 9 %. One round is what a first draft may lose: with a CREDIT of 0.3,
# texts whose drafts are good began to draft after a dozen tokens, and a fixed 4 was faster (bench/NOTES.md).
CREDIT, PROBE, EARNED = 1.0, 0.03, 4.0
DECAY = 0.9  # weight of a round's acceptance, from one round to the next
KEPT = 0.25  # weight of the last text's acceptance in the next
PRIOR, WEIGHT = (
    0.75,
    1.0,
)  # acceptance of a position before anything is known, and how many rounds that counts for
LEARN = 0.2  # weight of a new time
STAY = 1.05  # how much faster another width must be for all lanes to take it
TIMED = 3  # rounds of a kind until its time is known: recorded, and the better of two


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

    def begin(self):
        """A new text: most of what was learned about the last one does not hold for it."""
        self.kept, self.seen = ([KEPT * value for value in counts] for counts in (self.kept, self.seen))
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
        total = reach = 1.0
        for i in range(1, width):
            reach *= (self.kept[i] + PRIOR * WEIGHT) / (self.seen[i] + WEIGHT)
            total += reach
        return total

    def learn(self, width, accepted, emitted, seconds):
        """Take in what a round did."""
        self.tokens += emitted
        if width in self.seconds:
            known = self.seconds[width]
            self.seconds[width] = known + LEARN * (min(seconds, 2 * known) - known)
        if width == 1:
            return
        self.lost += seconds - emitted * self.seconds.get(1, 0.0)
        for i in range(1, width):
            if i > accepted + 1:
                break
            self.kept[i] = DECAY * self.kept[i] + (i <= accepted)
            self.seen[i] = DECAY * self.seen[i] + 1.0


class SharedWidth:
    """One v a round for all lanes: the most tokens a second, from what rounds of so many lanes took.

    seconds: {(lanes, v): time of a round}, the better of two, then followed. A pair that was not timed is
    tried, since its rounds commit tokens too, unless it would not pay even at the time of fewer rows. No text
    depends on it.
    """

    def __init__(self, block):
        self.widths, self.seconds = widths(block), {}
        self._ran, self._last = Counter(), 1

    def choose(self, lanes, schedules):
        """v of the next round. schedules: of the texts that decode, for what they expect to commit."""
        rates, least = {}, 0.0  # least: seconds of the widest round so far
        for width in self.widths:
            tokens = sum(one.expected(width) for one in schedules)
            if self._ran[lanes, width] < TIMED and tokens > least * max(rates.values(), default=0.0):
                return width
            if (lanes, width) in self.seconds:
                least = self.seconds[lanes, width]
                rates[width] = tokens / least
        best = max(rates, key=rates.get)
        if rates[best] > STAY * rates.get(self._last, 0.0):
            self._last = best
        return self._last

    def learn(self, lanes, width, seconds):
        """Take in what a round took; not the first of its kind, which is recorded then."""
        kind = lanes, width
        self._ran[kind] += 1
        known = self.seconds.get(kind, seconds)
        if self._ran[kind] > TIMED:
            self.seconds[kind] = known + LEARN * (min(seconds, 2 * known) - known)
        elif self._ran[kind] > 1:
            self.seconds[kind] = min(known, seconds)
