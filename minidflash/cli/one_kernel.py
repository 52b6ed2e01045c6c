"""`minidflash verify --kernel NAME --shape T=5,D=64`: one row of the table, this backend against the oracle,
array by array."""

import re

import numpy as np

from ..errors import UserError
from .findings import Place, compare
from .kernels import dim_letters
from .terminal import write_lines
from .verify import SIZES, TOLERANCE, arguments


def verify_kernel(args):
    """Run it. Returns 0, or 1 when an array is off.

    Errors: UserError for an unknown kernel, for a shape that it cannot have, and as open_ops.
    Source: engine.md 3.
    """
    from minidflash.kernels import open_ops
    from minidflash.kernels.table import ROWS

    from .verify_layers import save

    if args.kernel not in ROWS:
        raise UserError(f"no kernel {args.kernel!r} in the table", "there are: " + ", ".join(ROWS))
    row, sizes = ROWS[args.kernel], sizes_of(args.shape)
    ops = open_ops(args.backend, args.activations, args.device)
    findings = run_both(open_ops("oracle", ops.activations), ops, row, sizes)
    used = sorted({c for arg in row.args for dim in arg.dims or () for c in re.findall("[A-Z]", dim)} - {"Z"})
    shape = ",".join(f"{letter}={sizes[letter]}" for letter in used)
    off = [one for one in findings if one.is_off]
    if not args.quiet:
        write_lines([f"{row.name} on {ops.name}, {ops.activations}, {shape}, against the oracle",
                     *map(line, findings)])  # fmt: skip
    write_lines([f"FAILED  {off[0].told()}" if off else "it agrees with the oracle"])
    if args.json:
        save(args.json, {"kernel": row.name, "backend": ops.name, "activations": ops.activations,
                         "shape": {letter: sizes[letter] for letter in used},
                         "findings": [one.to_json() for one in findings]})  # fmt: skip
    return 1 if off else 0


def line(one):
    """An array's numbers."""
    word = "FAILED" if one.is_off else "ok"
    return (f"{word:<8}{one.what:<12}{one.error:>9.2g} absolute{one.ulps:>9.2g} ulp"
            f"{one.share:>9.2g} of tolerance  at {one.index}")  # fmt: skip


def run_both(truth, ops, row, sizes):
    """A Finding of every array that the row writes, on the same random arguments. Errors: UserError where the
    arguments do not fit each other."""
    from minidflash.kernels.oracle import real

    results = []
    for one in (truth, ops):
        try:
            given = arguments(one, row, sizes)
        except (ValueError, IndexError, KeyError) as error:
            raise UserError(
                f"{row.name} has no such shape: {error}", f"minidflash kernels {row.name}"
            ) from None
        getattr(one, row.name)(*given.values())
        results.append({
            arg.name: one.download(given[arg.name]) for arg in row.args
            if (arg.inplace or arg in row.outputs) and arg.name != "work"
        })  # fmt: skip
    findings = []
    for name, expected in results[0].items():
        found, place = results[1][name], Place(row.name)
        if expected.dtype == np.int32:
            findings.append(compare("kernel", place, name, found, expected, 0.5))
            continue
        wide = real(expected)
        tolerance = TOLERANCE[ops.activations] * np.abs(wide).max(initial=0)
        is_bf16 = expected.dtype == np.uint16
        findings.append(compare("kernel", place, name, real(found), wide, tolerance, is_bf16=is_bf16))
    return [one for one in findings if one]


def sizes_of(text):
    """The table's letters from "qwen3-8b,T=5": a model's, those given, and what follows from them.

    Errors: UserError for what is neither.
    """
    from minidflash.kernels.sizes import SIZES as MODELS

    letters, found = dim_letters(), {}
    words = [word for word in (text or "").split(",") if word]
    if words and words[0] in MODELS:
        found |= MODELS[words.pop(0)].dims
    for word in words:
        match = re.fullmatch(r"([A-Z])=([1-9][0-9]{0,8})", word)
        if not match or match[1] not in letters or match[1] == "Z":
            known = "".join(letter for letter in letters if letter != "Z")
            hint = f"letters are {known}; models: {', '.join(MODELS)}"
            raise UserError(f"--shape: {word!r} is no size, need a model's name or T=5", hint)
        found[match[1]] = int(match[2])
    return SIZES | following(SIZES | found) | found


def following(sizes):
    """What letters must be beside others, where nobody says it: as many rows, keys and columns as are
    addressed."""
    rows, room = sizes["T"], sizes["T"] + 8
    return {
        "M": rows, "R": rows, "B": max(rows, SIZES["B"]), "J": sizes["K"] // 2,
        "C": max(2 * sizes["D"], SIZES["C"]),
        "S": max(room, SIZES["S"]), "P": max(room, SIZES["P"]), "Y": min(SIZES["Y"], sizes["V"]),
        "G": sizes["G"] if sizes["H"] % sizes["G"] == 0 else 1,
    }  # fmt: skip
