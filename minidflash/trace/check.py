"""`minidflash trace FILE --check`: run again what a trace says, and compare every line but its times."""

import json
from contextlib import closing
from dataclasses import replace

from ..cli.terminal import json_line
from ..errors import UserError
from ..loop import rounds_of
from ..request import Request
from ..run import machine_of
from ..stats import Timing
from ..values import told
from .write import Lines, identity_of

TIMES = "seconds", "stages"
CUT_SHORT = "text", "finish_reason"  # of the line with which an interrupted run ended


def load_keywords(header, target=None, drafter=None):
    """The keywords of engine.load for a trace's run.

    target, drafter: where they lie here, None: as the header names them. What only the header names is not
    fetched, but for the default pair: a stranger's file must not choose what comes onto this machine.
    """
    names = {"target": (target, header["target"]), "drafter": (drafter, header["drafter"])}
    found, is_offline = {}, False
    for role, (given, named) in names.items():
        found[role] = given or named
        revision = header["files"].get(role, {}).get("revision")
        found["revision" if role == "target" else "drafter_revision"] = None if given else revision
        is_offline |= given is None and named not in (None, "default")
    return found | {
        "offline": is_offline, "backend": header["backend"], "activations": header["activations"],
        "ctx": header["ctx"], "prefill_chunk": header["prefill_chunk"], "weights": header["weights"],
    }  # fmt: skip


def differences(engine, recording):
    """What of a trace is not so on this engine: yields a line of words each; nothing where all of it is.

    A line's times are not compared. Rounds verify as many rows as they did, whatever --verify was. Errors:
    UserError for a header that cannot be run.
    """
    header = recording.header
    for role, files in header["files"].items():
        here = identity_of(engine.origins[role]) if role in engine.origins else {}
        for name in [name for name in files if files[name] != here.get(name)]:
            yield f"{role} {name}: {told(files[name])} then, {told(here.get(name))} now"
    yield from _other_lines(engine, recording.lines, request_of(engine, recording))


def request_of(engine, recording):
    """The Request of a trace's run, its rounds as wide as they were."""
    request = Request.of(engine, recording.header["prompt"], recording.header["options"] | {"trace": True})
    widths = [[] for _ in range(request.sampling.samples)]
    for line in recording.lines:
        if line.get("sample", 0) >= len(widths):
            raise UserError(f"the trace has a sample {line['sample']}, its header asks for {len(widths)}")
        if line["verify"] > request.block:
            raise UserError(f"the trace has a round of {line['verify']} rows, its block is {request.block}")
        if line["verify"]:
            widths[line.get("sample", 0)].append(line["verify"])
    return replace(request, widths=widths)


def _other_lines(engine, lines, request):
    """Differences of rounds, the first one of each line."""
    made, count = Lines(engine.tokenizer), 0
    with closing(rounds_of(engine, request, Timing())) as rounds:
        for line, r in zip(lines, rounds, strict=False):
            found, count = json.loads(json_line(made.of(r))), count + 1
            skipped = TIMES + (CUT_SHORT if line["finish_reason"] == "interrupted" else ())
            for key in [key for key in {**line, **found} if key not in skipped]:
                if line.get(key) != found.get(key):
                    yield f"round {count - 1}: {key} {told(line.get(key))} then, {told(found.get(key))} now"
                    break
        was_interrupted = bool(lines) and lines[-1]["finish_reason"] == "interrupted"
        if count < len(lines):
            yield f"{len(lines)} rounds then, {count} now"
        elif not was_interrupted and next(rounds, None) is not None:
            yield f"{len(lines)} rounds then, more now"


def other_machine(engine, header):
    """A note where the trace is of another machine, whose bits are not promised to be this one's; or None."""
    here = machine_of(engine.ops)
    return None if here == header["machine"] else f"the trace was made on {header['machine']}, this is {here}"
