"""A .cu -> a cubin for one card: NVRTC, cached on disk.

Compiling needs NVRTC alone, so every kernel can be compiled for every card without a GPU. Nothing of CUDA is
imported before it is needed.
"""

import importlib
import re
from dataclasses import dataclass
from functools import cache

from ..errors import UserError
from . import diskcache, source

ARCHES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

# -v: the log then holds registers and spills. NVRTC's own cache (where there is a driver) keeps no log;
# ours does.
_OPTIONS = ["-std=c++17", "-lineinfo", "--ptxas-options=-v", "--no-cache"]
ON_CPU = "use --backend numba"


def choose_arch(major, minor):
    """The NVRTC target of a compute capability. Errors: UserError, code 3, for cards without a variant."""
    arch = ARCHES.get((major, minor))
    if arch is None:
        known = ", ".join(f"{a}.{b}" for a, b in ARCHES)
        raise UserError(
            f"this GPU has compute capability {major}.{minor}; the CUDA kernels are written for {known}",
            hint=ON_CPU,
            code=3,
        )
    return arch


def missing(what, package):
    """The UserError, code 3, that names a package to install."""
    return UserError(what, hint=f"pip install '{package}', or {ON_CPU}", code=3)


def bindings(name):
    """Module `name` of CUDA's Python bindings. Errors: UserError, code 3, where they are not installed."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise missing("the Python bindings of CUDA are not installed", "cuda-bindings>=13,<14") from error


@cache
def open_nvrtc():
    """(the bindings, version) of a usable NVRTC."""
    nvrtc = bindings("nvrtc")
    try:
        result, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:  # the library is searched for at the first call
        raise missing("CUDA's compiler NVRTC is not installed", "nvidia-cuda-nvrtc==13.0.*") from error
    if result != 0 or (major, minor) < (13, 0):
        raise missing(f"NVRTC {major}.{minor} is too old, 13.0 is needed", "nvidia-cuda-nvrtc==13.0.*")
    return nvrtc, (major, minor)


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel: registers a thread; stack and spilled bytes, all 0 in a good kernel."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def resources(log):
    """{kernel name: Resources} from the log of a compilation."""
    found = {}
    pattern = (
        r"Function properties for (\w+)\s*\n\D*(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\s*\n[^\n]*Used (\d+) registers"
    )
    for name, stack, stores, loads, registers in re.findall(pattern, log):
        found[name] = Resources(int(registers), int(stack), int(stores), int(loads))
    return found


def compile_cubin(file, arch, defines=None):
    """Compile a .cu for one card, or take it from the cache.

    file: a name in kernels/cuda or a path. arch: "sm_90a", ... defines: {macro: value}, for -D.
    Returns (cubin bytes, log text). Errors: UserError for what is not installed; RuntimeError with NVRTC's
    words for what does not compile.
    """
    path = source.find(file)
    texts = source.texts(path)
    nvrtc, version = open_nvrtc()
    options = [f"-arch={arch}", *_OPTIONS]
    options += [f"-D{key}={value}" for key, value in sorted(source.macros(path, defines).items())]
    key = diskcache.digest(version, *options, *texts.values())  # what the folders below hold is in the texts
    options += [f"-I{path.parent}", f"-I{source.CUDA_FOLDER}"]
    folder = diskcache.folder("cubin")
    if folder:
        stored, log = folder / f"{path.stem}-{key}.cubin", folder / f"{path.stem}-{key}.log"
        cubin, text = diskcache.load(stored), diskcache.load(log)
        if cubin is not None and text is not None:
            return cubin, text.decode()
    cubin, text = _compile(nvrtc, path, texts[path], options)
    if folder:
        diskcache.store(log, text.encode())
        diskcache.store(stored, cubin)
    return cubin, text


def _compile(nvrtc, path, text, options):
    def checked(result, *values):
        if result != 0:
            raise RuntimeError(f"NVRTC: {result.name} for {path.name}")
        return values[0] if values else None

    program = checked(*nvrtc.nvrtcCreateProgram(text.encode(), path.name.encode(), 0, [], []))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        buffer = bytearray(checked(*nvrtc.nvrtcGetProgramLogSize(program)))
        checked(*nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.rstrip(b"\0 \n").decode(errors="replace")
        if result == nvrtc.nvrtcResult.NVRTC_ERROR_BUILTIN_OPERATION_FAILURE:
            raise missing("NVRTC does not find its builtins library", "nvidia-cuda-nvrtc==13.0.*")
        if result != 0:
            raise RuntimeError(f"NVRTC could not compile {path.name} ({result.name}):\n{log[-4000:]}")
        cubin = bytearray(checked(*nvrtc.nvrtcGetCUBINSize(program)))
        checked(*nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)
