"""warm_up(): every kernel of a run called once at load, so that compiling is timed apart from generating."""

import time

from .ahead import program
from .loop import begin, prefill
from .request import Request, release, reserve

NOT_COMPILED = (
    "oracle",
    "emulate",
)  # nothing to compile, or built ahead, and far too slow to run for nothing


def warm_up(engine, progress=None):
    """Prefill one token and run a plain and a drafted round on the engine's own buffers;
    adds to engine.jit_s.

    Kernels are compiled by type, not by shape, so this compiles (or loads from the disk cache) all that a run
    calls. What the rounds compute is thrown away. progress: None or progress(label, done, total).
    Returns None. Errors: as `generate`. Source: F79.
    """
    if engine.ops.name in NOT_COMPILED:
        return
    since = time.perf_counter()
    request = Request.of(engine, [0], {"max_tokens": 0})
    widths = [1, request.block] if request.drafts else [1]
    label, total = "preparing kernels (compiled on the first run)", 1 + len(widths)
    show = progress or (lambda label, done, total: None)
    s = reserve(engine, request)
    try:
        show(label, 0, total)
        (first,) = prefill(engine, s, request)
        begin(engine, s, request, 0, first)
        for done, width in enumerate(widths):
            show(label, 1 + done, total)
            how = request.drafts, width, width > 1, request.sampling.choice
            program(engine, s, how, 1 + s.block).launch()
        engine.ops.download(s.record)
        show(label, total, total)
    finally:
        release(engine)
    engine.jit_s += time.perf_counter() - since
