"""How the target's token is chosen: the checked sampling options, and what of them lies on the device."""

from dataclasses import dataclass

import numpy as np

from .errors import UserError
from .values import flag, one_of, real, whole

GREEDY_BELOW = 1e-5  # as in kernels/oracle.py: a temperature from 0 to here means the likeliest token
OPTIONS = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "samples": 1, "accept": "match",
    "logprobs": False,
}  # fmt: skip
LARGEST = 3e38  # of f32, about: a hotter law is as flat
MOST_SAMPLES = 65536  # the first tokens of all of them are drawn and kept before the first answer begins


@dataclass(frozen=True)
class Sampling:
    """Checked. A draw belongs to (seed, sample, position), so it does not matter which round makes it.

    accept "match" (sample-and-match): the target's own draw at every position decides, and drafts that equal
    it are kept. So the text is drawn from the target's filtered law, whatever the drafter, and is the same
    without one. accept "reject": drafts are drawn from the drafter's law, through the same filters, and kept
    by rejection sampling. The law is the same, the text is not: it depends on the drafter,
    the block and the rows verified.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    samples: int
    accept: str
    logprobs: bool

    @classmethod
    def of(cls, given):
        """Check keywords; absent or None is the default. Errors: UserError naming the option."""
        o = OPTIONS | {name: value for name, value in given.items() if name in OPTIONS and value is not None}
        law = cls(
            real("temperature", o["temperature"], lambda t: t >= 0, "a number from 0 up"),
            whole("top_k", o["top_k"], 0, 2**31 - 1),
            real("top_p", o["top_p"], lambda p: 0 < p <= 1, "a number above 0, at most 1"),
            real("min_p", o["min_p"], lambda p: 0 <= p <= 1, "a number from 0 to 1"),
            whole("seed", o["seed"], 0, 2**64 - 1),
            whole("samples", o["samples"], 1, MOST_SAMPLES),
            one_of("accept", o["accept"], ("match", "reject")),
            flag("logprobs", o["logprobs"]),
        )
        if given.get("temperature") is None:
            for name in ("top_k", "top_p", "min_p", "seed", "samples", "accept"):
                if getattr(law, name) != OPTIONS[name]:
                    wish = "--" + name.replace("_", "-")
                    raise UserError(
                        f"{wish} has no effect at temperature 0", f"leave out {wish}, or give --temperature"
                    )
        return law

    @property
    def rejects(self):
        """Whether drafts are drawn, and kept by rejection sampling; near temperature 0 both rules are one."""
        return self.accept == "reject" and self.temperature >= GREEDY_BELOW

    def check_verify(self, verify):
        """Refuse a number of rows that is not fixed, where the text depends on it. Errors: UserError."""
        if self.accept == "reject" and verify == "auto":
            raise UserError(
                "--accept reject needs a fixed --verify: it promises the target's law, not the text of plain "
                "decoding, and what a seed gives depends on how many drafts a round verifies",
                "add --verify N, or leave out --accept reject",
            )

    @property
    def choice(self):
        """How target.choose chooses."""
        if self.logprobs:
            return "scored"
        return "drawn" if self.temperature >= GREEDY_BELOW else "likeliest"

    def place(self, ops, s, number, slot=0):
        """Write key and law of sample `number` to a slot of the state."""
        words = np.array([self.seed & 0xFFFFFFFF, self.seed >> 32, number, self.top_k], np.uint32)
        law = np.array([min(self.temperature, LARGEST), self.top_p, self.min_p], np.float32)
        law[1] = max(law[1], np.finfo(np.float32).tiny)  # the likeliest token stays
        ops.upload(s.key[slot : slot + 1], words.view(np.int32)[None])
        ops.upload(s.law[slot : slot + 1], law[None])
