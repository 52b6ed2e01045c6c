"""The kernel tests on the GPU under compute-sanitizer: memcheck, racecheck and synccheck,
many processes at a time.

    python bench/sanitize.py [--tool PATH] [--checks racecheck ...] [--parts fast_gemm ...] [--most 16]
        [--jobs 12]

A part is a file of tests/kernels: at most --most of its tests, some of every function, of small shapes (not
BIG); `round` is whole rounds of a toy model, plain and drafted. Each check must also find the mistake planted
for it. Exit code 1 unless all is clean. Writes bench/results/NAME.json, or into $OUT.
"""

import argparse
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import record
from gpu_check import PYTEST, names_of

CHECKS = "memcheck", "racecheck", "synccheck"
LONG = (
    "fast_bits",
    "attend",
    "qkv",
    "fast_attend",
    "sample",
    "fast_gemm",
)  # these begin first
OTHERS = (
    "compile",
    "cuda_backend",
    "emulate",
    "launch",
    "loading",
    "races",
    "table",
)  # no kernels, or none on a GPU
PARTS = [file.stem.removeprefix("test_") for file in (ROOT / "tests" / "kernels").glob("test_*.py")]
PARTS = [*LONG, *sorted(set(PARTS) - {*LONG, *OTHERS}), "round"]
BIG = "long or many or fit or 4096"
# One mistake for each check, which it must report: a write past the end; a read of what another warp writes;
# a lane that its own mask leaves out.
PLANTED = """
extern "C" __global__ void memcheck(int* out) { out[(1 << 20) + threadIdx.x] = 1; }
extern "C" __global__ void racecheck(int* out) {
    __shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void synccheck(int* out) {
    unsigned mask = __ballot_sync(0xffffffffu, threadIdx.x % 32 < 16);
    if (threadIdx.x % 32 <= 16) __syncwarp(mask);
    out[threadIdx.x] = mask;
}
"""


def inside(part):
    """What a process under the tool runs, where it is no test."""
    if part == "round":
        from shapes import random_engine

        import minidflash as md

        engine, _ = random_engine(md.ops("cuda"), "toy", 512)
        prompt = list(range(1, 150))
        plain = md.generate(engine, prompt, max_tokens=8, drafter=False)
        assert plain.tokens == md.generate(engine, prompt, max_tokens=8, verify=16).tokens
    else:
        import cupy
        from minidflash.kernels.launch import CudaDevice

        device, out = CudaDevice(), cupy.zeros(64, cupy.int32)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "planted.cu"
            path.write_text(PLANTED)
            device.launch(device.function(path, part), 1, 64, 0, [out])
            device.synchronize()
    print("1 passed")


def command(part, most):
    """The command of a part, to run under the tool."""
    if part == "round" or part in CHECKS:
        return [sys.executable, __file__, "--inside", part]
    return [*PYTEST, "--tb=short", *some_tests(part, most)]


@cache
def some_tests(part, most):
    """Names of at most so many tests of a file, in turn from each of its functions; the same at every run."""
    functions = {}
    for name in names_of(f"tests/kernels/test_{part}.py", "-k", f"not ({BIG})"):
        functions.setdefault(name.split("[")[0], []).append(name)
    for names in functions.values():
        random.Random(0).shuffle(names)
    turns = itertools.zip_longest(*functions.values())
    return [name for names in turns for name in names if name][:most]


def run(words, seconds):
    """{"is_clean", "passed", "seconds", "words": the tool's summaries, "text"} of a command."""
    since = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, code = process.communicate(timeout=seconds)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and what runs under it
        text, code = process.communicate()[0], f"not ended after {seconds:.0f} s"
    passed = re.search(r"(\d+) passed", text)
    summaries = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*|Warning: .*)", text)
    return {
        "is_clean": code == 0 and bool(passed), "passed": int(passed[1]) if passed else 0,
        "seconds": round(time.perf_counter() - since, 1), "words": "; ".join(summaries) or str(code),
        "text": text,
    }  # fmt: skip


def check(tool, name, part, most, seconds):
    """A part under one check. A planted mistake is clean when it is found."""
    options = ["--tool", name, "--error-exitcode", "9", "--num-cuda-barriers", "32", "--print-limit", "20"]
    found = run([tool, *options, *command(part, most)], seconds)
    if part in CHECKS:
        found["is_clean"] = bool(re.search(r"SUMMARY: [1-9]", found["words"]))
    if not found["is_clean"]:
        print(name, part, found["text"][-3000:], flush=True)
    print(f"{name:10} {part:15} {'clean' if found['is_clean'] else 'NOT CLEAN'} {found['passed']:4} passed, "
          f"{found['seconds']} s, {found['words']}", flush=True)  # fmt: skip
    return name, "planted" if part in CHECKS else part, found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--tool", default="compute-sanitizer", help="the program")
    parser.add_argument("--checks", nargs="+", default=CHECKS, choices=CHECKS)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--most", type=int, default=16, help="tests of a part at most")
    parser.add_argument("--jobs", type=int, default=12, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=90, help="a part at most")
    parser.add_argument("--name", default="sanitizer", help="of the file of results")
    args = parser.parse_args()
    if args.inside:
        return inside(args.inside)
    version = subprocess.run([args.tool, "--version"], check=True, capture_output=True, text=True).stdout
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [*((c, c) for c in args.checks), *itertools.product(args.checks, args.parts)]
        done = list(pool.map(lambda job: check(args.tool, *job, args.most, args.seconds), jobs))
    found = {name: {"is_clean": True, "passed": 0, "parts": {}} for name in args.checks}
    for name, part, one in done:
        whole = found[name]
        whole["is_clean"] &= one["is_clean"]
        whole["passed"] += one["passed"] if part != "planted" else 0
        whole["parts"][part] = {key: one[key] for key in ("is_clean", "passed", "seconds", "words")}
    print(record.write(args.name, {"compute_sanitizer": version.splitlines()[-1], "checks": found}))
    return int(not all(one["is_clean"] for one in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
