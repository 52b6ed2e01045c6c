"""Who starts the next round: the host, one kernel or one graph at a time, or the GPU,
in a WHILE node around the round.

    python bench/loops.py [--shapes smollm2-135m qwen3-8b] [--rounds 20] [--repeat 10] [--name loops]

Each way runs the same rounds of 16 rows from the same context, as the loop does on a GPU: the host starts a
round before it reads the last one's record. Milliseconds a round, on the GPU, from the begin of the first to
the end of the last; all must commit the same ids. A WHILE's records come through a ring in pinned memory.
Writes bench/results/NAME.json.
"""

import argparse
import sys
from collections import deque
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import record
from minidflash.kernels import source
from minidflash.kernels.launch import CudaFunction
from round import copy_bandwidth, device
from shapes import SHAPES, fill_caches, random_engine, set_context

import minidflash as md
from minidflash.loop import one_round
from minidflash.request import Request, reserve

GO = Path(__file__).with_name("go.cu")
WAYS = {  # how the host starts rounds: (mode, may a kernel start while the one before it ends)
    "one by one": ("eager", False),
    "one by one, dependent": ("eager", True),
    "graph": ("graph", False),
    "graph, dependent": ("graph", True),
}
LOOPS = {  # the same of what is captured into a WHILE
    "WHILE": ("eager", False),
    "WHILE, dependent": ("eager", True),
}


def linked(arch):
    """go.cu with the device runtime, which alone can set a condition: a cubin."""
    from cuda.core import Linker, LinkerOptions, ObjectCode, Program, ProgramOptions
    from cuda.pathfinder import find_static_lib

    options = ProgramOptions(arch=arch, relocatable_device_code=True)
    runtime = ObjectCode.from_library(Path(find_static_lib("cudadevrt")).read_bytes())
    own = Program(GO.read_text(), "c++", options).compile("cubin")
    return Linker(own, runtime, options=LinkerOptions(arch=arch)).link("cubin").code


def load_go(gpu):
    """The kernel, loaded on a CudaDevice."""
    image = np.frombuffer(linked(gpu.arch), np.uint8)
    module = gpu.do(gpu.driver.cuModuleLoadData(image.ctypes.data))
    handle = gpu.do(gpu.driver.cuModuleGetFunction(module, b"go"))
    return CudaFunction("go", source.parameters(GO.read_text(), "go"), handle, 0, 0)


class While:
    """A round (a Replay) in a WHILE node. rounds: at most so many;
    records: what they left, in pinned memory."""

    def __init__(self, backend, program, s, rounds):
        import cupy

        self.gpu, self.program, size = backend.device, program, s.record.size
        gpu, driver = self.gpu, self.gpu.driver
        pinned = cupy.cuda.alloc_pinned_memory(4 * rounds * size)
        self.records = np.frombuffer(pinned, np.int32, rounds * size).reshape(rounds, size)
        self.count = backend.array((1,), "i32")
        go, graph = load_go(gpu), gpu.do(driver.cuGraphCreate(0))
        kinds = driver.CUgraphConditionalNodeType
        loop = gpu.do(
            driver.cuGraphConditionalHandleCreate(graph, gpu._context, 1, driver.CU_GRAPH_COND_ASSIGN_DEFAULT)
        )
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle, node.conditional.size = loop, 1
        node.conditional.type, node.conditional.ctx = kinds.CU_GRAPH_COND_TYPE_WHILE, gpu._context
        gpu.do(driver.cuGraphAddNode(graph, None, None, 0, node))
        args = [int(loop), s.done, s.record, pinned.ptr, self.count, size, rounds]
        self._capture(node.conditional.phGraph_out[0], lambda: gpu.launch(go, 1, 32, 0, args))
        self.executable = gpu.do(driver.cuGraphInstantiate(graph, 0))

    def _capture(self, body, end):
        gpu, driver, before = self.gpu, self.gpu.driver, self.gpu.driver_stream
        own = gpu.new_stream()
        gpu.use(own)
        try:
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            gpu.do(driver.cuStreamBeginCaptureToGraph(own, body, None, None, 0, mode))
            self.program.launch()
            end()
            gpu.do(driver.cuStreamEndCapture(own))
        finally:
            gpu.use(before)
            driver.cuStreamDestroy(own)

    def launch(self):
        self.gpu.do(self.gpu.driver.cuGraphLaunch(self.executable, self.gpu.driver_stream))


@contextmanager
def in_use(backend, mode, dependent):
    """One of the ways, for what is recorded or launched meanwhile."""
    before = backend.mode, backend.dependent
    backend.mode, backend.dependent = mode, dependent
    try:
        yield
    finally:
        backend.mode, backend.dependent = before


def by_host(ops, s, program, rounds):
    """(ms, records) of rounds that the host starts, one ahead of the record that it reads."""
    import cupy

    results, under_way = [], deque()
    for _ in range(rounds):
        under_way.append(ops.start(program, s.record))
        if len(under_way) > ops.rounds_ahead:
            results.append((under_way[0], under_way.popleft()()[1]))
    results += [(wait, wait()[1]) for wait in under_way]
    first, last = results[0][0].events[0], results[-1][0].events[1]
    return cupy.cuda.get_elapsed_time(first, last), np.concatenate([found for _, found in results])


def by_gpu(ops, loop):
    """The same of a While."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    ops.upload(loop.count, 0)
    with ops.backend._stream:
        begin.record()
        loop.launch()
        end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end), loop.records.copy()


def measure(ops, shape, context, rounds, repeat):
    """{way: median ms a round}, the ways that the driver refuses, and whether all committed the same ids."""
    engine, _ = random_engine(ops, shape, context + 16 * rounds + 64)
    s = reserve(engine, Request.of(engine, list(range(1, 65)), {"max_tokens": 8}))
    fill_caches(ops, s)
    bucket = ops.bucket(context + 16 * (rounds + 1))

    def fn():
        one_round(engine, s, True, s.block, True)

    runs, refused = {}, {}
    for way, how in (WAYS | LOOPS).items():
        with in_use(ops.backend, *how):
            program = ops.program(fn, bucket)
            try:
                runs[way] = (
                    partial(by_host, ops, s, program, rounds) if way in WAYS
                    else partial(by_gpu, ops, While(ops.backend, program, s, rounds))
                )  # fmt: skip
            except RuntimeError as error:  # the driver's, of a WHILE
                refused[way] = str(error)
    times, ids = {way: [] for way in runs}, {}
    for again in range(repeat + 2):
        for way, run in runs.items():
            set_context(ops, s, context)
            with in_use(ops.backend, *(WAYS | LOOPS)[way]):
                ms, records = run()
            ids.setdefault(way, records[:, 3 : 3 + s.block].tolist())
            if again >= 2:
                times[way].append(ms / rounds)
    engine.state = engine.programs = None
    found = {way: round(median(all_), 4) for way, all_ in times.items()}
    return {"ms": found, "refused": refused, "is_same": all(one == ids["one by one"] for one in ids.values())}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m", "qwen3-8b"], choices=SHAPES)
    parser.add_argument("--context", type=int, default=1900)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--name", default="loops")
    args = parser.parse_args()
    ops = md.ops("cuda")
    found = {
        "copy_tb_per_s": round(copy_bandwidth(ops) / 1e12, 4),
        "context": args.context,
        "rounds": args.rounds,
    }
    for shape in args.shapes:
        found[shape] = measure(ops, shape, args.context, args.rounds, args.repeat)
        print(shape, found[shape], flush=True)
    print(record.write(args.name, found, **device(ops)))


if __name__ == "__main__":
    main()
