"""Where a round's time goes: when each kernel of the replayed graph began and when it had what it waits for.

    python bench/timeline.py [--shapes qwen3-8b ...] [--context 2048] [--rounds 30] [--card h100]

Kernels are compiled with -DSTAMPS: block 0 of each launch notes the GPU's clock before and after its wait for
the kernel ahead (griddep_wait in sm90.cuh). From one release to the next is what a kernel adds to the round;
what lies between a kernel's begin and its release is its head start.
Writes bench/results/timeline-SHAPE-CARD.json, which bench/plots.py draws.
"""

import argparse
import ctypes
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import record
from minidflash.kernels.launch import CudaDevice
from round import copy_bandwidth, device
from shapes import SHAPES, random_engine, set_context

import minidflash as md
from minidflash.loop import one_round
from minidflash.request import Request, release, reserve

STAMPS = 1 << 12  # launches of one module; sm90.cuh notes some phases of each


def with_stamps():
    """Every kernel that a CudaDevice loads from now on notes its times."""
    plain = CudaDevice.function
    CudaDevice.function = lambda self, file, name, defines=None: plain(
        self, file, name, {**(defines or {}), "STAMPS": STAMPS}
    )


def read(device, clear=False):
    """[(file, begin, release, {phase: time})] of each launch in nanoseconds, by release.
    clear: forget them."""
    found = []
    for (file, _), module in device._modules.items():
        code, at, size = device.driver.cuModuleGetGlobal(module, b"stamps")
        if code != 0:
            continue  # a kernel that waits for nobody
        count_at = device.do(device.driver.cuModuleGetGlobal(module, b"stamp_count"))
        count = ctypes.c_uint32()
        device.do(device.driver.cuMemcpyDtoH(ctypes.addressof(count), count_at, 4))
        stamps = np.zeros((min(count.value, STAMPS), size // STAMPS // 8), np.uint64)
        if len(stamps):
            device.do(device.driver.cuMemcpyDtoH(stamps.ctypes.data, at, stamps.nbytes))
        for begin, released, *rest in stamps.tolist():
            phases = {phase: time for phase, time in enumerate(rest, 2) if time >= released}
            found.append((Path(file).stem, begin, released, phases))
        if clear:
            device.do(device.driver.cuMemsetD32(count_at, 0, 1))
    return sorted(found, key=lambda launch: launch[2])


def rounds_of(engine, s, how, count, context):
    """Kernels of `count` replays of a round (arguments of one_round), one list each."""
    ops, found = engine.ops, []
    program = ops.program(lambda: one_round(engine, s, *how), ops.bucket(context + 2 * s.block))
    for i in range(count + 3):
        set_context(ops, s, context, fresh=s.block)
        read(ops.backend.device, clear=True)
        program.launch()
        ops.download(s.start)
        if i >= 3:
            found.append(read(ops.backend.device))
    lengths = {len(launches) for launches in found}
    assert len(lengths) == 1, f"rounds of {lengths} kernels"
    return found


def summary(rounds):
    """Microseconds by place in the round: [{file, at, adds, head_start, phases}], medians over rounds."""
    rows = []
    for place in range(len(rounds[0])):
        each = [launches[place] for launches in rounds]
        following = [launches[place + 1][2] if place + 1 < len(launches) else None for launches in rounds]
        after = [f - k[2] for f, k in zip(following, each, strict=True)] if following[0] else []
        phases = sorted({phase for k in each for phase in k[3]})
        rows.append({
            "kernel": each[0][0],
            "at": median(k[2] - launches[0][2] for k, launches in zip(each, rounds, strict=True)) / 1e3,
            "adds": median(after) / 1e3 if after else None,
            "head_start": median(k[2] - k[1] for k in each) / 1e3,
            "phases": {p: median(k[3][p] - k[2] for k in each if p in k[3]) / 1e3 for p in phases},
        })  # fmt: skip
    return rows


def by_kernel(rows):
    """Sums over the places of one kernel, largest first."""
    groups = defaultdict(list)
    for row in rows[:-1]:
        groups[row["kernel"]].append(row)
    return sorted(
        ({
            "kernel": name, "launches": len(own), "adds_us": round(sum(r["adds"] for r in own), 1),
            "median_us": round(median(r["adds"] for r in own), 2),
            "head_start_us": round(median(r["head_start"] for r in own), 2),
            "phases_us": {p: round(median(r["phases"][p] for r in own if p in r["phases"]), 2)
                          for p in sorted({p for r in own for p in r["phases"]})},
        } for name, own in groups.items()), key=lambda g: -g["adds_us"],
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-8b"], choices=SHAPES)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--card", default="h100", help="in the names of what is written")
    args = parser.parse_args()
    ops = md.ops("cuda")
    bandwidth = copy_bandwidth(ops)
    with_stamps()
    for name in args.shapes:
        engine, _ = random_engine(ops, name, args.context + 256)
        request = Request.of(engine, list(range(1, 65)), {"max_tokens": 8})
        s, found = reserve(engine, request), {"copy_tb_per_s": round(bandwidth / 1e12, 4)}
        for kind, how in {"plain": (False, 1, False), "round_16": (True, s.block, True)}.items():
            rows = summary(rounds_of(engine, s, how, args.rounds, args.context))
            found[kind] = {"launches": len(rows), "us": round(rows[-1]["at"], 1), "kernels": by_kernel(rows)}
            print(name, kind, found[kind]["launches"], found[kind]["us"], flush=True)
            for group in found[kind]["kernels"]:
                print("  ", group, flush=True)
            found[kind]["places"] = rows
        print(record.write(f"timeline-{name}-{args.card}", found, context=args.context, **device(ops)))
        release(engine)
        engine.state = engine.programs = None


if __name__ == "__main__":
    main()
