"""Is the cuda backend right on this card? Kernel tests, golden pairs, the embedded pair; one table and one JSON file.

    python bench/gpu_check.py [--only kernels golden pair] [--commit C] [--seconds 500]

Needs a GPU, the packages of the extras `cuda` and `test`, no network. Golden data is read from tests/golden and
MINIDFLASH_GOLDEN, the embedded pair's target from MINIDFLASH_CACHE. Writes bench/results/gpu-check-CARD.json, or into
$OUT. Exit code 1 when something is wrong. Parts that --seconds leaves no time for are named, not passed over.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import minidflash as md  # in a bare checkout it lies beside this folder

PARTS = {
    "kernels": ["tests/kernels"],
    "golden": ["tests/test_golden.py", "tests/test_golden_drafters.py", "tests/test_invariance.py", "tests/test_lossless.py"],
}  # fmt: skip
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


def run_tests(paths, seconds):
    """GPU tests of these files: {"passed", "failed", "skipped", "seconds", "failures": first words of each}."""
    begun, limit = time.perf_counter(), max(30, seconds)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        here = [path for path in paths if (ROOT / path).exists()]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short",
                   "--maxfail=60", f"--junitxml={report}", *here]  # fmt: skip
        try:
            done = subprocess.run(
                command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired as error:
            text = (error.stdout or b"").decode(errors="replace")
            return {"failed": 1, "failures": [f"not ended after {limit:.0f} s: {text[-300:]}"]}
        print(done.stdout[-3000:] if done.returncode else done.stdout.strip().splitlines()[-1])
        if not report.exists():
            return {"failed": 1, "failures": [(done.stdout + done.stderr)[-600:]]}
        cases = list(ElementTree.parse(report).iter("testcase"))
    found = {
        "passed": 0,
        "failed": 0,
        "skipped": 0,
        "seconds": round(time.perf_counter() - begun, 1),
        "failures": [],
    }
    for case in cases:
        kinds = {child.tag: child for child in case}
        bad = kinds.get("failure", kinds.get("error"))
        found["failed" if bad is not None else "skipped" if "skipped" in kinds else "passed"] += 1
        if bad is not None and len(found["failures"]) < 40:
            found["failures"].append(f"{case.get('name')}: {(bad.get('message') or '')[:200]}")
    return found


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
    """bf16 activations: drafted text is plain text for every width; golden ids up to the first close margin; speed."""
    engine = md.load(backend="cuda", activations="bf16", ctx=512, **options)
    wrong, speed, taus = [], {"plain": [], "drafted": []}, []
    for p in range(6):
        prompt = g[f"p{p}.input_ids"].tolist()
        plain = md.generate(engine, prompt, max_tokens=TOKENS, drafter=False)
        if not until_close(plain.tokens, g[f"p{p}.plain_ids"].tolist(), g[f"p{p}.margin"]):
            wrong.append(f"prompt {p}: plain ids leave the golden ones before a close margin")
        for b, v in ((16, 16), (16, 5), (16, "auto"), (8, 8), (4, 4)):
            drafted = md.generate(engine, prompt, max_tokens=TOKENS, block=b, verify=v)
            if drafted.tokens != plain.tokens:
                wrong.append(f"prompt {p} block {b} verify {v}: drafted text is not plain text")
        plain = md.generate(engine, prompt, max_tokens=TOKENS, drafter=False)
        drafted = md.generate(engine, prompt, max_tokens=TOKENS, block=16, verify=16)
        for kind, result in (("plain", plain), ("drafted", drafted)):
            speed[kind].append(len(result.tokens) / result.timing.decode_s)
        taus.append(drafted.stats.tau)
    return {
        "mode": engine.ops.backend.mode, "wrong": wrong, "tau": round(float(np.mean(taus)), 3),
        "load_s": round(engine.load_s, 2), "jit_s": round(engine.jit_s, 2),
        **{f"{kind}_tokens_per_s": round(float(np.median(rates)), 1) for kind, rates in speed.items()},
        "variants": dict(engine.ops.backend.variants),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "pair"], default=[*PARTS, "pair"])
    parser.add_argument("--commit", help="what is measured, where the tree travels without its history")
    parser.add_argument("--seconds", type=float, default=500, help="time for all of it (default %(default)s)")
    args = parser.parse_args()
    if args.commit:
        os.environ["MINIDFLASH_COMMIT"] = args.commit
    begun, found = time.perf_counter(), card()
    print(f"{found['card']}, driver {found['driver']}")

    def left():
        return args.seconds - (time.perf_counter() - begun)

    if "pair" in args.only:  # first: minutes of tests must not keep it from running
        g = golden_numbers()
        for name, run in (("pair f32", lambda: exact_pair(g)), ("pair bf16", lambda: bf16_pair(g)),
                          ("pair bf16 eager", lambda: bf16_pair(g, graph=False))):  # fmt: skip
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
                run_tests(paths, left()) if left() > 30 else {"failed": 1, "failures": ["no time left"]}
            )
    print_table(found)
    print(record.write("gpu-check-" + re.sub(r"\W+", "-", found["card"]).strip("-").lower(), found))
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
