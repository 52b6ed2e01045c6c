"""What a run yields and what is counted about it: Round, Stats, Timing, Memory, Result."""

import math
from dataclasses import asdict, dataclass, field

SCHEMA = 1  # the `schema` of Result.to_json(), described by result.schema.json


@dataclass
class Detail:
    """What the rounds of a run with trace=True also say.

    anchor: the token that the round went on from, at position `start`. injected: context features that were
    injected. choice: the target's token behind each verified row, None where its logits were not finite:
    behind drafts that were kept it is the next draft or the target's own, behind others what it would have
    said after them. margins: how far each choice's logit lies above the second largest; None for the whole
    round where tokens are drawn or scored, since a draw is not the largest of anything, and for a row that
    has no second or no numbers. stages: seconds by stage, in order; the rest of Round.seconds is the host's.
    Of the round that prefill is: the row behind the prompt's last token. Source: engine.md 2.
    """

    anchor: int
    start: int
    injected: int
    choice: list
    margins: list | None
    stages: dict

    @classmethod
    def of(cls, anchor, start, injected, choice, margins, stages):
        """From arrays as a backend has them. choice: i32 (v,). margins: f32 (v,) or None. Errors: none."""
        if margins is not None:
            margins = [number if math.isfinite(number) else None for number in margins.tolist()]
        choice = [None if number < 0 else number for number in choice.tolist()]
        return cls(anchor, start, injected, choice, margins, stages)


@dataclass
class Round:
    """One draft-verify-accept round, as `stream` yields it.

    tokens: ids committed by it, after stop and budget cuts. text: what they add to the text, None without a
    tokenizer; a character still incomplete comes with a later round. Of a model with channels the text is
    that of the final one, with raw=True all of it, special tokens too. drafted: the drafts that were verified
    (v - 1 ids). accepted: how many of them verification kept, before stop and budget cuts. verify: v, the
    rows verified. seconds: wall time, of all texts that run side by side. finish_reason: on a run's last
    round why it ended, else None. sample: which of several answers to one prompt. logprobs: where asked for,
    a pair for each token: its log-probability under the law that it was drawn from, and under the model's own
    (temperature 1, no filter). experts: distinct ones of a layer that the verified rows went through, the
    mean over layers; None for a target without, and for texts side by side. detail: with trace=True.

    The first item of a stream is the token that prefill chose: drafted == [], verify == 0. Plain decoding
    yields one token a round with drafted == [], verify == 1. Source: engine.md 2 and 5.
    """

    tokens: list[int]
    text: str | None = None
    drafted: list[int] = field(default_factory=list)
    accepted: int = 0
    verify: int = 0
    seconds: float = 0.0
    finish_reason: str | None = None
    sample: int = 0
    logprobs: list | None = None
    experts: float | None = None
    detail: Detail | None = None


@dataclass
class Stats:
    """How well drafting worked. Fields as in engine.md 5.

    tau: mean of the tokens committed by a round, None without rounds. round_count: verify rounds that
    committed something; prefill is not one, and plain decoding has none. drafted: verified drafts. accepted:
    drafts kept by verification. acceptance_by_position: for positions 1..B-1 of the block accepted / reached,
    where one is reached when it was verified and all before it were accepted; None where it never was.
    verify: v of each round. block: B, None for plain decoding. rows_reused, rows_run: rows of the prompt that
    the caches held, and that were run. Source: engine.md 5, F41.
    """

    tau: float | None
    round_count: int
    drafted: int
    accepted: int
    acceptance_by_position: list[float | None]
    verify: list[int]
    block: int | None
    rows_reused: int = 0
    rows_run: int = 0

    @classmethod
    def of(cls, rounds, block, rows_reused=0, rows_run=0):
        """Count over the rounds of one run.

        rounds: list of Round. block: B the drafter drafted at, None for plain decoding. rows_reused,
        rows_run: as in the class. Returns Stats.
        Errors: none. Source: engine.md 5.
        """
        counted = verify_rounds(rounds, block)
        by_position = []
        for i in range(1, block or 1):
            reached = sum(r.verify > i and r.accepted >= i - 1 for r in counted)
            kept = sum(r.verify > i and r.accepted >= i for r in counted)
            by_position.append(kept / reached if reached else None)
        return cls(
            tau=sum(len(r.tokens) for r in counted) / len(counted) if counted else None,
            round_count=len(counted),
            drafted=sum(len(r.drafted) for r in counted),
            accepted=sum(r.accepted for r in counted),
            acceptance_by_position=by_position,
            verify=[r.verify for r in counted],
            block=block,
            rows_reused=rows_reused,
            rows_run=rows_run,
        )

    def to_json(self):
        """The `stats` object of engine.md 5.

        Returns dict. Errors: none. Source: engine.md 5.
        """
        return asdict(self)


@dataclass
class Timing:
    """Seconds of a run's parts, and tokens per second.

    load_s: reading weights. jit_s: compiling kernels. prefill_s: the prompt. decode_s: all rounds after it.
    ttft_s: from the call of generate or stream to the first token, all that lies between counted.
    tokens_per_s: tokens after the first / decode_s, None when there are none. Source: engine.md 5.
    """

    load_s: float = 0.0
    jit_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    tokens_per_s: float | None = None


@dataclass
class Memory:
    """Bytes of the buffers a run holds. Source: engine.md 5."""

    weights: int = 0
    rope_tables: int = 0
    target_cache: int = 0
    drafter_cache: int = 0
    workspace: int = 0


@dataclass
class Result:
    """A finished run.

    text: as in Round. tokens: all new ids, a stop id included. finish_reason: "stop", "length"
    or "interrupted". rounds: tokens committed by each verify round; the prefill's token is not in it, so
    1 + sum(rounds) == len(tokens) unless tokens is empty; [] for plain decoding. prompt_tokens: count.
    machine: one line. target, drafter: names as loaded, drafter None for plain decoding. options: what the
    run was asked for. samples: None, or with --samples N every answer: text, tokens, finish_reason, rounds
    (and logprobs); the first is the one told here. logprobs: None, or as in Round. Source: engine.md 5.
    """

    text: str | None
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    rounds: list[int]
    stats: Stats
    timing: Timing
    memory_bytes: Memory
    backend: str
    activations: str
    machine: str
    target: str
    drafter: str | None
    options: dict
    samples: list | None = None
    logprobs: list | None = None

    @classmethod
    def of(
        cls, rounds, block, finish_reason=None, timing=None, memory_bytes=None, samples=1, rows=(0, 0),
        **facts
    ):  # fmt: skip
        """Gather a run's rounds.

        rounds: list of Round as streamed. block: B, None for plain decoding. finish_reason: of the last
        answer where its rounds say none, default "length". samples: how many answers were asked for; those
        that had not begun when a run was interrupted are left out. timing.tokens_per_s is filled in where it
        is None, over all of them. rows: of the prompt, reused and run. facts: prompt_tokens,
        backend, activations, machine, target, drafter, options. Returns Result. Errors: TypeError for a
        missing or unknown fact. Source: engine.md 5.
        """
        begun = rounds[-1].sample + 1 if rounds else 1 if finish_reason else samples
        answers = [[r for r in rounds if r.sample == i] for i in range(begun)]
        decoded = sum(len(r.tokens) for r in rounds) - len(answers)
        timing = timing or Timing()
        if timing.tokens_per_s is None and decoded > 0 and timing.decode_s > 0:
            timing.tokens_per_s = decoded / timing.decode_s
        told = [answer(of_one, block, finish_reason if of_one is answers[-1] else None) for of_one in answers]
        return cls(
            **told[0],
            stats=Stats.of(answers[0], block, *rows),
            timing=timing,
            memory_bytes=memory_bytes or Memory(),
            samples=told if samples > 1 else None,
            **facts,
        )

    def to_json(self):
        """The object that `--json` prints; result.schema.json describes it.

        Returns dict of plain JSON values, keys in engine.md's order. Errors: none. Source: engine.md 5.
        """
        extra = {"samples": self.samples, "logprobs": self.logprobs}
        return {
            "schema": SCHEMA,
            "text": self.text,
            "tokens": [int(token) for token in self.tokens],
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "rounds": list(self.rounds),
            "stats": self.stats.to_json(),
            "timing": asdict(self.timing),
            "memory_bytes": asdict(self.memory_bytes),
            "backend": self.backend,
            "activations": self.activations,
            "machine": self.machine,
            "target": self.target,
            "drafter": self.drafter,
            "options": self.options,
        } | {name: value for name, value in extra.items() if value is not None}


def answer(rounds, block, finish_reason=None):
    """One sample's text, tokens, finish_reason, rounds, and logprobs if it has them, as a dict.
    Arguments as Result.of."""
    texts = [r.text for r in rounds]
    told = {
        "text": None if None in texts else "".join(texts),
        "tokens": [int(token) for r in rounds for token in r.tokens],
        "finish_reason": (rounds[-1].finish_reason if rounds else None) or finish_reason or "length",
        "rounds": [len(r.tokens) for r in verify_rounds(rounds, block)],
    }
    if any(r.logprobs is not None for r in rounds):
        told["logprobs"] = [pair for r in rounds for pair in r.logprobs or []]
    return told


def verify_rounds(rounds, block):
    """The rounds that statistics count: not prefill's token, not plain decoding's, none a stop emptied.

    rounds: list of Round. block: B, None for plain decoding. Returns list of Round. Errors: none.
    Source: engine.md 5.
    """
    return [r for r in rounds if r.verify > 0 and r.tokens] if block else []
