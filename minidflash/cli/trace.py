"""`minidflash trace`: re-tells a trace file in the terminal or as a page, or runs it again to check it."""

import sys
from pathlib import Path

from ..errors import UserError
from ..trace.read import read
from ..trace.tell import summary, tell_round, tell_rows, tell_text
from .terminal import Paint, Progress, is_terminal, say, write, write_lines


def trace(args, interrupt=None):
    """Run the subcommand. args: parsed flags. Returns the exit code."""
    for flag in ("target", "drafter"):
        if getattr(args, flag) is not None and not args.check:
            raise UserError(f"--{flag} says what --check runs", f"leave out --{flag}, or add --check")
    recording = read(args.file)
    if args.check:
        return check(recording, args)
    if args.html is not None:
        save(recording, args)
        return 0
    tell(recording, args)
    return 0


def tell(recording, args):
    """Every round, or one of them row by row; then the text and the numbers."""
    lines, paint = recording.lines, Paint(sys.stdout)
    if args.round is not None and args.round >= len(lines):
        raise UserError(f"--round {args.round}: the trace has rounds 0 to {len(lines) - 1}")
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
    if args.round is not None:
        write("\n".join(tell_rows(lines[args.round], paint)) + "\n")
        return
    if not args.quiet:
        write(f"\n{tell_text(lines, paint)}\n\n")
    write("\n".join(summary(recording)) + "\n")


def save(recording, args):
    """The run as a page. Errors: UserError where it cannot be written."""
    from ..trace.page import render

    page = render(recording, Path(args.file).name)
    try:
        Path(args.html).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"page {args.html!r} cannot be written: {error.strerror}", code=3) from None


def check(recording, args):
    """Run it again. Returns 0, or 1 where a line is another one now."""
    from ..engine import load
    from ..trace.check import differences, load_keywords, other_machine

    if recording.header is None:
        raise UserError(
            "this trace has no header, which says what to run again", "write it anew: --trace FILE"
        )
    with Progress(is_terminal(sys.stderr) and not args.quiet) as show:
        engine = load(**load_keywords(recording.header, args.target, args.drafter), progress=show)
    found = list(differences(engine, recording))
    if found:
        write_lines(f"FAILED: {one}" for one in found)
        note = other_machine(engine, recording.header)
        if note:
            say(f"minidflash: {note}: bits are promised per machine and backend")
        return 1
    write_lines([f"{len(recording.lines)} rounds run again: every line is so, but for its times"])
    return 0
