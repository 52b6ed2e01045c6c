"""Builds the emulator's runtime and one library a .cu with g++, cached by all that goes into them."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from importlib import resources
from pathlib import Path

from ...errors import UserError
from .. import diskcache, source

FOLDER = Path(str(resources.files(__package__)))
_RUNTIME = ("switch.cpp", "scheduler.cpp", "hardware.cpp", "warpgroups.cpp", "races.cpp")

# No contraction: an fma happens where the source says fmaf. No aliasing rules: kernels read memory as uint4.
_FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing", "-g1",
          "-fno-extern-tls-init", "-ftls-model=global-dynamic", "-fstack-clash-protection",
          "-Wall", "-Wno-unknown-pragmas",
          "-Wno-unused-function", "-Wno-unused-variable", "-Wno-unused-but-set-variable"]  # fmt: skip
# The checks that cost little and find what a GPU would trap on or get wrong; each is one conditional jump.
_TRAPS = ["-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero,vla-bound",
          "-fsanitize-undefined-trap-on-error"]  # fmt: skip
_SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]

# Characters of a source and its headers above which a kernel is built without optimisation: products on
# tensor cores, which take longer to optimise than tests take to run them. What models run is shorter.
_LONG = 45_000

_lock = threading.Lock()
_temporary = None  # holds libraries where there is no cache folder, or none that takes them


def is_sanitized():
    """Whether this process builds with ASan and UBSan (MINIDFLASH_SANITIZE=1)."""
    return os.environ.get("MINIDFLASH_SANITIZE", "0") not in ("", "0")


def finds_races():
    """Whether kernels are built to find races in shared memory (MINIDFLASH_RACES=1): races.cpp."""
    return os.environ.get("MINIDFLASH_RACES", "0") not in ("", "0")


@cache
def compiler():
    """(path, version text) of g++. Errors: UserError, code 3, without one or on another processor."""
    if platform.machine() != "x86_64":  # the fiber switch and the thread-local trick of entry.cpp
        raise UserError(
            f"the emulate backend is written for x86-64, this machine is {platform.machine()}",
            hint="use --backend numba",
            code=3,
        )
    path = shutil.which("g++")
    if path is None:
        raise UserError(
            "the emulate backend builds the CUDA kernels with g++, which is not installed",
            hint="install g++ (Debian, Ubuntu: apt install g++), or use --backend numba",
            code=3,
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, version.splitlines()[0]


@cache
def _machine_flags():
    """-mfma where the processor has it: fmaf is exact either way, without it it is a slow call."""
    try:
        flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    except (OSError, TypeError):
        return []
    return ["-mfma", "-mavx2"] if {"fma", "avx2"} <= flags else []


def sanitizer_environment():
    """Environment for a Python whose emulated kernels run under ASan and UBSan.

    ASan must be loaded before everything else, so it cannot be switched on inside a running Python: start
    a new one with this. libstdc++ comes along because ASan looks for its exception functions at start.
    """
    path, _ = compiler()
    names = []
    for name in ("libasan.so", "libstdc++.so.6"):
        found = subprocess.run(
            [path, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout
        names.append(os.path.realpath(found.strip()))
    return dict(
        os.environ,
        MINIDFLASH_SANITIZE="1",
        LD_PRELOAD=" ".join(names),
        ASAN_OPTIONS="detect_leaks=0:abort_on_error=0",  # Python itself leaks by design
    )


def _check_sanitizer():
    if is_sanitized() and not hasattr(ctypes.CDLL(None), "__asan_init"):
        preload = sanitizer_environment()["LD_PRELOAD"]
        raise UserError(
            "MINIDFLASH_SANITIZE=1, but ASan is not loaded in this Python",
            hint=f"start it with LD_PRELOAD='{preload}' ASAN_OPTIONS=detect_leaks=0",
            code=3,
        )


def _build(*what):
    with _lock:  # one folder for the uncached, one g++ for what two threads ask for at once
        return _build_locked(*what)


def _build_locked(name, arguments, inputs, files=None, parsed=()):
    """Compile into the cache unless it is there; returns the library's path.

    inputs: strings that determine the result besides the arguments. files: {name: text} put where g++ runs.
    parsed: flags with which what builds share is compiled once for all; none: for each.
    """
    files = files or {}
    global _temporary
    path, version = compiler()
    key = diskcache.digest(version, *arguments, *inputs, *files.values())
    folder = diskcache.folder("emulate")
    for place in (folder, _temporary and _temporary.name):
        library = place and Path(place) / f"{name}-{key}.so"
        if library and diskcache.load(library) is not None:  # opening a damaged one would end the process
            return library
    with tempfile.TemporaryDirectory(prefix="minidflash-") as work:
        out = Path(work) / "out.so"
        for file, text in files.items():
            (Path(work) / file).write_text(text, encoding="utf-8")
        first = []
        if parsed:
            shared = Path(_parsed(*parsed).name)
            first = [f"-I{shared}", str(shared / "entry.o")]
        command = [path, *first, *arguments, "-shared", "-o", str(out)]
        _check(name, subprocess.run(command, check=False, capture_output=True, text=True, cwd=work))
        data = out.read_bytes()
    library = folder and folder / f"{name}-{key}.so"
    if not library or not diskcache.store(library, data):
        _temporary = _temporary or tempfile.TemporaryDirectory(prefix="minidflash-")
        library = Path(_temporary.name) / f"{name}-{key}.so"
        if not diskcache.store(library, data):
            hint = "free some disk space, or set TMPDIR"
            raise UserError(f"cannot write {library}", hint, code=3)
    return library


def _texts(*names):
    return [(FOLDER / name).read_text(encoding="utf-8") for name in names]


@cache
def runtime():
    """The loaded runtime, its symbols visible to the kernel libraries."""
    _check_sanitizer()
    flags = (
        ["-O1", *_SANITIZE] if is_sanitized() else ["-O2"]
    )  # with checks, -O2 takes twice as long to build
    flags += [*_FLAGS, *_machine_flags()]
    sources = [str(FOLDER / name) for name in _RUNTIME]
    library = _build("runtime", [*flags, *sources], _texts(*_RUNTIME, "scheduler.h", "fibers.h"))
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.emulate_launch.restype = ctypes.c_int
    return loaded


def _check(name, result):
    """Errors: RuntimeError with g++'s words where it failed."""
    if result.returncode:
        raise RuntimeError(f"g++ could not build {name} for the emulator:\n{result.stderr[-4000:]}")


@cache
def _parsed(*flags):
    """A folder with what all builds of these flags share, as long as the process lives: the headers as
    g++ keeps them parsed, and entry.cpp compiled, each a part of a build. g++ takes the former where the
    flags are the same, and else the headers."""
    place = tempfile.TemporaryDirectory(prefix="minidflash-")
    for what in ("c++-header", "cuda_language.h", "cuda_language.h.gch"), ("c++", "entry.cpp", "entry.o"):
        language, file, out = what
        command = [compiler()[0], *flags, "-x", language, "-c", str(FOLDER / file)]
        command += ["-o", str(Path(place.name) / out)]
        _check(file, subprocess.run(command, check=False, capture_output=True, text=True))
    return place


def kernels(path, defines):
    """The library of one .cu, and its path.

    path: the source. defines: {name: value} for -D. Needs runtime() to be loaded first.
    """
    texts = source.texts(path)
    # Dynamic arrays share one address after all static ones: the assembler file comes last for the linker.
    dynamic = sorted(
        {n for t in texts.values() for n in re.findall(r"extern\s+__shared__[^;]*?(\w+)\s*\[\s*\]", t)}
    )
    places = "".join(
        f".globl {n}\n.hidden {n}\n.type {n}, @object\n{n}:\n" for n in ["emulate_dynamic_begin", *dynamic]
    )
    assembler = (
        '.section .tbss.end,"awT",@nobits\n.globl emulate_static_end\n.hidden emulate_static_end\n'
        ".type emulate_static_end, @object\nemulate_static_end:\n"
        f'.section .tbss.dynamic,"awT",@nobits\n.p2align 10\n{places}'
        '.section .note.GNU-stack,"",@progbits\n'
    )
    names = source.kernel_names(texts[path])
    entry = "".join(
        f'extern "C" __attribute__((visibility("default"))) void emulate_call_{n}(void** arguments) '
        f"{{ emulate::call({n}, arguments); }}\n"
        for n in names
    )
    text = f'#include "cuda_language.h"\n#include "{path}"\n#include "call.h"\n{entry}'
    is_long = sum(map(len, texts.values())) > _LONG
    flags = [
        "-O0" if is_long or finds_races() else "-O1",
        *_FLAGS,
        *_machine_flags(),
        *(_SANITIZE if is_sanitized() else _TRAPS),
        *(["-fsanitize=thread"] if finds_races() else []),  # its hooks are ours, so its library stays out
        "-DMINIDFLASH_EMULATE",
    ]
    parsed = () if is_sanitized() else tuple(flags)
    flags += [f"-D{key}={value}" for key, value in sorted(source.macros(path, defines).items())]
    flags += [f"-I{FOLDER}", f"-I{source.CUDA_FOLDER}", f"-fmacro-prefix-map={path.parent}/="]
    flags += [
        f"-fmacro-prefix-map={source.CUDA_FOLDER}/=",
        "-x",
        "c++",
        *([] if parsed else [str(FOLDER / "entry.cpp")]),
        "kernels.cpp",
    ]
    flags += ["-x", "assembler", "places.s"]
    if finds_races():
        flags += ["-nodefaultlibs", "-x", "none", "-lstdc++", "-lm", "-lgcc_s", "-lc"]
    flags.append("-Wl,-Bsymbolic-functions")  # a kernel named like a libc function (accept) stays ours
    headers = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.h"))]
    headers += _texts("entry.cpp")
    files = {"kernels.cpp": text, "places.s": assembler}
    library = _build(path.stem, flags, [*headers, *texts.values()], files, parsed)
    return ctypes.CDLL(str(library)), library


def where(message, library):
    """The message with code addresses, [0x...], replaced by file:line where addr2line knows them."""
    tool = shutil.which("addr2line")

    def place(match):
        address = int(match[1], 16)
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, offset, _ = line.split(None, 3)
            low, high = (int(part, 16) for part in span.split("-"))
            if low <= address < high and str(library) in line and tool:
                command = [tool, "-s", "-e", str(library), hex(address - low + int(offset, 16))]
                found = subprocess.run(command, check=False, capture_output=True, text=True).stdout
                return f"at {found.strip()}"
        return f"at {match[1]}"

    return re.sub(r"\[(0x[0-9a-f]+)\]", place, message)
