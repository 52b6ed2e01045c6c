"""Trace files: one JSON line a round, written as it goes; and `minidflash trace`, which re-tells them."""

import json
import sys

from ..encoding import read_text
from ..errors import UserError, printable
from ..stats import Round, Stats
from .terminal import Paint, duration, json_line, write

BARS = " ▁▂▃▄▅▆▇█"
MOST_ROWS = 1024  # of one round
LONGEST = 1e9  # seconds of one round, 31 years


class Trace:
    """A trace file being written, as a context manager. path: where; an older file there is replaced.

    A line: round (0: prefill's token), ids, drafts (ids verified), accepted (drafts kept, before stop and
    budget cuts), verify (rows), seconds, text, finish_reason, with a tokenizer id_texts and draft_texts, from
    the second sample on sample, logprobs where they were asked for, and experts as in Round.
    Errors: UserError when it cannot be written, code 3 once it is open: a disk is full then.
    """

    def __init__(self, path):
        if path in ("", "-"):
            raise UserError(
                f"--trace {path!r}: a trace needs a file of its own",
                "--trace run.jsonl, or --trace ./- for that name",
            )
        try:
            # Unbuffered: closing writes nothing again.
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UserError(f"trace file {path!r} cannot be written: {error.strerror}") from None
        self._path, self._count = path, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._do(self._file.close)

    def write(self, r, tokenizer=None):
        """Append one Round. tokenizer: of the target, or None."""
        line = {
            "round": self._count, "ids": r.tokens, "drafts": r.drafted, "accepted": r.accepted,
            "verify": r.verify,
            "seconds": r.seconds, "text": r.text, "finish_reason": r.finish_reason,
        }  # fmt: skip
        if r.sample:
            line["sample"] = r.sample
        for name in ("logprobs", "experts"):
            if getattr(r, name) is not None:
                line[name] = getattr(r, name)
        if tokenizer is not None:
            line["id_texts"] = [tokenizer.decode([i]) for i in r.tokens]
            line["draft_texts"] = [tokenizer.decode([i]) for i in r.drafted]
        rest = json_line(line).encode()
        while rest:  # a disk that becomes full takes a part
            rest = rest[self._do(self._file.write, rest) :]
        self._count += 1

    def _do(self, action, *args):
        """Something with the file. Errors: UserError naming it; BrokenPipeError as it is."""
        try:
            return action(*args)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(
                f"trace file {self._path!r} cannot be written: {error.strerror}", code=3
            ) from None


def read(path):
    """The lines of a trace file as dicts. Errors: UserError naming the file and the line."""
    lines = []
    for number, line in enumerate(read_text(path, f"trace file {path!r}").splitlines(), 1):
        try:
            found = json.loads(line)
            wrong = _wrong(found)
        except (ValueError, RecursionError):
            wrong = "it is not JSON"
        if wrong:
            hint = "minidflash generate --trace FILE writes such files"
            raise UserError(f"{path}, line {number}: this is no line of a trace: {wrong}", hint)
        lines.append(found)
    if not lines:
        raise UserError(f"trace file {path!r} is empty")
    return lines


def _is_whole(value, most=2**31):
    return type(value) is int and 0 <= value < most


def _is_list(value, is_one):
    return isinstance(value, list) and all(map(is_one, value))


def _is_text(value):
    return isinstance(value, str)


# What each value of a line must be
KINDS = {
    "ids": lambda value: _is_list(value, _is_whole),
    "drafts": lambda value: _is_list(value, _is_whole),
    "accepted": _is_whole,
    "verify": lambda value: _is_whole(value, MOST_ROWS),
    "seconds": lambda value: type(value) in (int, float) and 0 <= value <= LONGEST,
    "text": lambda value: value is None or _is_text(value),
    "finish_reason": lambda value: value in (None, "stop", "length", "interrupted"),
}
MOST_EXPERTS = 1e6  # of a layer
TEXTS = {"id_texts": "ids", "draft_texts": "drafts"}  # these may be missing


def _wrong(line):
    """What makes this no line of a trace, in words, or None."""
    if not isinstance(line, dict):
        return f"it is a {type(line).__name__}"
    for key, is_right in KINDS.items():
        if key not in line or not is_right(line[key]):
            return f"{key} is {line[key]!r:.40}" if key in line else f"it has no {key}"
    for key, ids in TEXTS.items():
        if key in line and not (_is_list(line[key], _is_text) and len(line[key]) == len(line[ids])):
            return f"{key} are not the texts of {ids}"
    experts = line.get("experts", 0)
    if type(experts) not in (int, float) or not 0 <= experts <= MOST_EXPERTS:
        return f"experts is {experts!r:.40}"
    if not (line["ids"] or line["finish_reason"]):
        return "it has no ids"
    if line["accepted"] > len(line["drafts"]) or len(line["drafts"]) != max(0, line["verify"] - 1):
        counts = f"{line['verify']} rows, {len(line['drafts'])} drafts and {line['accepted']} accepted"
        return f"{counts} do not agree"
    return None


def tell(args, interrupt=None):
    """`minidflash trace FILE`: every block, what was kept and what was rejected. Returns the exit code."""
    lines = read(args.file)
    if args.round is not None and args.round >= len(lines):
        raise UserError(f"--round {args.round}: the trace has rounds 0 to {len(lines) - 1}")
    paint = Paint(sys.stdout)
    if not args.quiet:
        kept, own, lost = (
            paint("kept", "kept draft"),
            paint("own", "[target's own]"),
            paint("rejected", "~rejected~"),
        )
        write(f"{kept}  {own}  {lost}   (ids where there is no text)\n")
    for number, line in enumerate(lines):
        if args.round in (None, number):
            write(tell_round(number, line, paint) + "\n")
    if args.round is None:
        write("\n".join(summary(lines)) + "\n")
    return 0


def tell_round(number, line, paint):
    """One line about one round."""
    ids = _pieces(line, "id_texts", "ids")
    drafts = _pieces(line, "draft_texts", "drafts")
    kept = min(line["accepted"], len(ids))
    words = [paint("kept", piece) for piece in ids[:kept]]
    words += [paint("own", f"[{piece}]") for piece in ids[kept:]]
    words += [paint("rejected", f"~{piece}~") for piece in drafts[line["accepted"] :]]
    if line["verify"] == 0:
        what = "prefill"
    elif line["verify"] == 1:
        what = "plain"
    else:
        what = f"kept {line['accepted']} of {len(drafts)}"
    if "experts" in line:
        words.append(paint("faint", f" ({line['experts']:.1f} experts a layer)"))
    end = f"  ({line['finish_reason']})" if line["finish_reason"] else ""
    return f"{number:4}  {what:<13} {duration(line['seconds']):>9}  {' '.join(words)}{paint('faint', end)}"


def _pieces(line, texts, ids):
    """Texts of ids, control characters made visible; the ids themselves where there is none."""
    found = line.get(texts) or [""] * len(line[ids])
    return [printable(piece).replace(" ", "·") or str(i) for i, piece in zip(line[ids], found, strict=True)]


def summary(lines):
    """Closing lines: tau, acceptance by position as bars, seconds."""
    rounds = [
        Round(line["ids"], line["text"], line["drafts"], line["accepted"], line["verify"], line["seconds"])
        for line in lines
    ]
    tokens, seconds = sum(len(r.tokens) for r in rounds), sum(r.seconds for r in rounds)
    widest = max(r.verify for r in rounds)
    if widest <= 1:
        return [f"{tokens} tokens, plain decoding, {duration(seconds)}"]
    stats = Stats.of(rounds, widest)
    found = (
        f"{tokens} tokens in {stats.round_count} rounds: tau {stats.tau:.2f} (the target's own token "
        f"counted), {stats.accepted} of {stats.drafted} drafts accepted, {duration(seconds)}"
    )
    bars = "".join(BARS[round(8 * a)] if a is not None else "-" for a in stats.acceptance_by_position)
    numbers = " ".join("-" if a is None else f"{a:.2f}" for a in stats.acceptance_by_position)
    return [found, f"accepted / reached by position 1..{widest - 1}: {bars}  {numbers}"]
