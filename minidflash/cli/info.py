"""`minidflash info`: this machine and its backends, the resolved facts of a pair and where they come from,
memory."""

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from .. import __version__
from ..errors import UserError
from .options import BACKENDS, load_keywords
from .terminal import amount, json_line, write, write_lines

PACKAGES = ("numpy", "numba", "ml-dtypes", "safetensors", "tokenizers", "jinja2", "cupy-cuda13x", "cuda-core")


KEYS = 2048  # of the context whose steps are told


def info(args, interrupt=None):
    """Run the subcommand. Returns the exit code. Errors: UserError for a pair that `generate` would refuse
    too."""
    found = {"minidflash": __version__, "machine": machine(), "packages": packages(), "backends": backends()}
    found |= pair(args)
    if args.json:
        write(json_line(found))
    else:
        write_lines(lines(found))
    return 0


def machine():
    """Processor, cores that this process may use, memory in bytes, Python, cache folder."""
    from minidflash.kernels.diskcache import cache_folder

    from ..fit import free_memory

    cache = cache_folder()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        memory = None
    return {
        "system": platform.system(), "processor": _processor(), "cores": cores, "memory_bytes": memory,
        "free_memory_bytes": free_memory(), "python": platform.python_version(),
        "cache": cache and str(cache),
    }  # fmt: skip


def _processor():
    """The processor's name, or its architecture where the system does not say."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{platform.machine()} {names[0]}" if names else platform.machine()


def packages():
    """Package -> version, None where it is not installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def backends():
    """Backend -> None where it works, else why not, in words."""
    from minidflash.kernels import open_ops

    found = {}
    for name in BACKENDS[1:]:
        try:
            open_ops(name)
            found[name] = None
        except UserError as error:
            found[name] = f"{error}" + (f" ({error.hint})" if error.hint else "")
    return found


def pair(args):
    """The facts of target and drafter, their files, the memory they need. Weights are mapped, not read."""
    from minidflash.kernels import open_ops
    from minidflash.kernels.roofline import PEAKS

    from ..costs import break_even, steps, weight_parts
    from ..fit import make_plan
    from ..pair import open_pair, weights_for

    is_default = args.target == "default"
    keywords = load_keywords(args)
    names = ("target", "drafter", "revision", "drafter_revision", "offline")
    opening = {name: keywords[name] for name in names if name in keywords}
    opening["offline"] |= is_default  # a look at the machine fetches nothing by itself
    ops = open_ops(args.backend, args.activations, args.device)
    try:
        weights = weights_for(ops, args.target, args.weights)
        found = open_pair(**opening, needs_weights=False, weights=weights)
    except UserError as error:
        if is_default and error.code == 3:
            return {
                "target": None,
                "note": "the default target is not here yet: the first generate fetches it (93 MB)",
            }
        raise
    plan = make_plan(ops, found, args.ctx, args.prefill_chunk, args.block)
    costs = steps(found, KEYS, {"f32": 4, "bf16": 2}[ops.activations])
    return {
        "target": facts(found.target), "drafter": found.drafter and facts(found.drafter),
        "memory": {
            "ctx": plan.ctx, "limit": plan.limit, "backend": ops.name, "activations": ops.activations,
            "bytes": plan.memory, "total": sum(plan.memory.values()), "weights": weight_parts(found),
        },
        "cost": {
            "keys": KEYS, "break_even_tau": break_even(costs),
            "steps": [asdict(step) | {"ms": {card: step.ms(card) for card in PEAKS}} for step in costs],
        },
    }  # fmt: skip


def facts(checked):
    """One checkpoint: where it lies, its weight files, every resolved fact with the config key it came from.

    A fact of layers is a list, one a layer.
    """
    from ..costs import parameters

    files, config = checked.files, checked.config
    values = {}
    for name, value in config.facts().items():
        if name in ("ropes", "experts"):
            value = [one and asdict(one) for one in value]
        value = list(value) if isinstance(value, tuple) else value
        values[name] = {"value": value, "from": config.sources.get(name)}
    return {
        "name": files.name, "folder": str(files.folder),
        "files": {path.name: size for path, size in files.files}, "facts": values,
        "parameters": parameters(checked.bound),
    }  # fmt: skip


def lines(found):
    """The same for a person."""
    m = found["machine"]
    total, free = (amount(m[key]) if m[key] else "unknown" for key in ("memory_bytes", "free_memory_bytes"))
    yield f"minidflash {found['minidflash']}, Python {m['python']}, {m['system']}"
    yield f"machine     {m['processor']}, {m['cores']} cores, {total} memory, {free} free"
    yield f"cache       {m['cache'] or 'none: no home folder is known, set MINIDFLASH_CACHE'}"
    yield "packages    " + ", ".join(f"{k} {v or 'not installed'}" for k, v in found["packages"].items())
    yield "backends"
    for name, why_not in found["backends"].items():
        yield f"  {name:<10}{'no: ' + why_not if why_not else 'yes'}"
    if found["target"] is None:
        yield f"target      {found['note']}"
        return
    for role in ("target", "drafter"):
        if found[role] is None:
            yield ""
            yield f"{role}     none: plain decoding"
        else:
            yield from _facts_lines(role, found[role])
    memory = found["memory"]
    yield ""
    yield (
        f"memory needed at a context of {memory['ctx']} positions on {memory['backend']}, "
        f"{memory['activations']}"
    )
    for name, size in memory["bytes"].items():
        parts = ", ".join(f"{part} {amount(one)}" for part, one in memory["weights"].items())
        yield f"  {name:<16}{amount(size):>12}" + (f"   {parts}" if name == "weights" else "")
    yield f"  {'in all':<16}{amount(memory['total']):>12}"
    yield from _cost_lines(found["cost"])


def _cost_lines(cost):
    """What a step reads at least, and how long that takes on the cards known."""
    yield ""
    yield f"at a context of {cost['keys']} keys a step reads at least, and takes at the makers' bandwidth"
    for step in cost["steps"]:
        times = ", ".join(f"{card} {ms:.2f} ms" for card, ms in step["ms"].items())
        experts = "" if step["experts"] is None else f"; {step['experts']:.1f} experts a layer expected"
        tau = cost["break_even_tau"].get(step["rows"]) if step["name"].startswith("round") else None
        pays = f"; pays from tau {tau:.2f} on" if tau else ""
        yield f"  {step['name']:<16}{amount(step['bytes']):>12}   {times}{experts}{pays}"


def _facts_lines(role, one):
    yield ""
    yield f"{role}     {one['name']} in {one['folder']}"
    for name, size in one["files"].items():
        yield f"  {name}, {amount(size)}"
    if not one["files"]:
        yield "  no weights here: their sizes are what config.json says, in the type they are published in"
    yield f"  {'parameters':<18}{one['parameters']}"
    for name, fact in one["facts"].items():
        value = fact["value"]
        if name == "ropes":
            value = "; ".join(map(_rope, value))
        elif name == "experts":
            value = _repeated([_experts(one) for one in value])
        elif name == "window":
            value = _repeated([window or "all keys" for window in value])
        elif isinstance(value, list):
            value = _repeated(value)
        yield f"  {name:<18}{value!s:<32}{'from ' + fact['from'] if fact['from'] else ''}".rstrip()


def _experts(experts):
    return experts and f"{experts['used']} of {experts['count']}, {experts['layout']}"


def _rope(rope):
    used = ("theta", "kind") if rope["kind"] == "default" else rope
    return ", ".join(f"{key} {rope[key]}" for key in used)


def _repeated(values):
    """A list, short where all of it is one value."""
    is_same = len(values) > 1 and all(value == values[0] for value in values)
    return f"{values[0]} x {len(values)}" if is_same else ", ".join(map(str, values))
