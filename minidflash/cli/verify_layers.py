"""`minidflash verify --layers`: a prompt and three rounds, stage by stage, against the oracle and, with
`--reference`, against golden numbers."""

from itertools import islice
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..loop import rounds_of
from ..request import Request
from ..stats import Timing
from .equations import check_known
from .findings import Place, by_stage, compare, table
from .generate import open_engine
from .options import load_keywords
from .prompts import read_prompts
from .terminal import json_line, say, write, write_lines
from .watch import watching
from .witness import Witness

ROUNDS = 3
KEYS = {"eps": ("norm", "rms_norm_eps"), "rope base": ("rope", "rope_theta"), "block": ("rows", "block_size"),
        "mask id": ("rows", "mask_token_id"), "taps": ("taps", "target_layer_ids"),
        "windows": ("attention", "sliding_window")}  # fmt: skip


def verify_layers(args, interrupt=None):
    """Run it. Returns 0, or 1 when a stage is off. Errors: UserError as load, for a layer that the oracle's
    side does not know, and for a reference of another model."""
    from .reference import Reference

    reference = None if args.reference is None else Reference(args.reference)
    engine, truth, pair = open_sides(args)
    if reference and engine.ops.activations != "f32":
        raise UserError("golden numbers are those of f32 activations", "--activations f32")
    if reference is None:
        given, options = shortest(read_prompts(args.prompts)), {"block": args.block}
    else:
        given, options = reference.prompt, {"block": reference.block}
    findings = [*config_checks(pair)]
    ids, found, witness = look(engine, truth, given, options, args.verify)
    findings += found
    if reference and not any(one.is_off for one in found):
        findings += reference.compare(witness, engine.drafter is not None)
    return tell(findings, args, {
        "backend": engine.ops.name, "activations": engine.ops.activations, "target": engine.target_name,
        "drafter": engine.drafter_name, "prompt_tokens": len(ids), "rounds": witness.round,
        "reference": args.reference,
    })  # fmt: skip


def open_sides(args):
    """(engine in use, the same pair on the oracle, its opened files)."""
    from ..engine import load
    from ..pair import open_pair, weights_for

    engine = open_engine(args, warm=False)
    check_known(engine.target.config)
    wanted = load_keywords(args)
    weights = weights_for(engine.ops, wanted.get("target", "default"), wanted.get("weights"))
    same = {name: wanted[name] for name in ("target", "drafter", "revision", "drafter_revision", "offline")
            if name in wanted}  # fmt: skip
    truth = load(**same, backend="oracle", ctx=engine.ctx, weights=weights, warm=False)
    return engine, truth, open_pair(**same, weights=weights)


def shortest(prompts):
    """The prompt with the fewest words or ids."""
    return min((p.get("tokens") or p["prompt"] for p in prompts), key=len)


def look(engine, truth, given, options, verify):
    """(prompt ids, findings, the Witness) of a prompt and ROUNDS rounds at most. verify: rows, "auto": whole
    blocks. Errors: as a run's, where no stage before them is off."""
    drafter = engine.drafter
    block = options["block"] or (drafter.config.block if drafter else 1)
    width = block if verify == "auto" else min(verify, block)
    options = {**options, "verify": width, "max_tokens": 1 + (ROUNDS + 1) * block}
    request = Request.of(engine, given, options)
    broken = None
    with watching(engine) as calls:
        rounds = rounds_of(engine, request, Timing())
        try:
            for _ in islice(rounds, 1 + ROUNDS):
                pass
        except Exception as error:  # noqa: BLE001 what was called before it may say why
            broken = error
        rounds.close()
    if not request.drafts:
        truth.drafter = None
    calls = [call for call in calls if call.round <= ROUNDS]
    witness = Witness(truth, calls, request.ids, request.block, width, engine.ops.activations == "bf16",
                      engine.stop_ids)  # fmt: skip
    findings = witness.walk()
    if broken and not any(one.is_off and one.stage != "calls" for one in findings):
        raise broken
    return request.ids, findings, witness


def config_checks(pair):
    """Findings of the numbers in config.json that change what is computed, read once more by their usual
    names; a key that is not there is not compared."""
    for side, checked in (("target", pair.target), ("drafter", pair.drafter)):
        if checked is None:
            continue
        raw, stack = flat(checked.files.config), checked.config
        ours = {"eps": stack.eps, "windows": stack.each("window")}
        if len(stack.ropes) == 1:
            ours["rope base"] = stack.ropes[0].theta
        if side == "drafter" and stack.layout == "z-lab":
            ours |= {"block": stack.block, "mask id": stack.mask_id, "taps": stack.taps}
        for what, value in ours.items():
            stage, key = KEYS[what]
            stated = stated_windows(raw, len(stack.layers)) if key == "sliding_window" else raw.get(key)
            if stated is not None:
                place = Place(side, None, 0, f"config.json {key}")
                yield compare(stage, place, what, np.atleast_1d(value), np.atleast_1d(stated), 0.0)


def flat(config):
    """The keys of a config.json, those of the objects in it too; an outer one counts."""
    found = {}
    for value in config.values():
        found = (flat(value) | found) if isinstance(value, dict) else found
    return found | {key: value for key, value in config.items() if not isinstance(value, dict)}


def stated_windows(raw, count):
    """A window for each layer, 0: none; None where the file does not say."""
    kinds, window = raw.get("layer_types"), raw.get("sliding_window")
    if not isinstance(kinds, list) or len(kinds) != count:
        return None
    return [window or 0 if kind == "sliding_attention" else 0 for kind in kinds]


def tell(findings, args, about):
    """Print the table, and write --json; returns the exit code."""
    off = next((one for one in findings if one.is_off), None)
    if not args.quiet:
        whose = f" and {about['reference']}" if about["reference"] else ""
        what = f"{about['prompt_tokens']} prompt tokens, {about['rounds']} rounds"
        sides = f"{about['backend']}, {about['activations']}, against the float64 oracle{whose}"
        write_lines([f"{sides}: {what}", *table(findings)])
    if off:
        write_lines([f"FAILED  {off.told()}"])
    else:
        only = "" if about["reference"] else " (both read the same files; --reference checks that too)"
        write(f"all stages agree{only}\n")
    if args.json:
        stages = {stage: one.to_json() for stage, one in by_stage(findings).items()}
        found = about | {"first": off and off.to_json(), "stages": stages,
                         "findings": [one.to_json() for one in findings]}  # fmt: skip
        save(args.json, found)
    return 1 if off else 0


def save(path, found):
    """Write a JSON file. Errors: UserError naming it."""
    try:
        Path(path).write_text(json_line(found), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "name another file", code=3) from None
    say(f"minidflash: written to {path}")
