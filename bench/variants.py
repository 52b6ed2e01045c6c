"""Variants of kernels side by side in whole passes: cuts of products, macros of kernels,
how attention is cut.

    python bench/variants.py FILE [--shape qwen3-8b] [--context 2048] [--parts verify_16 verify_1 round_16]
        [--fp8 both] [--repeat 5]

FILE is Python: variants(Split, measured) -> {label: {"cuts": {(N, K): Split}, "macros": {"attend_fast.cu":
{name: value}}, "attend": tuning of attend_fast.attend}}; measured: the cuts in use by (N, K). All kernels are
compiled on all cores and all programs recorded first; then they are timed in turn, so that whatever the card
does meets all of them. Prints medians and least times in ms and warns of kernels that spill.
A variant's bits may be others: what is kept goes through the tests.
"""

import argparse
import runpy
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cuts
from minidflash.kernels import launch
from minidflash.kernels.gpu import attend_fast, fast, fp8, split
from round import FP8, copy_bandwidth, passes
from shapes import SHAPES, fill_caches, random_engine, set_context

import minidflash as md
from minidflash.request import Request, reserve

TOGETHER = 4  # launches a timing


@contextmanager
def in_use(how, device, table):
    """The cuts, macros and tuning of a variant, for what is recorded meanwhile. table: of cuts."""
    measured, plain, function = dict(table), fast.FAST["attend"], launch.CudaDevice.function
    macros = how.get("macros", {})

    def with_macros(self, file, name, defines=None):
        return function(self, file, name, {**(defines or {}), **macros.get(str(file), {})})

    table.update({(*shape, device.sms): cut for shape, cut in how.get("cuts", {}).items()})
    fast.FAST["attend"] = partial(attend_fast.attend, **how.get("attend", {}))
    launch.CudaDevice.function = with_macros
    split.choose.cache_clear()
    try:
        yield
    finally:
        table.clear()
        table.update(measured)
        fast.FAST["attend"], launch.CudaDevice.function = plain, function
        split.choose.cache_clear()


@contextmanager
def noted(wanted, backend):
    """Programs made meanwhile are not captured; kernels that they ask for are noted as (file, defines),
    not compiled."""
    plain, mode = (launch.CudaDevice.function, launch.CudaDevice.holds), backend.mode

    def note(self, file, name, defines=None):
        wanted.add((file, tuple(sorted((defines or {}).items()))))

    launch.CudaDevice.function, launch.CudaDevice.holds = note, lambda *_, **__: 1 << 20
    backend.mode = "eager"
    try:
        yield
    finally:
        launch.CudaDevice.function, launch.CudaDevice.holds = plain
        backend.mode = mode


def timed(ops, s, context, programs, repeat):
    """{key: [seconds a launch]}: the programs take turns."""
    times = {key: [] for key in programs}
    for again in range(2 * repeat):
        for key, program in programs.items():
            set_context(ops, s, context)
            since = time.perf_counter()
            for _ in range(TOGETHER):
                program.launch()
            ops.download(s.start)
            if again:
                times[key].append((time.perf_counter() - since) / TOGETHER)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument(
        "--parts", nargs="+", default=["verify_16", "verify_1", "round_16"], help="of round.py's"
    )
    parser.add_argument("--fp8", default="none", choices=FP8, help="of the pair, whose weights are")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    ops = md.ops("cuda")
    device = ops.backend.device
    table = split.MEASURED if args.fp8 == "none" else fp8.MEASURED
    known_cuts = split.MEASURED | table
    measured = {(n, k): cut for (n, k, sms), cut in known_cuts.items() if sms == device.sms}
    variants = runpy.run_path(args.file)["variants"](split.Split, measured)
    print(f"{device.name()}, copy {copy_bandwidth(ops) / 1e12:.3f} TB/s", flush=True)
    engine, _ = random_engine(ops, args.shape, args.context + 256, fp8=FP8[args.fp8])
    s = reserve(engine, Request.of(engine, list(range(1, 65)), {"max_tokens": 8}))
    fill_caches(ops, s)
    bucket = ops.bucket(args.context + 2 * s.block)
    known = passes(engine, s)
    parts = {name: known[name] for name in args.parts}
    wanted, programs = set(), {}
    for how in variants.values():
        with noted(wanted, ops.backend), in_use(how, device, table):
            for fn in parts.values():
                ops.program(fn, bucket)
    cuts.compile_all(device.arch, wanted)
    for label, how in variants.items():
        with in_use(how, device, table):
            for name, fn in parts.items():
                programs[label, name] = ops.program(fn, bucket)
    for asked, function in device._functions.items():
        if function.local_bytes and len(asked) == 2:  # else the same under what it was asked for as
            print(f"spills: {asked[1]} {dict(asked[0][1])}", flush=True)
    times = timed(ops, s, args.context, programs, args.repeat)
    for label in variants:
        cells = [
            f"{name} {1e3 * median(found):.4f} (least {1e3 * min(found):.4f})"
            for name, found in ((name, times[label, name]) for name in parts)
        ]
        print(f"{label:32} {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
