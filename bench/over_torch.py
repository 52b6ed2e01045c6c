"""What the GPU benches share: our kernels over torch's memory and streams, a graph's time, the copy they are held against."""

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from minidflash.kernels.launch import CudaDevice


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

    def __init__(self):
        self.device = CudaDevice()
        self.sms, self.dependent = self.device.sms, False
        self.spills = False  # whether a kernel launched since this was cleared does

    def launch(self, file, kernel, grid, block, shared, args, defines=None, **how):
        function = self.device.function(file, kernel, defines)
        self.spills |= bool(function.local_bytes)
        args = [a.tensor.data_ptr() if isinstance(a, Buffer) else a for a in args]
        stream = torch.cuda.current_stream().cuda_stream
        self.device.launch(function, grid, block, shared, args, stream=stream, **how)


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


def copy_gb_s(pool):
    """GB/s of a copy of half of a tensor onto the other, read and written counted."""
    half = len(pool) // 2
    nbytes = 2 * half * pool.element_size()
    return nbytes / (1e3 * timed([lambda: pool[half : 2 * half].copy_(pool[:half])] * 4, 20))
