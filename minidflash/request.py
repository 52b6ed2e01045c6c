"""What a run was asked for: prompt to ids, keywords to checked values, an engine reserved for it."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from . import sampling
from .config import WIDEST
from .errors import UserError
from .fit import fitting_slots
from .schedule import Schedule, SharedWidth
from .state import make_state
from .text import RoundText
from .values import flag, instance, is_word, told, whole, whole_number

# Keywords of generate and stream, and their defaults. None of block: what the drafter was trained on.
OPTIONS = {
    "max_tokens": 256, "stop": (), "ignore_eos": False, "block": None, "verify": "auto", "raw": False,
    "system": None,
    "template_args": None, "drafter": True, "trace": False,
} | sampling.OPTIONS  # fmt: skip

SIDE_BY_SIDE = 16  # samples at a time: a CPU gains nothing by more, and the next ones wait for the longest
ROUNDED = 256  # positions of their slots, so that runs of about a length share buffers


@dataclass
class Request:
    """Checked. ids: the prompt. drafts: whether the drafter takes part. verify: rows a round, or "auto".

    raw: text is that of all channels. sampling: how tokens are chosen.
    options: what was asked for, as plain values. begun: when, by perf_counter. resumes: rows that the caches
    hold already are not run again. rows_reused, rows_run: of the prompt, written by prefill. trace: rounds
    have a detail. widths: of a run that is repeated, the rows that each round of each sample verified; None:
    as verify says.
    """

    ids: list
    max_tokens: int
    stop: list
    ignore_eos: bool
    raw: bool
    block: int
    verify: int | str
    drafts: bool
    sampling: sampling.Sampling
    options: dict
    begun: float
    resumes: bool = False
    rows_reused: int = 0
    rows_run: int = 0
    trace: bool = False
    widths: list | None = None

    @property
    def rows_left(self):
        """Tokens of the prompt that have not run."""
        return len(self.ids) - self.rows_reused - self.rows_run

    @property
    def choice(self):
        """How target.choose chooses."""
        return "ranked" if self.trace and self.sampling.choice == "likeliest" else self.sampling.choice

    @classmethod
    def of(cls, engine, prompt, given, resumes=False, batch=None):
        """Check keywords and prompt. resumes: as in the class. batch: the Batch that it is for, which may be
        what keeps the engine busy.

        Errors: TypeError for an unknown keyword; UserError for a bad value, for a prompt that is none or does
        not fit, and while the engine generates.
        """
        begun = time.perf_counter()
        o, law = checked(engine, given)
        if batch is None:
            refuse_busy(engine)
        drafts = engine.drafter is not None and o["drafter"]
        block = (o["block"] or engine.drafter.config.block) if drafts else 1
        verify = o["verify"] if o["verify"] == "auto" else min(o["verify"], block)
        if block == 1:
            drafts, verify = False, 1
        ids = prompt_ids(engine, prompt, o)
        check_room(engine, len(ids), o["max_tokens"], drafts, resumes, batch)
        told_back = {name: o[name] for name in _meant(given)}
        return cls(
            ids, o["max_tokens"], o["stop"], o["ignore_eos"], o["raw"], block, verify, drafts, law, told_back,
            begun, resumes, trace=o["trace"],
        )  # fmt: skip


def _meant(given):
    """The keywords that say something. None is "not given"; of drafter it is plain decoding."""
    return {name: value for name, value in given.items() if value is not None or name == "drafter"}


def checked(engine, given):
    """All options as plain values, and the Sampling of them. Errors: as Request.of, for keywords."""
    for name in given:
        if name not in OPTIONS:
            raise TypeError(f"unknown keyword {name!r}; known: {', '.join(OPTIONS)}")
    given = _meant(given)
    options, law = _plain(engine, OPTIONS | given), sampling.Sampling.of(given)
    law.check_verify(options["verify"])
    return options | asdict(law), law


def _plain(engine, options):
    """The options that are not sampling's, as plain values. Errors: UserError naming the option."""
    o = dict(options)
    is_plain = o["drafter"] is None or is_word(o["drafter"], "none")
    o["drafter"] = False if is_plain else flag("drafter", o["drafter"])
    o["max_tokens"] = whole("max_tokens", o["max_tokens"], 0)
    if not is_word(o["verify"], "auto"):
        o["verify"] = whole("verify", o["verify"], 1)
    if o["block"] is not None:
        o["block"] = whole("block", o["block"], 1, WIDEST)
    for name in ("ignore_eos", "raw", "trace"):
        o[name] = flag(name, o[name])
    if o["system"] is not None:
        instance("system", o["system"], str, "a text")
    if o["template_args"] is not None:
        o["template_args"] = dict(
            instance("template_args", o["template_args"], Mapping, "names and their values")
        )
        for name in o["template_args"]:
            instance("template_args", name, str, "names that are texts")
    for stop in instance("stop", o["stop"], (list, tuple, str), "a list of texts"):
        instance("stop", stop, str, "a list of texts")
    RoundText(engine.tokenizer, o["stop"])  # refuses what it cannot stop at
    o["stop"] = list(o["stop"])
    return o


def check_room(engine, count, max_tokens, drafts, resumes=False, batch=None):
    """Refuse a run that needs more positions than there are. resumes: it is a turn of a conversation.
    batch: it is for a slot of one. Errors: UserError with the numbers and what helps."""
    need, longest = count + max_tokens, engine.target.config.max_positions
    ctx, longer = (engine.ctx, "raise --ctx") if batch is None else (batch.ctx, "raise the ctx of the Batch")
    words = f"{count} prompt tokens and {told(max_tokens)} new ones need {told(need)} positions"
    if need > ctx:
        ways = [longer] if ctx < longest else []
        if count < ctx:
            ways.append("lower --max-tokens")
        if resumes and batch is None:
            ways.append("begin the conversation anew: /reset, or reset() of the Chat")
        elif count >= ctx:
            ways.append("shorten the prompt")
        raise UserError(f"{words}, {ctx} are there", " or ".join(ways))
    drafted = drafts and engine.drafter.config.max_positions  # 0: not stated
    if drafted and need > drafted:
        raise UserError(
            f"{words}, the drafter was made for {drafted}",
            f"decode plainly, which goes to {engine.ctx}: --drafter none (drafter=False)",
        )


def prompt_ids(engine, prompt, options):
    """Ids of a prompt: a sequence of ids as it is, a list of messages or a str through the chat template.

    Errors: UserError for an empty prompt, ids without a row in the target's embedding, text without a
    tokenizer, and what is no prompt.
    """
    is_chat = isinstance(prompt, (list, tuple)) and any(isinstance(item, Mapping) for item in prompt)
    if isinstance(prompt, str) or is_chat:
        ids = _text_ids(engine, prompt if isinstance(prompt, str) else list(prompt), options)
    else:
        ids = _given_ids(prompt)
        _refuse_chat_options(options, ("system", "template_args"), "a prompt of ids is taken as it is")
    if not ids:
        raise UserError("the prompt is empty", 'give some text: minidflash generate "hello"')
    rows = engine.target.config.vocab
    bad = next((i for i in ids if not 0 <= i < rows), None)
    if bad is not None:
        is_known = engine.tokenizer is not None and 0 <= bad < 2**32
        text = engine.tokenizer.backend.id_to_token(bad) if is_known else None
        words, hint = f"token {told(bad)}", None
        if text is not None:
            words, hint = (
                f"{words} {told(text)}",
                "leave it out of the prompt: this model was not made for it",
            )
        raise UserError(f"{words} is outside 0 to {rows - 1}, the ids that the target embeds", hint)
    return ids


def _given_ids(prompt):
    """A prompt of whole numbers as a list of int."""
    needed = "need a text, a list or array of ids, or a list of messages"
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or (prompt.size and prompt.dtype.kind not in "iu"):
            raise UserError(f"the prompt is an array of {prompt.dtype} with shape {prompt.shape}, {needed}")
        return prompt.tolist()
    if not isinstance(prompt, (list, tuple, range)):
        hint = "give its ids as a list: prompt.tolist()" if hasattr(prompt, "tolist") else None
        raise UserError(f"the prompt is of type {type(prompt).__name__}, {needed}", hint)
    ids = [whole_number(item) for item in prompt]
    if None in ids:
        bad = prompt[ids.index(None)]
        raise UserError(f"the prompt holds {told(bad)} of type {type(bad).__name__}, {needed}")
    return ids


def _text_ids(engine, prompt, options):
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise UserError("this checkpoint has no tokenizer.json", 'give ids: --tokens "5 9 9"')
    text = render(engine, prompt, options)
    if isinstance(prompt, str) and (options["raw"] or not tokenizer.has_chat_template):
        return tokenizer.encode(text)
    return tokenizer.encode_rendered(text)


def render(engine, prompt, options):
    """The text that is encoded: the prompt itself when raw or without a template, else the rendered chat."""
    if isinstance(prompt, str):
        if options["raw"] or not engine.tokenizer.has_chat_template:
            why = "the prompt is raw" if options["raw"] else "this checkpoint has none"
            _refuse_chat_options(options, ("system", "template_args"), f"it needs a chat template, and {why}")
            return prompt
        prompt = [{"role": "user", "content": prompt}]
        if options["system"]:
            prompt = [{"role": "system", "content": options["system"]}, *prompt]
    else:
        _refuse_chat_options(options, ("system",), "the messages hold their own")
    return engine.tokenizer.render(prompt, **(options["template_args"] or {}))


def _refuse_chat_options(options, names, why):
    """Refuse options that the prompt gives no place to; what is asked for is never quietly left out (F61)."""
    for name in names:
        if options[name]:
            flag = {"system": "--system", "template_args": "--chat-template-arg"}[name]
            raise UserError(f"{flag} has no effect here: {why}", f"leave out {flag}")


def refuse_busy(engine):
    """Errors: UserError while a run goes on. A stream that has not begun is none."""
    if engine.is_busy:
        raise UserError(
            "this engine is generating already", "finish or close that stream, or load a second engine"
        )


def reserve(engine, request):
    """The engine's State for this request alone: a slot for each of its samples, as many as memory holds, up
    to SIDE_BY_SIDE. Errors: as `hold`."""
    law, ctx = request.sampling, engine.ctx
    rejects = request.drafts and law.rejects
    slots = 1 if request.trace else min(law.samples, SIDE_BY_SIDE)  # a trace tells of one text at a time
    if slots > 1:
        need = len(request.ids) + request.max_tokens
        ctx = min(ctx, -(-need // ROUNDED) * ROUNDED)
        slots = fitting_slots(engine, slots, ctx, request.block, rejects)
    shape = Shape(slots, ctx if slots > 1 else engine.ctx, request.block, request.drafts, rejects)
    return hold(engine, shape)


@dataclass(frozen=True)
class Shape:
    """What an engine's State is made for: texts at a time, positions of each, rows of a block, whether the
    drafter takes part, and whether its drafts are drawn."""

    slots: int
    ctx: int
    block: int
    drafts: bool
    rejects: bool = False


def hold(engine, shape):
    """The engine's State of a shape, made anew only when that changes; the engine is busy until `release`.

    Errors: UserError when busy, and in a forked process where the backend does not work there.
    """
    refuse_busy(engine)
    engine.ops.refuse_fork()
    engine.is_busy, engine.is_interrupted = True, False
    try:
        stops, held = len(engine.stop_ids), engine.state_shape
        # A plain run fits into the buffers of a drafted one; they are not given up for it.
        fits = held == shape or (
            held and not shape.drafts and (held.slots, held.ctx) == (shape.slots, shape.ctx)
        )
        if engine.state is None or not fits or stops > engine.state.stop.shape[1]:
            engine.state, engine.programs = None, {}
            drafter = engine.drafter.config if shape.drafts else None
            engine.state = make_state(
                engine.ops, engine.target.config, drafter, stops, shape.slots, shape.ctx, shape.block,
                min(engine.chunk, shape.ctx), shape.rejects,
            )  # fmt: skip
            engine.state_shape = shape
            if engine.schedule is None or engine.schedule.block != shape.block:
                engine.schedule, engine.shared = Schedule(shape.block), SharedWidth(shape.block)
        return engine.state
    except BaseException:
        engine.is_busy = False
        raise


def release(engine):
    """The run is over, in whatever way."""
    engine.is_busy = False
