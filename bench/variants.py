"""Variants of kernels side by side in whole passes: cuts of products, macros of kernels, how attention is cut.

    python bench/variants.py FILE [--shape qwen3-8b] [--context 2048] [--parts v16 v1 round] [--repeat 5]

FILE is Python: variants(Split, measured) -> {label: {"cuts": {(N, K): Split}, "macros": {"attend_fast.cu": {name: value}},
"attend": tuning of attend_fast.attend}}; measured: the cuts in use by (N, K). All kernels are compiled on all cores and all
programs recorded first; then they are timed in turn, so that whatever the card does meets all of them. Prints medians and
least times in ms and warns of kernels that spill. A variant's bits may be others: what is kept goes through the tests.
"""

import argparse
import os
import runpy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from minidflash.kernels import launch
from minidflash.kernels.gpu import attend_fast, fast, split
from round import copy_bandwidth
from shapes import SHAPES, random_engine

import minidflash as md
from minidflash import target as verifier
from minidflash.loop import device_ids, one_round
from minidflash.request import Request, reserve

TOGETHER = 4  # launches a timing


@contextmanager
def in_use(how, device):
    """The cuts, macros and tuning of a variant, for what is recorded meanwhile."""
    measured, plain, function = dict(split.MEASURED), fast.FAST["attend"], launch.CudaDevice.function
    macros = how.get("macros", {})

    def with_macros(self, file, name, defines=None):
        return function(self, file, name, {**(defines or {}), **macros.get(str(file), {})})

    split.MEASURED.update({(*shape, device.sms): cut for shape, cut in how.get("cuts", {}).items()})
    fast.FAST["attend"] = partial(attend_fast.attend, **how.get("attend", {}))
    launch.CudaDevice.function = with_macros
    split.choose.cache_clear()
    try:
        yield
    finally:
        split.MEASURED.clear()
        split.MEASURED.update(measured)
        fast.FAST["attend"], launch.CudaDevice.function = plain, function
        split.choose.cache_clear()


@contextmanager
def noted(wanted):
    """Kernels asked for meanwhile are noted as (file, defines) and not compiled."""
    plain = launch.CudaDevice.function, launch.CudaDevice.holds

    def note(self, file, name, defines=None):
        wanted.add((str(file), tuple(sorted((key, str(value)) for key, value in (defines or {}).items()))))

    launch.CudaDevice.function, launch.CudaDevice.holds = note, lambda *_, **__: 1 << 20
    try:
        yield
    finally:
        launch.CudaDevice.function, launch.CudaDevice.holds = plain


def prepare(ops, fn, bucket):
    """Everything that recording fn() needs, nothing launched."""
    with ops.record() as calls:
        fn()
    backend = ops.backend
    backend.is_preparing, backend.bucket = True, bucket
    try:
        for _, call, args in calls:
            call(*args)
    finally:
        backend.is_preparing, backend.bucket = False, None


def compile_all(arch, wanted):
    def compile_one(kernel):
        file, defines = kernel
        for name, used in launch.resources(launch.compile_cubin(file, arch, dict(defines))[1]).items():
            if used.stack:
                print(f"spills: {name} {used} {dict(defines)}", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sorted(wanted)))


def place(ops, s, context):
    """Put the state to a context, and wait."""
    for buffer, value in ((s.start, context), (s.fresh, 0), (s.done, 0), (s.left, 10**6), (s.anchor, 5)):
        ops.upload(buffer, np.array([value], np.int32))
    ops.download(s.start)


def passes(engine, s):
    """{name: what is recorded}."""
    ops, taps = engine.ops, engine.drafter.config.taps

    def verify(v):
        return lambda: verifier.verify(ops, engine.target, s, v, taps, device_ids(ops, range(v)))

    return {"v16": verify(16), "v1": verify(1), "round": lambda: one_round(engine, s, True, s.block, True)}


def timed(ops, s, context, programs, repeat):
    """{key: [seconds a launch]}: the programs take turns."""
    times = {key: [] for key in programs}
    for again in range(2 * repeat):
        for key, program in programs.items():
            place(ops, s, context)
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
    parser.add_argument("--parts", nargs="+", default=["v16", "v1", "round"], choices=["v16", "v1", "round"])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    ops = md.ops("cuda")
    device = ops.backend.device
    measured = {(n, k): cut for (n, k, sms), cut in split.MEASURED.items() if sms == device.sms}
    variants = runpy.run_path(args.file)["variants"](split.Split, measured)
    print(f"{device.name()}, copy {copy_bandwidth(ops) / 1e12:.3f} TB/s", flush=True)
    engine, _ = random_engine(ops, args.shape, args.context + 256)
    s = reserve(engine, Request.of(engine, list(range(1, 65)), {"max_tokens": 8}))
    bucket = ops.bucket(args.context + 2 * s.block)
    parts = {name: fn for name, fn in passes(engine, s).items() if name in args.parts}
    wanted, programs = set(), {}
    for how in variants.values():
        with noted(wanted), in_use(how, device):
            for fn in parts.values():
                prepare(ops, fn, bucket)
    compile_all(device.arch, wanted)
    for label, how in variants.items():
        with in_use(how, device):
            for name, fn in parts.items():
                programs[label, name] = ops.program(fn, bucket)
    times = timed(ops, s, args.context, programs, args.repeat)
    for label in variants:
        cells = [
            f"{name} {1e3 * median(found):.4f} (least {1e3 * min(found):.4f})"
            for name, found in ((name, times[label, name]) for name in parts)
        ]
        print(f"{label:32} {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
