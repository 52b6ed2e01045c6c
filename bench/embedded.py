"""`minidflash bench` of the embedded pair over bench/prompts.jsonl, as a file of results.

    python bench/embedded.py [--backend cuda] [--tokens 256] [--repeat 2] [--prompt TEXT]
        [--name embedded-h100]

Speed with and without the drafter by kind of prompt, or of one prompt.
Writes bench/results/NAME.json, or into $OUT.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import record


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--prompt", help="this one instead of bench/prompts.jsonl")
    parser.add_argument("--name", default="embedded-h100")
    args = parser.parse_args()
    words = ["-n", str(args.tokens), "-r", str(args.repeat), "-q", "-o", "json"]
    command = [sys.executable, "-m", "minidflash", "bench", "--backend", args.backend, *words]
    with tempfile.TemporaryDirectory() as folder:
        if args.prompt:
            (Path(folder) / "prompts.jsonl").write_text(
                json.dumps({"kind": args.prompt, "prompt": args.prompt})
            )
            command += ["--prompts", f"{folder}/prompts.jsonl"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=record.ROOT)
    found = json.loads(done.stdout)
    on = found.pop("machine")
    print(record.write(args.name, found, on=on))


if __name__ == "__main__":
    main()
