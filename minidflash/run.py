"""stream(): a run round by round; generate(): a whole run as a Result."""

import os
from contextlib import closing

from .loop import rounds_of
from .request import Request
from .stats import Memory, Result, Timing


def stream(engine, prompt, **options):
    """Generate, yielding one `Round` a round; the first one is the token that prefill chose.

    prompt: str (chat template applied unless raw=True), list of ids, or list of chat messages. options:
    keywords as the flags, see request.py. Returns a generator; closing it early leaves the engine usable, one
    that was never begun holds nothing. The last Round has a finish_reason, also when `engine.is_interrupted`
    ended the run. Several samples run side by side (with trace one after another) and come one behind the
    other: the first one's rounds as they are made, the others' once those before have ended.
    Errors: TypeError for an unknown keyword, UserError for what cannot be run, both at the call.
    Source: models.md 7.4, engine.md 2.
    """
    return rounds_of(engine, Request.of(engine, prompt, options), Timing())


def generate(engine, prompt, **options):
    """Run to the end, or to an interruption: Ctrl-C, or `engine.is_interrupted`.

    Arguments and errors as `stream`. Returns a Result. Source: engine.md 5-6.
    """
    request, timing = Request.of(engine, prompt, options), Timing()
    return complete(engine, request, rounds_of(engine, request, timing), timing)


def complete(engine, request, stream, timing):
    """Result of a run, to its end or to Ctrl-C. stream: the generator of its rounds."""
    rounds, reason = [], None
    try:
        with closing(stream):
            for r in stream:
                rounds.append(r)  # noqa: PERF402 what came before Ctrl-C is kept
    except KeyboardInterrupt:
        reason = "interrupted"
    return finish(engine, request, rounds, timing, reason)


def finish(engine, request, rounds, timing, reason=None):
    """Result of a run from its rounds."""
    memory = Memory(engine.target.nbytes + (engine.drafter.nbytes if engine.drafter else 0))
    memory.rope_tables = engine.table_bytes
    for name, value in (engine.state.memory if engine.state else {}).items():
        setattr(memory, name, value)
    timing.load_s, timing.jit_s = engine.load_s, engine.jit_s
    return Result.of(
        rounds, request.block if request.drafts else None, reason, timing, memory,
        samples=request.sampling.samples, rows=(request.rows_reused, request.rows_run),
        prompt_tokens=len(request.ids), backend=engine.ops.name,
        activations=engine.ops.activations, machine=machine_of(engine.ops), target=engine.target_name,
        drafter=engine.drafter_name if request.drafts else None, options=request.options,
    )  # fmt: skip


def machine_of(ops):
    """One line about what a backend runs on."""
    return getattr(ops.backend, "machine", machine_name)()


def machine_name():
    """One line about the processor."""
    import platform

    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
