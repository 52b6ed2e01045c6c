"""llama.cpp by the package llama-cpp-python, for bench/peers/cpu.py. Ways: KIND plain, KIND dflash WIDTH.

The package is built from its sources here (CMAKE_ARGS=-DGGML_NATIVE=ON). KIND is of the target's matrices:
q4_1 is the default target's file, q8_0 is made of its numbers. DFlash is llama.cpp's own, its rounds run by
llama_dflash.cpp: the drafter is in Q8_0, a block has WIDTH rows, all of which are drafted and verified.
"""

import json
from pathlib import Path

import job
import llama_cpp as llama
import llama_files
import numpy as np

CONTEXT = 1024


def open_model(path, threads):
    """(context, size of the vocabulary)."""
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = CONTEXT, threads, threads
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    return llama.llama_init_from_model(model, options), vocab


def plain(given, target):
    """(seconds, tokens, no rounds) of the prompts."""
    clock = job.clock_of(given)
    context, vocab = open_model(target, given["threads"])

    def decode(ids):
        array = (llama.llama_token * len(ids))(*ids)
        if llama.llama_decode(context, llama.llama_batch_get_one(array, len(ids))) != 0:
            raise RuntimeError("llama_decode failed")
        return int(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (vocab,)).argmax())

    def generate(ids):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        tokens, since = [decode(ids)], clock()
        while len(tokens) < given["tokens"]:
            tokens.append(decode(tokens[-1:]))
        return since, tokens, None

    seconds, tokens, _ = job.timed(given, generate)
    return seconds, tokens, None


def dflash(given, target, width):
    """(seconds, tokens, rounds) of the prompts, the first of them once before, as job.timed has it."""
    scratch, threads = Path(given["scratch"]), str(given["threads"])
    drafter = llama_files.drafter(given["drafter"], target, scratch)
    asked = [given["prompts"][0], *given["prompts"]]
    lines = "".join(" ".join(map(str, [given["tokens"], *ids])) + "\n" for ids in asked)
    printed = llama_files.do(
        llama_files.program(scratch), "-m", target, "-md", drafter, "-c", str(CONTEXT), "-fit", "off",
        "--spec-type", "draft-dflash", "--spec-draft-n-max", str(int(width) - 1), "--temp", "0",
        "-t", threads, "-td", threads, given=lines,
    )  # fmt: skip
    found = [json.loads(line) for line in printed.splitlines()][1:]
    return tuple([one[key] for one in found] for key in (given["clock"], "tokens", "rounds"))


def main():
    given = job.read()
    kind, way, *width = given["way"].split()
    target = llama_files.target(given["target"], kind, Path(given["scratch"]))
    found = plain(given, target) if way == "plain" else dflash(given, target, *width)
    job.answer(*found, ["llama-cpp-python"])


if __name__ == "__main__":
    main()
