"""`minidflash kernels`: the signature table, and one row of it explained."""

import re

from ..errors import UserError
from .ladder import entry, folder, ladders
from .terminal import write

TYPES = {
    "A": "activations", "W": "a weight, stored dtype and layout", "f32": "f32", "i32": "i32",
}  # fmt: skip


def kernels(args, interrupt=None):
    """Run the subcommand. Returns the exit code. Errors: UserError for an unknown kernel."""
    from minidflash.kernels.table import ROWS, TABLE

    if args.name is not None and args.name not in ROWS:
        raise UserError(f"no kernel {args.name!r} in the table", "there are: " + ", ".join(ROWS))
    if args.bench:
        from .kernels_bench import bench_kernels

        return bench_kernels(args)
    if args.name is None:
        width = max(map(len, ROWS))
        write("".join(f"{name:<{width}}  {text}\n" for name, text in TABLE.items()))
        return 0
    write("\n".join(sources(args.name) if args.source else explain(ROWS[args.name])) + "\n")
    return 0


def explain(row):
    """Lines about a row: what it computes, every argument, the way to the code on every backend."""
    from minidflash.kernels import oracle

    truth = (getattr(oracle, row.name).__doc__ or "").strip()
    yield f"{row.name}: " + "\n".join(line.strip() for line in truth.splitlines())
    yield ""
    for arg in row.args:
        shape = f"[{', '.join(arg.dims)}]" if arg.dims else ""
        role = "read and written" if arg.inplace else "written" if arg in row.outputs else "read"
        more = ", may be None" if arg.optional else ""
        kind = f"{arg.type}{shape}"
        yield f"  {arg.name:<10}{kind:<18}{role}{more}" + (
            "" if arg.dims or arg.type == "W" else ", a number"
        )
    yield ""
    letters = dim_letters()
    used = sorted({c for arg in row.args for dim in arg.dims or () for c in re.findall(r"[A-Z]", dim)})
    yield "  dims: " + ", ".join(f"{c} {letters.get(c, '?')}" for c in used)
    kinds = {arg.type for arg in row.args if arg.dims or arg.type == "W"}
    yield "  types: " + ", ".join(f"{kind} is {TYPES[kind]}" for kind in ("A", "W") if kind in kinds)
    yield ""
    yield "  from the row to the code; cuda, emulate ask prefill (prompts), wide (many rows), fast, plain"
    for who, steps in {"all": entry(row.name), **ladders(row.name)}.items():
        for i, step in enumerate(steps):
            yield f"  {'' if i else who:<9}{step}"


def dim_letters():
    """Dim letter -> meaning, as the table's own text says it."""
    from minidflash.kernels import table

    listed = re.search(r"Dims are letters \((.*?)\)", table.__doc__, re.DOTALL)
    words = " ".join(listed[1].split()) if listed else ""
    return dict(re.findall(r"([A-Z]) ([^,)]+)", words))


def sources(name):
    """The Numba file and the .cu files of a row, as text, each below its path."""
    steps = [step for who, found in ladders(name).items() if who != "oracle" for step in found]
    for file in dict.fromkeys(step.file for step in steps if not step.file.startswith("kernels/gpu/")):
        yield f"==> {file} <==\n{(folder().parent / file).read_text(encoding='utf-8')}"
