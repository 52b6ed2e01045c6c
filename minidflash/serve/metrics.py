"""What /metrics tells, in Prometheus's text format."""

import time
from collections import Counter

HELP = {  # name -> (kind, what it is); all begin with minidflash_
    "slots": ("gauge", "Texts that can run side by side."),
    "lanes": ("gauge", "Texts that run."),
    "waiting": ("gauge", "Texts that wait for a slot."),
    "tau": ("gauge", "Tokens a round, mean of all drafted runs so far."),
    "requests_total": ("counter", "Requests that ended, by how: completed, cancelled, refused, failed."),
    "prompt_tokens_total": ("counter", "Tokens of prompts that were taken on."),
    "tokens_total": ("counter", "Tokens that were generated."),
    "rounds_total": ("counter", "Rounds of texts: two texts in one round of the machine are two."),
    "round_seconds_total": ("counter", "Seconds of these rounds."),
    "first_token_seconds_sum": ("counter", "Seconds from a request to its first token, summed."),
    "first_token_seconds_count": ("counter", "Texts that had a first token."),
    "queue_seconds_sum": ("counter", "The part of them before the prompt ran, summed."),
}


class Meters:
    """Counters since the start. last_round: when a round came last, by time.monotonic, or None."""

    def __init__(self):
        self._counts, self._ended, self._drafted = Counter(), Counter(), Counter()
        self.last_round = None

    def begin(self, prompt_tokens):
        """A text was taken on."""
        self._counts["prompt_tokens_total"] += prompt_tokens

    def end(self, how):
        """A request ended. how: as in HELP."""
        self._ended[how] += 1

    def add(self, found, is_drafted, waited=None):
        """A Round came. is_drafted: a drafter takes part. waited: for the first one, seconds since it was
        asked for."""
        self.last_round = time.monotonic()
        counts = self._counts
        counts["tokens_total"] += len(found.tokens)
        if waited is not None:
            counts["first_token_seconds_sum"] += waited
            counts["first_token_seconds_count"] += 1
            counts["queue_seconds_sum"] += max(0.0, waited - found.seconds)  # its seconds are the prompt's
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
            elif name in told:
                lines.append(f"minidflash_{name} {told[name]}")
        return "\n".join(lines) + "\n"
