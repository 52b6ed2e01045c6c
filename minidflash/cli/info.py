"""`minidflash info`: this machine and its backends, the resolved facts of a pair and where they come from,
memory."""

import os
import platform
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version

from .. import __version__
from ..errors import UserError
from .options import BACKENDS
from .terminal import amount, json_line, write, write_lines

PACKAGES = ("numpy", "numba", "ml-dtypes", "safetensors", "tokenizers", "jinja2", "cupy-cuda13x", "cuda-core")


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
    from minidflash.weights import names, open_checkpoint

    from ..config import check_pair, read_drafter, read_target
    from ..engine import context_length
    from ..fit import fitting_context, needed, weight_bytes

    is_default = args.target == "default"
    try:  # a look at the machine fetches nothing by itself
        files = open_checkpoint(args.target, "target", args.revision, args.offline or is_default)
    except UserError as error:
        if is_default and error.code == 3:
            return {
                "target": None,
                "note": "the default target is not here yet: the first generate fetches it (93 MB)",
            }
        raise
    target = read_target(files.config, files.generation, files.tensors)
    bound = names.bind_target(target, files.tensors)
    found = {"target": facts(files, target), "drafter": None}
    weights, drafter = weight_bytes(bound), None
    wanted = args.drafter or ("default" if is_default else "none")
    if wanted != "none":
        files = open_checkpoint(wanted, "drafter", None, args.offline)
        drafter = read_drafter(files.config, files.tensors)
        bound = names.bind_drafter(drafter, files.tensors)
        check_pair(target, drafter)
        found["drafter"] = facts(files, drafter)
        weights += weight_bytes(bound)
    ops = open_ops(args.backend, args.activations)
    limit = context_length(target, args.ctx)
    chunk = args.prefill_chunk or ops.prefill_chunk
    ctx = args.ctx or fitting_context(ops, target, drafter, limit, weights, chunk)
    memory = {"weights": weights, **needed(ops, target, drafter, ctx, args.block, min(chunk, ctx))}
    found["memory"] = {
        "ctx": ctx, "limit": limit, "backend": ops.name, "activations": ops.activations, "bytes": memory,
        "total": sum(memory.values()),
    }  # fmt: skip
    return found


def facts(files, config):
    """One checkpoint: where it lies, its weight files, every resolved fact with the config key it came
    from."""
    values = {}
    for field in fields(config):
        if field.name == "sources":
            continue
        value = getattr(config, field.name)
        value = asdict(value) if field.name == "rope" else list(value) if isinstance(value, tuple) else value
        values[field.name] = {"value": value, "from": config.sources.get(field.name)}
    return {
        "name": files.name, "folder": str(files.folder),
        "files": {path.name: size for path, size in files.files}, "facts": values,
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
    where = f"{memory['backend']}, {memory['activations']}"
    yield f"memory needed at a context of {memory['ctx']} positions on {where}"
    for name, size in memory["bytes"].items():
        yield f"  {name:<16}{amount(size):>12}"
    yield f"  {'in all':<16}{amount(memory['total']):>12}"


def _facts_lines(role, one):
    yield ""
    yield f"{role}     {one['name']} in {one['folder']}"
    for name, size in one["files"].items():
        yield f"  {name}, {amount(size)}"
    for name, fact in one["facts"].items():
        value = fact["value"]
        if name == "rope":
            used = ("theta", "kind") if value["kind"] == "default" else value
            value = ", ".join(f"{key} {value[key]}" for key in used)
        elif name == "windows":
            value = _repeated([window or "all keys" for window in value])
        elif isinstance(value, list):
            value = _repeated(value)
        yield f"  {name:<16}{value!s:<32}{'from ' + fact['from'] if fact['from'] else ''}".rstrip()


def _repeated(values):
    """A list, short where all of it is one value."""
    is_same = len(values) > 1 and all(value == values[0] for value in values)
    return f"{values[0]} x {len(values)}" if is_same else ", ".join(map(str, values))
