"""What a run was asked for: prompt to ids, keywords to checked values, an engine reserved for it."""

from dataclasses import dataclass

from . import sampling
from .errors import UserError
from .schedule import Schedule
from .state import make_state

WIDEST = 64  # widest block; above what the drafter was trained on acceptance falls (golden README)
# Keywords of generate and stream, and their defaults. None of block: what the drafter was trained on.
OPTIONS = {
    "max_tokens": 256, "stop": (), "ignore_eos": False, "block": None, "verify": "auto", "raw": False, "system": None,
    "template_args": None, "drafter": True,
} | sampling.OPTIONS  # fmt: skip


@dataclass
class Request:
    """Checked. ids: the prompt. drafts: whether the drafter takes part. verify: rows a round, or "auto".

    sampling: how tokens are chosen.
    """

    ids: list
    max_tokens: int
    stop: tuple
    ignore_eos: bool
    block: int
    verify: int | str
    drafts: bool
    sampling: sampling.Sampling
    options: dict

    @classmethod
    def of(cls, engine, prompt, given):
        """Check keywords and prompt. Errors: TypeError for an unknown keyword, UserError for a bad value."""
        for name in given:
            if name not in OPTIONS:
                raise TypeError(f"unknown keyword {name!r}; known: {', '.join(OPTIONS)}")
        o = OPTIONS | given
        law = sampling.Sampling.of(given)
        drafts = engine.drafter is not None and o["drafter"] is True
        trained = engine.drafter.config.block if drafts else 1
        block = _count(o, "block", trained, 1, WIDEST) if drafts else 1
        verify = o["verify"]
        law.check_verify(verify)
        if verify != "auto":
            verify = min(_count(o, "verify", None, 1, None), block)
        if block == 1:
            drafts, verify = False, 1
        max_tokens = _count(o, "max_tokens", None, 0, None)
        ids = prompt_ids(engine, prompt, o)
        need = len(ids) + max_tokens
        if need > engine.ctx:
            raise UserError(
                f"{len(ids)} prompt tokens and {max_tokens} new ones need {need} positions, {engine.ctx} are there",
                "raise --ctx or lower --max-tokens",
            )
        return cls(ids, max_tokens, tuple(o["stop"]) if not isinstance(o["stop"], str) else o["stop"],
                   bool(o["ignore_eos"]), block, verify, drafts, law, dict(given))  # fmt: skip


def _count(options, name, default, low, high):
    """A whole number option within bounds. Errors: UserError naming it."""
    value = options[name]
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high and value > high):
        bounds = f"from {low} to {high}" if high else f"from {low} up"
        raise UserError(f"{name.replace('_', '-')} is {value!r}, need a whole number {bounds}")
    return value


def prompt_ids(engine, prompt, options):
    """Ids of a prompt: a list of ids as it is, a list of messages or a str through the chat template.

    Errors: UserError for an empty prompt, ids outside the vocabulary, text without a tokenizer.
    """
    vocab = engine.target.config.vocab
    if isinstance(prompt, (list, tuple)) and not any(isinstance(item, dict) for item in prompt):
        ids = list(prompt)
        bad = [
            i for i in ids if isinstance(i, bool) or not hasattr(i, "__index__") or not 0 <= int(i) < vocab
        ]
        if bad:
            raise UserError(f"token {bad[0]!r} is outside 0 to {vocab - 1}")
        ids = [int(i) for i in ids]
        _refuse_chat_options(options, ("system", "template_args"), "a prompt of ids is taken as it is")
    else:
        ids = _text_ids(engine, prompt, options)
    if not ids:
        raise UserError("the prompt is empty", 'give some text: minidflash generate "hello"')
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


def reserve(engine, request):
    """The engine's State for this request, made anew only when its shape changes. Errors: UserError when busy."""
    if engine.is_busy:
        raise UserError(
            "this engine is generating already", "finish or close that stream, or load a second engine"
        )
    engine.is_busy, engine.is_interrupted = True, False
    try:
        stop_ids = frozenset() if request.ignore_eos else engine.stop_ids
        rejects = request.drafts and request.sampling.rejects
        shape = 1, request.block, stop_ids, request.drafts, rejects
        # A plain run fits into the buffers of a drafted one; they are not given up for it.
        fits = engine.state_shape == shape or (
            not request.drafts and (engine.state_shape or shape)[2] == stop_ids
        )
        if engine.state is None or not fits:
            engine.state, engine.programs = None, {}
            drafter = engine.drafter.config if request.drafts else None
            engine.state = make_state(
                engine.ops,
                engine.target.config,
                drafter,
                stop_ids,
                1,
                engine.ctx,
                request.block,
                engine.chunk,
                rejects,
            )
            engine.state_shape = shape
            engine.schedule = Schedule(request.block)
        return engine.state
    except BaseException:
        engine.is_busy = False
        raise


def release(engine):
    """The run is over, in whatever way."""
    engine.is_busy = False
