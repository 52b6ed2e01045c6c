"""The embedded pair beside other programs on this CPU: the same prompts, one after the other, in one run.

    python bench/peers/cpu.py [--prompts FILE|golden] [--each 3] [--tokens 64] [--repeat 3] [--threads 2]
        [--programs minidflash llama.cpp ...] [--timeout 900] [--clock wall|processor]

llama.cpp (from llama-cpp-python's sources, for this processor unless CMAKE_ARGS says otherwise), transformers
and the public dflash package are each installed, by pip and once, into an environment of their own in the
cache folder. Every way of a program takes its turn in a process of its own, every turn anew, so that all meet
the same machine; one that fails or does not end is told of in the result, and the others go on. Greedy, end
tokens ignored, tokens a second behind the first.
--clock processor: on a busy machine only processor time of one thread says something.
Writes bench/results/peers-cpu.json; exit code 1 where a way failed.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

import record
from minidflash.kernels.diskcache import cache_folder
from minidflash.weights.default import default_target

import minidflash as md
from minidflash.cli.prompts import read_prompts
from minidflash.request import OPTIONS, prompt_ids

# program -> (script, what pip installs, as command lines, its ways)
TORCH = ["torch==2.13.0", "transformers==5.15.0"], ["--no-deps", "dflash==0.1.0"]  # dflash names these two
LLAMA = ["llama-cpp-python==0.3.36", "gguf==0.19.0"]
CMAKE_ARGS = os.environ.get("CMAKE_ARGS", "-DGGML_NATIVE=ON")  # what it is built with
# plain, and its own DFlash at the width that is its default and at the drafter's block
LLAMA_WAYS = tuple(f"{kind} {way}" for kind in ("q4_1", "q8_0") for way in ("plain", "dflash 4", "dflash 16"))
PROGRAMS = {
    "minidflash": ("ours.py", (), ("file 1", "file auto", "bf16 1", "bf16 auto", "bf16 16")),
    "llama.cpp": ("llama_loop.py", (LLAMA,), LLAMA_WAYS),
    "transformers": ("torch_loops.py", TORCH, ("float32 plain", "bfloat16 plain")),
    "dflash": ("torch_loops.py", TORCH, ("float32 drafted", "bfloat16 drafted")),
}
GOLDEN = HERE.parent.parent / "tests" / "golden" / "smollm2-135m" / "prompts.json"
REFERENCE = "minidflash", "bf16 1"  # whose tokens the others' are compared with


def environment(installs):
    """The Python of the environment that holds these packages, made on the first call with these CMAKE_ARGS.
    Errors: CalledProcessError with pip's last words."""
    if not installs:
        return sys.executable
    name = "-".join(word for words in installs for word in words if not word.startswith("-"))
    folder = cache_folder() / "peers" / name.replace("==", "-")
    done = folder / "installed"
    if not done.exists() or done.read_text() != CMAKE_ARGS:
        venv.create(folder, with_pip=True, clear=True)
        for words in installs:
            command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *words]
            building = {**os.environ, "CMAKE_ARGS": CMAKE_ARGS}
            subprocess.run(command, check=True, env=building, capture_output=True, text=True)
        done.write_text(CMAKE_ARGS)
    return str(folder / "bin" / "python")


def turn(program, given, timeout):
    """One process's answer. Errors: CalledProcessError, TimeoutExpired, ValueError for no answer."""
    script, installs, _ = PROGRAMS[program]
    threads = {name: str(given["threads"]) for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS")}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [environment(installs), str(HERE / script)], check=True, capture_output=True, text=True,
        input=json.dumps(given), env=clean | threads, timeout=timeout,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def words_of(error):
    """Why a turn gave nothing, in a line."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"did not end within {error.timeout} s"
    if isinstance(error, subprocess.CalledProcessError):
        last = (error.stderr or "").strip().splitlines() or ["no words"]
        return f"exit code {error.returncode}: {last[-1][:200]}"
    return f"gave no answer: {error}"


def installed(programs):
    """(programs that can run, {program: why it cannot}). Installs what is missing."""
    failed = {}
    for program in programs:
        try:
            print(f"{program}: {environment(PROGRAMS[program][1])}", flush=True)
        except (subprocess.SubprocessError, OSError) as error:
            failed[program] = f"cannot be installed: {words_of(error)}"
            print(f"{program}: {failed[program]}", flush=True)
    return [program for program in programs if program not in failed], failed


def all_turns(given, programs, repeat, timeout, say=print):
    """({(program, way): [answers]}, {"program way": why}). What failed once gets no other turn."""
    ways = [(program, way) for program in programs for way in PROGRAMS[program][2]]
    answers, failed = {one: [] for one in ways}, {}
    for number in range(repeat):
        for program, way in ways:
            if f"{program} {way}" in failed:
                continue
            try:
                found = turn(program, given | {"way": way}, timeout)
                answers[program, way].append(found)
                say(f"{number + 1}/{repeat} {program} {way}: {sum(found['seconds']):.1f} s")
            except (subprocess.SubprocessError, ValueError, IndexError) as error:
                failed[f"{program} {way}"] = words_of(error)
                say(f"{number + 1}/{repeat} {program} {way}: {failed[f'{program} {way}']}")
    return {one: found for one, found in answers.items() if f"{one[0]} {one[1]}" not in failed}, failed


def summary(program, way, answers, reference):
    """A row of the table. reference: tokens of each prompt."""
    tokens, rounds = answers[0]["tokens"], answers[0]["rounds"]
    behind_first = sum(len(one) - 1 for one in tokens)
    rates = [behind_first / sum(one["seconds"]) for one in answers]
    return {
        "program": program, "way": way, "tokens_per_s": round(median(rates), 2),
        "spread": round((max(rates) - min(rates)) / 2, 2),
        "tau": round(behind_first / sum(rounds), 3) if rounds else None,
        "same_as_reference": sum(one == other for one, other in zip(tokens, reference, strict=True)),
        "versions": answers[0]["versions"],
    }  # fmt: skip


def prompts_of(path, each):
    """The first `each` prompts of every kind of a file; "golden": those of the embedded pair's golden run."""
    if path == "golden":
        found = json.loads(GOLDEN.read_text(encoding="utf-8"))
        return [{"kind": name, "prompt": one["prompt"]} for name, one in found.items()]
    kinds = {}
    for prompt in read_prompts(path):
        kinds.setdefault(prompt["kind"], []).append(prompt)
    return [prompt for some in kinds.values() for prompt in some[:each]]


def table(found):
    """The rows as Markdown."""
    yield "| program | way | tok/s | tau | texts as ours |"
    yield "|---|---|---|---|---|"
    for one in found["ways"]:
        tau = "-" if one["tau"] is None else f"{one['tau']:.2f}"
        same = f"{one['same_as_reference']} of {len(found['prompts'])}"
        rate = f"{one['tokens_per_s']:.1f} ± {one['spread']:.1f}"
        yield f"| {one['program']} | {one['way']} | {rate} | {tau} | {same} |"
    for what, why in found["failed"].items():
        yield f"| {what} | failed: {why} | - | - | - |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompts", help="a file, as of minidflash bench, or golden; default bench/prompts.jsonl"
    )
    parser.add_argument("--each", type=int, default=3, help="prompts of each kind, where a file has kinds")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one process")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--name", default="peers-cpu")
    args = parser.parse_args()
    if "minidflash" not in args.programs:
        parser.error("--programs needs minidflash, whose texts the others' are compared with")
    programs, missing = installed(args.programs)
    engine, prompts = md.load(backend="numba", warm=False), prompts_of(args.prompts, args.each)
    asked = [prompt.get("tokens") or prompt["prompt"] for prompt in prompts]
    drafter = HERE.parent.parent / "weights" / "default"
    given = {
        "target": str(default_target()), "drafter": str(drafter), "scratch": str(cache_folder() / "peers"),
        "prompts": [prompt_ids(engine, one, OPTIONS) for one in asked], "tokens": args.tokens,
        "threads": args.threads, "clock": args.clock,
    }  # fmt: skip
    answers, failed = all_turns(given, programs, args.repeat, args.timeout, lambda s: print(s, flush=True))
    reference = answers[REFERENCE][0]["tokens"]
    found = {
        "tokens": args.tokens, "repeat": args.repeat, "threads": args.threads, "clock": args.clock,
        "cmake_args": CMAKE_ARGS,
        "prompts": [prompt.get("id", prompt["kind"]) for prompt in prompts],
        "ways": [summary(*one, some, reference) for one, some in answers.items()], "failed": missing | failed,
    }  # fmt: skip
    print(*table(found), sep="\n")
    print(record.write(args.name, found))
    return int(bool(missing | failed))


if __name__ == "__main__":
    raise SystemExit(main())
