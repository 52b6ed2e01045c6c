"""Bytes of a file or of stdin as text: UTF-8, with or without the mark that Windows editors put first."""

import codecs
from pathlib import Path

from .errors import UserError

MARKS = {  # UTF-32 first: its mark begins as UTF-16's does
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip


def without_mark(data, what):
    """UTF-8 bytes without a byte order mark. Errors: UserError naming another encoding that a mark tells."""
    other = next((name for mark, name in MARKS.items() if data.startswith(mark)), None)
    if other:
        raise UserError(f"{what} is {other}, need UTF-8", "save it as UTF-8")
    return data.removeprefix(codecs.BOM_UTF8)


def decoded(data, what):
    """The text of UTF-8 bytes, without a byte order mark.

    data: bytes. what: where they come from, for messages. Returns str, line ends as they are. Errors:
    UserError naming the encoding where a mark tells it, else the first byte that is not UTF-8.
    Source: Unicode 2.6.
    """
    try:
        return without_mark(data, what).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not UTF-8 (byte {error.start})", "convert it to UTF-8") from None


def read_text(path, what):
    """The text of a file, as `decoded` has it. what: the file, for messages.

    Errors: UserError where it cannot be read, and those of `decoded`.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{what} cannot be read: {error.strerror}") from None
    return decoded(data, what)
