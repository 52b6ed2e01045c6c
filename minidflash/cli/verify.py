"""`minidflash verify`: does drafting change a token here, and do the kernels agree with the float64
oracle?"""

from itertools import chain
from types import SimpleNamespace

import numpy as np

from ..errors import UserError
from ..run import generate
from .generate import open_engine
from .ladder import gpu_functions
from .prompts import read_prompts
from .terminal import write, write_lines

# Optional arguments with which a row has a kernel of its own on a GPU: it is run without them too.
OWN_KERNEL = {"linear_add": ("norm", "scale")}
# Dims of no model that every fast kernel takes.
SIZES = {"T": 5, "N": 1, "D": 48, "H": 4, "G": 2, "K": 64, "F": 40, "V": 37, "C": 96, "S": 24, "P": 32,
         "J": 8, "B": 5, "L": 2, "R": 5, "M": 5, "X": 1, "Y": 5, "E": 6, "U": 2}  # fmt: skip
MANY = {"T": 40, "M": 40, "Y": 40, "R": 40, "S": 64, "P": 64}  # more rows than a skinny pass holds
MOST_LOGITS = 4096  # of a model's vocabulary
TOLERANCE = {"f32": 1e-4, "bf16": 2e-2}  # of the largest value of an array


def verify(args, interrupt=None):
    """Run the subcommand: prints one line a check. Returns 0, or 1 when one failed. --layers and --kernel run
    another one each."""
    refuse_idle(args)
    if args.kernel:
        from .one_kernel import verify_kernel

        return verify_kernel(args)
    if args.layers:
        from .verify_layers import verify_layers

        return verify_layers(args)
    prompts = first_of_each_kind(read_prompts(args.prompts))
    engine = open_engine(args)
    kernels = kernel_checks(engine.ops, widths_of(engine))
    failed = tell(chain(kernels, lossless_checks(engine, prompts, args)), args.quiet)
    write(f"{failed} checks failed\n" if failed else "all checks passed\n")
    return 1 if failed else 0


def refuse_idle(args):
    """Refuse a flag that would change nothing. Errors: UserError naming it."""
    for flag, needs in (("reference", "layers"), ("shape", "kernel")):
        if getattr(args, flag) and not getattr(args, needs):
            raise UserError(f"--{flag} has no effect without --{needs}", f"add --{needs}")
    if args.layers and args.kernel:
        raise UserError("--layers and --kernel are two checks", "leave out one of them")
    if args.json and not (args.layers or args.kernel):
        raise UserError("--json has no effect without --layers or --kernel", "add one of them")


def tell(checks, is_quiet):
    """Print a line a check as it ends, those that failed alone when quiet; returns how many did."""
    failed = 0
    for name, problem in checks:
        failed += problem is not None
        if problem or not is_quiet:
            write_lines([f"{'FAILED' if problem else 'ok':<8}{name}{': ' + problem if problem else ''}"])
    return failed


def first_of_each_kind(prompts):
    """One prompt of every kind, in order."""
    found = {}
    for prompt in prompts:
        found.setdefault(prompt["kind"], prompt)
    return list(found.values())


def lossless_checks(engine, prompts, args):
    """(name, problem) of each prompt: drafted ids, at two verify lengths and `auto`, against plain ids."""
    if engine.drafter is None:
        return
    for prompt in prompts:
        try:
            yield from compared(engine, prompt, args)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 a run that breaks is a failed check, the others still count
            yield f"drafted == plain, {prompt['kind']}", f"{type(error).__name__}: {error}"


def compared(engine, prompt, args):
    """(name, problem) of one prompt's runs."""
    wide, given = args.block or engine.drafter.config.block, prompt.get("tokens") or prompt["prompt"]
    plain = generate(engine, given, max_tokens=args.max_tokens, drafter=False)
    for rows in dict.fromkeys((wide, max(2, wide // 2), args.verify)):
        run = generate(engine, given, max_tokens=args.max_tokens, block=args.block, verify=rows)
        name = f"drafted == plain, verify {rows}, {prompt['kind']}: {len(plain.tokens)} tokens"
        if run.stats.tau:
            name += f", tau {run.stats.tau:.2f}"
        yield name, first_difference(plain.tokens, run.tokens)


def first_difference(plain, drafted):
    """Where two lists of ids part, in words, or None."""
    if plain == drafted:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b), None)
    if at is None:
        return f"{len(plain)} tokens without the drafter, {len(drafted)} with it"
    return f"token {at} is {plain[at]} without the drafter, {drafted[at]} with it"


def widths_of(engine):
    """SIZES with the widths of the engine's target, and what its drafter takes of it."""
    stack, layer, drafter = engine.target.config, engine.target.config.layers[0], engine.drafter
    taps, layers = (len(drafter.config.taps), len(drafter.config.layers)) if drafter else (2, 2)
    return SIZES | {
        "D": stack.width, "H": layer.heads, "G": layer.kv_heads, "K": layer.head_size,
        "J": layer.head_size // 2,
        "F": layer.ffn_width, "V": min(stack.vocab, MOST_LOGITS), "C": max(2, taps) * stack.width,
        "L": layers,
    }  # fmt: skip


def kernel_checks(ops, widths=None):
    """(name, problem) of every table row: random arguments, this backend against the oracle.

    widths: sizes of a model, taken after SIZES. Behind a row's name stand the variants that ran. On a GPU
    with bf16 it is a problem that a fast, wide or prefill variant never did.
    """
    from minidflash.kernels import open_ops
    from minidflash.kernels.table import ROWS

    truth, has_variants = open_ops("oracle", ops.activations), hasattr(ops.backend, "variants")
    for name, row in ROWS.items():
        wanted = [variant for variant in gpu_functions(name) if variant != "plain"] if has_variants else []
        ran, problem = {}, None
        shapes = [SIZES, *([SIZES | MANY] if "wide" in wanted else []), *([widths] if widths else [])]
        for one in (ops, ops.for_prefill) if "prefill" in wanted else (ops,):
            for sizes in shapes:
                for without in _forms(row):
                    problem = problem or row_problem(truth, one, row, sizes, without, ran)
        never = [variant for variant in wanted if variant not in ran and ops.activations == "bf16"]
        if never and not problem:
            problem = f"no shape ran {' or '.join(never)}"
        yield f"{name} == oracle ({', '.join(ran)})", problem


def _forms(row):
    """Names of optional arguments that are left out: none, those of OWN_KERNEL, all."""
    optional = tuple(arg.name for arg in row.args if arg.optional)
    return list(dict.fromkeys([(), OWN_KERNEL.get(row.name, ()), optional]))


def row_problem(truth, ops, row, sizes, without, ran):
    """What is wrong with a row at these sizes, or None. The variant that runs becomes a key of `ran`."""
    variants, results = getattr(ops.backend, "variants", {}), []
    variants.pop(row.name, None)
    changed = [arg.name for arg in row.args if arg.inplace or arg in row.outputs]
    where = f"D {sizes['D']}" + (f", without {', '.join(without)}" if without else "")
    try:
        for one in (truth, ops):
            given = arguments(one, row, sizes, without)
            getattr(one, row.name)(*given.values())
            results.append(
                {n: one.download(given[n]) for n in changed if n != "work" and given[n] is not None}
            )
    except Exception as error:  # noqa: BLE001 a failed check, the others still count
        return f"{type(error).__name__}: {error} ({where})"
    variant = variants.get(row.name, ops.name)
    ran[variant] = True
    problem = worst(*results, TOLERANCE[ops.activations])
    return problem and f"{problem} ({variant}, {where})"


def worst(expected, found, tolerance):
    """The first array that is off, in words, or None. Integers must be equal."""
    for name, truth in expected.items():
        if truth.dtype == np.int32:
            if not np.array_equal(truth, found[name]):
                return f"{name} differs"
            continue
        a, b = _real(truth), _real(found[name])
        error, scale = np.abs(a - b).max(initial=0), np.abs(a).max(initial=0)
        if not error <= tolerance * scale:
            return f"{name} is off by {error:.3g}, its largest value is {scale:.3g}"
    return None


def _real(array):
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def arguments(ops, row, sizes=SIZES, without=()):
    """Argument name -> value for a row: the same numbers on every backend, addresses that are in range.

    without: arguments that are None. Norms are powers of two: where a kernel rounds a row times its norm to
    bf16, it loses nothing, so ids that depend on close logits are the oracle's.
    """
    from minidflash.kernels.ops import expected
    from minidflash.kernels.table import role_of

    rng = np.random.default_rng(sum(map(ord, row.name)))
    widest = max(256, sizes["C"], sizes["F"], sizes["H"] * sizes["K"])
    most = max(256, sizes["V"], 2 * sizes["F"], (sizes["H"] + 2 * sizes["L"] * sizes["G"]) * sizes["K"])
    sizes = sizes | {"Z": ops.backend.work_size(sizes["T"], widest, most)}
    special = _special(sizes) | {"experts_up": {"limit": 2.0}, "gate_up": {"act": 0}}.get(row.name, {})
    given = {}
    for arg in row.args:
        if arg.name in without:
            given[arg.name] = None
            continue
        if arg.type != "W" and arg.dims is None:
            given[arg.name] = special[arg.name]
            continue
        shape = tuple(expected(dim, sizes) for dim in arg.dims)
        if arg.type == "W":
            bits = _bf16(_numbers(rng, shape, min(1, 7 / shape[-1] ** 0.5))).reshape(-1, shape[-1])
            part = SimpleNamespace(array=bits, dtype="BF16", shape=bits.shape, drop=lambda: None)
            given[arg.name] = ops.weight([part], role_of(row.name, arg.name), *shape[:-2])
            continue
        given[arg.name] = buffer = ops.array(shape, arg.type)
        if arg.name in special and arg.type == "f32":
            ops.upload(buffer, np.resize(np.asarray(special[arg.name], np.float32), shape))
        elif arg.type == "i32":
            ops.upload(buffer, np.resize(np.asarray(special.get(arg.name, 0), np.int32), shape))
        elif arg.name == "norm":
            ops.upload(buffer, rng.choice(np.float32([0.5, 1, 2, -1]), shape))
        elif arg.name != "work" and arg not in row.outputs:
            values = _numbers(rng, shape)
            ops.upload(buffer, _bf16(values) if arg.type == "A" and ops.activations == "bf16" else values)
    return given


def _numbers(rng, shape, scale=1.0):
    """Normal f32 of that spread; of many, a stretch of prime length again and again,
    which takes less time."""
    some = scale * rng.standard_normal(min(int(np.prod(shape)), 1000003), np.float32)
    return np.resize(some, shape)


def _bf16(values):
    """The bits of f32, cut."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _special(sizes):
    """Values of scalars and of integer arguments, by name; every other integer argument is 0."""
    from minidflash.kernels.oracle_moe import group

    rows = np.arange(sizes["T"])
    expert = np.resize([0, 3, 3, 5, 1, 0, 5, 3, 4, 1], sizes["T"] * sizes["U"]) % sizes["E"]
    first, order = group(expert, sizes["E"])
    return {
        "eps": 1e-6, "scale": 0.25, "window": 4, "causal": 1, "limit": sizes["V"] - 3, "tap_at": sizes["D"],
        "ids": rows, "pos": rows + 3, "at": rows + 3, "begin": rows + 3, "end": rows + 4,
        "tap_row": rows[::-1], "pick": rows[::-1],
        "drafts": [0, 1, 2, 9, 9], "choice": [1, 2, 3, 4, 5], "stop": [[99]], "start": [7], "anchor": [11],
        "fresh": [2], "left": [9], "fill": [0, 21, 22, 23, 24],
        "key": [11, 0, 0, 9], "law": [0.8, 0.9, 0.02],
        "mass": [2.0**43, 2.0**40, 2.0**42], "multiplier": 1.25, "cap": 3.0, "names": [1, 4, 5, 9, 12],
        "normalise": 1, "adds": 1, "expert": expert, "first": first, "order": order, "act": 1, "alpha": 1.7,
    }  # fmt: skip
