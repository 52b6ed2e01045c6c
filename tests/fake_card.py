"""A GPU that is none: CuPy is NumPy in disguise, the driver writes down what it is asked.
For tests of the cuda backend."""

import ctypes
import types

import numpy as np


class Array(np.ndarray):
    """A CuPy array in what the backend uses of it."""

    @property
    def data(self):
        whole = self

        class Pointer:
            ptr = whole.ctypes.data

            def copy_to_host_async(self, target, count, stream):
                ctypes.memmove(target, self.ptr, count)

        return Pointer()

    def set(self, values, stream):
        assert values.flags.c_contiguous and values.dtype == self.dtype and values.shape == self.shape
        self[...] = values


class Pinned(bytearray):
    """Pinned memory."""

    @property
    def ptr(self):
        return ctypes.addressof((ctypes.c_char * len(self)).from_buffer(self))


class Context:
    """A Device or a Stream: something to be inside of."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self):
        pass


class Event:
    """An event that knows which it was."""

    count = 0

    def record(self, stream):
        Event.count += 1
        self.recorded = Event.count

    def synchronize(self):
        assert self.recorded


def fake_cupy():
    pool = types.SimpleNamespace(free_bytes=lambda: 5)
    return types.SimpleNamespace(
        empty=lambda shape, dtype: np.full(shape, 77, dtype).view(Array),
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Array),
        ascontiguousarray=lambda a: np.ascontiguousarray(a).view(Array),
        get_default_memory_pool=lambda: pool,
        cuda=types.SimpleNamespace(
            Device=Context, ExternalStream=Context, alloc_pinned_memory=Pinned, Event=Event,
            get_elapsed_time=lambda begin, end: 1e3 * (end.recorded - begin.recorded),
            runtime=types.SimpleNamespace(memGetInfo=lambda: (1000, 2000)),
        ),
    )  # fmt: skip


class Driver:
    """The driver's types, and calls that are written down. fails: name of a call -> the code it answers."""

    def __init__(self):
        from cuda.bindings import driver

        self.real, self.calls, self.fails, self.launched_on = driver, [], {}, []
        self.order = []  # (what, stream) of copies, records and waits

    def __getattr__(self, name):
        if not name.startswith("cu") or not name[2].isupper():
            return getattr(self.real, name)
        return lambda *args: self.answer(name, args)

    def answer(self, name, args):
        self.calls.append(name)
        if name in self.fails:
            return (self.fails[name],)
        if name in ("cuMemcpyHtoDAsync", "cuEventRecord"):
            self.order.append(("copy" if "Memcpy" in name else "record", int(args[-1])))
        if name == "cuStreamWaitEvent":
            self.order.append(("wait", int(args[0])))
        code = self.real.CUresult.CUDA_SUCCESS
        if name == "cuLaunchKernelEx":
            self.launched_on.append(int(args[0].hStream))
            return (code,)
        if name == "cuStreamCreate":
            return code, self.real.CUstream(7 + self.count(name))
        if name == "cuMemcpy2DAsync":
            how = args[0]
            for row in range(how.Height):
                ends = [int(p) + row * pitch for p, pitch in
                        ((how.dstDevice, how.dstPitch), (how.srcDevice, how.srcPitch))]  # fmt: skip
                ctypes.memmove(*ends, how.WidthInBytes)
        if name == "cuMemcpyHtoDAsync":
            ctypes.memmove(int(args[0]), int(args[1]), int(args[2]))
        if name == "cuDeviceGetAttribute":
            short = args[0].name.removeprefix("CU_DEVICE_ATTRIBUTE_")
            known = {
                "COMPUTE_CAPABILITY_MAJOR": 9,
                "COMPUTE_CAPABILITY_MINOR": 0,
                "MULTIPROCESSOR_COUNT": 132,
            }
            return code, known.get(short, 232448)
        if name == "cuDeviceGetName":
            return code, b"NVIDIA H100 80GB HBM3\0\0"
        answers = {
            "cuDeviceGetCount": 1, "cuFuncGetAttribute": 24,
            "cuOccupancyMaxActiveClusters": 132,
        }  # fmt: skip
        return code, answers.get(name, 3)

    def count(self, name):
        return self.calls.count(name)
