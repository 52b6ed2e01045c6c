"""What /metrics tells, in Prometheus's text format."""

import time
from bisect import bisect_left
from collections import Counter
from itertools import accumulate

HELP = {  # name -> (kind, what it is); all begin with minidflash_
    "slots": ("gauge", "Texts that can run side by side."),
    "lanes": ("gauge", "Texts that run."),
    "waiting": ("gauge", "Texts that wait for a slot."),
    "tau": ("gauge", "Tokens a round, mean of all drafted runs so far."),
    "requests_total": ("counter", "Requests that ended, by how: completed, cancelled, refused, failed."),
    "prompt_tokens_total": ("counter", "Tokens of prompts that were taken on."),
    "prompt_tokens_reused_total": ("counter", "Those of them that did not run: a slot kept them."),
    "tokens_total": ("counter", "Tokens that were generated."),
    "rounds_total": ("counter", "Rounds of texts: two texts in one round of the machine are two."),
    "round_seconds_total": ("counter", "Seconds of these rounds."),
    "first_token_seconds": ("histogram", "Seconds from a request to its first token."),
    "queue_seconds": ("histogram", "The part of them in which its prompt did not run, but waited."),
    "round_gap_seconds": (
        "histogram",
        "Seconds from a round of a text to its next: that one, and what ran before.",
    ),
}
BOUNDS = {  # of a histogram's buckets, seconds
    "first_token_seconds": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    "queue_seconds": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    "round_gap_seconds": (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
}


class Histogram:
    """How many values lie at or below each bound, and their sum."""

    def __init__(self, bounds):
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value):
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name):
        """As Prometheus reads them: each bucket holds those below it too."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {sum(self._counts)}"


class Meters:
    """Counters since the start. last_round: when a round came last, by time.monotonic, or None."""

    def __init__(self):
        self._counts, self._ended, self._drafted = Counter(), Counter(), Counter()
        self._histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        self.last_round = None

    def begin(self, prompt_tokens):
        """A text was taken on."""
        self._counts["prompt_tokens_total"] += prompt_tokens

    def reuse(self, prompt_tokens):
        """A text has begun, and a slot kept so much of its prompt."""
        self._counts["prompt_tokens_reused_total"] += prompt_tokens

    def end(self, how):
        """A request ended. how: as in HELP."""
        self._ended[how] += 1

    def add(self, found, is_drafted, waited=None, gap=None):
        """A Round came. is_drafted: a drafter takes part. waited: for the first one, seconds since it was
        asked for. gap: for a later one, seconds since the one before it."""
        self.last_round = time.monotonic()
        counts, histograms = self._counts, self._histograms
        counts["tokens_total"] += len(found.tokens)
        if waited is not None:
            histograms["first_token_seconds"].add(waited)
            histograms["queue_seconds"].add(max(0.0, waited - found.seconds))  # its seconds are the prompt's
        if gap is not None:
            histograms["round_gap_seconds"].add(gap)
        if found.verify:
            counts["rounds_total"] += 1
            counts["round_seconds_total"] += found.seconds
            if is_drafted and found.tokens:
                self._drafted.update(rounds=1, tokens=len(found.tokens))

    def text(self, slots, busy):
        """The page. busy: texts that run or wait."""
        told = {name: self._counts[name] for name, (kind, _) in HELP.items() if kind == "counter"}
        told |= {"slots": slots, "lanes": min(slots, busy), "waiting": max(0, busy - slots)}
        del told["requests_total"]
        if self._drafted["rounds"]:
            told["tau"] = self._drafted["tokens"] / self._drafted["rounds"]
        lines = []
        for name, (kind, words) in HELP.items():
            lines += [f"# HELP minidflash_{name} {words}", f"# TYPE minidflash_{name} {kind}"]
            if name == "requests_total":
                lines += [f'minidflash_{name}{{outcome="{how}"}} {self._ended[how]}'
                          for how in ("completed", "cancelled", "refused", "failed")]  # fmt: skip
            elif kind == "histogram":
                lines += self._histograms[name].lines(f"minidflash_{name}")
            elif name in told:
                lines.append(f"minidflash_{name} {told[name]}")
        return "\n".join(lines) + "\n"
