"""What a client is told instead of an answer: an HTTP status, and an error as OpenAI's clients read it."""

import re

from ..errors import UserError

# A field of the body, where its name is not the keyword's.
FIELDS = {
    "samples": "n",
    "template_args": "chat_template_kwargs",
    "chat_template_arg": "chat_template_kwargs",
}
# As the checks of a run spell them: a flag, or a keyword's name before what was found.
_NAMES = "max-tokens", "temperature", "top-k", "top-p", "min-p", "seed", "stop", "logprobs"
_KEYWORD = re.compile(
    rf"--(?:{'|'.join([*_NAMES, 'samples', 'chat-template-arg'])})\b"
    rf"|^(?:{'|'.join([*_NAMES, 'samples', 'template-args'])})(?= is )"
)
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """status: of HTTP. param: the field it is about, or None. code: one word for programs, or None.
    retry_s: seconds after which to try again, or None."""

    def __init__(self, status, message, param=None, code=None, retry_s=None):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_s = status, param, code, retry_s

    @classmethod
    def of(cls, error):
        """A UserError in a client's words: keywords and flags become fields of the body."""
        text = f"{error}; {error.hint}" if error.hint else str(error)
        found = []

        def field(match):
            name = match[0].strip("-").replace("-", "_")
            found.append(FIELDS.get(name, name))
            return found[-1]

        text = _KEYWORD.sub(field, text)
        status = 400 if isinstance(error, UserError) and error.code == 2 else 500
        return cls(status, text, found[0] if found else None)

    def to_json(self):
        """The object that is sent. Source: OpenAI's API reference, errors."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self):
        """What HTTP wants beside this status."""
        known = {"Retry-After": self.retry_s and str(self.retry_s),
                 "WWW-Authenticate": "Bearer" if self.status == 401 else None}  # fmt: skip
        return {name: value for name, value in known.items() if value}
