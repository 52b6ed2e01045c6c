"""Every kernel once at small shapes, for compute-sanitizer: plain and fast variants, prompt products, a whole round.

    python bench/sanitize.py                        # runs itself under memcheck, racecheck, synccheck; writes the JSON
    compute-sanitizer --tool memcheck python bench/sanitize.py --inside

Exit code 1 when a tool reports an error. Writes bench/results/sanitizer.json.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from shapes import random_engine

import minidflash as md
from minidflash.check import kernel_checks
from minidflash.kernel_bench import arguments

TOOLS = "memcheck", "racecheck", "synccheck"
SMALL = {"D": 256, "H": 8, "G": 2, "K": 64, "F": 320, "V": 1008, "L": 2, "taps": 2}


def inside():
    """All launches. Prints which variant every row took."""
    from minidflash.kernels.table import ROWS

    for activations in ("f32", "bf16"):
        ops = md.ops("cuda", activations)
        for name, problem in kernel_checks(ops):
            print(activations, name, problem or "ok", flush=True)
    ops = md.ops("cuda", "bf16")
    for rows in (1, 16, 40):
        for name, row in ROWS.items():
            args = arguments(ops, row, SMALL, rows, 300)
            getattr(ops, name)(*args)
            if name not in ("stage", "stage_context", "accept"):
                getattr(ops.for_prefill, name)(*args)
    print(ops.backend.variants, flush=True)
    engine, _ = random_engine(ops, "toy", 512)
    plain = md.generate(engine, list(range(1, 150)), max_tokens=24, drafter=False)
    drafted = md.generate(engine, list(range(1, 150)), max_tokens=24, verify=16)
    assert plain.tokens == drafted.tokens
    print("done", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--seconds", type=float, default=150, help="a tool at most")
    if (args := parser.parse_args()).inside:
        inside()
        return 0
    found = {}
    for tool in TOOLS:
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            sys.executable,
            __file__,
            "--inside",
        ]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=args.seconds)
        except subprocess.TimeoutExpired as error:
            found[tool] = {"is_clean": False, "summary": f"not ended after {args.seconds} s"}
            print(tool, found[tool], (error.stdout or b"")[-300:])
            continue
        text = done.stdout + done.stderr
        summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY.*)", text)
        found[tool] = {"is_clean": done.returncode == 0 and "done" in text, "summary": "; ".join(summary)}
        print(tool, found[tool], "" if found[tool]["is_clean"] else text[-1500:], flush=True)
    print(record.write("sanitizer", {"tools": found}))
    return int(not all(one["is_clean"] for one in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
