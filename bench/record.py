"""Who measured what: the head that every file under bench/results carries, and its atomic writing.

    python bench/record.py

prints the commit as results name it. A tree that travels without its history gets it as MINIDFLASH_COMMIT.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CHANGES = "+changes"  # behind a commit: of a tree that had others than the commit's files
# What benches write or generate is not what they measure.
MEASURED = [".", ":!bench/results", ":!bench/MEASURED.md", ":!README.md", ":!docs"]
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
    """The commit measured: MINIDFLASH_COMMIT where the tree travels without its history, else what git says
    of the tree that this file is in; CHANGES behind it when the tree is not the commit's.
    None where neither knows."""
    given = os.environ.get("MINIDFLASH_COMMIT")
    if given:
        return given

    def git(*words):
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        head, changes = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--", *MEASURED)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + (CHANGES if changes else "")


BEGUN = commit()


def commit_of_run():
    """The commit, with CHANGES where the tree is not what it was as the run began:
    it may have read files of both."""
    now = commit()
    if os.environ.get("MINIDFLASH_COMMIT") or now == BEGUN or not BEGUN:
        return now
    return BEGUN.removesuffix(CHANGES) + CHANGES


def write(name, numbers, **facts):
    """Write bench/results/NAME.json, or into $OUT/NAME.json when OUT is set. Returns the path."""
    command = shlex.join(
        [Path(sys.executable).name, *(os.path.relpath(a) if os.path.isabs(a) else a for a in sys.argv)]
    )
    found = {
        "date": datetime.now(UTC).date().isoformat(), "commit": commit_of_run(), "command": command,
        "machine": machine(), "versions": versions(), **facts, **numbers,
    }  # fmt: skip
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)
    return path


if __name__ == "__main__":
    print(commit())
