"""Whole rounds of models of true shape with random weights: plain, verify, draft, inject, round, prefill.

    python bench/round.py [--shapes qwen3-8b ...] [--contexts 128 2048 8192 32768] [--backend cuda]
        [--lossless TOKENS] [--fp8 none target both]

Each part is a program of its own (a graph on CUDA), timed back to back; medians of 50. Floors are bytes over
the copy bandwidth measured in the same run. Writes bench/results/round-NAME.json.
"""

import argparse
import time
from itertools import pairwise, product
from statistics import median

import numpy as np
import record
from shapes import SHAPES, fill_caches, pass_bytes, random_engine, set_context

import minidflash as md
from minidflash import drafter as draft
from minidflash import target as target_pass
from minidflash.costs import key_bytes
from minidflash.loop import one_round, prefill
from minidflash.request import Request, release, reserve
from minidflash.sampling import Sampling
from minidflash.state import device_ids


def copy_bandwidth(ops):
    """Bytes a second of a big copy, read plus written."""
    if ops.name == "cuda":
        import cupy

        a = cupy.zeros(2**30, cupy.uint8) + 7
        b = cupy.empty_like(a)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        times = []
        for _ in range(12):
            begin.record()
            b[...] = a
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
        del a, b
        cupy.get_default_memory_pool().free_all_blocks()
    else:
        a = np.ones(2**27, np.uint8)
        b, times = np.empty_like(a), []
        for _ in range(5):
            since = time.perf_counter()
            b[...] = a
            times.append(time.perf_counter() - since)
        return 2 * len(a) / median(times)
    return 2 * 2**30 / median(times)


def passes(engine, s):
    """{name: what is recorded} of a round's parts."""
    ops, taps = engine.ops, engine.drafter.config.taps

    def verify(v):
        return lambda: target_pass.verify(ops, engine.target, s, v, taps, device_ids(ops, range(v)))

    return {
        **{f"verify_{v}": verify(v) for v in (1, 4, 16)},
        "draft": lambda: draft.draft(ops, engine, s, device_ids(ops, range(1, s.block))),
        "inject": lambda: draft.inject_fresh(ops, engine.drafter, s),
        "plain_round": lambda: one_round(engine, s, False, 1, False),
        "round_16": lambda: one_round(engine, s, True, s.block, True),
    }


# Several launches a timing: the host's turn is then a part of what it is in the loop,
# whose gap is reported apart.
TOGETHER = {"draft": 10, "inject": 20}


def parts(engine, s, context, repeat):
    """Milliseconds of every part of a round at a context: {name: median}."""
    ops = engine.ops

    def timed(fn, together=5):
        program, times = ops.program(fn, ops.bucket(context + 2 * s.block)), []
        for i in range(repeat + 3):
            set_context(ops, s, context)
            since = time.perf_counter()
            for _ in range(together):
                program.launch()
            ops.download(s.start)
            if i >= 3:
                times.append((time.perf_counter() - since) / together)
        return round(1e3 * median(times), 4)

    found = {name: timed(fn, TOGETHER.get(name, 5)) for name, fn in passes(engine, s).items()}
    warm, filtered = {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}
    for name, law in {
        "sampled": warm,
        "sampled_top_p": filtered,
        "sampled_top_k": filtered | {"top_k": 50},
    }.items():
        Sampling.of(law).place(ops, s, 0)
        found[f"round_16_{name}"] = timed(lambda: one_round(engine, s, True, s.block, True, "drawn"))
    found["round_16_with_host"] = timed(lambda: one_round(engine, s, True, s.block, True), 1)
    return found


def host_gap(engine, tokens=160):
    """Median microseconds on the GPU between the end of a round of the loop and the begin of the next;
    None on a host."""
    if engine.ops.name != "cuda":
        return None
    import cupy

    ops, start, events = engine.ops, engine.ops.start, []

    def noted(*args):
        result = start(*args)
        events.append(result.events)
        return result

    ops.start = noted
    try:
        for _ in md.stream(engine, list(range(1, 65)), max_tokens=tokens, ignore_eos=True, verify=64):
            pass
    finally:
        ops.start = start
    gaps = [cupy.cuda.get_elapsed_time(end, begin) for (_, end), (begin, _) in pairwise(events[2:])]
    return round(1e3 * median(gaps), 2)


FP8 = {"none": (), "target": ("target",), "both": ("target", "drafter")}


def measure(ops, name, contexts, repeat, bandwidth, tokens, prompt, fp8=()):
    engine, _ = random_engine(ops, name, max(contexts) + 256, fp8=fp8)
    nbytes = engine.target.nbytes + engine.drafter.nbytes
    found = {"weights_gb": round(nbytes / 1e9, 3)}
    request = Request.of(engine, list(range(1, prompt + 1)), {"max_tokens": 8})
    s = reserve(engine, request)
    fill_caches(ops, s)
    target, drafter = pass_bytes(engine.target), pass_bytes(engine.drafter)
    head = engine.target.head.nbytes
    item = 2 if ops.activations == "bf16" else 4
    found["contexts"] = []
    for context in contexts:
        times = parts(engine, s, context, repeat)
        kv, own = (key_bytes(one.config, context, item) for one in (engine.target, engine.drafter))
        floors = {
            "plain": target + kv,
            "draft": drafter + head + own,
            "round": target + drafter + head + kv + own,
        }
        floors = {what: round(1e3 * size / bandwidth, 3) for what, size in floors.items()}
        share = round(floors["round"] / times["round_16"], 3)
        one = {"context": context, "ms": times, "floor_ms": floors, "round_of_floor": share}
        found["contexts"].append(one)
        print(name, found["contexts"][-1], flush=True)
    found["prefill"] = time_prefill(engine, s, request)
    release(engine)
    found["host_gap_us"] = host_gap(engine)
    if tokens:
        found["lossless"] = lossless(engine, tokens)
    print(name, {k: v for k, v in found.items() if k != "contexts"}, flush=True)
    engine.state = engine.programs = None
    return found


def time_prefill(engine, s, request):
    """The prompt's pass with its first token: the best of three."""
    times = []
    for _ in range(3):
        since = time.perf_counter()
        prefill(engine, s, request)
        engine.ops.download(s.record)
        times.append(time.perf_counter() - since)
    return {"tokens": len(request.ids), "ms": round(1e3 * min(times), 2)}


def lossless(engine, tokens):
    """The same ids with and without the drafter, its drafts replaced by a replay of every accepted length."""
    from tests.replay import Replay, histogram, proposing  # shapes.py has put the root on the path

    prompt, vocab = list(range(1, 100)), engine.target.config.vocab
    plain = md.generate(engine, prompt, max_tokens=tokens, drafter=False)
    speed = round(plain.timing.tokens_per_s, 2)
    found = {"tokens": tokens, "distinct": len(set(plain.tokens)), "plain_tokens_per_s": speed}
    for block in (4, 8, 16):
        with proposing(engine, Replay(prompt + plain.tokens, len(prompt), block, vocab, seed=block)):
            rounds = list(md.stream(engine, prompt, max_tokens=tokens, block=block, verify=block))
        found[f"block_{block}"] = {
            "is_same": [i for r in rounds for i in r.tokens] == plain.tokens,
            "rounds": len(rounds) - 1,
            "accepted": {str(n): count for n, count in sorted(histogram(rounds).items())},
        }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-8b"], choices=SHAPES)
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 2048, 8192, 32768])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--lossless", type=int, default=0)
    parser.add_argument(
        "--fp8", nargs="+", default=["none"], choices=FP8, help="of a pair, whose weights are"
    )
    parser.add_argument("--name", default="round")
    args = parser.parse_args()
    ops = md.ops(args.backend)
    bandwidth = copy_bandwidth(ops)
    print(f"copy {bandwidth / 1e12:.3f} TB/s", flush=True)
    found = {"backend": ops.name, "copy_tb_per_s": round(bandwidth / 1e12, 4)}
    for name, kind in product(args.shapes, args.fp8):
        what = name if kind == "none" else f"{name}-fp8-{kind}"
        found[what] = measure(
            ops, name, args.contexts, args.repeat, bandwidth, args.lossless, args.prompt, FP8[kind]
        )
        print(record.write(args.name, found, **device(ops)))


def device(ops):
    """Card and driver, on a GPU."""
    if ops.name != "cuda":
        return {}
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {"card": properties["name"].decode(), "driver": cupy.cuda.runtime.driverGetVersion(),
            "sms": properties["multiProcessorCount"]}  # fmt: skip


if __name__ == "__main__":
    main()
