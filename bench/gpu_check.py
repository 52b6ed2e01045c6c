"""Is the cuda backend right on this card? Kernel tests, golden pairs, sampling, the embedded pair, planted
faults; one table and one JSON file.

    python bench/gpu_check.py [--only kernels golden sampling pair tau faults] [--commit C] [--seconds 500]

Needs a GPU, the packages of the extras `cuda` and `test`, no network. Golden data is read from tests/golden
and MINIDFLASH_GOLDEN, the embedded pair's target from MINIDFLASH_CACHE. Writes
bench/results/gpu-check-CARD.json, or into $OUT. Exit code 1 when something is wrong.
Parts that --seconds leaves no time for are named, not passed over.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import minidflash as md  # in a bare checkout it lies beside this folder
from minidflash.cli.prompts import read_prompts

PARTS = {
    "kernels": ["tests/kernels/test_*.py"],
    "golden": [
        "tests/test_golden*.py",
        "tests/test_invariance.py",
        "tests/test_lossless.py",
        "tests/test_true_shape.py",
        "tests/test_mixtures.py",
        "tests/test_gemma_pair.py",
        "tests/test_carried.py",
    ],
    "sampling": ["tests/test_sampling*.py"],
}
PAIR = "pair", "tau"
FAULTS = "faults"  # of tests/faults, those that only a GPU shows and those of verify.toml
BLOCKS, TOKENS = (16, 8, 4), 96


def card():
    """Name of the GPU, driver and CUDA versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        name, driver, memory = (word.strip() for word in found.split(","))
    except (OSError, subprocess.CalledProcessError, IndexError):
        import cupy

        name, driver, memory = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), None, None
    return {"card": name, "driver": driver, "memory": memory}


PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
TOGETHER = 50  # tests of a process at most: a long file has several


def names_of(path, *words):
    """Names of the GPU tests of a file. words: more of pytest's."""
    command = [*PYTEST, "--collect-only", *words, str(path)]
    found = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True).stdout
    return [name for name in found.splitlines() if "::" in name]


def tests_of(path):
    """[(path, names of GPU tests)]: what a process of its own runs."""
    names = names_of(path)
    count = -(-len(names) // TOGETHER)
    return [(path, names[i * len(names) // count : (i + 1) * len(names) // count]) for i in range(count)]


def run_part(path, names, limit):
    """Some GPU tests of a file: (passed, skipped, [what failed])."""
    with tempfile.TemporaryDirectory() as folder:
        report, listed = Path(folder) / "report.xml", Path(folder) / "names"
        listed.write_text("\n".join(names))
        command = [*PYTEST, "--tb=short", "--maxfail=60", f"--junitxml={report}", f"@{listed}"]
        try:
            done = subprocess.run(
                command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired as error:
            text = (error.stdout or b"").decode(errors="replace")
            return 0, 0, [f"{path.name}: not ended after {limit:.0f} s: {text[-300:]}"]
        if not report.exists():
            return 0, 0, [f"{path.name}: {(done.stdout + done.stderr)[-600:]}"]
        cases = list(ElementTree.parse(report).iter("testcase"))
    passed, skipped, failures = 0, 0, []
    for case in cases:
        kinds = {child.tag: child for child in case}
        bad = kinds.get("failure", kinds.get("error"))
        if bad is not None:
            failures.append(f"{path.name}: {case.get('name')}: {(bad.get('message') or '')[:200]}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failures


def run_tests(patterns, seconds, jobs):
    """GPU tests of these files, a process each: {"passed", "failed", "skipped", "seconds", "failures"}."""
    begun, end = time.perf_counter(), time.perf_counter() + max(30, seconds)
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    with ThreadPoolExecutor(jobs) as pool:
        parts = [part for found in pool.map(tests_of, paths) for part in found]
        parts.sort(key=lambda part: -len(part[1]))  # the long ones first
        results = list(pool.map(lambda part: run_part(*part, max(1, end - time.perf_counter())), parts))
    passed, skipped, failures = (
        [r[0] for r in results],
        [r[1] for r in results],
        [f for r in results for f in r[2]],
    )
    return {
        "passed": sum(passed), "failed": len(failures), "skipped": sum(skipped),
        "seconds": round(time.perf_counter() - begun, 1), "failures": failures[:40],
    }  # fmt: skip


def golden_numbers():
    from tests.models import numbers

    return numbers("smollm2-135m")


def until_close(tokens, wanted, margins, limit=0.5):
    """Whether ids are equal up to the first one whose margin is below the limit."""
    close = np.flatnonzero(np.asarray(margins) < limit)
    count = int(close[0]) if len(close) else len(wanted)
    return list(tokens[:count]) == list(wanted[:count])


def exact_pair(g):
    """f32 activations: ids and rounds of every prompt and block, exactly."""
    from tests.models import clipped

    engine = md.load(backend="cuda", activations="f32", ctx=512)
    wrong, runs = [], 0
    for p in range(6):
        prompt = g[f"p{p}.input_ids"].tolist()
        for b in BLOCKS:
            want = g[f"p{p}.b{b}.output_ids"].tolist()
            result = md.generate(engine, prompt, max_tokens=TOKENS, block=b, verify=b)
            runs += 1
            if result.tokens != want:
                wrong.append(f"prompt {p} block {b}: ids")
            if result.rounds != clipped(g[f"p{p}.b{b}.rounds"], len(want)):
                wrong.append(f"prompt {p} block {b}: rounds")
    return {"runs": runs, "wrong": wrong, "variants": dict(engine.ops.backend.variants)}


def bf16_pair(g, **options):
    """bf16 activations: drafted text is plain text for every width;
    golden ids up to the first close margin."""
    engine = md.load(backend="cuda", activations="bf16", ctx=512, **options)
    wrong, taus, runs = [], [], 0
    for p in range(6):
        prompt = g[f"p{p}.input_ids"].tolist()
        plain = md.generate(engine, prompt, max_tokens=TOKENS, drafter=False)
        runs += 1
        if not until_close(plain.tokens, g[f"p{p}.plain_ids"].tolist(), g[f"p{p}.margin"]):
            wrong.append(f"prompt {p}: plain ids leave the golden ones before a close margin")
        for b, v in ((16, 16), (16, 5), (16, "auto"), (8, 8), (4, 4)):
            drafted = md.generate(engine, prompt, max_tokens=TOKENS, block=b, verify=v)
            runs += 1
            if drafted.tokens != plain.tokens:
                wrong.append(f"prompt {p} block {b} verify {v}: drafted text is not plain text")
            if (b, v) == (16, 16):
                taus.append(drafted.stats.tau)
    return {
        "mode": engine.ops.backend.mode, "runs": runs, "wrong": wrong, "tau": round(float(np.mean(taus)), 3),
        "load_s": round(engine.load_s, 2), "jit_s": round(engine.jit_s, 2),
        "variants": dict(engine.ops.backend.variants),
    }  # fmt: skip


def tau_pair(count, tokens):
    """tau of bf16 beside f32 activations over many prompts, all rounds of each taken together,
    at block 16."""
    prompts = read_prompts()[:count]
    taus = {}
    for activations in ("f32", "bf16"):
        engine = md.load(backend="cuda", activations=activations, ctx=1024)
        rounds = [
            emitted
            for p in prompts
            for emitted in md.generate(engine, p["prompt"], max_tokens=tokens, block=16, verify=16).rounds
        ]
        taus[activations] = round(float(np.mean(rounds)), 4)
    ratio = taus["bf16"] / taus["f32"]
    wrong = [] if abs(ratio - 1) < 0.03 else [f"bf16 tau is {ratio:.3f} of f32's"]
    return {"runs": 2 * len(prompts), "max_tokens": tokens, **taus, "ratio": round(ratio, 4), "wrong": wrong}


def planted(jobs):
    """Whether the tests catch every fault that only a GPU shows, and `verify` those that it must name."""
    from tests.faults import plant

    faults = plant.read()
    here = [f for f in faults if f.gpu]
    here += [replace(f, tests=f.tests.replace("emulate", "cuda")) for f in faults if f.topic == "verify"]
    outcomes = plant.plant(here, jobs=jobs)
    wrong = [f"{out.name}: {out.status}: {out.why}" for out in outcomes if out.status != "caught"]
    return {"runs": len(outcomes), "wrong": wrong}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *PAIR, FAULTS], default=[*PARTS, *PAIR, FAULTS])
    parser.add_argument("--commit", help="what is measured, where the tree travels without its history")
    parser.add_argument("--seconds", type=float, default=500, help="time for all of it (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=12, help="test processes side by side")
    parser.add_argument("--prompts", type=int, default=50, help="prompts for tau")
    parser.add_argument("--name", help="of the file of results, default gpu-check-CARD")
    args = parser.parse_args()
    if args.commit:
        os.environ["MINIDFLASH_COMMIT"] = args.commit
    begun, found = time.perf_counter(), card()
    print(f"{found['card']}, driver {found['driver']}")

    def left():
        return args.seconds - (time.perf_counter() - begun)

    runs = {}  # first: minutes of tests must not keep them from running
    if "pair" in args.only:
        g = golden_numbers()
        runs |= {"pair f32": lambda: exact_pair(g), "pair bf16": lambda: bf16_pair(g),
                 "pair bf16 eager": lambda: bf16_pair(g, graph=False)}  # fmt: skip
    if "tau" in args.only:
        runs["tau"] = lambda: tau_pair(args.prompts, 128)
    if FAULTS in args.only:
        runs["planted faults"] = lambda: planted(min(4, args.jobs))
    if runs:
        for name, run in runs.items():
            since = time.perf_counter()
            try:
                found[name] = run()
            except Exception as error:  # noqa: BLE001 the other parts still say something
                found[name] = {"wrong": [f"{type(error).__name__}: {error}"[:400]]}
            found[name]["seconds"] = round(time.perf_counter() - since, 1)
            print(name, found[name])
    for name, paths in PARTS.items():
        if name in args.only:
            found[name] = (
                run_tests(paths, left(), args.jobs)
                if left() > 30
                else {"failed": 1, "failures": ["no time left"]}
            )
    print_table(found)
    name = args.name or "gpu-check-" + re.sub(r"\W+", "-", found["card"]).strip("-").lower()
    print(record.write(name, found))
    return int(
        any(part.get("failed") or part.get("wrong") for part in found.values() if isinstance(part, dict))
    )


def print_table(found):
    """One line a part."""
    print(f"\n{'part':18} {'ok':>6} {'wrong':>6} {'s':>7}")
    for name, part in found.items():
        if isinstance(part, dict):
            wrong = part.get("failed", len(part.get("wrong", [])))
            ok = part.get("passed", part.get("runs", ""))
            print(f"{name:18} {ok:>6} {wrong:>6} {part.get('seconds', ''):>7}")
            for line in [*part.get("failures", []), *part.get("wrong", [])][:12]:
                print(f"    {line[:180]}")


if __name__ == "__main__":
    raise SystemExit(main())
