"""A step of several sequences at once, random weights of true shape: plain, and rounds of 4, 8 and 16 rows.

    python bench/steps.py [--shape qwen3-8b] [--lanes 1 4 16 64] [--widths 1 4 8 16] [--context 2048]
        [--repeat 30] [--fp8 none] [--name steps-h200]

A step is a whole round on the GPU as one graph: inject FRESH features a sequence, draft a block each, verify
so many rows each, accept; width 1 is plain. Medians. Beside it the same with the skinny family alone, whose
passes hold 8 to 32 rows, and the floor: the bytes of weights and keys once, over the copy bandwidth of the
same run. Writes bench/results/NAME.json (into $OUT where that is set). Needs a GPU.
"""

import argparse
import time
from statistics import median

import cupy
import numpy as np
import record
from round import FP8, copy_bandwidth, device
from shapes import SHAPES, pass_bytes, random_engine, set_context

import minidflash as md
from minidflash.costs import key_bytes
from minidflash.loop import one_round
from minidflash.request import Shape, hold, release

FRESH = 5  # features of a sequence that wait: tokens of a round, about


def fill(ops, s):
    """Random keys and values at all positions of all slots, made on the GPU."""
    tile = cupy.asarray(np.random.default_rng(1).integers(0, 2**16, 2**22, np.uint16) & 0x81FF | 0x3E00)
    for array in (part for cache in (*s.caches, *s.drafter_caches) for part in (cache.k, cache.v)):
        flat = array.reshape(-1).view(np.uint16)
        for at in range(0, flat.size, tile.size):
            flat[at : at + tile.size] = tile[: min(tile.size, flat.size - at)]
    cupy.cuda.runtime.deviceSynchronize()


def step_ms(engine, s, width, context, repeat):
    """Median milliseconds of a step of all slots of `s`."""
    ops, times, drafts = engine.ops, [], width > 1
    program = ops.program(
        lambda: one_round(engine, s, drafts, width, drafts), ops.bucket(context + 2 * s.block)
    )
    for i in range(repeat + 3):
        set_context(ops, s, context, FRESH)
        since = time.perf_counter()
        program.launch()
        ops.download(s.record)
        if i >= 3:
            times.append(time.perf_counter() - since)
    return round(1e3 * median(times), 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--lanes", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--fp8", default="none", choices=FP8, help="of the pair, whose weights are")
    parser.add_argument("--name", default="steps")
    args = parser.parse_args()
    ops = md.ops("cuda")
    bandwidth = copy_bandwidth(ops)
    print(f"copy {bandwidth / 1e12:.3f} TB/s", flush=True)
    room = args.context + 128
    engine, _ = random_engine(ops, args.shape, room, fp8=FP8[args.fp8])
    block = engine.drafter.config.block
    held = hold(engine, Shape(max(args.lanes), room, block, True))
    fill(ops, held)
    target, drafter = pass_bytes(engine.target), pass_bytes(engine.drafter) + engine.target.head.nbytes
    keys, own = (key_bytes(one.config, args.context, 2) for one in (engine.target, engine.drafter))
    found = []
    for lanes in args.lanes:
        s = held.first(lanes)
        for width in args.widths:
            one = {"lanes": lanes, "width": width}
            for name, wide in (("ms", True), ("skinny_ms", False)):
                if wide or lanes > 1:
                    ops.backend.wide = wide
                    repeat = args.repeat if wide else max(3, args.repeat // 6)
                    one[name] = step_ms(engine, s, width, args.context, repeat)
            ops.backend.wide = True
            moved = target + lanes * keys + (drafter + lanes * own if width > 1 else 0)
            one["floor_ms"] = round(1e3 * moved / bandwidth, 3)
            found.append(one)
            print(one, flush=True)
    release(engine)
    facts = {
        "shape": args.shape,
        "fp8": args.fp8,
        "context": args.context,
        "fresh": FRESH,
        "copy_tb_per_s": bandwidth / 1e12,
    }
    print(record.write(args.name, {"steps": found}, **facts, **device(ops)))


if __name__ == "__main__":
    main()
