"""`minidflash chat`: lines in, replies out, until the input ends."""

import sys

from ..encoding import decoded
from ..errors import UserError
from .generate import open_engine, options_of, run, warn
from .terminal import Interrupt, is_terminal, say, say_error

HELP = """/stats  statistics of the last reply
/reset  begin anew, with the system text alone
/help   this
Any other line is a message; one that begins with / follows a space. Ctrl-C stops a reply, Ctrl-D leaves."""


def chat(args, interrupt=None):
    """Run the subcommand. args: parsed flags. interrupt: the Interrupt in force. Returns the exit code."""
    from ..conversation import Chat

    if sys.stdin is None:
        raise UserError("stdin is closed, and a conversation comes from there")
    options = options_of(args)
    engine = open_engine(args)
    talk = Talk(Chat(engine, args.system, **options), args, interrupt or Interrupt())
    is_asked = is_terminal(sys.stdin)
    warn(args, engine, options.get("block") or 1)
    if is_asked and not args.quiet:
        say("/help lists the commands, Ctrl-D leaves")
    lines = asked() if is_asked else piped()
    while True:
        talk.interrupt.rearm()
        try:
            line = next(lines, None)
            if line is None:
                return 0
            if line.strip() and not talk.take(line) and not is_asked:
                return 130
        except KeyboardInterrupt:
            if not is_asked:
                raise
            say("")
            lines = asked()  # Ctrl-C ended the generator
        except UserError as error:
            if not is_asked or error.code == 3:
                raise
            say_error(error)


class Talk:
    """The conversation of a command line."""

    def __init__(self, conversation, args, interrupt):
        self.chat, self.args, self.interrupt = conversation, args, interrupt
        self.last = None  # (Rounds, Result) of the last reply

    def take(self, line):
        """Do what a line says. Returns False where a reply was interrupted."""
        word = line.strip()
        if not line.startswith("/"):
            return self.reply(word)
        if word == "/reset":
            self.chat.reset()
            self.note("the conversation begins anew")
        elif word == "/stats":
            self.tell_stats()
        elif word == "/help":
            say(HELP)
        else:
            raise UserError(
                f"there is no command {word.split()[0]}",
                "/help lists them; a space before it makes it a message",
            )
        return True

    def reply(self, text):
        """Print the reply to a message, and why it ended where that is no end of its own."""
        from ..stats import Timing

        (said, request), timing = self.chat.ask(text), Timing()
        stream = self.chat.rounds_of(said, request, timing)
        self.last = run(self.chat.engine, request, stream, timing, self.args, self.interrupt)
        reason = self.last[1].finish_reason
        if reason == "length":
            self.note(f"the reply ended after {request.max_tokens} tokens: -n N allows more")
        elif reason == "interrupted":
            is_kept = len(self.chat.messages) > len(said)
            self.note("stopped; what was said is kept" if is_kept else "stopped; the message is forgotten")
        return reason != "interrupted"

    def tell_stats(self):
        """What --stats of generate says, about the last reply."""
        from .report import stats_lines

        if self.last is None:
            self.note("nothing was said yet")
            return
        rounds, result = self.last
        engine = self.chat.engine
        # What the schedule measured; measuring now would write over the caches.
        say("\n".join(stats_lines(result, rounds, dict(engine.schedule.seconds), engine.ctx)))

    def note(self, text):
        """A line about the conversation, on stderr unless quiet."""
        if not self.args.quiet:
            say(f"minidflash: {text}")


def asked():
    """Lines that a person types. The prompt is no part of stdout where that is no terminal."""
    prompt = "> "
    if is_terminal(sys.stdout):
        try:
            import readline  # noqa: F401 input() then edits its line and remembers those before
        except ImportError:
            pass
    while True:
        if not is_terminal(sys.stdout):
            sys.stderr.write(prompt)
            sys.stderr.flush()
        try:
            yield input(prompt if is_terminal(sys.stdout) else "")
        except EOFError:
            say("")
            return
        except UnicodeDecodeError:
            say_error(UserError("the line is not UTF-8", "type it anew"))


def piped():
    """Lines of a pipe or file."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        yield decoded(line, f"line {number} of stdin").rstrip("\r\n")
