"""What others take for the same step: the public `dflash` loop on transformers,
and transformers' own generate.

    PYTHONPATH=dflash-0.1.0-py3-none-any.whl python bench/peers/gpu.py [--context 2048] [--tokens 48]

Random weights of Qwen3-8B shape, bf16, made on the GPU; their drafts are all rejected, so a step of dflash is
a draft and a verify pass. The wheel alone is enough, without what it asks for. PYTHONPATH must not name this
checkout: its `kernels` folder hides the package of that name, which transformers looks for.
Writes bench/results/peer.json.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import Qwen3Config, Qwen3ForCausalLM


def models():
    """(target, drafter), made on the device."""
    common = {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        target = Qwen3ForCausalLM(
            Qwen3Config(num_hidden_layers=36, tie_word_embeddings=False, **common)
        ).eval()
        config = Qwen3Config(num_hidden_layers=5, **common)
        config.num_target_layers, config.block_size = 36, 16
        config.dflash_config = {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669}
        drafter = DFlashDraftModel(config).eval()
    return target, drafter


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    target, drafter = models()
    ids = torch.randint(0, 150000, (1, args.context), device="cuda")
    prefill, steps, plain, emitted = [], [], [], []
    with torch.inference_mode():
        for _ in range(args.repeat):
            run = dflash_generate(drafter, target, ids, args.tokens, None, return_stats=True)
            count = len(run.acceptance_lengths)
            prefill.append(run.time_to_first_token)
            steps.append(run.time_per_output_token * run.num_output_tokens / count)
            emitted.append(sum(run.acceptance_lengths) / count)
        for _ in range(args.repeat):
            short, long = generate(target, ids, 1), generate(target, ids, args.tokens)
            plain.append((long - short) / (args.tokens - 1))
    found = {
        "shape": "qwen3-8b", "dflash": "0.1.0", "context": args.context, "tokens": args.tokens,
        "block": drafter.block_size,
        "dflash_prefill_ms": milliseconds(prefill), "dflash_step_ms": milliseconds(steps),
        "dflash_tau": median(emitted),
        "transformers_token_ms": milliseconds(plain),
    }  # fmt: skip
    print(found)
    print(record.write("peer", found, card=torch.cuda.get_device_name()))


def generate(target, ids, count):
    """Seconds of transformers' own greedy loop for `count` tokens, the prompt's pass included."""
    torch.cuda.synchronize()
    since = time.perf_counter()
    target.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    torch.cuda.synchronize()
    return time.perf_counter() - since


def milliseconds(seconds):
    """The median and each: the first warms up."""
    return {"median": round(1e3 * median(seconds), 2), "runs": [round(1e3 * s, 2) for s in seconds]}


if __name__ == "__main__":
    main()
