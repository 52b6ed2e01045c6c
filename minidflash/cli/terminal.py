"""Streams of the command line: text out, notes and progress on stderr, colours, Ctrl-C."""

import json
import os
import signal
import sys
import threading
import time

from ..errors import UserError, printable


def write(text):
    """Write to stdout as it is and flush. Errors: BrokenPipeError as it is,
    UserError code 3 for a full disk."""
    if sys.stdout is None:  # started with stdout closed
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(sys.stdout)
        raise UserError(f"stdout cannot be written: {error.strerror}", code=3) from error


def silence(stream):
    """Point a broken stream at nothing, so that Python's own flush at exit does not complain about it."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
    except (OSError, ValueError, AttributeError):  # no descriptor: nothing of ours to flush
        pass


def write_lines(lines):
    """Write lines for a person to stdout, each of them printable. Errors: those of write."""
    write("".join(f"{printable(line)}\n" for line in lines))


def json_line(found):
    """found as a line of JSON for every strict reader. Errors: UserError code 1 for NaN and infinity."""
    try:
        return json.dumps(found, allow_nan=False) + "\n"
    except ValueError:
        raise UserError(
            "a number of the result is NaN or infinite, and JSON has no word for it", code=1
        ) from None


def say(text):
    """Lines on stderr, printable: names in them may come from a stranger's file."""
    if sys.stderr is not None:
        print(printable(text, keep="\n\t"), file=sys.stderr, flush=True)


def say_error(error):
    """A UserError on stderr: its line, and its hint."""
    say(f"minidflash: {error}")
    if error.hint:
        say(f"  hint: {error.hint}")


def is_terminal(stream):
    """True if a person looks at this stream."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


STYLES = {"kept": "34", "own": "1", "rejected": "9;33", "faint": "2"}  # blue, bold, struck out orange


class Paint:
    """ANSI styles, or nothing where they do not belong: NO_COLOR set, or no terminal.
    Source: no-color.org."""

    def __init__(self, stream):
        self.is_on = (
            is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )

    def __call__(self, style, text):
        return f"\033[{STYLES[style]}m{text}\033[0m" if self.is_on and text else text


class Progress:
    """One line on stderr that is overwritten and then wiped: download, conversion, weights, kernels.

    Used as `with Progress(is_shown) as show: load(progress=show)`; show is None when nothing is to be shown.
    """

    def __init__(self, is_shown):
        self._is_shown, self._last, self._width, self._label = is_shown, 0.0, 0, None

    def __enter__(self):
        return self._show if self._is_shown else None

    def __exit__(self, *_):
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()

    def _show(self, label, done, total):
        now = time.monotonic()
        if label == self._label and done < total and now - self._last < 0.1:
            return
        self._last, self._label = now, label
        share = f" {100 * done // total} %" if total else ""
        size = f" of {amount(total)}" if total and total >= 1e6 else ""
        line = printable(f"{label}{share}{size}")
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = max(self._width, len(line))


def amount(nbytes):
    """Bytes for people, in powers of ten: "437.6 kB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return None


def duration(seconds):
    """Seconds for people: "52.9 ms", "1.20 s"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


class Interrupt:
    """Ctrl-C while a command runs. The first one raises KeyboardInterrupt, or ends the run of `engine` after
    its round once that is set; the second one ends the process at once.

    count: how often it was pressed. A process started with SIGINT ignored (a shell's background job)
    stays so.
    """

    def __init__(self):
        self.count, self.engine, self._before = 0, None, None

    def __enter__(self):
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            self._before = signal.signal(signal.SIGINT, self._caught)
        return self

    def __exit__(self, *_):
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _caught(self, number, frame):
        self.count += 1
        if self.count > 1:
            os._exit(130)
        if self.engine is None:
            raise KeyboardInterrupt
        self.engine.is_interrupted = True

    def rearm(self):
        """What was interrupted is over; the next Ctrl-C is a first one again."""
        self.count, self.engine = 0, None
