"""vLLM on the same prompts, plain and with a DFlash drafter, on a GPU, by people who have vLLM installed.

    python bench/peers/vllm_speed.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16
        [--prompts FILE] [--tokens 256] [--block 16]

minidflash bench with the same --target, --drafter and --prompts gives the numbers to set beside these.
Not run by this project: no result of it is quoted. Each way runs in a process of its own, since vLLM gives
memory back only at its end. Writes bench/results/peers-vllm.json.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import record


def one_way(args, drafted):
    """Tokens a second of every prompt, one after the other, with the first of them once before."""
    from vllm import LLM, SamplingParams

    given = {"model": args.drafter, "method": "dflash", "num_speculative_tokens": args.block - 1}
    engine = LLM(model=args.target, max_num_seqs=1, **({"speculative_config": given} if drafted else {}))
    law = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    rows = [json.loads(line) for line in Path(args.prompts).read_text(encoding="utf-8").splitlines() if line]
    chats, found = [[{"role": "user", "content": row["prompt"]}] for row in rows], []
    engine.chat(chats[0], law)
    for chat in chats:
        since = time.perf_counter()
        (result,) = engine.chat(chat, law)
        tokens = len(result.outputs[0].token_ids)
        found.append({"tokens": tokens, "tokens_per_s": tokens / (time.perf_counter() - since)})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", default=str(HERE.parent / "prompts.jsonl"))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--way", choices=("plain", "drafted"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(one_way(args, args.way == "drafted")))
        return
    found = {}
    for way in ("plain", "drafted"):
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    print(record.write("peers-vllm", found, target=args.target, drafter=args.drafter, tokens=args.tokens))


if __name__ == "__main__":
    main()
