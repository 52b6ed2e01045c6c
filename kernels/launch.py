"""A kernel of a .cu, compiled (compiler.py), loaded and launched. Nothing of CUDA is imported before it is
needed.

CudaDevice and emulate.EmulatedDevice have one interface: a backend is written once over either.
"""

import ctypes
from functools import cache
from threading import Lock

from ..errors import UserError
from . import source
from .compiler import ON_CPU, bindings, choose_arch, compile_cubin, missing, open_nvrtc
from .fork import started

_STREAMS, _STREAMS_LOCK = {}, Lock()
MOST_CONFIGS = 256  # kept of a kernel: a prompt's grids vary with its length


@cache
def _driver():
    """The driver's bindings, initialised."""
    driver = bindings("driver")
    try:
        (result,) = driver.cuInit(0)
    except (RuntimeError, OSError) as error:
        raise UserError("no NVIDIA driver (libcuda.so.1) on this machine", hint=ON_CPU, code=3) from error
    if result != 0:
        raise UserError(f"the NVIDIA driver finds no usable GPU ({result.name})", hint=ON_CPU, code=3)
    _, version = driver.cuDriverGetVersion()
    have = f"{version // 1000}.{version % 1000 // 10}"
    if version < 13000:
        raise UserError(
            f"the NVIDIA driver supports CUDA {have}, 13.0 is needed",
            hint=f"install driver 580 or newer, or {ON_CPU}",
            code=3,
        )
    _, (major, minor) = open_nvrtc()
    if (major, minor) > (version // 1000, version % 1000 // 10):
        raise missing(
            f"NVRTC {major}.{minor} is newer than the driver's CUDA {have}", f"nvidia-cuda-nvrtc=={have}.*"
        )
    return driver


class CudaFunction:
    """One loaded kernel: name, parameters, static shared bytes a block, local bytes a thread."""

    def __init__(self, name, parameters, handle, shared, local_bytes):
        self.name = name
        self.parameters = parameters
        self.handle = handle
        self.shared = shared
        self.local_bytes = local_bytes
        self.opted_in = 0  # dynamic shared bytes allowed so far
        self.configs, self.held = {}, {}  # of launches seen before; see CudaDevice.holds


class CudaDevice:
    """One NVIDIA GPU and a stream on it.

    index: which GPU. The primary context is used, the one CuPy uses too. Errors: UserError, code 3, where a
    package, the driver or a supported card is missing.
    """

    def __init__(self, index=0):
        self.driver = driver = _driver()
        started("CUDA")
        count = self.do(driver.cuDeviceGetCount())
        if not 0 <= index < count:
            raise UserError(
                f"no GPU {index}: this machine has {count}", hint="--device 0 is the first", code=3
            )
        self._device = device = self.do(driver.cuDeviceGet(index))
        attribute = driver.CUdevice_attribute

        def ask(name):
            return self.do(
                driver.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)
            )

        self.arch = choose_arch(ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR"))
        self.sms = ask("MULTIPROCESSOR_COUNT")
        self.shared_limit = ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._context = self.do(driver.cuDevicePrimaryCtxRetain(device))
        self.enter()
        # One stream a GPU, whoever uses it: of two kernels side by side, each with blocks that wait for
        # blocks of their own, none might end. Not the default stream: other libraries use that.
        with _STREAMS_LOCK:
            if (driver, index) not in _STREAMS:
                _STREAMS[driver, index] = self.new_stream()
        self.use(_STREAMS[driver, index])
        self._modules = {}
        self._functions = {}

    def new_stream(self):
        return self.do(self.driver.cuStreamCreate(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def use(self, stream):
        """Launch on this stream of the driver's."""
        self.driver_stream, self.stream = stream, int(stream)

    def name(self):
        """The card's name, as the driver has it."""
        return self.do(self.driver.cuDeviceGetName(256, self._device)).split(b"\0")[0].decode()

    def do(self, result):
        """The value of a driver call. result: (code, value...)."""
        code, *values = result
        if code == self.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise UserError("the GPU is out of memory", hint="lower --ctx, or free the GPU", code=3)
        if code != 0:
            raise RuntimeError(f"CUDA driver: {code.name}")
        return values[0] if values else None

    def enter(self):
        """Make this GPU the calling thread's: contexts are current by host thread."""
        self.do(self.driver.cuCtxSetCurrent(self._context))

    def function(self, file, name, defines=None):
        """A kernel of a .cu, compiled and loaded if need be; do this before a graph capture.

        file: a name in kernels/cuda or a path. name: the kernel. defines: {macro: value}, for -D.
        Errors: UserError for a missing file or kernel, RuntimeError for a source that does not compile.
        """
        asked = file, name, *(defines or {}).items()
        if asked not in self._functions:
            self._functions[asked] = self._load(file, name, defines or {})
        return self._functions[asked]

    def _load(self, file, name, defines):
        defines = {key: str(value) for key, value in defines.items()}
        module_key, driver = (str(file), tuple(sorted(defines.items()))), self.driver
        if (module_key, name) in self._functions:
            return self._functions[module_key, name]
        path = source.find(file)
        parameters = source.parameters(path.read_text(encoding="utf-8"), name)
        self.enter()
        if module_key not in self._modules:
            cubin, _ = compile_cubin(path, self.arch, defines)
            image = ctypes.create_string_buffer(cubin, len(cubin))
            self._modules[module_key] = self.do(driver.cuModuleLoadData(ctypes.addressof(image)))
        handle = self.do(driver.cuModuleGetFunction(self._modules[module_key], name.encode()))
        attribute = driver.CUfunction_attribute

        def ask(what):
            return self.do(driver.cuFuncGetAttribute(getattr(attribute, f"CU_FUNC_ATTRIBUTE_{what}"), handle))

        # One division of L1 and shared memory for all: a multiprocessor changes it only when it is empty,
        # which kept the next kernel's blocks waiting for the last one's.
        carveout = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self.do(driver.cuFuncSetAttribute(handle, carveout, 100))
        used = ask("SHARED_SIZE_BYTES"), ask("LOCAL_SIZE_BYTES")
        function = self._functions[module_key, name] = CudaFunction(name, parameters, handle, *used)
        return function

    def launch(self, function, grid, block, shared, args, cluster=1, dependent=False, early=()):
        """Start a kernel in the device's stream; returns at once.

        grid: blocks, an int or up to three. block, cluster: threads and blocks, ints. shared: dynamic bytes a
        block. args: CuPy arrays or device addresses for pointers, numbers for scalars. dependent: may start
        while the launch before it in the stream still runs; the kernel then calls griddep_wait. early: arrays
        of which it reads before that what the launch before did not write; a matter of the emulator. Errors:
        UserError for the card's limits, TypeError for arguments, RuntimeError with the driver's code.
        """
        packed = source.pack(function.name, function.parameters, args, _address)
        self.enter()
        key = grid, block, shared, cluster, dependent, self.stream
        config = function.configs.get(key)
        if config is None:
            if len(function.configs) >= MOST_CONFIGS:
                function.configs.clear()
            config = function.configs[key] = self._config(function, *key[:-1])
        pointers = (ctypes.c_void_p * max(len(packed), 1))(*map(ctypes.addressof, packed))
        (code,) = self.driver.cuLaunchKernelEx(config, function.handle, ctypes.addressof(pointers), 0)
        if code != 0:
            raise RuntimeError(
                f"launch of {function.name}, grid {grid}, block {block}, shared {shared}: {code.name}"
            )

    def _config(self, function, grid, block, shared, cluster, dependent):
        """What the driver is told of a launch, once; the same launch takes a third of the time from then
        on."""
        driver = self.driver
        grid = source.grid_of(function.name, grid, cluster)
        self._allow(function, shared)
        if cluster > 8:  # not portable to every card with clusters
            kinds = driver.CUfunction_attribute
            self.do(driver.cuFuncSetAttribute(
                function.handle, kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1
            ))  # fmt: skip
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared
        config.hStream = self.driver_stream
        attributes = self._attributes(cluster, dependent)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def _allow(self, function, shared):
        """Let a kernel have so many dynamic bytes: the default of 48 KB counts static shared memory too."""
        if shared <= function.opted_in:
            return
        source.check_shared(function.name, function.shared, shared, self.shared_limit)
        name = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.do(self.driver.cuFuncSetAttribute(function.handle, name, shared))
        function.opted_in = shared

    def holds(self, function, threads, shared, cluster=1):
        """How many blocks of such a launch the card holds at once: what kernels may launch whose blocks wait
        for each other."""
        key = threads, shared, cluster
        if key not in function.held:
            driver = self.driver
            self.enter()
            self._allow(function, shared)
            if cluster == 1:
                ask = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
                function.held[key] = self.sms * self.do(ask(function.handle, threads, shared))
            else:
                config = self._config(function, cluster, threads, shared, cluster, False)
                function.held[key] = cluster * self.do(
                    driver.cuOccupancyMaxActiveClusters(function.handle, config)
                )
        return function.held[key]

    def _attributes(self, cluster, dependent):
        """Launch attributes; none for the plain case."""
        driver = self.driver
        kinds = driver.CUlaunchAttributeID
        attributes = []
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            attributes.append(attribute)
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        return attributes

    def synchronize(self):
        """Until the device's stream is empty. Errors: RuntimeError with the code of a kernel's fault."""
        self.enter()
        self.do(self.driver.cuStreamSynchronize(self.driver_stream))


def _address(parameter, value):
    """A device address as an int. value: a CuPy array or an int."""
    if isinstance(value, int):
        return value
    address = getattr(getattr(value, "data", None), "ptr", None)
    if address is None:
        raise TypeError(
            f"{parameter.name}: a pointer wants a CuPy array or an address, got {type(value).__name__}"
        )
    if not value.flags.c_contiguous:
        raise TypeError(f"{parameter.name}: the array is not contiguous")
    return address
