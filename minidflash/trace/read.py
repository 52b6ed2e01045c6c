"""Trace files as a stranger may have written them: bounded, every value that is used checked, or refused."""

import json
from dataclasses import dataclass
from pathlib import Path

from ..encoding import decoded
from ..errors import UserError
from ..sampling import OPTIONS as LAW
from ..stats import Detail, Round
from ..values import told
from .write import FORMAT

LARGEST, MOST_LINES, LONGEST_LINE = 256 << 20, 1 << 18, 8 << 20  # bytes of a file; lines; characters of one
MOST_ROWS = 1024  # of one round
LONGEST = 1e9  # seconds of one round, 31 years
LARGEST_LOGIT, MOST_EXPERTS = 3.5e38, 1e6  # of f32, about; of a layer
MOST_IDS, MOST_TEXT, MOST_NAME = 1 << 20, 1 << 16, 4096  # of a prompt; characters of a text, and of a name
STAGES = "prefill", "inject", "draft", "verify", "accept"
HINT = "minidflash generate --trace FILE writes such files"


@dataclass
class Recording:
    """A trace file. header: its first line, None in one that has none. lines: those of the rounds."""

    header: dict | None
    lines: list

    @property
    def rounds(self):
        """The lines as Rounds."""
        return [round_of(line) for line in self.lines]

    @property
    def block(self):
        """B, or the widest round where no header says it; None for plain decoding."""
        widest = max((line["verify"] for line in self.lines), default=1)
        if self.header and self.header["drafter"] is not None:
            return max(self.header["options"]["block"], widest)
        return widest if widest > 1 else None


def round_of(line):
    """The Round that a line tells."""
    detail = {name: line.get(name) for name in ("anchor", "start", "injected", "choice", "margins", "stages")}
    return Round(
        line["ids"], line["text"], line["drafts"], line["accepted"], line["verify"], line["seconds"],
        line["finish_reason"], line.get("sample", 0), line.get("logprobs"), line.get("experts"),
        Detail(**detail) if line.get("choice") else None,
    )  # fmt: skip


def read(path):
    """A Recording of a trace file. Errors: UserError naming the file and the line."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise UserError(f"trace file {path!r} cannot be read: {error.strerror}") from None
    if len(data) > LARGEST:
        raise UserError(f"trace file {path!r} is larger than {LARGEST >> 20} MiB", HINT)
    header, lines = None, []
    for number, text in enumerate(decoded(data, f"trace file {path!r}").splitlines(), 1):
        found, wrong = _parse(text, number)
        is_header = number == 1 and isinstance(found, dict) and "trace" in found
        wrong = wrong or (_wrong_header if is_header else _wrong)(found)
        if wrong:
            what = "header" if is_header else "line"
            raise UserError(f"{path}, line {number}: this is no {what} of a trace: {wrong}", HINT)
        if is_header:
            header = found
        else:
            lines.append(found)
    if header is None and not lines:
        raise UserError(f"trace file {path!r} is empty")
    return Recording(header, lines)


def _parse(text, number):
    """(the JSON value of a line, what is wrong in words or None)."""
    if number > MOST_LINES:
        return None, f"there are more than {MOST_LINES} lines"
    if len(text) > LONGEST_LINE:
        return None, f"it has more than {LONGEST_LINE} characters"
    try:
        return json.loads(text), None
    except (ValueError, RecursionError):
        return None, "it is not JSON"


def _is_whole(value, most=2**31):
    return type(value) is int and 0 <= value < most


def _is_real(value, most):
    return type(value) in (int, float) and 0 <= value <= most


def _is_list(value, is_one):
    return isinstance(value, list) and all(map(is_one, value))


def _is_text(value, most=MOST_TEXT):
    return isinstance(value, str) and len(value) <= most


def _is_seconds(value):
    return _is_real(value, LONGEST)


def _is_pair(value):
    """The log-probabilities of a token."""
    return (
        _is_list(value, lambda one: type(one) in (int, float) and abs(one) <= LARGEST_LOGIT)
        and len(value) == 2
    )


def _is_margin(value):
    return value is None or _is_real(value, LARGEST_LOGIT)


# What each value of a line must be, and which may be missing
KINDS = {
    "ids": lambda value: _is_list(value, _is_whole),
    "drafts": lambda value: _is_list(value, _is_whole),
    "accepted": _is_whole,
    "verify": lambda value: _is_whole(value, MOST_ROWS),
    "seconds": _is_seconds,
    "text": lambda value: value is None or _is_text(value),
    "finish_reason": lambda value: value in (None, "stop", "length", "interrupted"),
    "round": _is_whole,
    "sample": _is_whole,
    "experts": lambda value: _is_real(value, MOST_EXPERTS),
    "logprobs": lambda value: _is_list(value, _is_pair),
    "anchor": _is_whole,
    "start": _is_whole,
    "injected": _is_whole,
    "choice": lambda value: _is_list(value, lambda one: one is None or _is_whole(one)),
    "margins": lambda value: value is None or _is_list(value, _is_margin),
    "stages": lambda value: isinstance(value, dict)
    and set(value) <= set(STAGES)
    and all(map(_is_seconds, value.values())),
}  # fmt: skip
NEEDED = "ids", "drafts", "accepted", "verify", "seconds", "text", "finish_reason"
DETAIL = "anchor", "start", "injected", "choice", "margins", "stages"  # all of them, or none
TEXTS = {"id_texts": "ids", "draft_texts": "drafts", "choice_texts": "choice"}  # these may be missing


def _wrong(line):
    """What makes this no line of a trace, in words, or None."""
    if not isinstance(line, dict):
        return f"it is a {type(line).__name__}"
    needed = NEEDED + (DETAIL if any(key in line for key in DETAIL) else ())
    for key, is_right in KINDS.items():
        if key not in line and key in needed:
            return f"it has no {key}"
        if key in line and not is_right(line[key]):
            return f"{key} is {told(line[key])}"
    for key, ids in TEXTS.items():
        if key in line and not (_is_list(line[key], _is_text) and len(line[key]) == len(line.get(ids, ()))):
            return f"{key} are not the texts of {ids}"
    if not (line["ids"] or line["finish_reason"]):
        return "it has no ids"
    rows = max(1, line["verify"])
    if line["accepted"] > len(line["drafts"]) or len(line["drafts"]) != rows - 1:
        counts = f"{line['verify']} rows, {len(line['drafts'])} drafts and {line['accepted']} accepted"
        return f"{counts} do not agree"
    for key in ("choice", "margins"):
        if line.get(key) is not None and len(line[key]) != rows:
            return f"{len(line[key])} {key} of {rows} rows"
    return None


def _is_name(value):
    return _is_text(value, MOST_NAME) and value != ""


def _are_files(value):
    """Role -> {"revision": commit}, or {name: sha256}."""
    return isinstance(value, dict) and set(value) <= {"target", "drafter"} and all(
        isinstance(one, dict) and len(one) <= MOST_NAME and all(map(_is_name, (*one, *one.values())))
        for one in value.values()
    )  # fmt: skip


# The options of a run that a header has, beside those of sampling.py; their values are checked when it runs.
OPTIONS = {"max_tokens", "stop", "ignore_eos", "raw", "verify", "drafter", "block", *LAW}
HEADER = {
    "trace": lambda value: value == FORMAT and type(value) is int,
    "version": _is_name,
    "target": _is_name,
    "drafter": lambda value: value is None or _is_name(value),
    "files": _are_files,
    "weights": lambda value: value in (None, "file", "bf16"),
    "backend": lambda value: value in ("oracle", "numba", "emulate", "cuda"),
    "activations": lambda value: value in ("f32", "bf16"),
    "machine": _is_name,
    "ctx": _is_whole,
    "prefill_chunk": _is_whole,
    "plain_seconds": lambda value: value is None or _is_seconds(value),
    "prompt": lambda value: _is_list(value, _is_whole) and 0 < len(value) <= MOST_IDS,
    "options": lambda value: isinstance(value, dict) and set(value) <= OPTIONS
    and _is_whole(value.get("block", 1), MOST_ROWS) and _is_whole(value.get("seed", 0), 2**64)
    and _is_real(value.get("temperature", 0), LARGEST_LOGIT),
}  # fmt: skip


def _wrong_header(header):
    """What makes this no header of a trace, in words, or None."""
    for key, is_right in HEADER.items():
        if key not in header:
            return f"it has no {key}"
        if not is_right(header[key]):
            return f"{key} is {told(header[key])}"
    if header["drafter"] is not None and "block" not in header["options"]:
        return "its options have no block"
    return None
