"""Ops: every kernel of the table as a method. Checks the arguments against the row, then calls the backend.

A backend is an object with `name`, `activations`, `array`, `upload`, `download`, `copy`, `weight`, `compile`
(a list of checked calls -> something with `launch()`), `start` (launch a program, fetch buffers) with
`rounds_ahead`, the programs that may be started before the first one's result is asked for, `prompt_passes`,
the rows that a prompt's pass is recorded for (none where it is missing), `chunk_between_rounds`, the prompt
tokens that texts which decode wait for at most (a whole chunk where it is missing), `lost_by_fork`, and one
function a row. What a call costs is the backend's: `record` checks once and replays without checking,
which is what a round does.
"""

from contextlib import contextmanager

import numpy as np

from .fork import refuse_lost
from .table import ALLOWED, ROWS
from .weight import Weight

PREFILL_CHUNK = 256  # prompt tokens in one pass, where a backend has no number of its own
DTYPES = {"i32": np.int32, "f32": np.float32}


def storage(activations):
    """NumPy dtype that holds an activation: bf16 is kept as its bits."""
    return {"f32": np.float32, "bf16": np.uint16}[activations]


class Ops:
    """Kernels of one backend with one activation type.

    backend: see the module text. Methods: one a table row, arguments in table order,
    all buffers the caller's.
    Errors: TypeError and ValueError name the kernel, the argument, what was found and what was needed.
    """

    def __init__(self, backend):
        self.backend = backend
        self.name = backend.name
        self.activations = backend.activations
        self.array, self.upload, self.download = backend.array, backend.upload, backend.download
        self.copy = backend.copy
        self.weight, self.start, self.rounds_ahead = backend.weight, backend.start, backend.rounds_ahead
        # Only a backend that copies weights elsewhere has it.
        self.read_ahead = getattr(backend, "read_ahead", lambda weights: None)
        self.prefill_chunk = getattr(backend, "prefill_chunk", PREFILL_CHUNK)
        self.chunk_between_rounds = getattr(backend, "chunk_between_rounds", self.prefill_chunk)
        self.prompt_passes = getattr(backend, "prompt_passes", ())
        self._recording = self._clock = None
        self._for_prefill = None

    @property
    def for_prefill(self):
        """Ops whose rows suit the many token rows of a prompt; this object where the backend has no others.

        Weights and buffers are the same. A row's bits may differ from this object's,
        and do not depend on the chunk.
        """
        if self._for_prefill is None:
            make = getattr(self.backend, "for_prefill", None)
            self._for_prefill = Ops(make()) if make else self
        return self._for_prefill

    def refuse_fork(self):
        """Errors: UserError in a forked process that lost what the backend needs; see fork.py."""
        refuse_lost(self.backend.lost_by_fork)

    def __getattr__(self, name):
        if name not in ROWS:
            raise AttributeError(f"no kernel {name!r} in the table (kernels: {', '.join(ROWS)})")
        row, function = ROWS[name], getattr(self.backend, name)

        def call(*args):
            check(row, args, self.activations)
            if self._recording is not None:
                self._recording.append((name, function, args))
            else:
                self.refuse_fork()
                function(*args)

        self.__dict__[name] = call  # the next lookup does not come here
        return call

    @contextmanager
    def record(self):
        """Collect the calls made inside instead of running them; yields the list for `backend.compile`."""
        if self._recording is not None:
            raise RuntimeError("a recording is already open")
        self._recording = calls = []
        try:
            yield calls
        finally:
            self._recording = None

    def program(self, fn, bucket=None, is_timed=False):
        """Run `fn()` once in recording and return what replays it: `.launch()`, same buffers, no checks.

        bucket: of `bucket`, for programs whose rows see no key behind it. is_timed: its `.clock` looks where
        fn has a `mark`; `clock.read()` gives the seconds of each stage, once a launch has ended and before
        the next one. Else there is no clock, and the calls are those of fn without marks.
        """
        clock = self.backend.clock() if is_timed else None
        with self.record() as calls:
            self._clock = clock
            try:
                fn()
            finally:
                self._clock = None
        program = self.backend.compile(calls, bucket)
        program.clock = clock
        return program

    def mark(self, stage):
        """Here begins a stage of a program that is timed; None: the last one has ended."""
        if self._clock is not None:
            self._recording.append(("mark", self._clock.look, (stage,)))

    def bucket(self, keys):
        """The context that a program for rows with so many keys is recorded for; None: any."""
        return next((bucket for bucket in self.backend.buckets if keys <= bucket), None)


def check(row, args, activations):
    """Compare `args` with the row: count, types, dims, contiguity. Errors: as Ops."""
    if len(args) != len(row.args):
        raise TypeError(f"{row.name} takes {len(row.args)} arguments, {len(args)} given")
    known, later = {}, []
    for spec, value in zip(row.args, args, strict=True):
        where = f"{row.name}: {spec.name}"
        if value is None:
            if not spec.optional:
                raise TypeError(f"{where} is None")
        elif spec.type == "W":
            if not isinstance(value, Weight):
                raise TypeError(f"{where} must be a Weight, not {type(value).__name__}")
            later.append((where, spec.dims, value.shape))
        elif spec.dims is None:
            if not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"{where} must be a number, not {type(value).__name__}")
            if value not in ALLOWED.get((row.name, spec.name), (value,)):
                raise ValueError(f"{where} is {value}, needed one of {ALLOWED[row.name, spec.name]}")
        else:
            want = storage(activations) if spec.type == "A" else DTYPES[spec.type]
            if getattr(value, "dtype", None) != want:
                raise TypeError(
                    f"{where} must be {np.dtype(want)}, not {getattr(value, 'dtype', type(value))}"
                )
            if len(value.shape) != len(spec.dims):
                raise ValueError(f"{where} must have {len(spec.dims)} dims, not shape {value.shape}")
            if not value.flags.c_contiguous:
                raise ValueError(f"{where} must be contiguous")
            later.append((where, spec.dims, value.shape))
    for where, dims, shape in later:  # plain letters first: products are checked against them
        for dim, size in zip(dims, shape, strict=True):
            if dim.isalpha() and known.setdefault(dim, size) != size:
                raise ValueError(f"{where}: {dim} is {size}, elsewhere {known[dim]}")
    for where, dims, shape in later:
        for dim, size in zip(dims, shape, strict=True):
            if not dim.isalpha() and size not in (fitting := [expected(d, known) for d in dim.split("|")]):
                raise ValueError(f"{where}: {dim} is {size}, needed {' or '.join(map(str, fitting))}")


def expected(dim, known):
    """Value of a sum of products of letters and numbers, e.g. "2*G*K" or "B+3"; of alternatives the first."""
    total = 0
    for term in dim.split("|")[0].split("+"):
        product = 1
        for factor in term.split("*"):
            product *= known[factor] if factor.isalpha() else int(factor)
        total += product
    return total
