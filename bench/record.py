"""Who measured what: the head that every file under bench/results carries, and its atomic writing."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = (
    "numpy",
    "numba",
    "tokenizers",
    "cupy-cuda13x",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "torch",
    "transformers",
)


def machine():
    """The processor: model, cores, memory in GiB."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags")).split()
        model += ", AVX-512" if "avx512f" in flags else ""
    except (OSError, StopIteration):
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"processor": model, "cores": os.cpu_count(), "memory_gib": round(memory, 1)}


def versions():
    """Versions of Python and of what is installed of the packages that matter."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit():
    """The commit measured: MINIDFLASH_COMMIT where the tree travels without its history, else what git says."""
    given = os.environ.get("MINIDFLASH_COMMIT")
    if given:
        return given
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def write(name, numbers, **facts):
    """Write bench/results/NAME.json, or into $OUT/NAME.json when OUT is set. Returns the path."""
    command = " ".join(
        [Path(sys.executable).name, *(os.path.relpath(a) if os.path.isabs(a) else a for a in sys.argv)]
    )
    found = {
        "date": datetime.now(UTC).date().isoformat(), "commit": commit(), "command": command, "machine": machine(),
        "versions": versions(), **facts, **numbers,
    }  # fmt: skip
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)
    return path
