"""Trace files as they are written: a header that says what to run, then a line a round, as they come."""

from dataclasses import asdict

from .. import __version__
from ..cli.terminal import json_line
from ..errors import UserError

FORMAT = 1  # of the header's `trace`
TEXTS_OF_A_CHECKPOINT = "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"


class Trace:
    """A trace file being written, as a context manager. path: where; an older file there is replaced.

    Errors: UserError when it cannot be written, code 3 once it is open: a disk is full then.
    """

    def __init__(self, path):
        if path in ("", "-"):
            raise UserError(
                f"--trace {path!r}: a trace needs a file of its own",
                "--trace run.jsonl, or --trace ./- for that name",
            )
        try:
            # Unbuffered: closing writes nothing again.
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UserError(f"trace file {path!r} cannot be written: {error.strerror}") from None
        self._path, self._lines, self._run = path, Lines(None), None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self._put_header()
        finally:
            self._do(self._file.close)

    def begin(self, engine, request):
        """What will run. Its files are read to tell them from others: a second for each 1 to 2 GB."""
        self._lines, self._run = Lines(engine.tokenizer), (engine, request, files_of(engine, request))

    def write(self, r):
        """Append one Round."""
        self._put_header()
        self._put(self._lines.of(r))

    def _put_header(self):
        """Before the first round: by then the engine has measured what it measures before a run."""
        if self._run is not None:
            run, self._run = self._run, None
            self._put(header_of(*run))

    def _put(self, line):
        rest = json_line(line).encode()
        while rest:  # a disk that becomes full takes a part
            rest = rest[self._do(self._file.write, rest) :]

    def _do(self, action, *args):
        """Something with the file. Errors: UserError naming it; BrokenPipeError as it is."""
        try:
            return action(*args)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(
                f"trace file {self._path!r} cannot be written: {error.strerror}", code=3
            ) from None


class Lines:
    """Rounds as lines of a trace, in their order. tokenizer: of the target, or None.

    A line: round (0: prefill's token), ids, drafts (ids verified), accepted (drafts kept, before stop and
    budget cuts), verify (rows), seconds, text, finish_reason; with a tokenizer id_texts, which join to the
    text, and draft_texts, each by itself; from the second sample on sample; logprobs where they were asked
    for, and experts as in Round. Of a Detail: anchor, start, injected, choice (with choice_texts),
    margins, stages.
    """

    def __init__(self, tokenizer):
        self._tokenizer, self._count, self._texts = tokenizer, 0, {}
        self._stream, self._sample = tokenizer and tokenizer.stream(), 0

    def of(self, r):
        """The line of the next Round, as a dict."""
        line = {
            "round": self._count, "ids": r.tokens, "drafts": r.drafted, "accepted": r.accepted,
            "verify": r.verify, "seconds": r.seconds, "text": r.text, "finish_reason": r.finish_reason,
        }  # fmt: skip
        if r.sample:
            line["sample"] = r.sample
        for name in ("logprobs", "experts"):
            if getattr(r, name) is not None:
                line[name] = getattr(r, name)
        if r.detail is not None:
            line |= vars(r.detail)
        if self._tokenizer is not None:
            if r.sample != self._sample:
                self._stream, self._sample = self._tokenizer.stream(), r.sample
            line["id_texts"] = [self._stream.push([token]) for token in r.tokens]
            for ids, texts in {"drafts": "draft_texts", "choice": "choice_texts"}.items():
                if ids in line:
                    line[texts] = list(map(self._text, line[ids]))
        self._count += 1
        return line

    def _text(self, token):
        """A token's text by itself; they come again and again, and decoding takes longer than the rest."""
        if token not in self._texts:
            self._texts[token] = "" if token is None else self._tokenizer.decode([token])
        return self._texts[token]


def header_of(engine, request, files):
    """The first line of a trace: what to run again, and a plain round's cost where it was measured.

    engine: Engine. request: Request. files: of files_of. Returns a dict: pair (target,
    drafter, and each one's revision or the sha256 of its files), backend, activations, machine, options, the
    prompt's ids. Errors: none. Source: engine.md 5.
    """
    from ..run import machine_of

    options = {
        "max_tokens": request.max_tokens, "stop": request.stop, "ignore_eos": request.ignore_eos,
        "raw": request.raw, "verify": request.verify, "drafter": request.drafts, **asdict(request.sampling),
    }  # fmt: skip
    if request.drafts:
        options["block"] = request.block
    plain = engine.schedule.seconds.get(1) if request.drafts and engine.schedule else None
    return {
        "trace": FORMAT, "version": __version__, "target": engine.target_name,
        "drafter": engine.drafter_name if request.drafts else None,
        "files": files, "weights": engine.weights, "backend": engine.ops.name,
        "activations": engine.ops.activations, "machine": machine_of(engine.ops),
        "ctx": engine.ctx, "prefill_chunk": engine.chunk, "plain_seconds": plain,
        "options": options, "prompt": list(request.ids),
    }  # fmt: skip


def files_of(engine, request):
    """Role -> identity_of the checkpoints that a run reads."""
    roles = ("target", "drafter") if request.drafts else ("target",)
    return {role: identity_of(engine.origins[role]) for role in roles if role in engine.origins}


def identity_of(checkpoint):
    """What tells a checkpoint from others: {"revision": commit}, or {file name: sha256} of what lies here."""
    from minidflash.weights.hub import commit_of
    from minidflash.weights.manifest import sha256

    commit = commit_of(checkpoint.name, checkpoint.folder)
    if commit:
        return {"revision": commit}
    texts = [checkpoint.folder / name for name in TEXTS_OF_A_CHECKPOINT]
    paths = [path for path in texts if path.is_file()] + [path for path, _ in checkpoint.files]
    try:
        return {path.name: sha256(path) for path in paths}
    except OSError as error:
        raise UserError(f"{checkpoint.name}: {error.filename} cannot be read: {error.strerror}") from None
