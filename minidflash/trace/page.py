"""`minidflash trace FILE --html OUT`: one page of its own, nothing fetched. page.html lays out what is counted here.

Texts come from strangers: jinja2 escapes every one of them, what a screen would obey is written out, and the
page's own policy lets no script or style run but the two whose hashes it names.
"""

import base64
import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from statistics import mean, median

from ..errors import UserError, printable
from ..stats import Stats, verify_rounds
from .tell import verdict_of

MOST_ROUNDS, MOST_DRAWN = 5000, 200  # of a page; in the timeline, which is about as wide as 200 screens
STEP = 46.0  # units of the timeline for a plain step
LANE = 64.0  # units of a chart's height
ROUND = 9  # units of a round in the heatmap, and of a position
HOST = "host"  # what no stage has of a round's seconds


@dataclass
class Plain:
    """A plain step. seconds; how: where the number is from, in words."""

    seconds: float
    how: str


def plain_of(recording):
    """The Plain of a trace: measured before the run, or in it, or estimated; None where nothing says it."""
    rounds = [r for r in recording.rounds if r.verify > 0]
    own = [r.seconds for r in rounds if r.verify == 1]
    if recording.block is None and own:
        return Plain(mean(own), "this run, which decoded plainly")
    if recording.header and recording.header["plain_seconds"]:
        return Plain(recording.header["plain_seconds"], "measured on the same machine before the run")
    if len(own) >= 3:
        return Plain(median(own), f"median of the {len(own)} plain rounds of this run")
    verify = [r.detail.stages["verify"] for r in rounds if r.detail and r.detail.stages.get("verify")]
    if verify:
        return Plain(
            median(verify), "estimated: as long as the run's median verify stage, which is an upper bound"
        )
    return None


def shown(text):
    """A token's text for a page: what a screen would obey written out, ends of lines kept."""
    return printable(text, keep="\n\t")


def named(token):
    """What the token at hand is called where it is spoken of: its text, or what it is."""
    return token.strip() or {"": "no text", "\n": "new line"}.get(token, "blank")


def cells(recording):
    """Tokens in their order: dicts for page.html and page.js."""
    found = []
    for number, line in enumerate(recording.lines):
        texts = line.get("id_texts") or [f"{i} " for i in line["ids"]]
        drafts = line.get("draft_texts") or [str(i) for i in line["drafts"]]
        margins = line.get("margins") or []
        for row, text in enumerate(map(shown, texts)):
            is_kept = row < line["accepted"]
            draft = shown(drafts[row]) if row < len(drafts) else None
            if line["verify"] == 0:
                who = "chosen by the target after the prompt"
            else:
                who = "drafted, and kept" if is_kept else "the target's own"
            lost = [] if is_kept else [shown(one) for one in drafts[row:]]
            found.append({
                "text": text, "kind": "kept" if is_kept else "own", "who": who, "round": number, "position": row + 1,
                "id": line["ids"][row], "drafted": draft, "margin": margins[row] if row < len(margins) else None,
                "kept": line["accepted"], "of": len(drafts), "lost": lost, "sample": line.get("sample", 0),
                "lines": text.count("\n"), "name": named(text), "why": verdict_of(line, row)[1] if drafts else "",
            })  # fmt: skip
    return found


def parts_of(r):
    """(stage, seconds) of a round, the host's share last."""
    stages = list(r.detail.stages.items()) if r.detail else []
    rest = r.seconds - sum(seconds for _, seconds in stages)
    return stages + ([(HOST, rest)] if rest > 0 else [])


def timeline(recording, plain):
    """Two lanes on one clock, in units: bars of the rounds' stages, chips of their tokens, the plain steps."""
    scale, at, bars, chips, steps = STEP / plain.seconds, 0.0, [], [], []
    tokens = cells(recording)
    drawn = [(n, r) for n, r in enumerate(recording.rounds) if r.verify > 0][:MOST_DRAWN]
    for number, r in drawn:
        begin = at
        for stage, seconds in parts_of(r):
            bars.append(
                {"x": at, "width": seconds * scale, "stage": stage, "round": number, "ms": 1e3 * seconds}
            )
            at += seconds * scale
        own = [t for t in tokens if t["round"] == number]
        width = (at - begin) / max(1, len(own))
        for i, token in enumerate(own):
            chips.append(token | {"x": begin + i * width, "width": width, "cut": cut(token["text"], width)})
            steps.append(token | {"x": len(steps) * STEP, "width": STEP, "cut": cut(token["text"], STEP)})
    width = max(at, len(steps) * STEP)
    seconds = width / scale
    tick = next(
        (t for t in (m * 10.0**e for e in range(-4, 4) for m in (1, 2, 5)) if t * scale >= 90), seconds
    )
    ticks = [{"x": i * tick * scale, "label": f"{i * tick:.4g} s"} for i in range(int(seconds / tick) + 1)]
    return {
        "bars": bars, "chips": chips, "steps": steps, "ticks": ticks, "width": width, "end": at,
        "plain_end": len(steps) * STEP, "rounds": len(drawn), "seconds": at / scale,
        "plain_seconds": len(steps) * plain.seconds,
    }  # fmt: skip


def cut(text, width):
    """As much of a text as a chip of that width holds."""
    text = " ".join(text.split())
    most = int((width - 5) / 6.6)
    return text if len(text) <= most else text[: max(0, most - 1)] + "…" if most > 1 else ""


def acceptance(recording):
    """By position 1..B-1: kept / reached, and how many of the rounds that verified it kept all up to there."""
    block = recording.block
    rounds = [r for r in verify_rounds(recording.rounds, block) if r.verify > 1]
    found = []
    for i, rate in enumerate(Stats.of(rounds, block).acceptance_by_position, 1):
        verified = [r for r in rounds if r.verify > i]
        if verified:
            reached = sum(r.accepted >= i - 1 for r in verified)
            survival = sum(r.accepted >= i for r in verified) / len(verified)
            found.append({"position": i, "rate": rate, "reached": reached, "survival": survival})
    return found


def heat(recording):
    """Rounds that drafted, as columns: how many positions were kept, and how many drafts behind the stop."""
    found = []
    for number, r in enumerate(recording.rounds):
        if r.verify > 1:
            drafts = r.verify - 1
            stop = int(r.accepted < drafts)
            found.append({"round": number, "kept": r.accepted, "stop": stop, "rest": drafts - r.accepted - stop,
                          "of": drafts})  # fmt: skip
    return found


def break_even(recording, plain):
    """How fast drafting rounds were beside plain ones, by tau; None where the run had none, or no plain step."""
    rounds = [r for r in recording.rounds if r.verify > 1 and r.tokens]
    if not rounds or plain is None:
        return None
    cost, tau = mean(r.seconds for r in rounds), mean(len(r.tokens) for r in rounds)
    if not cost:
        return None
    most = max(recording.block, 2)
    top = max(1.5, most * plain.seconds / cost)
    return {"cost": cost, "tau": tau, "needed": cost / plain.seconds, "speed": tau * plain.seconds / cost,
            "most": most, "top": top, "first": plain.seconds / cost, "last": most * plain.seconds / cost}  # fmt: skip


def facts(recording, plain):
    """(name, value) of what was run."""
    header = recording.header
    if header is None:
        return [("trace", "without a header: nothing says what was run")]
    options = header["options"]
    found = [("target", header["target"]), ("drafter", header["drafter"] or "none: plain decoding")]
    for role, names in header["files"].items():
        found.append((f"{role} files", ", ".join(f"{name} {value[:12]}" for name, value in names.items())))
    found += [("backend", f"{header['backend']}, {header['activations']}"), ("machine", header["machine"]),
              ("prompt", f"{len(header['prompt'])} tokens"), ("context", f"{header['ctx']} positions")]  # fmt: skip
    if header["drafter"]:
        found.append(("block", f"{options['block']}, rows verified: {options.get('verify', 'auto')}"))
    if options.get("temperature", 0):
        law = [f"{name} {options[name]}" for name in ("temperature", "top_k", "top_p", "min_p", "seed", "accept")
               if name in options]  # fmt: skip
        found.append(("sampling", ", ".join(law)))
    if plain:
        found.append(("plain step", f"{1e3 * plain.seconds:.2f} ms, {plain.how}"))
    return [*found, ("written by", f"minidflash {header['version']}")]


def headline(recording, plain):
    """(value, what it is) of the numbers that a reader looks for first."""
    rounds = [r for r in recording.rounds if r.verify > 0]
    tokens, seconds = sum(len(r.tokens) for r in rounds), sum(r.seconds for r in rounds)
    found = [(str(sum(len(line["ids"]) for line in recording.lines)), "tokens"), (str(len(rounds)), "rounds")]
    if recording.block:
        stats = Stats.of(rounds, recording.block)
        if stats.tau is not None:
            found.append((f"{stats.tau:.2f}", "tau: tokens a round, the target's own one counted"))
        if stats.drafted:
            found.append((f"{100 * stats.accepted / stats.drafted:.0f} %", "of the verified drafts kept"))
    if seconds:
        found.append((f"{tokens / seconds:.1f}", "tokens a second after the first"))
        if plain and recording.block:
            found.append((f"{tokens * plain.seconds / seconds:.2f} ×", "plain decoding's speed"))
    return found


def render(recording, name):
    """The page of a trace as a str of HTML. name: of the trace file. Errors: UserError for one too long."""
    import jinja2

    if len(recording.lines) > MOST_ROUNDS:
        most = f"a page shows up to {MOST_ROUNDS}"
        raise UserError(
            f"the trace has {len(recording.lines)} rounds, {most}", "trace a shorter run: -n 2000"
        )
    folder, plain = files(__package__), plain_of(recording)
    css, script, html = (
        (folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["n"] = lambda value: f"{value:.2f}".rstrip("0").rstrip(".")  # a number of an SVG
    tokens = cells(recording)
    is_timed = plain is not None and plain.seconds > 0 and any(line["verify"] for line in recording.lines)
    return environment.from_string(html).render(
        name=shown(str(name)), css=trusted(css), script=trusted(script), css_hash=digest(css), tokens=tokens,
        script_hash=digest(script), data=trusted(as_json(tokens)), lines=recording.lines, lane=LANE, step=ROUND,
        facts=[(key, shown(value)) for key, value in facts(recording, plain)], plain=plain,
        numbers=headline(recording, plain), rows=acceptance(recording) if recording.block else [],
        heat=heat(recording), even=break_even(recording, plain), shown=shown, host=HOST,
        time=timeline(recording, plain) if is_timed else None, block=recording.block,
    )  # fmt: skip


def trusted(text):
    """Our own text, which is not escaped."""
    from markupsafe import Markup

    return Markup(text)


def digest(text):
    """Of a script or style, as a content security policy names it. Source: CSP level 3, section 2.3.1."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def as_json(tokens):
    """What page.js reads of the tokens, as JSON inside of a script element: no `<` may end it."""
    told = [{key: t[key] for key in ("who", "round", "position", "id", "drafted", "margin", "kept", "of", "text",
                                     "name", "why")} for t in tokens]  # fmt: skip
    return json.dumps(told).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
