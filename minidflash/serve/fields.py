"""A request's body: its fields become keywords of a run; what is not understood is refused by its name."""

from dataclasses import dataclass
from typing import Any

from ..values import told
from .refusal import Refusal

MOST_ANSWERS = 128  # of one request, as OpenAI has it
# Fields of a run, and the keyword of `generate` that each one is.
KEYWORDS = {
    "max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "min_p": "min_p", "seed": "seed", "stop": "stop",
}  # fmt: skip
CHAT = {"max_completion_tokens": "max_tokens", "chat_template_kwargs": "template_args"}
OTHERS = "model", "n", "stream", "stream_options", "logprobs", "user"  # user: who asks; changes no text
# Clients send these always; with such a value they ask for nothing.
NOTHING = {
    "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "tools": [], "top_logprobs": 0,
    "response_format": {"type": "text"}, "best_of": 1, "echo": False,
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A body that was understood.

    prompt: messages, a text, or ids. options: keywords of `generate`. answers: how many. model: None where
    none was named. is_streamed: events, not one object. tells_usage: in an event of its own.
    """

    prompt: Any
    options: dict
    answers: int
    model: str | None
    is_streamed: bool
    tells_usage: bool

    def seeded(self, number):
        """Options of one of the answers: where they are drawn, each has the seed behind the one before it."""
        if not number or not self.options.get("temperature"):
            return self.options
        return self.options | {"seed": (self.options.get("seed") or 0) + number}


def read_chat(body):
    """Asked, from a body of /v1/chat/completions. Errors: Refusal naming the field."""
    body = present(body, {*KEYWORDS, *CHAT, *OTHERS, "messages"})
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "messages must be a list with at least one message", "messages")
    prompt = [message_of(i, message) for i, message in enumerate(messages)]
    if {"max_tokens", "max_completion_tokens"} <= set(body):
        raise Refusal(400, "max_tokens and max_completion_tokens are one limit; give one", "max_tokens")
    options = options_of(body, KEYWORDS | CHAT)
    if "logprobs" in body:
        options["logprobs"] = flag(body, "logprobs")
    return asked_of(body, prompt, options)


def read_text(body):
    """Asked, from a body of /v1/completions. Errors: as read_chat."""
    body = present(body, {*KEYWORDS, *OTHERS, "prompt"})
    if "prompt" not in body:
        raise Refusal(400, "prompt is missing: a text, or a list of token ids", "prompt")
    prompt = body["prompt"]
    is_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise Refusal(400, f"prompt is {told(prompt)}, need a text or a list of token ids", "prompt")
    options = options_of(body, KEYWORDS)
    if isinstance(prompt, str):
        options["raw"] = True
    if "logprobs" in body:
        if body["logprobs"] not in (0, False, True):
            words = f"logprobs is {told(body['logprobs'])}: those of other tokens are not told; need 0"
            raise Refusal(400, words, "logprobs")
        options["logprobs"] = body["logprobs"] is not False
    return asked_of(body, prompt, options)


def present(body, known):
    """The fields that say something. Errors: Refusal of a body that is no object, and of unknown fields."""
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is {told(body)}, need a JSON object")
    found = {}
    for name, value in body.items():
        if value is None or (name in NOTHING and is_same(value, NOTHING[name])):
            continue
        if name not in known:
            raise Refusal(400, f"{told(name)} is not supported here; leave it out", name, "unknown_field")
        found[name] = value
    return found


def is_same(value, other):
    """Equal, and true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def options_of(body, keywords):
    """The keywords of a run that a body gives; a stop that is one text becomes a list."""
    options = {keyword: body[name] for name, keyword in keywords.items() if name in body}
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    if "max_tokens" in options and is_same(options["max_tokens"], 0):
        raise Refusal(400, "max_tokens is 0, need a whole number from 1 up", "max_tokens")
    return options


def asked_of(body, prompt, options):
    """What both kinds of body share."""
    answers, model, usage = body.get("n", 1), body.get("model"), body.get("stream_options", {})
    if type(answers) is not int or not 1 <= answers <= MOST_ANSWERS:
        raise Refusal(400, f"n is {told(answers)}, need a whole number from 1 to {MOST_ANSWERS}", "n")
    if answers > 1 and "temperature" not in body:
        raise Refusal(400, "n has no effect at temperature 0; leave out n, or give temperature", "n")
    for name in ("model", "user"):
        if not isinstance(body.get(name, ""), str):
            raise Refusal(400, f"{name} is {told(body[name])}, need a text", name)
    if not isinstance(usage, dict) or set(usage) - {"include_usage"}:
        words = f"stream_options is {told(usage)}, need an object with include_usage alone"
        raise Refusal(400, words, "stream_options")
    is_streamed = flag(body, "stream")
    if "stream_options" in body and not is_streamed:
        raise Refusal(400, "stream_options has no effect without stream", "stream_options")
    return Asked(prompt, options, answers, model, is_streamed, flag(usage, "include_usage"))


def flag(fields, name):
    """True or false; false where it is not given."""
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise Refusal(400, f"{name} is {told(value)}, need true or false", name)
    return value


def message_of(number, message):
    """A message as templates read it: a role and a text. Errors: Refusal naming what else it holds."""
    where = f"messages[{number}]"
    if not isinstance(message, dict):
        raise Refusal(400, f"{where} is {told(message)}, need an object with role and content", where)
    given = {name: value for name, value in message.items() if value is not None}
    for name in given:
        if name not in ("role", "content"):
            raise Refusal(400, f"{where}.{name} is not supported here; leave it out", f"{where}.{name}",
                          "unknown_field")  # fmt: skip
    content = given.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]
        content = part.get("text") if set(part) == {"type", "text"} and part["type"] == "text" else content
    for name, value in (("role", given.get("role")), ("content", content)):
        if not isinstance(value, str):
            raise Refusal(400, f"{where}.{name} is {told(value)}, need a text", f"{where}.{name}")
    return {"role": given["role"], "content": content}
