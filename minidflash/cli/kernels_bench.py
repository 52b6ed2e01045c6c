"""`minidflash kernels --bench`: time, bytes and share of the copy bandwidth of one row or all,
at a model's shapes."""

import time
from statistics import median
from types import SimpleNamespace

import numpy as np

from ..errors import UserError
from .terminal import write

ROTATED = 128 << 20  # bytes of different weights between two uses of the same: more than any cache holds
BLOCK = 16
CURVE = {"multiplier": 1.0, "cap": 0.0}  # of logits: most models have none
# Optional arguments that are not timed: of a row, and ends of names.
NOT_TIMED = ("linear_add", "norm"), ("linear_add", "scale"), ("head", "margin")
LEFT_OUT = "bias", "sinks", "logprob", "v_norm", "u_norm", "expert_scale"
EXPERT_ROWS = "route", "experts_up", "experts_down"


def bench_kernels(args):
    """Run the benchmark. Returns the exit code. Errors: UserError as open_ops, and for an unknown shape."""
    from minidflash.kernels import open_ops
    from minidflash.kernels.sizes import SIZES
    from minidflash.kernels.table import ROWS

    if args.shape not in SIZES:
        raise UserError(f"no shape {args.shape!r}", "there are: " + ", ".join(SIZES))
    sizes = SIZES[args.shape]
    rows = [args.name] if args.name else list(ROWS)
    if not sizes.E:
        rows = [name for name in rows if name not in EXPERT_ROWS]
        if not rows:
            raise UserError(
                f"shape {args.shape} has no experts",
                "there are: " + ", ".join(n for n, s in SIZES.items() if s.E),
            )
    ops = open_ops(args.backend, args.activations)
    copy = copy_bandwidth(ops)
    write(
        f"{ops.name}, {ops.activations}, shape {args.shape}, {args.rows} rows, context {args.context}; "
        f"copy {copy / 1e9:.1f} GB/s\n\n"
        "| row | fused | MB | us | GB/s | of copy |\n|---|---|---|---|---|---|\n"
    )
    for name in rows:
        moved, seconds, fused = measure(ops, name, sizes, args.rows, args.context)
        rate = moved / seconds
        write(
            f"| {name} | {fused} | {moved / 1e6:.2f} | {1e6 * seconds:.1f} | {rate / 1e9:.1f} | "
            f"{rate / copy:.2f} |\n"
        )
    return 0


def copy_bandwidth(ops):
    """Bytes a second of a big copy on the backend's memory, read plus written; the median of some."""
    size = 2**28 if ops.name == "cuda" else 2**25
    a, b = ops.array((size,), "f32"), ops.array((size,), "f32")
    a[...] = 1.0
    b[...] = a
    times, probe = [], ops.array((1,), "i32")
    for _ in range(7):
        ops.download(probe)
        since = time.perf_counter()
        b[...] = a
        if ops.name == "cuda":
            ops.backend.device.synchronize()
            import cupy

            cupy.cuda.get_current_stream().synchronize()
        times.append(time.perf_counter() - since)
    return 2 * a.nbytes / median(times)


def measure(ops, name, sizes, rows, context, repeat=20):
    """(bytes, seconds a call, what is fused) of one row."""
    from minidflash.kernels.roofline import FUSED, touched, traffic
    from minidflash.kernels.table import ROWS

    def make(like=None):
        return arguments(ops, ROWS[name], sizes.dims, rows, context, like, sizes.experts)

    sets = [make()]
    heavy = sum(v.nbytes for v in sets[0] if hasattr(v, "layout"))
    if experts := touched(name, sets[0]):
        heavy = heavy * experts // sizes.E
    while heavy and len(sets) * heavy < ROTATED and len(sets) < 64:
        sets.append(make(sets[0]))

    def calls():
        for given in sets:
            getattr(ops, name)(*given)

    program, times, probe = ops.program(calls), [], ops.array((1,), "i32")
    for i in range(repeat + 3):
        ops.download(probe)
        since = time.perf_counter()
        program.launch()
        ops.download(probe)
        if i >= 3:
            times.append((time.perf_counter() - since) / len(sets))
    return traffic(name, sets[0], context)[0], median(times), FUSED[name]


def arguments(ops, row, shape, rows, context, like=None, experts="bf16"):
    """Arguments of a row at true shape, random, in table order.

    like: reuse these but for the weights. experts: what theirs are stored as.
    """
    from minidflash.kernels.ops import expected
    from minidflash.kernels.oracle_moe import group
    from minidflash.kernels.table import CLAMPED, SILU, role_of

    rng = np.random.default_rng(1)
    sizes = shape | {"T": rows, "N": 1, "M": rows, "S": context + max(rows, BLOCK), "R": BLOCK,
                     "P": context + max(rows, BLOCK), "J": shape["K"] // 2, "B": BLOCK, "X": 1,
                     "Y": shape["V"] // 4}  # fmt: skip
    widest = max(sizes["C"], sizes["F"])
    most = max(sizes["V"], 2 * sizes["F"], 2 * sizes["L"] * sizes["G"] * sizes["K"])
    sizes["Z"] = ops.backend.work_size(max(rows, BLOCK), widest, most)
    if row.name in ("stage", "stage_context"):
        sizes["T"] = BLOCK
    where = np.arange(sizes["T"]) + context
    values = {
        "eps": 1e-6, "scale": shape["K"] ** -0.5, "window": 0, "causal": 1, "limit": sizes["V"], "tap_at": 0,
        "act": SILU, **CURVE,
        "ids": where % sizes["V"], "pos": where, "at": where, "begin": where, "end": where + 1,
        "tap_row": np.arange(rows) % BLOCK,
        "pick": np.arange(rows), "left": 1000, "start": context, "stop": -1,
        "law": [0.7, 0.9, 0.0], "mass": 2.0**43, "narrow": 2.0**43,
        "names": np.arange(sizes["Y"])[::-1],
    }  # fmt: skip
    if row.name == "embed":
        values["scale"] = 1.0
    if row.name == "widen":  # in place, over and over: names are ids of the reduced head too
        values["ids"] = where % sizes["Y"]
    if row.name in EXPERT_ROWS:
        E, U = sizes["E"], sizes["U"]
        expert = np.stack([rng.permutation(E)[:U] for _ in range(rows)])
        first, order = group(expert, E)
        values |= {
            "expert": expert, "first": first, "order": order, "share": 1 / U, "normalise": 1, "adds": 1,
            "act": CLAMPED if experts == "mxfp4" else SILU, "limit": 7.0, "alpha": 1.702,
        }  # fmt: skip
        sizes["Z"] = ops.backend.work_size(
            rows * U, max(sizes["D"], sizes["F"]), max(sizes["D"], 2 * sizes["F"], E)
        )
    found = []
    for i, arg in enumerate(row.args):
        if arg.type == "W":
            count, (stacked, cols) = 0, (expected(dim, sizes) for dim in arg.dims[-2:])
            if len(arg.dims) == 3:
                count, stacked = sizes["E"], sizes["E"] * stacked
            part = _part(rng, stacked, cols, experts if count else "bf16")
            found.append(ops.weight([part], role_of(row.name, arg.name), count))
        elif like is not None:
            found.append(like[i])
        elif arg.dims is None:
            found.append(values[arg.name])
        elif arg.optional and (arg.name.endswith(LEFT_OUT) or (row.name, arg.name) in NOT_TIMED):
            found.append(None)
        else:
            found.append(_buffer(ops, arg, tuple(expected(dim, sizes) for dim in arg.dims), values, rng))
    return found


def _part(rng, rows, cols, kind):
    """A random checkpoint tensor, "bf16" or "mxfp4"."""
    shape = {"shape": (rows, cols), "drop": lambda: None}
    if kind == "mxfp4":
        blocks, scales = (rows, cols // 32, 16), rng.integers(118, 122, (rows, cols // 32), np.uint8)
        return SimpleNamespace(
            array=rng.integers(0, 256, blocks, np.uint8), scales=scales, dtype="MXFP4", **shape
        )
    bits = (rng.integers(0, 2**16, (rows, cols), np.uint16) & 0x80FF) | 0x3C00
    return SimpleNamespace(array=bits, dtype="BF16", **shape)


def _buffer(ops, arg, dims, values, rng):
    buffer = ops.array(dims, arg.type)
    if arg.type == "i32":
        ops.upload(buffer, np.resize(np.asarray(values.get(arg.name, 0), np.int32), dims))
    elif arg.name in values:
        ops.upload(buffer, np.resize(np.asarray(values[arg.name], np.float32), dims))
    elif arg.name != "work":  # the workspace's counters stay zero
        numbers = rng.standard_normal(dims, np.float32)
        is_half = arg.type == "A" and ops.activations == "bf16"
        ops.upload(buffer, (numbers.view(np.uint32) >> 16).astype(np.uint16) if is_half else numbers)
    return buffer
