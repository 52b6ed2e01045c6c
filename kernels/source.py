"""What a .cu file says about itself: its text with everything it includes, and its kernels' parameters.

Both devices (launch.py, emulate) read arguments through this, so an argument of the wrong kind is refused
in the same words on a GPU and without one.
"""

import ctypes
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from ..errors import UserError
from . import record

CUDA_FOLDER = Path(str(resources.files(__package__))) / "cuda"

_SCALARS = {"int": ctypes.c_int32, "u64": ctypes.c_uint64, "float": ctypes.c_float}


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: its name, its ctypes type or None for a pointer, whether it points to const."""

    name: str
    scalar: object
    is_const: bool


def find(file):
    """The path of a .cu: an absolute path as it is, otherwise a name in kernels/cuda."""
    path = CUDA_FOLDER / file
    if not path.is_file():
        raise UserError(f"no CUDA source {file}", hint="kernels are named by their file in kernels/cuda")
    return path.resolve()


def texts(path):
    """{path: text} of a source and of its quoted includes, found beside the includer or in kernels/cuda.

    path: absolute. Includes which are not files of ours (angle brackets) are not read.
    """
    found, waiting = {}, [path]
    while waiting:
        here = waiting.pop()
        if here in found:
            continue
        found[here] = here.read_text(encoding="utf-8")
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', found[here], re.MULTILINE):
            for folder in (here.parent, CUDA_FOLDER):
                if (folder / name).is_file():
                    waiting.append((folder / name).resolve())
                    break
    return found


def macros(path, defines=None):
    """{macro: value} that a source is compiled with: the caller's, and what a file that asks for RECORD_*
    needs."""
    own = record.defines() if "RECORD_" in texts(path)[path] else {}
    return own | (defines or {})


def strip_comments(text):
    """The text without comments, so that a kernel mentioned in prose is not taken for code."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def kernel_names(text):
    """Names of the `extern "C" __global__` kernels that a source defines, in order."""
    pattern = r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\('
    return re.findall(pattern, strip_comments(text))


def parameters(text, name):
    """The parameters of one kernel, in order.

    text: the source. name: the kernel. Returns a tuple of Parameter. Errors: UserError for a kernel or a type
    that is not there.
    """
    text = strip_comments(text)
    head = re.search(rf"__global__[^;{{}}]*?\b{re.escape(name)}\s*\(", text)
    if not head:
        raise UserError(f"no kernel {name} in this source; it has {', '.join(kernel_names(text)) or 'none'}")
    inside = text[head.end() : text.index(")", head.end())]
    return tuple(_parameter(part, name) for part in inside.split(",") if part.strip())


def _parameter(declaration, kernel):
    words = re.sub(r"__restrict__|__grid_constant__", " ", declaration).strip()
    match = re.fullmatch(r"(.*?)(\w+)", words, re.DOTALL)
    kind, name = match[1].strip(), match[2]
    if "*" in kind:
        return Parameter(name, None, "const" in kind.split("*")[0].split())
    kind = " ".join(word for word in kind.split() if word != "const")
    scalar = _SCALARS.get(kind)
    if scalar is None:
        raise UserError(
            f"kernel {kernel}: parameter {name} has type {kind!r}, not a pointer or a known scalar"
        )
    return Parameter(name, scalar, True)


def pack(kernel, wanted, given, address):
    """Kernel arguments as ctypes objects, checked against the parameters.

    kernel: its name, for messages. wanted: Parameters. given: what the caller passed; None is a null pointer.
    address: function of (parameter, argument) that gives a pointer as an int. Returns ctypes scalars.
    Errors: TypeError for a wrong count or kind, OverflowError for an integer that does not fit.
    """
    if len(wanted) != len(given):
        names = ", ".join(p.name for p in wanted)
        raise TypeError(f"{kernel}({names}) takes {len(wanted)} arguments, got {len(given)}")
    packed = []
    for parameter, value in zip(wanted, given, strict=True):
        if parameter.scalar is None:
            packed.append(ctypes.c_void_p(None if value is None else address(parameter, value)))
            continue
        plain = value.item() if isinstance(value, np.generic) else value
        integer = parameter.scalar is not ctypes.c_float
        if not isinstance(plain, int if integer else (int, float)):
            raise TypeError(f"{kernel}: {parameter.name} is a scalar, got {type(value).__name__}")
        result = parameter.scalar(plain)
        if integer and result.value != int(plain):  # ctypes wraps silently
            raise OverflowError(
                f"{kernel}: {parameter.name} = {plain} does not fit {parameter.scalar.__name__}"
            )
        packed.append(result)
    return packed


MOST_CLUSTER = 16  # blocks; above 8, a card must be asked


def grid_of(kernel, grid, cluster):
    """A grid, an int (its x) or up to three, as three ints. Errors: UserError where clusters do not divide
    it."""
    sizes = (grid,) if isinstance(grid, (int, np.integer)) else tuple(grid)
    sizes = tuple(int(size) for size in sizes) + (1,) * (3 - len(sizes))
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(f"grid {grid} must be one to three sizes of at least 1")
    if cluster > MOST_CLUSTER or sizes[0] % cluster:
        raise UserError(
            f"kernel {kernel}: clusters of {cluster} are over {MOST_CLUSTER} or do not divide grid {grid}"
        )
    return sizes


def check_shared(kernel, fixed, dynamic, limit):
    """Refuse more shared memory than a block of this device can have; fixed and dynamic in bytes."""
    if fixed + dynamic > limit:
        raise UserError(
            f"kernel {kernel} asks for {fixed + dynamic} bytes of shared memory a block, "
            f"the limit here is {limit}",
            hint="use smaller tiles or fewer stages",
            code=3,
        )
