"""What the GPU benches share: our kernels over torch's memory and streams, a graph's time,
the copy they are held against."""

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from minidflash.kernels.gpu import packed
from minidflash.kernels.launch import CudaDevice
from minidflash.kernels.weight import Weight

from minidflash.errors import UserError

ROTATED = 200e6  # bytes of different weights between two uses of the same


class Buffer:
    """A torch tensor as row functions see an array: shape, size, slices, a pointer."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.size = tensor, tuple(tensor.shape), tensor.numel()

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        return Buffer(self.tensor[rows])


class Backend:
    """What row functions need of a backend, over torch's memory and current stream."""

    activations = "bf16"
    bucket = prefill_frame = following = ready = laid = None

    def __init__(self):
        self.device = CudaDevice()
        self.sms, self.dependent = self.device.sms, False
        self.spills = False  # whether a kernel launched since this was cleared does

    def launch(self, file, kernel, grid, block, shared, args, defines=None, **how):
        function = self.device.function(file, kernel, defines)
        self.spills |= bool(function.local_bytes)
        args = [a.tensor.data_ptr() if isinstance(a, Buffer) else a for a in args]
        self.on_device(function, grid, block, shared, args, **how)

    def on_device(self, function, *args, **how):
        """A launch in torch's current stream."""
        self.device.use(self.device.driver.CUstream(torch.cuda.current_stream().cuda_stream))
        self.device.launch(function, *args, **how)


def packed_weights(pool, outputs, cols, layout="packed"):
    """Weights that rotate, of a pool of random bf16: random bits are as good packed as plain."""
    size = packed.tiles_of(outputs) * -(-cols // 32) * 512
    count = max(1, min(-(-int(ROTATED) // (2 * size)), len(pool) // size, 64))
    return [Weight((outputs, cols), "bf16", layout, (Buffer(pool[i * size :][:size]),)) for i in range(count)]


def rotated(weights):
    """At least 8 of them, over and over."""
    return weights * -(-8 // len(weights))


def timed_over(backend, weights, call, replays):
    """Microseconds of call(weight) over weights in turn; None where the kernel spills or does not fit."""
    backend.spills = False
    try:
        call(weights[0])
        torch.cuda.synchronize()
    except (RuntimeError, UserError) as error:
        print(f"  {str(error).splitlines()[0]}")
        return None
    if backend.spills:
        return None
    return timed([lambda w=w: call(w) for w in rotated(weights)], replays)


def timed(calls, replays):
    """Microseconds a call: median over replays of a graph of all calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(replays + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return median(times[3:])


def copy_gb_s(pool=None, nbytes=2**30):
    """GB/s of a copy of `nbytes`, read and written counted: the better of the driver's and a kernel's.

    pool: a tensor whose halves are used where they are so large; else fresh memory. A smaller copy fits half
    into L2 or ends before the memory is at its pace (512 MB: 2425 GB/s where 1 GiB reaches 2960).
    """
    if pool is None or pool.numel() * pool.element_size() < 2 * nbytes:
        source, target = (torch.empty(nbytes // 4, device="cuda", dtype=torch.float32) for _ in range(2))
    else:
        source, target = pool[: len(pool) // 2], pool[len(pool) // 2 : len(pool) // 2 * 2]
    ways = lambda: target.copy_(source), lambda: torch.neg(source, out=target)
    return max(2 * source.numel() * source.element_size() / (1e3 * timed([way] * 2, 10)) for way in ways)
