"""`minidflash generate`: the prompt in, text out round by round, then JSON or statistics."""

import sys
from contextlib import closing, nullcontext
from pathlib import Path

from ..channels import without_final
from ..encoding import decoded
from ..errors import UserError
from ..values import told
from .options import load_keywords, sampling_wishes
from .terminal import Interrupt, Progress, is_terminal, json_line, say, write

BETWEEN = "\n\n"  # two samples
EXAMPLE = 'minidflash generate "Why is the sky blue?"'


def generate(args, interrupt=None):
    """Run the subcommand. args: parsed flags. interrupt: the Interrupt in force. Returns the exit code."""
    from ..loop import rounds_of
    from ..request import Request
    from ..stats import Timing
    from ..trace.write import Trace

    interrupt = interrupt or Interrupt()
    options = options_of(args, "raw", "system", "ignore_eos")
    if args.trace is not None:
        options["trace"] = True
    prompt = read_prompt(args)
    with nullcontext() if args.trace is None else Trace(args.trace) as trace:
        engine = open_engine(args)
        request = Request.of(engine, prompt, options)
        request.options |= {"ctx": engine.ctx, "prefill_chunk": engine.chunk}
        if args.show_prompt:
            show_prompt(engine, prompt, request)
        warn(args, engine, request.block)
        timing = Timing()
        stream = rounds_of(engine, request, timing)
        rounds, result = run(engine, request, stream, timing, args, interrupt, trace)
    if args.json:
        write(json_line(result.to_json()))
    if args.stats:
        from .report import round_costs, stats_lines

        interrupt.engine = None  # nothing is generated any more: the next Ctrl-C ends at once
        say("\n".join(stats_lines(result, rounds, round_costs(engine, request), engine.ctx)))
    reasons = [one["finish_reason"] for one in result.samples or []]
    return 130 if "interrupted" in [result.finish_reason, *reasons] else 0


def options_of(args, *more):
    """The keywords of a run that flags ask for. more: flags that are one by name."""
    from ..chat import parse_template_arg

    options = {"max_tokens": args.max_tokens, "verify": args.verify, **sampling_wishes(args)}
    for name in ("stop", "block", *more):
        if getattr(args, name):
            options[name] = getattr(args, name)
    if args.chat_template_arg:
        options["template_args"] = dict(map(parse_template_arg, args.chat_template_arg))
    return options


def read_prompt(args):
    """The prompt that was given: a list of ids, or a str. Errors: UserError without one,
    or for unreadable text."""
    if args.tokens is not None:
        if args.prompt is not None:
            raise UserError("a prompt and --tokens are two prompts", "leave out one of them")
        words = args.tokens.split()
        bad = [word for word in words if not (word.isascii() and word.isdigit() and len(word) < 20)]
        if bad:
            raise UserError(
                f"--tokens: {told(bad[0])} is no token id", 'ids are parted by spaces: --tokens "5 9 9"'
            )
        return [int(word) for word in words]
    text = args.prompt
    if text is None and (sys.stdin is None or is_terminal(sys.stdin)):
        raise UserError("no prompt", EXAMPLE)
    if text in (None, "-"):
        data, where = sys.stdin.buffer.read() if sys.stdin else b"", "stdin"
    elif text.startswith("@"):
        where = text[1:]
        try:
            data = Path(where).read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            hint = "a prompt that begins with @ can be given on stdin"
            raise UserError(f"prompt file {where!r} cannot be read: {reason}", hint) from None
    else:
        return text
    text = decoded(data, f"the prompt from {where}")  # line ends as they are: the model sees what was written
    if not text:
        raise UserError(f"the prompt from {where} is empty", EXAMPLE)
    return text


def open_engine(args, **keywords):
    """Load what the flags name, with progress on a terminal. keywords: more of engine.load's.
    Returns an Engine."""
    from ..engine import load

    with Progress(is_terminal(sys.stderr) and not args.quiet) as show:
        engine = load(**load_keywords(args), **keywords, progress=show)
    for note in [] if args.quiet else engine.notes:
        say(f"minidflash: {note}")
    if args.verbose:
        say(f"{engine.ops.name}, {engine.ops.activations}, context {engine.ctx}; loaded in "
            f"{engine.load_s:.2f} s, kernels ready in {engine.jit_s:.2f} s")  # fmt: skip
    return engine


def show_prompt(engine, prompt, request):
    """The rendered prompt, between lines that are not part of it, and its ids."""
    from ..request import OPTIONS, render

    if not isinstance(prompt, list):
        say(f"--- prompt\n{render(engine, prompt, OPTIONS | request.options)}\n--- end of prompt")
    say(f"{len(request.ids)} prompt ids: {' '.join(map(str, request.ids))}")


def warn(args, engine, block):
    """What a user should know before the text comes, each on one line of stderr. block: 1 drafts nothing."""
    if args.quiet:
        return
    if args.drafter is None and engine.drafter is None:
        say("minidflash: no drafter for this target: plain decoding (--drafter names one)")
    if engine.drafter is not None and block > engine.drafter.config.block:
        trained = engine.drafter.config.block
        say(f"minidflash: block {block} is wider than the {trained} this drafter was trained on: "
            f"expect fewer "
            "accepted drafts")  # fmt: skip
    allowed = engine.target.config.max_positions
    if args.ctx is None and engine.ctx < allowed:
        say(
            f"minidflash: context {engine.ctx} of {allowed} positions: what memory holds (--ctx N takes more)"
        )
    if engine.tokenizer is None and not args.json:
        say("minidflash: no tokenizer in this checkpoint: token ids are printed")


def run(engine, request, stream, timing, args, interrupt, trace=None):
    """Generate, printing and tracing round by round. stream: the generator of the rounds.
    Returns (list of Round, Result)."""
    from ..run import finish

    rounds, reason, is_streaming = [], None, not (args.json or args.no_stream)
    gap = ""  # between answers; written once there is text behind it
    if trace:
        trace.begin(engine, request)
    try:
        with closing(stream):
            for r in stream:
                interrupt.engine = engine  # from now on the round is finished first
                rounds.append(r)
                if trace:
                    trace.write(r)
                if is_streaming:
                    is_first = len(rounds) == 1 or rounds[-2].sample != r.sample
                    gap += BETWEEN * (is_first and r.sample > 0)
                    if text := shown(r.text, r.tokens, is_first):
                        write(gap + text)
                        gap = ""
    except UserError:
        if rounds and is_streaming:  # what came is the target's own; the error begins a line
            write("\n")
        raise
    except KeyboardInterrupt:  # before the first token
        reason = "interrupted"
    result = finish(engine, request, rounds, timing, reason)
    answers = result.samples or [{"text": result.text, "tokens": result.tokens}]
    missing = [instead_of_text(engine, request, one["tokens"]) for one in answers]
    if not args.json and request.max_tokens and None in missing:
        texts = [shown(one["text"], one["tokens"]) for one in answers]
        write((gap if is_streaming else BETWEEN.join(texts)) + "\n")
    for number, words in enumerate(missing):
        if words and not args.quiet:
            which = f"answer {number}" if result.samples else "the answer"
            say(f"minidflash: {which} ended before its final channel: {words}")
    return rounds, result


def instead_of_text(engine, request, tokens):
    """What an answer holds instead of a final channel, in words; None where there is nothing to say."""
    if engine.tokenizer is None or engine.tokenizer.marks is None or request.raw or not request.max_tokens:
        return None
    return without_final(engine.tokenizer, request.ids, tokens)


def shown(text, tokens, is_first=True):
    """What stdout gets: the text, or ids where the checkpoint has no tokenizer."""
    if text is not None or not tokens:
        return text or ""
    return ("" if is_first else " ") + " ".join(map(str, tokens))
