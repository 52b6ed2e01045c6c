"""`minidflash bench`: tokens a second with and without the drafter, by kind of prompt,
and whether drafting pays."""

import csv
import io
from itertools import groupby
from statistics import mean, median

from ..loop import rounds_of
from ..request import Request
from ..run import finish, machine_of
from ..stats import Timing
from .generate import open_engine
from .prompts import read_prompts
from .report import break_even, round_costs
from .terminal import json_line, say, write, write_lines

LOOP = 50  # a token repeated this often says nothing about drafting (F63)


def bench(args, interrupt=None):
    """Run the subcommand. Returns the exit code."""
    prompts = read_prompts(args.prompts)
    engine = open_engine(args)
    kinds = {}
    for prompt in prompts:
        kinds.setdefault(prompt["kind"], []).extend(dialogue(engine, prompt, args))
    rows = [summary(kind, found) for kind, found in kinds.items()]
    if len(rows) > 1:
        rows.append(summary("all", [one for found in kinds.values() for one in found]))
    found = {
        "target": engine.target_name, "drafter": engine.drafter_name, "backend": engine.ops.name,
        "activations": engine.ops.activations, "machine": machine_of(engine.ops),
        "max_tokens": args.max_tokens,
        "repeat": args.repeat, "block": args.block, "verify": args.verify, "ctx": engine.ctx, "rows": rows,
    }  # fmt: skip
    if args.output == "json":
        write(json_line(found))
    elif args.output == "csv":
        write(comma_separated(found))
    else:
        write_lines(table(found))
    for row in rows:
        if row["longest_run"] > LOOP and row["kind"] != "all":
            say(f"minidflash: {row['kind']}: one token {row['longest_run']} times in a row; "
                f"speed and tau of such text "
                "say little")  # fmt: skip
    return 0


def dialogue(engine, prompt, args):
    """`measure` of a prompt and of each later turn, asked behind the plain answers to those before it."""
    if not prompt.get("then"):
        return [measure(engine, prompt, args)]
    messages, found = [], []
    for asked in (prompt["prompt"], *prompt["then"]):
        messages.append({"role": "user", "content": asked})
        found.append(measure(engine, {"prompt": list(messages)}, args))
        messages.append({"role": "assistant", "content": found[-1]["text"]})
    return found


def measure(engine, prompt, args):
    """Runs of one prompt, plain and drafted in turn so that a busy moment hits both."""
    given = prompt.get("tokens") or prompt["prompt"]
    found = {"plain": [], "drafted": [], "tau": None, "break_even": None, "same": True}
    options = {"max_tokens": args.max_tokens, "verify": args.verify}
    if args.block:
        options["block"] = args.block
    for _ in range(args.repeat):
        _, plain, _ = run(engine, given, {"max_tokens": args.max_tokens, "drafter": False})
        found["plain"].append(plain.timing.tokens_per_s)
        if engine.drafter is not None:
            request, drafted, rounds = run(engine, given, options)
            found["drafted"].append(drafted.timing.tokens_per_s)
            found["tau"] = drafted.stats.tau
            needed = break_even(rounds, round_costs(engine, request))
            found["break_even"] = needed and needed[3]
            found["same"] &= drafted.tokens == plain.tokens
    found["text"] = plain.text
    found["distinct"] = len(set(plain.tokens)) / max(1, len(plain.tokens))
    found["longest_run"] = max((len(list(same)) for _, same in groupby(plain.tokens)), default=0)
    return found


def run(engine, prompt, options):
    """(Request, Result, rounds) of one run."""
    request, timing = Request.of(engine, prompt, options), Timing()
    rounds = list(rounds_of(engine, request, timing))
    return request, finish(engine, request, rounds, timing), rounds


def summary(kind, found):
    """One row over the prompts of a kind: mean tokens/s, half the range over repeats, means of the rest."""

    def rate(which):
        runs = [[r for r in one[which] if r] for one in found]
        runs = [r for r in runs if r]
        if not runs:
            return None, None
        return mean(median(r) for r in runs), mean((max(r) - min(r)) / 2 for r in runs)

    def average(what):
        values = [one[what] for one in found if one[what] is not None]
        return mean(values) if values else None

    (plain, plain_spread), (drafted, drafted_spread) = rate("plain"), rate("drafted")
    return {
        "kind": kind, "prompts": len(found), "plain_tokens_per_s": plain, "plain_spread": plain_spread,
        "drafted_tokens_per_s": drafted, "drafted_spread": drafted_spread,
        "speedup": drafted / plain if plain and drafted else None, "tau": average("tau"),
        "break_even_tau": average("break_even"), "is_lossless": all(one["same"] for one in found),
        "distinct_ratio": average("distinct"), "longest_run": max(one["longest_run"] for one in found),
    }  # fmt: skip


def comma_separated(found):
    """The measurement as CSV: a line for each row, each with what was run; an unknown value is empty."""
    shared, out = {name: value for name, value in found.items() if name != "rows"}, io.StringIO()
    lines = csv.DictWriter(out, [*found["rows"][0], *shared], lineterminator="\n")
    lines.writeheader()
    lines.writerows(row | shared for row in found["rows"])
    return out.getvalue()


def table(found):
    """The measurement as Markdown."""
    width = f"block {found['block'] or 'as trained'}, verify {found['verify']}"
    yield f"{found['target']} with drafter {found['drafter'] or 'none'}, {width}, {found['backend']}, " + (
        f"{found['activations']}; {found['machine']}"
    )
    yield (f"{found['max_tokens']} tokens at most, {found['repeat']} runs of each prompt, greedy; "
           f"tokens/s after the first "
           "token, median and half the range")  # fmt: skip
    yield ""
    words = "plain tok/s", "drafted tok/s", "speedup", "tau", "break-even tau", "distinct", "longest run"
    yield f"| prompts | {' | '.join(words)} |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found["rows"]:
        rates = [
            f"{row[which + '_tokens_per_s']:.1f} ± {row[which + '_spread']:.1f}"
            if row[which + "_tokens_per_s"]
            else "-"
            for which in ("plain", "drafted")
        ]
        cells = [_cell(row[name], form) for name, form in (("speedup", "{:.2f}x"), ("tau", "{:.2f}"),
                 ("break_even_tau", "{:.2f}"), ("distinct_ratio", "{:.2f}"),
                 ("longest_run", "{}"))]  # fmt: skip
        yield "| " + " | ".join([f"{row['kind']} ({row['prompts']})", *rates, *cells]) + " |"
    yield ""
    yield verdict(found["rows"][-1])


def _cell(value, form):
    return "-" if value is None else form.format(value)


def verdict(row):
    """One sentence: does drafting pay here?"""
    if row["speedup"] is None:
        return "Plain decoding only: there is no drafter, or too few tokens to time."
    pays = "pays" if row["speedup"] > 1 else "does not pay"
    same = (
        "Every drafted text equals the plain one."
        if row["is_lossless"]
        else "DRAFTED TEXT DIFFERS FROM PLAIN TEXT."
    )
    return f"Drafting {pays} here: {row['speedup']:.2f} times the plain speed. {same}"
