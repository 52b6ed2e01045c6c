"""What a user can cause, and the exit code it ends with."""

import re

# What a terminal obeys instead of showing: control characters (C0, DEL, C1), marks that turn the direction of
# text, two separators that end a line; and lone surrogates, which no encoding takes.
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LONGEST = 400  # characters of a message or a hint; names and values in them may come from a stranger's file


def printable(text, keep=""):
    """text with everything that a terminal would obey written as an escape, e.g. \\x1b.

    text: str. keep: characters that stay as they are, e.g. "\\n\\t". Returns str; ordinary Unicode stays.
    Errors: none. Source: ECMA-48; Unicode annex 9.
    """
    return _OBEYED.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


def _line(text):
    """text as one printable line, cut in the middle if it is too long: its ends say what it is about."""
    text = printable(text if len(text) <= 4 * LONGEST else text[: 2 * LONGEST] + text[-2 * LONGEST :])
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 140]} ... {text[-130:]}"


class UserError(Exception):
    """A mistake or a lack the user can mend. Message: what was found and what was needed, one printable line.

    hint: what to type next, or None. code: 2 wrong use or a refused checkpoint; 3 not possible here
    (a missing package, no GPU, no memory); 1 a check failed.
    """

    def __init__(self, message, hint=None, code=2):
        super().__init__(_line(message))
        self.hint = hint and _line(hint)
        self.code = code
