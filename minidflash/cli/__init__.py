"""The command line: parsers, exit codes. What a subcommand does lies in the module of its name."""

import os
import sys
import traceback

from .. import __version__
from ..errors import UserError
from .options import (
    BACKENDS,
    Parser,
    add_how,
    add_machine,
    add_pair,
    add_sampling,
    add_stop,
    add_talk,
    add_template_arg,
    real,
    whole,
)
from .terminal import Interrupt, say, say_error, silence, write

EXAMPLES = """
examples:
  minidflash generate "Why is the sky blue?" --stats
  minidflash generate --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 @prompt.txt
  minidflash info
"""
GENERATE = """Generate text; what a drafter drafts is checked by the target, so the text is the target's own.

examples:
  minidflash generate "Why is the sky blue?"
  cat letter.txt | minidflash generate -n 400 --system "Answer this letter." --stats
  minidflash generate --target FOLDER --drafter FOLDER --tokens "5 9 9" --json
"""
CHAT = """Hold a conversation: a line is a message, and each turn runs only what is new.

Ctrl-C stops a reply and keeps what was said; the end of input (Ctrl-D) leaves. /help lists the commands.
From a pipe, every line is a message; only replies go to stdout. For a trace of one answer: generate --trace.

examples:
  minidflash chat --system "Answer in one sentence."
  printf 'My name is Ada.\\nWhat is my name?\\n' | minidflash chat -n 40
"""
SERVE = """Answer OpenAI's API: chat and text completions, streamed or not, several side by side.

Every text is what `generate` gives alone, whatever runs beside it, and defaults are those of generate
(temperature 0). A field that is not understood is refused by its name. /health and /metrics ask for no key.

examples:
  minidflash serve
  minidflash serve --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --slots 16 --ctx 8192
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'
"""
VERIFY = """Check on this machine that drafting changes no token and kernels agree with the oracle.

examples:
  minidflash verify
  minidflash verify --layers --json found.json
  minidflash verify --layers --target FOLDER --drafter FOLDER --reference golden.safetensors
  minidflash verify --kernel qkv --shape qwen3-8b,T=5
"""
TRACE = """Re-tell a run round by round: what was drafted, kept and rejected; or run it again to check it.

examples:
  minidflash generate "Why is the sky blue?" --trace run.jsonl
  minidflash trace run.jsonl
  minidflash trace run.jsonl --round 3
  minidflash trace run.jsonl --html run.html
  minidflash trace run.jsonl --check
"""


def make_parser():
    """The parser of all subcommands; `run` of what it returns is the subcommand's function."""
    parser = Parser(prog="minidflash", epilog=EXAMPLES,
                    description="DFlash speculative decoding, small and exact.")  # fmt: skip
    parser.add_argument("--version", action="version", version=f"minidflash {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for name, (fill, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text.splitlines()[0], description=text)
        fill(sub)
    return parser


def _generate(parser):
    parser.add_argument("prompt", metavar="PROMPT", nargs="?",
                        help="the text; - is stdin, @FILE a file; "
                             "default stdin when that is no terminal")  # fmt: skip
    what = add_pair(parser)
    what.add_argument("--tokens", metavar="IDS", help='a prompt of ids, "5 9 9", taken as they are')
    what.add_argument("--system", metavar="S", help="system text before the prompt")
    what.add_argument("--raw", action="store_true",
                      help="no chat template: continue the prompt as it is; text of "
                      "all channels, not just the final one")  # fmt: skip
    add_template_arg(what)
    what.add_argument(
        "--show-prompt", action="store_true", help="print the rendered prompt and its ids on stderr"
    )
    how = add_how(parser, max_tokens=256)
    add_stop(how)
    how.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    sampling = add_sampling(parser)
    sampling.add_argument(
        "--samples", metavar="N", type=whole(1), default=1, help="answers to make (default 1)"
    )
    sampling.add_argument("--logprobs", action="store_true", help="log probabilities of the new tokens")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object at the end, and no text")
    output.add_argument("--stats", action="store_true", help="print statistics on stderr after the text")
    output.add_argument("--trace", metavar="FILE",
                        help="write what is run, with hashes of its files, then a JSON line a round; see "
                        "minidflash trace")  # fmt: skip
    output.add_argument("--no-stream", action="store_true", help="print the text when it is complete")
    add_machine(parser)
    parser.set_defaults(run=_lazy("generate", "generate"))


def _chat(parser):
    what = add_pair(parser)
    what.add_argument("--system", metavar="S", help="system text that the conversation begins with")
    add_template_arg(what)
    add_stop(add_how(parser, max_tokens=256))
    add_sampling(parser)
    add_machine(parser)
    parser.set_defaults(run=_lazy("chat", "chat"), json=False, no_stream=False)


def _serve(parser):
    net = parser.add_argument_group("server")
    net.add_argument("--host", metavar="H", default="127.0.0.1",
                     help="address to listen at (default %(default)s: this machine alone)")  # fmt: skip
    net.add_argument("--port", metavar="N", type=whole(0, 65535), default=8000,
                     help="default %(default)s; 0: a free one")  # fmt: skip
    net.add_argument("--slots", metavar="N", type=whole(1, 64), default=8,
                     help="texts side by side (default %(default)s)")  # fmt: skip
    net.add_argument("--max-waiting", metavar="N", type=whole(0), default=64,
                     help="texts that may wait for a slot; one more is refused "
                          "(default %(default)s)")  # fmt: skip
    net.add_argument("--no-reuse", action="store_true",
                     help="run every prompt whole, also one that begins as a text before it did, which who "
                          "asks could notice by the time it takes")  # fmt: skip
    net.add_argument("--api-key", metavar="K",
                     help="what clients must send; default MINIDFLASH_API_KEY, else nothing")  # fmt: skip
    net.add_argument("--grace", metavar="S", type=real(0, 86400, "seconds from 0 to 86400"), default=30.0,
                     help="seconds that running texts may take to end on SIGTERM or Ctrl-C "
                          "(default %(default)s)")  # fmt: skip
    add_pair(parser)
    add_how(parser, max_tokens=256)
    add_machine(parser)
    parser.set_defaults(run=_lazy("serve", "serve"))


def _info(parser):
    add_pair(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_how(parser)
    add_machine(parser)
    parser.set_defaults(run=_lazy("info", "info"))


def _bench(parser):
    what = add_pair(parser)
    what.add_argument("--prompts", metavar="FILE",
                      help="JSON lines with kind and prompt (or tokens), or rows of GSM8K, HumanEval, "
                      "MT-Bench (each turn is a prompt) or MATH-500; default: "
                      "the checkout's bench/prompts.jsonl, else four built in")  # fmt: skip
    how = add_how(parser, max_tokens=64)
    how.add_argument("-r", "--repeat", metavar="N", type=whole(1), default=3,
                     help="runs of every prompt (default %(default)s)")  # fmt: skip
    parser.add_argument(
        "-o", "--output", choices=("md", "json", "csv"), default="md", help="form (default md)"
    )
    add_machine(parser)
    parser.set_defaults(run=_lazy("bench", "bench"))


def _trace(parser):
    parser.add_argument("file", metavar="FILE", help="what generate --trace wrote")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--round", metavar="N", type=whole(0),
                      help="only this round, position by position; 0 is prefill's token")  # fmt: skip
    what.add_argument("--html", metavar="OUT", help="write it as a page of its own, to open in a browser")
    what.add_argument("--check", action="store_true",
                      help="run it again and compare every line but its times; code 1 where one is another "
                      "now")  # fmt: skip
    for role in ("target", "drafter"):
        parser.add_argument(f"--{role}", metavar="FOLDER|ID",
                            help=f"with --check: the {role}, where it is not what the file names, or has "
                            "to be fetched")  # fmt: skip
    add_talk(parser)
    parser.set_defaults(run=_lazy("trace", "trace"))


def _verify(parser):
    add_pair(parser)
    how = add_how(parser, max_tokens=32)
    how.add_argument("--prompts", metavar="FILE", help="as in bench; the first of each kind is used")
    inside = parser.add_argument_group("inside")
    inside.add_argument("--layers", action="store_true",
                        help="instead: the shortest prompt and three rounds, stage by stage, against a "
                             "float64 pair with its own loop; names the first stage that is off")  # fmt: skip
    inside.add_argument("--reference", metavar="FILE",
                        help="with --layers: and against a golden.safetensors, on its prompt (it also tells "
                             "what is read wrongly from the files)")  # fmt: skip
    inside.add_argument(
        "--kernel", metavar="NAME", help="instead: one kernel of the table against the oracle"
    )
    inside.add_argument("--shape", metavar="S",
                        help="its sizes: letters of the table, perhaps behind a model's name, as in "
                             "qwen3-8b,T=5 or T=5,D=64; default those of a small model")  # fmt: skip
    inside.add_argument("--json", metavar="FILE", help="with --layers or --kernel: write all numbers there")
    add_machine(parser)
    parser.set_defaults(run=_lazy("verify", "verify"))


def _kernels(parser):
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="explain this kernel, and name the code that computes it"
    )
    parser.add_argument(
        "--source", action="store_true", help="print that code instead: the last step's files"
    )
    parser.add_argument("--bench", action="store_true", help="time it (all without NAME) against a copy")
    parser.add_argument(
        "--shape", metavar="S", default="smollm2-135m", help="model whose sizes are timed (%(default)s)"
    )
    parser.add_argument(
        "--rows", metavar="T", type=whole(1), default=16, help="token rows (default %(default)s)"
    )
    parser.add_argument(
        "--context", metavar="N", type=whole(1), default=2048, help="cached rows (default %(default)s)"
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="kernels (default auto: the fastest here)"
    )
    parser.add_argument("--activations", choices=("f32", "bf16"), help="type of activations and caches")
    add_talk(parser)
    parser.set_defaults(run=_lazy("kernels", "kernels"))


COMMANDS = {
    "generate": (_generate, GENERATE),
    "chat": (_chat, CHAT),
    "serve": (_serve, SERVE),
    "info": (_info, "Say what this machine can run, what a checkpoint pair is, and the memory it needs."),
    "bench": (_bench, "Measure tokens a second with and without the drafter, by kind of prompt."),
    "trace": (_trace, TRACE),
    "verify": (_verify, VERIFY),
    "kernels": (_kernels, "Print the signature table, or explain one kernel of it."),
}


def _lazy(module, name):
    """A subcommand's function, imported when it runs: --help must not wait for Numba."""

    def run(args, interrupt):
        from importlib import import_module

        return getattr(import_module(f".{module}", __package__), name)(args, interrupt)

    return run


def main(argv=None):
    """Run one command line.

    argv: list of str, default the process's. Returns the exit code: 0; 1 a check failed, or a bug; 2 wrong
    use or a refused checkpoint; 3 not possible here; 130 Ctrl-C; 141 closed pipe. Errors: none.
    Source: engine.md 5.
    """
    is_verbose = False
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without the character still gets the rest
    try:
        with Interrupt() as interrupt:
            args = make_parser().parse_args(
                [_typed(word) for word in (sys.argv[1:] if argv is None else argv)]
            )
            is_verbose = args.verbose
            code = args.run(args, interrupt) or 0
            write("")
            return code
    except SystemExit as done:  # --help and --version
        return _last_words(done)
    except BrokenPipeError:
        silence(sys.stdout)
        silence(sys.stderr)
        return 141
    except KeyboardInterrupt:
        say("minidflash: interrupted")
        return 130
    except UserError as error:
        say_error(error)
        return error.code
    except MemoryError as error:
        say(f"minidflash: not enough memory: {error}" if str(error) else "minidflash: not enough memory")
        say("  hint: lower --ctx; minidflash info says what is needed")
        return 3
    except Exception as error:  # noqa: BLE001 the last resort: one line, no traceback
        if is_verbose:
            say(traceback.format_exc().rstrip())
        reason = " ".join(str(error).split())[:300]
        more = "" if is_verbose else "; run with -v for the traceback"
        say(f"minidflash: internal error: {type(error).__name__}: {reason}{more}")
        return 1


def _typed(word):
    """A word of the command line as UTF-8 text, whatever the locale made Python take it for."""
    try:
        return os.fsencode(word).decode("utf-8")
    except UnicodeError:  # not UTF-8: the tokenizer refuses it in words, a file name may be any bytes
        return word


def _last_words(done):
    """Exit code after argparse printed help or version."""
    try:
        write("")
    except BrokenPipeError:
        silence(sys.stdout)
        return 141
    return done.code or 0
