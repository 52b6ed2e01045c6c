"""Options of the command line: groups that subcommands share, and what their values may be."""

import argparse
import math

from ..errors import UserError
from ..values import told

BACKENDS = ("auto", "oracle", "numba", "emulate", "cuda")


class Parser(argparse.ArgumentParser):
    """argparse whose refusals are UserErrors, so that all errors of the command line look alike."""

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message):
        raise UserError(message, hint=f"{self.prog} --help")


def whole(low, high=None):
    """An argparse type: a whole number within bounds."""

    def read(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            bounds = f"from {low} up" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{told(text)}, need a whole number {bounds}")
        return value

    return read


def real(low, high, needed):
    """An argparse type: a finite number, low <= x <= high. needed: the bounds in words."""

    def read(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{told(text)}, need {needed}")
        return value

    return read


def rows_to_verify(text):
    """The value of --verify: "auto" or a whole number."""
    if text == "auto":
        return text
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{told(text)}, need auto or a whole number from 1 up") from None


def add_pair(parser):
    """Which checkpoints. Returns the group, for what else a subcommand runs on."""
    group = parser.add_argument_group("what to run")
    group.add_argument("--target", metavar="T", default="default",
                       help="folder, Hugging Face id, or default: SmolLM2 135M, "
                            "fetched once (93 MB)")  # fmt: skip
    group.add_argument("--drafter", metavar="D",
                       help="folder, GGUF file, Hugging Face id, default (the embedded one), or "
                       "none: plain decoding. Default: the embedded one for the default target, "
                       "else none")  # fmt: skip
    group.add_argument("--revision", metavar="R", help="branch, tag or commit of a target on Hugging Face")
    group.add_argument("--drafter-revision", metavar="R", help="the same of a drafter")
    return group


def add_how(parser, max_tokens=None):
    """How a run goes. max_tokens: default of -n; None leaves out what only a run needs. Returns the group."""
    from ..config import WIDEST

    group = parser.add_argument_group("how")
    if max_tokens is not None:
        group.add_argument("-n", "--max-tokens", metavar="N", type=whole(0), default=max_tokens,
                           help="new tokens at most (default %(default)s)")  # fmt: skip
        group.add_argument("--verify", metavar="N|auto", type=rows_to_verify, default="auto",
                           help="rows of the block the target verifies; 1 drafts nothing (default auto: "
                                "the fastest)")  # fmt: skip
    group.add_argument("--block", metavar="N", type=whole(1, WIDEST),
                       help=f"tokens in a drafted block, the anchor counted, up to {WIDEST} (default: "
                            f"as trained)")  # fmt: skip
    group.add_argument("--prefill-chunk", metavar="N", type=whole(1),
                       help="prompt tokens in one pass; changes no result (default 256, "
                            "on cuda 2048)")  # fmt: skip
    return group


def add_machine(parser):
    """Where it runs, and how much is said. Returns the group."""
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="kernels (default auto: the fastest here)"
    )
    group.add_argument("--device", metavar="N", type=whole(0), default=0, help="which GPU (default 0)")
    group.add_argument("--activations", choices=("f32", "bf16"),
                       help="type of activations and caches (default f32 on the CPU, "
                            "bf16 on a GPU)")  # fmt: skip
    group.add_argument("--weights", choices=("bf16", "file"),
                       help="of a GGUF target and of the default one: rounded to bf16, or as the file has "
                            "them (default: the file's on the CPU, bf16 of the default target on a "
                            "GPU)")  # fmt: skip
    group.add_argument("--ctx", metavar="N", type=whole(1),
                       help="positions, prompt and new tokens (default: "
                            "what the target allows and memory holds)")  # fmt: skip
    group.add_argument("--offline", action="store_true", help="fetch nothing")
    add_talk(group)
    return group


def add_talk(parser):
    """-q and -v."""
    parser.add_argument("-q", "--quiet", action="store_true", help="no notes and no progress on stderr")
    parser.add_argument("-v", "--verbose", action="store_true", help="more notes, and tracebacks of errors")


def add_template_arg(group):
    """What a chat template reads."""
    group.add_argument("--chat-template-arg", metavar="K=V", action="append", default=[],
                       help="set what the chat template reads, e.g. enable_thinking=false; "
                            "may be repeated")  # fmt: skip


def add_stop(group):
    """Texts that end a text."""
    group.add_argument("--stop", metavar="TEXT", action="append", default=[],
                       help="end before this text; may be repeated")  # fmt: skip


def add_sampling(parser):
    """The sampling group; sampling.py says what its flags mean together. Returns the group."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", metavar="F", type=real(0, math.inf, "a number from 0 up"),
                       default=0.0, help="0: always the likeliest token (default 0)")  # fmt: skip
    group.add_argument(
        "--top-k", metavar="N", type=whole(0), default=0, help="only the N likeliest (default 0: all)"
    )
    group.add_argument("--top-p", metavar="F", type=real(0, 1, "a number from 0 to 1"), default=1.0,
                       help="only the likeliest that make up this probability (default 1: all)")  # fmt: skip
    group.add_argument("--min-p", metavar="F", type=real(0, 1, "a number from 0 to 1"), default=0.0,
                       help="only those at least this likely, relative to the likeliest (default 0: "
                            "all)")  # fmt: skip
    group.add_argument(
        "--seed", metavar="N", type=whole(0), default=0, help="of the random numbers (default 0)"
    )
    group.add_argument("--accept", choices=("match", "reject"), default="match",
                       help="how drafts are accepted when sampling. match (default): a seed's text is that "
                       "of plain decoding. reject: by rejection sampling; only the law is the same, not the "
                       "text; needs --verify N")  # fmt: skip
    return group


def sampling_wishes(args):
    """The sampling flags whose value is not the default, as keywords.
    Errors: UserError for what cannot be meant."""
    from ..sampling import OPTIONS, Sampling

    given = {name: getattr(args, name, usual) for name, usual in OPTIONS.items()}  # some have no such flag
    wishes = {name: value for name, value in given.items() if value != OPTIONS[name]}
    if given["logprobs"] and not (args.json or args.trace):
        raise UserError("--logprobs has no place in plain text", "add --json or --trace FILE")
    Sampling.of(wishes).check_verify(args.verify)
    return wishes


def load_keywords(args):
    """The keywords of engine.load that the flags of add_pair, add_how and add_machine ask for."""
    keywords = {
        "target": args.target, "backend": args.backend, "activations": args.activations, "ctx": args.ctx,
        "prefill_chunk": args.prefill_chunk, "revision": args.revision,
        "drafter_revision": args.drafter_revision,
        "offline": args.offline, "device": args.device, "weights": args.weights,
    }  # fmt: skip
    if args.drafter is not None:
        keywords["drafter"] = None if args.drafter == "none" else args.drafter
    return keywords
