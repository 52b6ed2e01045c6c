"""`minidflash trace FILE --html OUT`: one page, nothing fetched. page.html lays out what is counted here.

Texts come from strangers: jinja2 escapes every one of them, what a screen would obey is written out, and the
page's own policy lets no script or style run but the two whose hashes it names.
"""

import base64
import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib.resources import files
from statistics import mean, median

from ..errors import UserError, printable
from ..stats import Stats, verify_rounds
from ..values import told
from .tell import verdict_of

MOST_ROUNDS, MOST_DRAWN = 5000, 200  # of a page; in the timeline, which is about as wide as 200 screens
STEP = 46.0  # units of the timeline for a plain step
ROUND = 13  # units of a round in the heatmap, and of a position
LAW = "temperature", "top_k", "top_p", "min_p", "seed", "accept"
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
    blank = "no text" if not token else "new line" if "\n" in token else "blank"
    return token.strip() or blank


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
            lost = [] if is_kept else [shown(one).replace("\n", "↵") for one in drafts[row:]]
            found.append({
                "text": text, "kind": "kept" if is_kept else "own", "who": who, "round": number,
                "position": row + 1, "id": line["ids"][row], "drafted": draft,
                "margin": margins[row] if row < len(margins) else None, "kept": line["accepted"],
                "of": len(drafts), "lost": lost, "sample": line.get("sample", 0), "lines": text.count("\n"),
                "name": named(text), "why": verdict_of(line, row)[1] if drafts else "",
            })  # fmt: skip
    return found


def parts_of(r):
    """(stage, seconds) of a round, the host's share last."""
    stages = list(r.detail.stages.items()) if r.detail else []
    rest = r.seconds - sum(seconds for _, seconds in stages)
    return stages + ([(HOST, rest)] if rest > 0 else [])


def timeline(recording, plain):
    """Two lanes on one clock, in units: bars of rounds' stages, chips of their tokens, plain steps."""
    scale, at, bars, chips, steps = STEP / plain.seconds, 0.0, [], [], []
    by_round, sums = defaultdict(list), Counter()
    for token in cells(recording):
        by_round[token["round"]].append(token)
    drawn = [(n, r) for n, r in enumerate(recording.rounds) if r.verify > 0]
    for number, r in drawn[:MOST_DRAWN]:
        begin = at
        for stage, seconds in parts_of(r):
            width = seconds * scale
            bars.append({"x": at, "width": width, "stage": stage, "round": number, "ms": 1e3 * seconds})
            at, sums[stage] = at + width, sums[stage] + seconds
        tokens = by_round[number]
        width = (at - begin) / max(1, len(tokens))
        for i, token in enumerate(tokens):
            place = {"x": begin + i * width, "width": width, "cut": cut(token["text"], width)}
            chips.append(token | place)
            place = {"x": len(steps) * STEP, "width": STEP, "cut": cut(token["text"], STEP)}
            steps.append(token | place)
    width, plain_end = max(at, len(steps) * STEP), len(steps) * STEP
    return {
        "bars": bars, "chips": chips, "steps": steps, "ticks": ticks_of(width, scale), "width": width,
        "end": at, "plain_end": plain_end, "rounds": min(len(drawn), MOST_DRAWN),
        "is_all": len(drawn) <= MOST_DRAWN, "seconds": at / scale, "plain_seconds": plain_end / scale,
        "race": race_of(sums, plain_end / scale),
    }  # fmt: skip


def ticks_of(width, scale):
    """Marks of an axis at 1, 2 or 5 times a power of ten seconds, 90 units apart or more."""
    steps = (m * 10.0**e for e in range(-6, 10) for m in (1, 2, 5))
    tick = next((step for step in steps if step * scale >= 90), width / scale)
    count = int(width / scale / tick) + 1
    return [{"x": i * tick * scale, "label": f"{i * tick:.4g} s"} for i in range(count)]


def race_of(sums, plain_seconds):
    """(lane, its parts in hundredths of the longer one, seconds) of both lanes. sums: {stage: seconds}."""
    drafted = sum(sums.values())
    longest, at, parts = max(drafted, plain_seconds) or 1.0, 0.0, []
    for stage, seconds in sums.items():
        parts.append({"stage": stage, "x": at, "width": 100 * seconds / longest})
        at += 100 * seconds / longest
    plain = [{"stage": "verify", "x": 0.0, "width": 100 * plain_seconds / longest}]
    return [("with the drafter", parts, drafted), ("plain decoding", plain, plain_seconds)]


def cut(text, width):
    """As much of a text as a chip of that width holds."""
    text = " ".join(text.split())
    most = int((width - 5) / 6.6)
    return text if len(text) <= most else text[: max(0, most - 1)] + "…" if most > 1 else ""


def acceptance(recording):
    """By position 1..B-1: kept / reached, and how many of the rounds verifying it kept all up to there."""
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
            rest = drafts - r.accepted - stop
            found.append({"round": number, "kept": r.accepted, "stop": stop, "rest": rest, "of": drafts})
    return found


def break_even(recording, plain):
    """How fast drafting rounds were beside plain ones, by tau; None without either."""
    rounds = [r for r in recording.rounds if r.verify > 1 and r.tokens]
    if not rounds or plain is None:
        return None
    cost, tau = mean(r.seconds for r in rounds), mean(len(r.tokens) for r in rounds)
    if not cost:
        return None
    most = max(r.verify for r in rounds)
    top = max(1.5, most * plain.seconds / cost)
    first = plain.seconds / cost
    return {
        "cost": cost, "tau": tau, "needed": 1 / first, "speed": tau * first, "most": most, "top": top,
        "first": first, "last": most * first,
    }  # fmt: skip


def facts(recording, plain):
    """(name, value) of what was run."""
    header = recording.header
    if header is None:
        return [("trace", "without a header: nothing says what was run")]
    options = header["options"]
    found = [("target", header["target"]), ("drafter", header["drafter"] or "none: plain decoding")]
    for role, names in header["files"].items():
        found.append((f"{role} files", ", ".join(f"{name} {value[:12]}" for name, value in names.items())))
    found += [
        ("backend", f"{header['backend']}, {header['activations']}"), ("machine", header["machine"]),
        ("prompt", f"{len(header['prompt'])} tokens"), ("context", f"{header['ctx']} positions"),
    ]  # fmt: skip
    if header["drafter"]:
        found.append(("block", f"{options['block']}, rows verified: {told(options.get('verify'))}"))
    if options.get("temperature", 0):
        law = ", ".join(f"{name} {told(options[name])}" for name in LAW if name in options)
        found.append(("sampling", law))
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


def table(recording):
    """The rounds in words and numbers, for who does not look at pictures."""
    found = []
    for line in recording.lines:
        texts = line.get("id_texts") or map(str, line["ids"])
        lost = (line.get("draft_texts") or list(map(str, line["drafts"])))[line["accepted"] :]
        found.append({
            "rows": line["verify"], "kept": line["accepted"], "of": len(line["drafts"]),
            "tokens": shown("|".join(texts)), "lost": shown("|".join(lost)),
            "injected": line.get("injected", "-"), "ms": 1e3 * line["seconds"],
        })  # fmt: skip
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
        script_hash=digest(script), data=trusted(as_json(tokens)), table=table(recording), step=ROUND,
        facts=[(key, shown(value)) for key, value in facts(recording, plain)], plain=plain,
        numbers=headline(recording, plain), rows=acceptance(recording) if recording.block else [],
        heat=heat(recording), even=break_even(recording, plain), host=HOST,
        time=timeline(recording, plain) if is_timed else None, block=recording.block,
        widest=max((line["verify"] for line in recording.lines), default=1),
    )  # fmt: skip


def trusted(text):
    """Our own text, which is not escaped."""
    from markupsafe import Markup

    return Markup(text)


def digest(text):
    """Of a script or style, as a content security policy names it. Source: CSP level 3, section 2.3.1."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Of a token, by the page's script.
TOLD = "who", "round", "position", "id", "drafted", "margin", "kept", "of", "text", "name", "why"


def as_json(tokens):
    """What page.js reads of the tokens, as JSON inside of a script element: no `<` may end it."""
    text = json.dumps([{key: token[key] for key in TOLD} for token in tokens])
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
