"""What others take for the same step: the public `dflash` loop on transformers, and transformers' own generate.

    PYTHONPATH=dflash-0.1.0-py3-none-any.whl python -P bench/peer.py [--context 2048] [--tokens 48]

Random weights of Qwen3-8B shape, bf16, on the GPU. -P keeps this checkout's `kernels` folder from hiding the package of
that name, which transformers looks for. Writes bench/results/peer.json. A peer only: nothing here is imported elsewhere.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

import torch
import transformers
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
    args = parser.parse_args()
    target, drafter = models()
    ids = torch.randint(0, 150000, (1, args.context), device="cuda")
    steps, plain = [], []
    with torch.inference_mode():
        for _ in range(3):
            run = dflash_generate(drafter, target, ids, args.tokens, None, return_stats=True)
            steps.append(run.time_per_output_token * run.num_output_tokens / len(run.acceptance_lengths))
        for _ in range(3):
            times = []
            for count in (1, args.tokens):
                torch.cuda.synchronize()
                since = time.perf_counter()
                target.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - since)
            plain.append((times[1] - times[0]) / (args.tokens - 1))
    found = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
        "dflash": "0.1.0", "shape": "qwen3-8b", "context": args.context, "commit": os.environ.get("MINIDFLASH_COMMIT"),
        "dflash_step_ms": round(1e3 * median(steps), 2), "transformers_token_ms": round(1e3 * median(plain), 2),
    }  # fmt: skip
    print(found)
    folder = Path(os.environ.get("OUT") or Path(__file__).resolve().parent / "results")
    (folder / "peer.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
