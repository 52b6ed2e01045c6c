"""Output told by channel: a model thinks in one channel and answers in another, and only the answer is text.

A message is `<|start|>role<|channel|>name<|message|>body` and an end mark; more may follow the name. A prompt
ends inside the assistant's message, so the output goes on where the prompt left off. Whether output is told
so depends on what the tokenizer holds, not on the model's family.
Source: OpenAI's harmony response format.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

from .values import told

FINAL = "final"
NEEDED = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"
ENDS = "<|end|>", "<|return|>", "<|call|>"


@dataclass(frozen=True)
class Marks:
    """The ids that part messages. ends: those after a body."""

    start: int
    channel: int
    message: int
    ends: frozenset

    @classmethod
    def of(cls, backend):
        """The marks of a tokenizers.Tokenizer, None where one that is needed is no added token of it."""
        ids = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
        if not all(name in ids for name in NEEDED):
            return None
        start, channel, message = (ids[name] for name in NEEDED[:3])
        return cls(start, channel, message, frozenset(ids[name] for name in ENDS if name in ids))


class Reader:
    """Follows messages id by id. channel: of the message whose body has begun, else None."""

    def __init__(self, tokenizer, prompt=()):
        """Start behind a prompt. tokenizer: Tokenizer with marks. prompt: list of int."""
        self._tokenizer = tokenizer
        self._name = []  # ids between <|channel|> and <|message|>
        self._is_named = self._is_body = False
        self.channel = None
        start, last = tokenizer.marks.start, len(prompt) - 1
        # No earlier message matters.
        begin = next((at for at in range(last, -1, -1) if prompt[at] == start), 0)
        for token in prompt[begin:]:
            self.push(token)

    @property
    def is_final(self):
        """True inside the body of a final message."""
        return self.channel == FINAL

    def push(self, token):
        """Take one id. Returns True where it lies in a body."""
        marks = self._tokenizer.marks
        if token == marks.message:
            if self._is_named:
                shown = list(takewhile(self._tokenizer.is_shown, self._name))  # other marks end a name
                self.channel = next(iter(self._tokenizer.decode(shown).split()), None)
            self._is_named, self._is_body = False, True
        elif token == marks.channel or token == marks.start or token in marks.ends:
            self._name, self._is_named, self._is_body = [], token == marks.channel, False
            self.channel = None
        elif self._is_body:
            return True
        elif self._is_named:
            self._name.append(token)
        return False


class _MarkedStream:
    """A TextStream of some of the ids: what `_push` takes of each, joined. _text: the TextStream."""

    def push(self, ids):
        """Take ids, return the new text that will not change any more.

        ids: list of int. Returns str, perhaps "". Errors: none. Source: TextStream.
        """
        return "".join([self._push(token) for token in ids])

    def finish(self):
        """Return what is still held back. Returns str. Errors: none. Source: TextStream."""
        return self._text.finish()


class FinalStream(_MarkedStream):
    """A TextStream's work for final messages: pieces join to what decode gives of their bodies, in turn.

    has_begun: a final message has; until then no token can add text. Source: class docstring of TextStream.
    """

    def __init__(self, tokenizer, prompt=()):
        """Start behind a prompt.

        tokenizer: Tokenizer with marks. prompt: list of int. Errors: none. Source: none.
        """
        self._text = tokenizer.stream()
        self._reader = Reader(tokenizer, prompt)
        self.has_begun = self._reader.is_final

    def _push(self, token):
        is_body = self._reader.push(token)
        if self._reader.is_final:
            self.has_begun = True
            return self._text.push([token]) if is_body else ""
        return self._text.finish()


class WholeStream(_MarkedStream):
    """All text as it comes, special tokens written out between what decode gives of the ids between them."""

    has_begun = True

    def __init__(self, tokenizer):
        """Start empty.

        tokenizer: Tokenizer. Errors: none. Source: none.
        """
        self._tokenizer, self._text = tokenizer, tokenizer.stream()

    def _push(self, token):
        if self._tokenizer.is_shown(token):
            return self._text.push([token])
        return self._text.finish() + (self._tokenizer.backend.id_to_token(token) or "")


def open_stream(tokenizer, prompt=(), raw=False):
    """The stream that makes text of a run's ids.

    tokenizer: Tokenizer. prompt: list of int, which the ids go on from. raw: all channels, marks included.
    Returns TextStream for a tokenizer without channels, else FinalStream or WholeStream. Errors: none.
    Source: none.
    """
    if tokenizer.marks is None:
        return tokenizer.stream()
    return WholeStream(tokenizer) if raw else FinalStream(tokenizer, prompt)


def without_final(tokenizer, prompt, tokens):
    """What an answer holds instead of a final message, in words.

    tokenizer: Tokenizer with marks. prompt, tokens: lists of int. Returns str, such as
    "250 tokens of 'analysis'"; None where a final message begins. Errors: none. Source: none.
    """
    reader, counts = Reader(tokenizer, prompt), Counter()
    for token in tokens:
        if reader.is_final:
            break
        if reader.push(token):
            counts[reader.channel] += 1
    if reader.is_final:
        return None
    parts = [f"{_tokens(count)} of {told(name) if name else 'no channel'}" for name, count in counts.items()]
    return ", ".join(parts) or f"{_tokens(len(tokens))}, in no message"


def _tokens(count):
    return f"{count} token" + "s" * (count != 1)
