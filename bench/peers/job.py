"""What every program of bench/peers/cpu.py is given and answers: JSON on standard input, a JSON line last.

Given: {"way": which of the program's ways, "target": a folder with the bf16 checkpoint and the GGUF file,
"drafter": a folder, "scratch": a folder for files made once, "prompts": [ids],
"tokens": how many to generate, "threads": of a process, "clock": "wall" or "processor"}.
Answers: {"seconds": of each prompt's tokens behind the first, "tokens": [ids], "rounds": of each prompt or
None, "versions": {package: version}}. Standard library only: this runs in environments of their own.
"""

import json
import sys
import time
from importlib.metadata import version


def read():
    """The job."""
    return json.load(sys.stdin)


def clock_of(job):
    return time.perf_counter if job["clock"] == "wall" else time.process_time


def answer(seconds, tokens, rounds, packages):
    """Print the last line. rounds: how many each prompt took, or None."""
    found = {"seconds": seconds, "tokens": tokens, "rounds": rounds}
    print(json.dumps(found | {"versions": {name: version(name) for name in packages}}), flush=True)


def timed(job, generate):
    """Run generate(ids) -> (first moment behind the first token, ids, rounds) on each prompt, the first of
    them once before, which warms up. Returns (seconds, tokens, rounds)."""
    clock, seconds, tokens, rounds = clock_of(job), [], [], []
    generate(job["prompts"][0])
    for ids in job["prompts"]:
        since, found, count = generate(ids)
        seconds.append(clock() - since)
        tokens.append(found)
        rounds.append(count)
    return seconds, tokens, rounds
