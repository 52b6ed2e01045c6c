"""The text of rounds: fills in Round.text, and ends a run at a stop string with ids and text together."""

from bisect import bisect_left

from .channels import open_stream
from .errors import UserError


class StopText:
    """Find the first stop string in text that comes token by token, also across tokens and rounds.

    The cut lies before the stop string. The tokens that stay are the fewest that carry all of the kept text:
    where the stop begins on a token bound, decode(kept ids) is exactly the kept text; where it begins inside
    a token, that token stays and the text ends within it. The answer depends on the tokens alone, never on
    how rounds group them, so drafted and plain decoding stop alike. Tokens before the text, those of other
    channels, all stay. Source: F32.

    is_found: a stop is complete. kept_chars, kept_tokens: what certainly stays, counted from the start;
    final once is_found.
    """

    def __init__(self, stops):
        """Start at the beginning of an answer.

        stops: list of str. Errors: UserError for an empty stop string. Source: none.
        """
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise UserError("a stop string is empty", hint="give --stop some text")
        self._stops = list(stops)
        self._reach = max(map(len, self._stops), default=1) - 1  # characters a stop may lie before new text
        self._tail = ""  # the last _reach characters
        self._ends = []  # characters so far, after each token
        self._before = 0  # tokens before the text
        self.is_found = False
        self.kept_chars = 0
        self.kept_tokens = 0

    def push(self, piece, is_before=False):
        """Take the text that one token added.

        piece: str, "" when the token showed nothing yet. is_before: it comes before the text.
        Returns is_found.
        Errors: none. Source: F32.
        """
        start = (self._ends[-1] if self._ends else 0) - len(self._tail)
        text = self._tail + piece
        self._ends.append(start + len(text))
        self._before += is_before
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self.is_found = True
            self.kept_chars = start + min(found)
        else:
            self.kept_chars = start + len(text) - self._held(text)
            self._tail = text[max(0, len(text) - self._reach) :]
        # A token without text of its own stays only if text follows it: a later cut may fall right here.
        self.kept_tokens = bisect_left(self._ends, self.kept_chars) + 1 if self.kept_chars else self._before
        return self.is_found

    def _held(self, text):
        """How many last characters may be the start of a stop."""
        for count in range(min(self._reach, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0


class RoundText:
    """Give rounds their text and end them at a stop string; used by the loop between commit and yield.

    With stop strings a round whose end may belong to a stop is held until that is decided, because a round
    once given out is never taken back. Without stop strings nothing is held. is_stopped: a stop string was
    found; the loop ends then. Source: F32, F35.
    """

    def __init__(self, tokenizer, stops=(), prompt=(), raw=False):
        """Start at the beginning of an answer.

        tokenizer: Tokenizer, or None: text is then None. stops: stop strings. prompt, raw: as in open_stream.
        Errors: UserError for an empty stop, a bare str, or stops without a tokenizer. Source: none.
        """
        if isinstance(stops, str):
            raise UserError("stop is one text, a list is needed", hint=f"stop=[{stops!r}]")
        if stops and tokenizer is None:
            raise UserError(
                "stop strings need a tokenizer, and this checkpoint has none", hint="leave out stop"
            )
        self._stream = open_stream(tokenizer, prompt, raw) if tokenizer is not None else None
        self._stop = StopText(stops) if stops else None
        self._held = []  # rounds not given out yet
        self._tokens_out = 0
        self._chars_out = 0
        self.is_stopped = False

    def push(self, round, is_last=False):
        """Take a round as committed, return the rounds that can be given out now, with their text.

        round: Round, tokens after id stops and budget; changed in place. is_last: no round follows, so
        held text is given out. Returns list of Round, perhaps empty. On a stop string the tokens after it
        leave their rounds, rounds left without tokens are dropped, and the last one gets finish_reason
        "stop"; when no round is left to carry that, an empty one does. Errors: none. Source: F32.
        """
        if self._stream is None:
            round.text = None
            return [round]
        if self._stop is None:
            round.text = self._stream.push(round.tokens) + (self._stream.finish() if is_last else "")
            return [round]
        round.text = ""
        self._held.append(round)
        for index, token in enumerate(round.tokens):
            is_before = not self._stream.has_begun
            piece = self._stream.push([token])
            if is_last and index == len(round.tokens) - 1:
                piece += self._stream.finish()
            round.text += piece
            if self._stop.push(piece, is_before):
                self.is_stopped = True
                return self._cut()
        return self.finish() if is_last else self._release()

    def finish(self):
        """Give out what is held: the run ends without a stop string (also when it was interrupted).

        Returns list of Round. Errors: none. Source: none.
        """
        ready, self._held = self._held, []
        return ready

    def _release(self):
        """The held rounds that no later cut can touch."""
        ready = []
        while self._held and self._is_kept(self._held[0]):
            ready.append(self._held.pop(0))
            self._tokens_out += len(ready[-1].tokens)
            self._chars_out += len(ready[-1].text)
        return ready

    def _is_kept(self, round):
        """Whether no later cut can touch the round's tokens, nor the end of its text (a stop may begin inside
        a token)."""
        tokens, chars = self._tokens_out + len(round.tokens), self._chars_out + len(round.text)
        return tokens <= self._stop.kept_tokens and chars <= self._stop.kept_chars

    def _cut(self):
        """The held rounds, ended at the stop."""
        tokens, chars = self._stop.kept_tokens - self._tokens_out, self._stop.kept_chars - self._chars_out
        ready = []
        for round in self.finish():
            round.tokens, round.text = round.tokens[:tokens], round.text[:chars]
            round.logprobs = round.logprobs and round.logprobs[:tokens]
            tokens, chars = tokens - len(round.tokens), chars - len(round.text)
            last = round
            if round.tokens:
                ready.append(round)
        ready = ready or [last]
        ready[-1].finish_reason = "stop"
        return ready
