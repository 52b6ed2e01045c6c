"""Rounds as the objects that OpenAI's clients read: one whole, or a chunk a round.
Source: its API reference."""

import json
import time
import uuid


class Chat:
    """The form of /v1/chat/completions."""

    id, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    @staticmethod
    def answer(index, text, reason, logprobs):
        """A whole answer, as a choice."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    @staticmethod
    def piece(index, text, reason=None, logprobs=None, is_first=False):
        """What a round adds, as a choice."""
        delta = {"role": "assistant"} if is_first else {}
        delta |= {"content": text} if text or is_first else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    @staticmethod
    def logprobs(tokenizer, tokens, pairs):
        """Each token's log-probability under the model's own law."""
        told = [(token_text(tokenizer, t), own) for t, (_, own) in zip(tokens, pairs, strict=True)]
        return {"content": [{"token": text, "logprob": own, "bytes": token_bytes(text), "top_logprobs": []}
                            for text, own in told], "refusal": None}  # fmt: skip


class Text:
    """The form of /v1/completions."""

    id, whole, chunk = "cmpl-", "text_completion", "text_completion"

    @staticmethod
    def answer(index, text, reason, logprobs):
        """A whole answer, as a choice."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    @staticmethod
    def piece(index, text, reason=None, logprobs=None, is_first=False):
        """What a round adds, as a choice."""
        return Text.answer(index, text, reason, logprobs)

    @staticmethod
    def logprobs(tokenizer, tokens, pairs):
        """As Chat.logprobs."""
        return {"tokens": [token_text(tokenizer, t) for t in tokens],
                "token_logprobs": [own for _, own in pairs],
                "top_logprobs": None, "text_offset": None}  # fmt: skip


class Reply:
    """The objects of one request. form: Chat or Text. facts: model and system_fingerprint.
    first: the handle of its first answer."""

    def __init__(self, form, tokenizer, facts, first):
        self.form, self._tokenizer = form, tokenizer
        self._head = {"id": form.id + uuid.uuid4().hex, "created": int(time.time()), **facts}
        self._first, self._tokens = first, 0

    def count(self, rounds):
        """Count the tokens of rounds."""
        self._tokens += sum(len(r.tokens) for r in rounds)

    @property
    def usage(self):
        """Tokens of the prompt, those of them that a slot kept, and those of all rounds that were counted."""
        prompt = self._first.prompt_tokens
        return {
            "prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens,
            "prompt_tokens_details": {"cached_tokens": self._first.reused_tokens},
        }  # fmt: skip

    def whole(self, answers):
        """The object of answers, each a list of Round."""
        choices = [
            self.form.answer(
                i, "".join(r.text for r in rounds), rounds[-1].finish_reason, self._logprobs(rounds)
            )
            for i, rounds in enumerate(answers)
        ]
        return {**self._head, "object": self.form.whole, "choices": choices, "usage": self.usage}

    def chunk(self, choices, usage=None):
        """The object of one event."""
        told = {**self._head, "object": self.form.chunk, "choices": choices}
        return told if usage is None else told | {"usage": usage}

    def piece(self, index, found, is_first=False):
        """A Round as a choice; a form may say at the first one of an answer who speaks."""
        return self.form.piece(index, found.text, found.finish_reason, self._logprobs([found]), is_first)

    def _logprobs(self, rounds):
        if any(r.logprobs is None for r in rounds):
            return None
        tokens, pairs = [t for r in rounds for t in r.tokens], [p for r in rounds for p in r.logprobs]
        return self.form.logprobs(self._tokenizer, tokens, pairs)


def event(found):
    """An object as a server-sent event."""
    return f"data: {json.dumps(found, allow_nan=False)}\n\n".encode()


def token_text(tokenizer, token):
    """The text of one token; of a special one its name."""
    if tokenizer.is_shown(token):
        return tokenizer.decode([token])
    return tokenizer.backend.id_to_token(token) or ""


def token_bytes(text):
    """UTF-8 of a token's text; None where the token holds a part of a character."""
    return None if "\ufffd" in text else list(text.encode())
