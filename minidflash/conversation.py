"""Chat: a conversation. Each turn runs only the rows that the caches do not hold from the turn before."""

from contextlib import closing

from .errors import UserError
from .loop import rounds_of
from .request import Request, checked
from .run import complete
from .stats import Timing
from .values import instance

ENDED = "stop", "length"  # of themselves


class Chat:
    """A conversation on an engine.

    messages: what was said, dicts of role and content, the system text first; yours to read, edit and keep.
    Every turn renders all of them, so that its reply is, bit for bit, that of `generate(engine, messages)`;
    what the caches hold already of these ids, whoever ran them, is not run again: on the CPU all of it, on a
    GPU the rows that were run as a prompt (prefix.py). Source: engine.md 6.
    """

    def __init__(self, engine, system=None, **options):
        """Begin a conversation.

        engine: Engine; other runs may use it between turns. system: str or None. options: keywords of
        `generate` for every turn. Errors: TypeError for an unknown keyword; UserError for a bad value, for
        what has no place in a conversation, and for a checkpoint that cannot chat. Source: none.
        """
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            lacks = "tokenizer.json" if engine.tokenizer is None else "chat template"
            raise UserError(
                f"this checkpoint has no {lacks}, so it cannot chat", "minidflash generate goes without it"
            )
        self.engine, self.options, self._system = engine, options, system
        self._check({"system": system})
        self.reset()

    def reset(self):
        """Forget what was said, but for the system text. Errors: none. Source: none."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def stream(self, text, **options):
        """Say something; the reply comes as `minidflash.stream` yields it.

        text: str. options: keywords for this turn alone. Returns a generator of Round. However it ends, what
        was yielded of the reply is kept; where that is no text, and the reply did not end of itself, the turn
        is forgotten. Errors: those of `minidflash.stream`; UserError for a generator that begins after
        another turn. Source: none.
        """
        said, request = self.ask(text, **options)
        return self.rounds_of(said, request, Timing())

    def say(self, text, **options):
        """Say something, and wait for the reply, or for Ctrl-C. Arguments, errors: as `stream`. Returns a
        Result; its stats tell rows_reused and rows_run. Source: none."""
        (said, request), timing = self.ask(text, **options), Timing()
        return complete(self.engine, request, self.rounds_of(said, request, timing), timing)

    def ask(self, text, **options):
        """Check a turn.

        Arguments, errors: as `stream`. Returns (messages with the text as the last one, Request).
        Source: none.
        """
        self._check(options)
        if not instance("the message", text, str, "a text").strip():
            raise UserError("the message is empty", "say something")
        said = [*self.messages, {"role": "user", "content": text}]
        return said, Request.of(self.engine, said, self.options | options, resumes=True)

    def rounds_of(self, said, request, timing):
        """Rounds of a turn that `ask` checked, and their text into messages.

        timing: Timing to fill in. Returns a generator. Errors: as `stream`. Source: none.
        """
        if self.messages != said[:-1]:
            raise UserError("the conversation went on since this reply was asked for", "ask again")
        texts, reason = [], None
        try:
            with closing(rounds_of(self.engine, request, timing)) as rounds:
                for r in rounds:
                    texts.append(r.text)
                    reason = r.finish_reason
                    yield r
        finally:
            if any(texts) or reason in ENDED:
                self.messages = [*said, {"role": "assistant", "content": "".join(texts)}]

    def _check(self, options):
        """Errors: UserError for options that have no place in a conversation, and those of `generate`."""
        found, _ = checked(self.engine, self.options | options)
        if found["raw"]:
            raise UserError(
                "raw has no place in a conversation: the chat template tells who speaks", "leave it out"
            )
        if found["samples"] > 1:
            raise UserError("samples has no place in a conversation: a turn has one reply", "leave it out")
