"""A layer of experts on a GPU: route, experts_up and experts_down alone and in a chain, against a plain copy.

    python bench/experts.py [--models coder,gpt-oss-120b] [--rows 1,4,8,10,16,2048] [--cuts] [--backend cuda]

A time is per launch: the median over replays of one graph, with dependent launch, that goes over a few layers
of true shape with random weights, so that nothing stays in L2. Rows are routed each by itself (random) or all
alike. Bytes are those of the experts that have rows. --cuts tries other ways to deal out a tile
(kernels/gpu/experts.py) and ranks them, --variants ways to hold weights and tokens (experts_cuts.py).
Writes bench/results/experts-CARD.json (into $OUT where that is set).
`--backend emulate --models toy --rows 1,3 --replays 1` shows that it runs.
"""

import argparse
import re
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import record
from experts_cuts import compile_all, try_cuts, try_strips, try_variants
from minidflash.kernels import open_ops
from minidflash.kernels.gpu import experts
from minidflash.kernels.table import CLAMPED, SILU
from minidflash.kernels.weight import Weight

CHUNK = 32 << 20  # bytes of random weights that are repeated
MXFP4_SCALES = 32  # bytes of a unit's scales, as in mxfp4.cuh


@dataclass(frozen=True)
class Model:
    """Of a layer: width; experts, how many a row uses, their width, type, biases and activation."""

    width: int
    experts: int
    used: int
    ffn: int
    kind: str
    layers: int  # of the bench
    has_bias: bool = False
    act: tuple = (SILU, 0.0, 0.0)


GPT_OSS = (CLAMPED, 7.0, 1.702)
MODELS = {
    "coder": Model(2048, 128, 8, 768, "bf16", 4),
    "gpt-oss-120b": Model(2880, 128, 4, 2880, "mxfp4", 4, True, GPT_OSS),
    "gpt-oss-20b": Model(2880, 32, 4, 2880, "mxfp4", 8, True, GPT_OSS),
    "toy": Model(96, 12, 3, 80, "bf16", 2),
    "toy-mxfp4": Model(96, 12, 3, 64, "mxfp4", 2, True, GPT_OSS),
}


class RandomWeights:
    """Packed weights of random numbers, made on the device: the bytes of one chunk, again and again."""

    def __init__(self, ops, rng):
        self.ops, self.rng, self.backend, self.chunks = ops, rng, ops.backend, {}

    def experts(self, kind, shape, is_paired):
        """A Weight (E, rows, cols) in fragment order."""
        count, rows, _ = shape
        tiles = count, -(-rows // 16)
        return self.weight(kind, tiles, shape, "packed pairs" if is_paired else "packed")

    def chunk(self, kind):
        """Random bytes of packed weights, on the device: numbers of about 0.02."""
        if kind == "bf16":
            values = (self.rng.integers(0, 2**16, CHUNK // 2, np.uint16) & 0x80FF) | 0x3C00
        elif kind == "scales":
            values = self.rng.integers(118, 121, CHUNK // 8, np.uint8)
        else:
            values = self.rng.integers(0, 256, CHUNK, np.uint8)
        device = self.backend.empty(values.shape, values.dtype)
        self.backend.upload(device, values)
        return device

    def weight(self, kind, tiles, shape, layout):
        """A packed Weight whose bytes are the chunk, again and again."""
        width, size, _ = experts.UNIT[kind]
        units = -(-shape[-1] // width)
        dtype = np.uint16 if kind == "bf16" else np.uint8
        data = self.backend.empty((int(np.prod(tiles)) * units * size // dtype().itemsize,), dtype)
        self.fill(data, kind)
        data = data.reshape(*tiles, -1)
        for of_expert in data if kind == "mxfp4" else ():  # its scales lie behind all its words (mxfp4.cuh)
            self.fill(of_expert.reshape(-1)[-tiles[-1] * units * MXFP4_SCALES :], "scales")
        return Weight(shape, kind, layout, (data,))

    def fill(self, data, kind):
        if kind not in self.chunks:
            self.chunks[kind] = self.chunk(kind)
        source = self.chunks[kind]
        for first in range(0, len(data), len(source)):
            self.copy(data[first : first + len(source)], source[: min(len(source), len(data) - first)])

    def copy(self, to, source):
        if isinstance(to, np.ndarray):
            to[...] = source
            return
        device = self.backend.device
        device.enter()
        device.do(
            device.driver.cuMemcpyDtoDAsync(to.data.ptr, source.data.ptr, source.nbytes, device.driver_stream)
        )


class Layers(RandomWeights):
    """Random weights and buffers of a few layers, and programs over them."""

    def __init__(self, ops, model, rng):
        super().__init__(ops, rng)
        self.model = m = model
        n = m.layers
        self.routers = [
            self.weight("bf16", (-(-m.experts // 16),), (m.experts, m.width), "packed") for _ in range(n)
        ]
        up, down = (m.experts, -(-m.ffn // 8)), (m.experts, -(-m.width // 16))
        self.ups = [
            self.weight(m.kind, up, (m.experts, 2 * m.ffn, m.width), "packed pairs") for _ in range(n)
        ]
        self.downs = [self.weight(m.kind, down, (m.experts, m.width, m.ffn), "packed") for _ in range(n)]
        self.norm = self.put(np.ones(m.width, np.float32))
        self.biases = [None] * 3
        if m.has_bias:
            shapes = (m.experts,), (m.experts, 2 * m.ffn), (m.experts, m.width)
            self.biases = [self.put(0.1 * rng.standard_normal(shape).astype(np.float32)) for shape in shapes]

    def put(self, values):
        kinds = {"uint16": "A", "float32": "f32", "int32": "i32"}
        buffer = self.ops.array(values.shape, kinds[str(values.dtype)])
        self.ops.upload(buffer, values)
        return buffer

    def prepare(self, rows, is_alike):
        """Buffers for so many rows; what each layer's route says of them."""
        m, array = self.model, self.ops.array
        x = self.rng.standard_normal((1 if is_alike else rows, m.width)).astype(np.float32)
        bits = np.broadcast_to((x.view(np.uint32) >> 16).astype(np.uint16), (rows, m.width))
        self.x = self.put(np.ascontiguousarray(bits))
        self.pos, self.touched = self.put(np.arange(rows, dtype=np.int32)), array((1,), "i32")
        self.work = array(
            (self.backend.work_size(rows * m.used, max(m.width, m.ffn), max(m.width, 2 * m.ffn)),), "f32"
        )
        pairs = rows, m.used
        self.u, self.h = array((rows, m.width), "A"), array((*pairs, m.ffn), "A")
        self.routes = [
            (
                array(pairs, "i32"),
                array(pairs, "f32"),
                array((m.experts + 1,), "i32"),
                array((rows * m.used,), "i32"),
            )
            for _ in range(m.layers)
        ]
        for i in range(m.layers):
            self.route(i)
        firsts = [self.ops.download(first) for _, _, first, _ in self.routes]
        assert all(first[-1] == rows * m.used for first in firsts)
        return sum(int((np.diff(first) > 0).sum()) for first in firsts) / m.layers

    def route(self, i):
        expert, share, first, order = self.routes[i]
        self.ops.route(
            self.x, self.norm, None, 1e-6, self.routers[i], self.biases[0], 1, None, self.pos,
            self.touched, self.work, self.u, expert, share, first, order,
        )  # fmt: skip

    def up(self, i):
        expert, _, first, order = self.routes[i]
        args = [self.u, self.ups[i], self.biases[1], expert, first, order, *self.model.act, self.work, self.h]
        self.ops.experts_up(*args)

    def down(self, i):
        expert, share, first, order = self.routes[i]
        args = [
            self.h,
            self.downs[i],
            self.biases[2],
            expert,
            share,
            first,
            order,
            1,
            None,
            0,
            self.x,
            None,
            self.work,
        ]
        self.ops.experts_down(*args)

    def time(self, calls, replays):
        """Microseconds of a layer's calls."""
        rounds = max(1, 12 // self.model.layers)

        def all_layers():
            for i in range(rounds * self.model.layers):
                for call in calls:
                    call(i % self.model.layers)

        program = self.ops.program(all_layers)
        times = [self.ops.start(program)()[0] for _ in range(replays + 2)]
        return 1e6 * median(times[2:] if replays > 2 else times) / (rounds * self.model.layers)


class Copy:
    """A program: a large copy, device to device."""

    def __init__(self, backend, nbytes=2**30):
        self.device, self.nbytes = backend.device, nbytes
        self.source, self.to = (backend.empty((nbytes,), np.uint8) for _ in range(2))

    def launch(self):
        driver, device = self.device.driver, self.device
        to, source = self.to.data.ptr, self.source.data.ptr
        device.do(driver.cuMemcpyDtoDAsync(to, source, self.nbytes, device.driver_stream))


def copy_gb_s(ops):
    """GB/s of a copy of 1 GiB, read and written counted; None without a GPU."""
    if ops.name != "cuda":
        return None
    program = Copy(ops.backend)
    times = [ops.start(program)()[0] for _ in range(10)]
    return 2 * program.nbytes / median(times[2:]) / 1e9


def expert_bytes(model):
    """Of one expert's weights: (up, down)."""
    bits = {"bf16": 16, "mxfp4": 4.25}[model.kind]
    one = model.width * model.ffn * bits / 8
    return 2 * one, one


def measure(layers, name, rows, routing, replays, copy):
    """One line of results."""
    touched = layers.prepare(rows, routing == "alike")
    up, down = (touched * size for size in expert_bytes(layers.model))
    found = {
        "model": name,
        "rows": rows,
        "routing": routing,
        "touched": touched,
        "up_bytes": up,
        "down_bytes": down,
    }
    calls = {"route": layers.route, "up": layers.up, "down": layers.down}
    for what, call in calls.items():
        found[f"{what}_us"] = layers.time([call], replays)
    found["layer_us"] = layers.time(list(calls.values()), replays)
    assert all(layers.backend.variants[row] == "fast" for row in ("route", "experts_up", "experts_down"))
    found["share_of_copy"] = (up + down) / found["layer_us"] / 1e3 / copy if copy else None
    return found


def line(r, copy):
    def of(us, nbytes):
        rate = nbytes / us / 1e3
        return f"{us:8.1f} us {rate:5.0f} GB/s" + (f" {100 * rate / copy:3.0f} %" if copy else "")

    return (
        f"{r['model']:12} {r['rows']:4} rows {r['routing']:6} {r['touched']:5.1f} experts: "
        f"route {r['route_us']:6.1f} us, up {of(r['up_us'], r['up_bytes'])}, "
        f"down {of(r['down_us'], r['down_bytes'])}, "
        f"layer {of(r['layer_us'], r['up_bytes'] + r['down_bytes'])}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="coder,gpt-oss-120b")
    parser.add_argument("--rows", default="1,4,8,10,16,2048")
    parser.add_argument("--routing", default="random,alike")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument(
        "--cuts", action="store_true", help="rank other cuts, at 1 and 16 rows, and strips of a prompt"
    )
    parser.add_argument("--variants", action="store_true", help="rank ways to hold weights and tokens, too")
    parser.add_argument("--seconds", type=float, default=120, help="stop trying cuts after this long")
    args = parser.parse_args()
    begin, ops = time.perf_counter(), open_ops(args.backend, "bf16")
    card = ops.backend.device.name() if args.backend == "cuda" else args.backend
    copy, results, rankings = copy_gb_s(ops), [], {}
    rows = [int(n) for n in args.rows.split(",")]
    print(f"{card}, copy {copy or 0:.0f} GB/s", flush=True)
    for name in args.models.split(","):
        layers = Layers(ops, MODELS[name], np.random.default_rng(0))
        m = layers.model
        if args.backend == "cuda":
            compile_all(
                ops.backend.device,
                [(row, cols, m.kind, m.experts, experts.choose(cols, m.kind, row), n, act) for n in rows
                 for row, cols, act in (("experts_up", m.width, m.act[0]), ("experts_down", m.ffn, 0))],
            )  # fmt: skip
        for n, routing in product(rows, args.routing.split(",")):
            results.append(measure(layers, name, n, routing, args.replays, copy))
            print(line(results[-1], copy), flush=True)
        if args.cuts:
            rankings[name] = try_cuts(
                layers, [1, 16], args.replays, lambda: time.perf_counter() - begin > args.seconds
            )
            for row, times in rankings[name].items():
                print(f"{name}, {row}: us at 1 and 16 rows")
                for what, us in list(times.items())[:12]:
                    print("  " + ", ".join(f"{value:8.1f}" for value in us.values()), what, flush=True)
            if max(rows) > experts.MERGED_ROWS:
                strips = rankings[name]["strips"] = try_strips(layers, max(rows), args.replays)
                print(f"{name}: strips of a prompt, us of up and down: {strips}", flush=True)
        if args.variants:
            found = rankings[name] = try_variants(
                layers, rows, args.replays, lambda: time.perf_counter() - begin > args.seconds
            )
            for (row, by_rows), n in product(found.items(), rows):
                print(f"{name}, {row}, {n} rows: us")
                for what, us in by_rows[n].items():
                    print(f"  {us:8.1f} {what}", flush=True)
        del layers
    where = re.sub(r"\W+", "-", card).strip("-").lower()
    found = {"results": results, "cuts_us": rankings}
    out = record.write(f"experts-{where}", found, card=card, copy_gb_s=copy)
    print(f"{out}, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
