"""Targets with experts at true shape, random weights: plain, verify, draft and round, bytes as really
touched.

    python bench/moe.py [--shapes gpt-oss-20b gemma-4-26b-a4b ...] [--context 2048] [--cap GB]

Two routings: "random", rows of random tokens; "alike", all rows the same experts, as benches with dummy
weights have it: the router's weights are zeros. Distinct experts are counted on the device in every part; a
floor is the bytes of dense weights, touched experts, keys and head over the copy bandwidth of the same run.
--cap: memory that the pool may take, with a context of 8192. Writes bench/results/NAME.json, or into $OUT.
"""

import argparse
import gc
import time
from statistics import median

import numpy as np
import record
from round import copy_bandwidth, device, time_prefill
from shapes import SIZES, fill_caches, random_engine, set_context

import minidflash as md
from minidflash import drafter as draft
from minidflash import target as target_pass
from minidflash.costs import key_bytes
from minidflash.loop import one_round
from minidflash.request import Request, release, reserve
from minidflash.state import device_ids

WIDTHS = 1, 4, 8, 16
MIXTURES = [name for name, sizes in SIZES.items() if sizes.E]


def parts(engine, s):
    """Name -> (what is recorded, whether drafts, rows verified, whether the drafter runs)."""
    ops, taps, block = engine.ops, engine.drafter.config.taps, s.block
    found = {}
    for v in [w for w in WIDTHS if w < block] + [block]:
        rows = device_ids(ops, range(v))
        found[f"verify_{v}"] = (
            (lambda v=v, rows=rows: target_pass.verify(ops, engine.target, s, v, taps, rows)),
            v,
        )
        if v > 1:
            found[f"round_{v}"] = (lambda v=v: one_round(engine, s, True, v, True)), v
    found["plain_round"] = (lambda: one_round(engine, s, False, 1, False)), 1
    found["draft"] = (lambda: draft.draft(ops, engine, s, device_ids(ops, range(1, block)))), 0
    return found


def dense_bytes(model):
    """Bytes of a pass over all that is no expert's, the head's apart; and of one expert, up and down."""
    weights = [w for layer in model.layers for w in layer.values() if hasattr(w, "rows")]
    dense = sum(w.nbytes for w in weights if len(w.shape) == 2)
    experts = [w for w in weights if len(w.shape) == 3]
    each = sum(w.nbytes / w.shape[0] for w in experts)
    return dense, each  # the second over all layers


def measure(ops, shape, context, repeat, bandwidth, prompt):
    engine, seconds = random_engine(ops, shape, max(context + 512, prompt + 64))
    target, drafter, block = engine.target, engine.drafter, engine.drafter.config.block
    found = {"weights_gb": round((target.nbytes + drafter.nbytes) / 1e9, 2), "made_s": round(seconds, 1)}
    request = Request.of(engine, list(range(1, prompt + 1)), {"max_tokens": 8, "verify": block})
    s = reserve(engine, request)
    fill_caches(ops, s)
    dense, each = dense_bytes(target)
    small, _ = dense_bytes(drafter)
    fc, head = drafter.weights["fc"].nbytes + drafter.weights["kv"].nbytes, target.head.nbytes
    keys, own = key_bytes(target.config, context, 2), key_bytes(drafter.config, context, 2)
    touched, layers = s.rows.experts.touched, len(target.layers)
    rng, found["parts"] = np.random.default_rng(3), []
    for routing in ("random", "alike"):
        for layer in target.layers if routing == "alike" else ():
            router = layer["router"].data  # all logits equal: the first ids, for every row
            ops.upload(router, np.zeros(router.shape, router.dtype))
        target.ids = drafter.ids = 1 if routing == "alike" else SIZES[shape].V
        ids = rng.integers(0, SIZES[shape].V, (1, block)) if routing == "random" else np.zeros((1, block))
        for name, (fn, rows) in parts(engine, s).items():
            program, times, counts = ops.program(fn, ops.bucket(context + 2 * block)), [], []
            for i in range(repeat + 2):
                set_context(ops, s, context)
                ops.upload(s.anchor, np.zeros(1, np.int32))
                ops.upload(s.drafts, ids.astype(np.int32))
                ops.upload(s.law, np.zeros((1, 3), np.float32))
                before = int(ops.download(touched)[0])
                since = time.perf_counter()
                for _ in range(4):
                    program.launch()
                after = int(ops.download(touched)[0])
                if i >= 2:
                    times.append((time.perf_counter() - since) / 4)
                    counts.append((after - before) / 4)
            ms, experts = 1e3 * median(times), median(counts) / layers
            read = 0
            if rows:
                read += dense + experts * each + head + keys
            if name == "draft" or name.startswith("round"):
                read += small + head + own + (fc if name != "draft" else 0)
            floor = 1e3 * read / bandwidth
            found["parts"].append({
                "routing": routing, "part": name, "ms": round(ms, 3), "experts": round(experts, 1),
                "gb": round(read / 1e9, 3), "floor_ms": round(floor, 3), "of_floor": round(floor / ms, 3),
            })  # fmt: skip
            print(shape, found["parts"][-1], flush=True)
    found["prefill"] = time_prefill(engine, s, request)
    print(shape, found["prefill"], flush=True)
    release(engine)
    engine.state = engine.programs = None
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=MIXTURES)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--cap", type=float, help="GB that the pool may take")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--name", default="moe")
    args = parser.parse_args()
    ops = md.ops(args.backend)
    bandwidth = copy_bandwidth(ops)
    print(f"copy {bandwidth / 1e12:.3f} TB/s", flush=True)
    found = {"backend": ops.name, "copy_tb_per_s": round(bandwidth / 1e12, 4), "cap_gb": args.cap}
    if args.cap:
        import cupy

        cupy.get_default_memory_pool().set_limit(size=int(args.cap * 1e9))
    for shape in args.shapes:
        found[shape] = measure(ops, shape, args.context, args.repeat, bandwidth, args.prompt)
        gc.collect()
        if ops.name == "cuda":
            import cupy

            found[shape]["held_gb"] = round(cupy.get_default_memory_pool().total_bytes() / 1e9, 2)
            cupy.get_default_memory_pool().free_all_blocks()
        print(record.write(args.name, found, **device(ops)))


if __name__ == "__main__":
    main()
