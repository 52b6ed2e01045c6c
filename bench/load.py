"""Loading: a safetensors checkpoint of true Qwen3-8B shape from the page cache to packed GPU memory.

    python bench/load.py [--rings MB:THREADS:BUFFERS ...] [--alone N] [--folder F] [--layers N]

In one call: the rate of pinned memory to the device; of threads that read the files into such buffers,
without a device; of the engine's own path (engine.build: read, copy, pack, allocation of both sides
included). Rings take turns: the size of pieces, threads, and buffers of a thread (kernels/gpu/staging.py).
One load comes before, in which kernels are compiled. --alone: so many loads of each ring in processes of
their own, from before the backend is opened: what a user waits for. With an H100 45 s at most, of which the
files' writing takes 10, and 3 s more for each that is alone. Writes bench/results/NAME.json, or into $OUT.
Several rings side by side:

    python bench/load.py --rings {4,8,16}:12:2 8:16:2 --alone 3 --name load-rings
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
import round as rounds
from minidflash.kernels.gpu import staging
from minidflash.weights import names
from minidflash.weights.safetensors_io import INDEX, open_tensors
from shapes import configs

import minidflash as md
from minidflash.engine import build
from minidflash.rope import rope_tables

SHARD = 4 << 30  # bytes a file, about what such checkpoints have
POOL = 64 << 20  # random bytes that are written again and again
USUAL = f"{staging.PIECE >> 20}:{staging.THREADS}:{staging.BUFFERS}"


def write_checkpoint(folder, config):
    """Shards and index of a model of this shape, random bf16; the files are then in the page cache.
    Returns bytes."""
    shapes = dict(pair for named in names.target_table(config).values() for pair in named.sources)
    shapes["lm_head.weight"] = (config.vocab, config.width)
    shards, room = [{}], SHARD
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        if size > room and shards[-1]:
            shards.append({})
            room = SHARD
        shards[-1][name] = shape
        room -= size
    pool = memoryview(np.random.default_rng(0).bytes(POOL))
    total, place = 0, {}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for i, shard in enumerate(shards):
            file, header, at = f"model-{i + 1:05}-of-{len(shards):05}.safetensors", {}, 0
            for name, shape in shard.items():
                end = at + 2 * int(np.prod(shape))
                header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
                place[name], at = file, end
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            with (folder / file).open("wb") as out:
                out.write(len(text).to_bytes(8, "little") + text)
                out.flush()
                start, descriptor = 8 + len(text), out.fileno()
                os.truncate(descriptor, start + at)
                list(
                    threads.map(
                        lambda first, fd=descriptor, start=start, end=at: os.pwrite(
                            fd, pool[: min(POOL, end - first)], start + first
                        ),
                        range(0, at, POOL),
                    )
                )
            total += at
    (folder / INDEX).write_text(json.dumps({"weight_map": place}))
    return total


def pinned_rate(device, size=256 << 20, repeat=9):
    """Bytes a second of copies from pinned memory, each alone; the median."""
    import cupy

    host, there = cupy.cuda.alloc_pinned_memory(size), cupy.empty(size, cupy.uint8)
    ctypes.memset(host.ptr, 1, size)
    begin, end, times = cupy.cuda.Event(), cupy.cuda.Event(), []
    for _ in range(repeat + 1):
        begin.record()
        there.data.copy_from_host_async(host.ptr, size, cupy.cuda.get_current_stream())
        end.record()
        end.synchronize()
        times.append(1e-3 * cupy.cuda.get_elapsed_time(begin, end))
    return size / median(times[1:])


def read_rate(tensors, threads, piece):
    """Bytes a second of threads that read all tensors, each thread into a buffer of its own that is in
    memory."""
    jobs = [(t, first) for t in tensors.values() for first in range(0, t.nbytes, piece)]
    buffers = [np.ones(piece, np.uint8) for _ in range(threads)]

    def run(i):
        view = memoryview(buffers[i])
        for tensor, first in jobs[i::threads]:
            tensor.read_into(view[: min(piece, tensor.nbytes - first)], first)

    with ThreadPoolExecutor(threads) as pool:
        since = time.perf_counter()
        list(pool.map(run, range(threads)))
        return sum(t.nbytes for t in tensors.values()) / (time.perf_counter() - since)


def load_seconds(backend, config, tensors):
    """Seconds of the engine's path, until the device is done; and the same with a backend's opening before.

    A new backend: each load pins memory of its own.
    """
    gc.collect()
    begun = time.perf_counter()
    ops, bound = md.ops(backend), names.bind_target(config, tensors)
    since = time.perf_counter()
    model = build(ops, config, bound, {kind: rope_tables(ops, *kind, 16) for kind in config.rotations})
    if ops.name == "cuda":
        ops.backend.device.synchronize()
    seconds = time.perf_counter() - since, time.perf_counter() - begun
    del model
    if ops.name == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()  # the next load asks the driver, as a user's does
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the checkpoint is made, default memory or else the temporary folder",
    )
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=40, help="no further repeat after this long")
    parser.add_argument("--name", default="load", help="of the JSON")
    parser.add_argument("--rings", nargs="+", default=[USUAL], metavar="MB:THREADS:BUFFERS")
    parser.add_argument("--alone", type=int, default=0, metavar="N", help="loads in processes of their own")
    parser.add_argument(
        "--checkpoint", type=Path, help="load this one once, with the first ring; print the seconds"
    )
    args = parser.parse_args()
    config = configs(args.shape, 64)[0]
    if args.layers:
        config = replace(config, layers=config.layers[: args.layers])
    if args.checkpoint:
        use(args.rings[0])
        print(load_seconds(args.backend, config, open_tensors(args.checkpoint)[0])[1])
        return
    ops = md.ops(args.backend)
    folder = Path(tempfile.mkdtemp(prefix="minidflash-load-", dir=args.folder or roomy()))
    try:
        found = measure(ops, config, folder, args)
    finally:
        shutil.rmtree(folder)
    print(record.write(args.name, found, **rounds.device(ops)))


def use(ring):
    """Stage files so from the next backend on. Returns the bytes of a piece and the threads."""
    piece, staging.THREADS, staging.BUFFERS = map(int, ring.split(":"))
    staging.PIECE = piece << 20
    return staging.PIECE, staging.THREADS


def alone(folder, ring, args):
    """Seconds of a load in a process of its own, Python's start and the imports of this file apart."""
    words = ["--checkpoint", folder, "--rings", ring, "--backend", args.backend, "--shape", args.shape]
    words += ["--layers", args.layers] if args.layers else []
    command = [sys.executable, __file__, *map(str, words)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])


def roomy(size=24 << 30):
    """The folder of the host's memory where it holds the checkpoint, else None:
    the system's temporary folder."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > size else None


def measure(ops, config, folder, args):
    since = time.perf_counter()
    size = write_checkpoint(folder, config)
    print(f"{size / 1e9:.2f} GB written in {time.perf_counter() - since:.1f} s", flush=True)
    found = {
        "shape": args.shape,
        "layers": len(config.layers),
        "gb": round(size / 1e9, 3),
        "backend": ops.name,
    }
    tensors = open_tensors(folder)[0]
    first, _ = load_seconds(ops.name, config, tensors)
    found["first_seconds"] = round(first, 3)
    print(f"first load {first:.2f} s", flush=True)
    rings, pinned = args.rings, []
    read, seconds, own = ({ring: [] for ring in rings} for _ in range(3))
    for _ in range(args.repeat):  # in turns, since others may load the host's memory for a while
        if ops.name == "cuda":
            pinned.append(pinned_rate(ops.backend.device))
            print(f"pinned memory to device {pinned[-1] / 1e9:.1f} GB/s", flush=True)
        for ring in rings:
            piece, threads = use(ring)
            read[ring].append(read_rate(tensors, threads, piece))
            seconds[ring].append(load_seconds(ops.name, config, tensors)[0])
            print(
                ring,
                f"read {read[ring][-1] / 1e9:.1f}, load {size / seconds[ring][-1] / 1e9:.1f} GB/s",
                flush=True,
            )
        if time.perf_counter() - since > args.seconds:
            break
    for _ in range(args.alone):
        for ring in rings:
            own[ring].append(alone(folder, ring, args))
    if pinned:
        found["pinned_gb_per_s"] = round(median(pinned) / 1e9, 2)
    found["loads"] = []
    for ring in rings:
        rate = size / median(seconds[ring])
        piece, threads, buffers = map(int, ring.split(":"))
        one = {
            "piece_mb": piece, "threads": threads, "buffers": buffers,
            "read_gb_per_s": round(median(read[ring]) / 1e9, 2), "gb_per_s": round(rate / 1e9, 2),
            "seconds": [round(s, 3) for s in seconds[ring]],
        }  # fmt: skip
        if own[ring]:
            one["alone_seconds"] = [round(s, 3) for s in own[ring]]
        if pinned:
            one["of_pinned"] = round(rate / median(pinned), 3)
        found["loads"].append(one)
        print(one, flush=True)
    return found


if __name__ == "__main__":
    main()
