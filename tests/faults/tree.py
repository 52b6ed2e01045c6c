"""A copy of the project: a fault is planted in it, tests run in it, the fault is taken out again."""

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

LIMIT = 300  # seconds of one run of pytest
LEFT_OUT = (".git", ".cache", "build", "dist", "*.egg-info", "__pycache__", ".pytest_cache", ".ruff_cache")
KERNELS = Path("kernels/cpu")  # compiled by Numba, cached under one key of all sources there


@dataclass
class Run:
    """How pytest ended. code: its exit code, None after LIMIT. by,
    why: the test that failed first, and its words."""

    code: int | None
    passed: int
    seconds: float
    by: str = ""
    why: str = ""


class Tree:
    """A copy of the project, with a cache of compiled kernels that outlives it: they are keyed by content."""

    def __init__(self, root, place):
        """root: the project. place: the folder for copy and cache.
        Errors: SystemExit where another run uses it."""
        self.place, self.root, self.cache = place, place / "tree", place / "cache"
        place.mkdir(parents=True, exist_ok=True)
        self.lock = (place / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"{place} is in use: another run is planting faults there") from None
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(root, self.root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        self.cache.mkdir(exist_ok=True)
        golden = os.environ.get("MINIDFLASH_GOLDEN") or Path(root).parent / "shared" / "golden"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {
            "PYTHONPATH": str(self.root), "MINIDFLASH_CACHE": str(self.cache),
            "MINIDFLASH_GOLDEN": str(golden),
            "CI": "true",  # what is absent fails, and does not skip
        }  # fmt: skip

    def fits(self, fault):
        """Whether the patch can be made: `old` stands in the file once."""
        path = self.root / fault.file
        return path.is_file() and path.read_text(encoding="utf-8").count(fault.old) == 1

    @contextmanager
    def planted(self, fault):
        """The tree with the fault in it. Behind that without, in contents and times,
        and the cache as it was."""
        path = self.root / fault.file
        text, times, cached = path.read_bytes(), path.stat(), set(self.cache.rglob("*"))
        compiled = self.compiled() if path.parent == self.root / KERNELS else None
        path.write_bytes(text.replace(fault.old.encode(), fault.new.encode()))
        try:
            if compiled:
                self.seed(compiled, path.stem)
            yield
        finally:
            path.write_bytes(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # Numba and Python compare them
            for made in set(self.cache.rglob("*")) - cached:
                shutil.rmtree(made, ignore_errors=True) if made.is_dir() else made.unlink(missing_ok=True)
        assert path.read_bytes() == text, f"{path} is not as it was"

    def compiled(self):
        """The folder of Numba's compiled kernels for the sources as they are now;
        None where they do not load."""
        code = "from minidflash.kernels.cpu.jit import CACHE_FOLDER; print(CACHE_FOLDER)"
        command = [sys.executable, "-c", code]
        found = subprocess.run(
            command, check=False, cwd=self.root, env=self.environment, capture_output=True, text=True
        )
        return Path(found.stdout.strip()) if found.returncode == 0 else None

    def seed(self, compiled, stem):
        """Keep what the changed kernels/cpu/STEM.py has no part in: else all kernels would be compiled
        again."""
        sources = {p.stem: p.read_text(encoding="utf-8") for p in (self.root / KERNELS).glob("*.py")}
        uses = {
            name: set(re.findall(r"^from \.(\w+) import", text, re.MULTILINE))
            for name, text in sources.items()
        }
        changed, more = set(), {stem}
        while more - changed:
            changed |= more
            more = {name for name, used in uses.items() if used & changed}
        to = self.compiled()
        if to and compiled.is_dir():
            shutil.copytree(
                compiled, to, dirs_exist_ok=True,
                ignore=lambda _, names: [n for n in names if n.split(".")[0] in changed],
            )  # fmt: skip

    def test(self, arguments):
        """Run pytest with these arguments here: Run."""
        report = self.place / "report.xml"
        report.unlink(missing_ok=True)
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *shlex.split(arguments)]
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=self.root, env=self.environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, code = process.communicate(timeout=LIMIT)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what the tests started
            output, code = process.communicate()[0], None
        seconds, passed = time.perf_counter() - begun, 0
        for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
            kinds = {child.tag: child for child in case}
            bad = kinds.get("failure", kinds.get("error"))
            if bad is not None:
                words = " ".join((bad.get("message") or "").split())[:300]
                return Run(code, passed, seconds, f"{case.get('classname')}::{case.get('name')}", words)
            passed += "skipped" not in kinds
        return Run(code, passed, seconds, why=" ".join(output.split())[-300:])
