"""transformers' own generate, and the public dflash package's loop on it, for bench/peers/cpu.py.

Ways: TYPE plain, TYPE drafted; TYPE is float32 or bfloat16. Runs in an environment without this checkout on
its path: the `kernels` folder would hide a package of that name, which transformers looks for.
"""

import dflash.model
import job
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """When the first token was there: generate passes the prompt, then every token."""

    def __init__(self, clock):
        self.clock, self.seen, self.since = clock, 0, None

    def put(self, value):
        self.seen += 1
        if self.seen == 2:
            self.since = self.clock()

    def end(self):
        pass


def main():
    given = job.read()
    torch.set_num_threads(given["threads"])
    clock, (kind, way) = job.clock_of(given), given["way"].split()
    dtype, count = getattr(torch, kind), given["tokens"]
    target = AutoModelForCausalLM.from_pretrained(given["target"], dtype=dtype).eval()
    target.generation_config = GenerationConfig()  # no end token: every prompt gets `count` tokens
    drafter = dflash.model.DFlashDraftModel.from_pretrained(given["drafter"], dtype=dtype).eval()
    dflash.model._cuda_time = clock  # its statistics otherwise wait for a GPU

    def plain(ids):
        first = FirstToken(clock)
        found = target.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, streamer=first
        )
        return first.since, found[0, len(ids) :].tolist(), None

    def drafted(ids):
        begun = clock()
        run = dflash.model.dflash_generate(
            drafter, target, torch.tensor([ids]), count, None, return_stats=True
        )
        tokens = run.output_ids[0, len(ids) :].tolist()
        return begun + run.time_to_first_token, tokens, len(run.acceptance_lengths)

    with torch.inference_mode():
        seconds, tokens, rounds = job.timed(given, plain if way == "plain" else drafted)
    job.answer(seconds, tokens, None if way == "plain" else rounds, ["torch", "transformers", "dflash"])


if __name__ == "__main__":
    main()
