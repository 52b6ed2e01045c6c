"""Lane: a text in its slot, from the token behind its prompt to why it ends."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from minidflash.kernels.record import NOT_FINITE, OUT_OF_BUDGET, STOPPED

from .errors import UserError
from .request import Request
from .schedule import Schedule
from .text import RoundText

REASONS = {0: None, STOPPED: "stop", OUT_OF_BUDGET: "length", NOT_FINITE: None}


@dataclass(eq=False)
class Lane:
    """Sample `number` of a request, in a slot. schedule: what it learns of its drafts.

    texts: of its rounds. anchor: its newest token. committed: its tokens. waiting: context features, as
    s.fresh says. widths: rows of its rounds where those are fixed beforehand. given: its rounds that nobody
    has taken yet. is_over: it has no further round; then error says why, where that is no end of its own.
    """

    request: Request
    slot: int
    schedule: Schedule
    number: int = 0
    anchor: int = -1
    committed: int = 0
    waiting: int = 0
    widths: Any = None
    texts: RoundText | None = None
    given: deque = field(default_factory=deque)
    is_over: bool = False
    is_interrupted: bool = False
    error: UserError | None = None

    @classmethod
    def of(cls, engine, request, slot, schedule, number=0):
        """A lane that has not begun."""
        lane = cls(request, slot, schedule, number)
        lane.widths = iter(request.widths[number]) if request.widths else None
        lane.texts = RoundText(engine.tokenizer, request.stop, request.ids, request.raw)
        return lane

    @property
    def start(self):
        """Position of its anchor; before it begins, of the prompt's last token."""
        return len(self.request.ids) + self.committed - 1

    def take(self, found, why, is_interrupted):
        """Take in a round as committed; what can be given out now is, with its text. why: of its record."""
        self.is_interrupted = why == 0 and is_interrupted
        found.finish_reason = "interrupted" if self.is_interrupted else REASONS[why]
        self.given += self.texts.push(found, found.finish_reason is not None)
        self.is_over = why != 0 or self.is_interrupted or self.texts.is_stopped
        if why == NOT_FINITE and not self.texts.is_stopped:
            self.break_off()

    def break_off(self):
        """The target computes no numbers behind the anchor."""
        self.given += self.texts.finish()
        self.is_over, self.error = True, not_finite(self.start)


def not_finite(position):
    """The UserError of a run whose target computes no numbers. Code 1:
    what was generated before it is right."""
    return UserError(
        f"the target's logits at position {position} are not finite (NaN or infinity): damaged weights, "
        f"or an overflow",
        "fetch the checkpoint again, or try --activations f32",
        code=1,
    )
