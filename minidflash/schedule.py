"""How many rows to verify: `auto` maximises tokens a second from measured costs and running acceptance."""

import time

PROBE = 0.02  # share of plain decoding's time that drafting may lose to learn whether it pays ...
CREDIT = 3.0  # ... and how many plain rounds it may lose to start with: 3 + 0.02 n < 5 % of n at 256 tokens
DECAY = 0.9  # weight of a round's acceptance, from one round to the next
PRIOR, WEIGHT = (
    0.75,
    1.0,
)  # acceptance of a slot before anything is known, and how many rounds that counts for
LEARN = 0.2  # weight of a new time


def widths(block):
    """The widths auto chooses from: 1, powers of two from 4 on, the whole block."""
    return sorted({1, block} | {w for w in (4, 8, 16, 32) if w < block})


class Schedule:
    """Chooses v for every round of a run; costs are kept from run to run.

    seconds: {v: time of a whole round that verifies v rows}, measured, then followed. kept, seen: by slot, decayed
    counts of accepted and reached drafts. lost: seconds that drafting rounds took beyond what plain rounds would
    have taken for the same tokens; bounded by the allowance, which is what makes auto safe to leave on.
    """

    def __init__(self, block):
        self.block = block
        self.seconds = {}
        self.begin()

    def begin(self):
        """Forget the last text."""
        self.kept, self.seen = [0.0] * self.block, [0.0] * self.block
        self.lost, self.tokens = 0.0, 0

    def measure(self, launch):
        """Time a round of every width, the better of two after one to warm up. launch: width -> runs a round."""
        for width in widths(self.block):
            times = []
            for _ in range(3):
                since = time.perf_counter()
                launch(width)
                times.append(time.perf_counter() - since)
            self.seconds[width] = min(times[1:])

    def choose(self, request):
        """v of the next round: what was asked for, or the best that the allowance permits."""
        if request.verify != "auto":
            return request.verify
        plain = self.seconds[1]
        allowance = plain * (CREDIT + PROBE * self.tokens) - self.lost
        best = max(self.seconds, key=lambda width: self.expected(width) / self.seconds[width])
        if best > 1 and self.seconds[best] - plain <= allowance:
            return best
        # Drafting seems not to pay, or is out of credit: look again with the cheapest draft once it is affordable.
        probe = min((w for w in self.seconds if w > 1), key=self.seconds.get)
        return probe if self.tokens and self.seconds[probe] - plain <= allowance - plain * CREDIT / 2 else 1

    def expected(self, width):
        """Tokens that a round of this width is expected to commit."""
        total = reach = 1.0
        for slot in range(1, width):
            reach *= (self.kept[slot] + PRIOR * WEIGHT) / (self.seen[slot] + WEIGHT)
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
        for slot in range(1, width):
            if slot > accepted + 1:
                break
            self.kept[slot] = DECAY * self.kept[slot] + (slot <= accepted)
            self.seen[slot] = DECAY * self.seen[slot] + 1.0
