"""Beside llama.cpp on the same weights: the embedded pair on two cores, the six golden prompts.

    python bench/peer_cpu.py [--repeat 3] [--threads 2] [--tokens 96] [--clock wall|processor]

Needs the package llama-cpp-python, built here from its sources (CMAKE_ARGS=-DGGML_NATIVE=ON), and gguf, which
makes the Q8_0 file. One process after the other takes a turn, every turn anew, so that both meet the same
machine; they never share a process, whose OpenMP threads would wait for each other. clock: on a busy machine
only processor time with one thread says something. Writes bench/results/peer-cpu.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PLAIN, FIXED = 1, (4, 8, 16)


def prompts():
    """[(ids, new tokens)] of the golden prompts."""
    from tests.models import numbers

    g = numbers("smollm2-135m-q4_1")
    return [(g[f"p{p}.input_ids"].tolist(), len(g[f"p{p}.plain_ids"])) for p in range(6)]


def as_q8_0(source, path):
    """The default target's numbers in Q8_0 blocks."""
    import gguf

    reader, kind = gguf.GGUFReader(source), gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "llama")
    for key, found in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        value, form = found.contents(), found.types[0]
        if form == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, form)
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        array = array.reshape([int(n) for n in tensor.shape[::-1]])
        if array.ndim == 1:
            writer.add_tensor(tensor.name, array)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ours(target, weights, verify, tokens, clock):
    """Seconds of each prompt's new tokens, the first one not counted."""
    import minidflash as md

    engine = md.load(target, drafter="default", backend="numba", weights=weights, ctx=512)
    widths = verify if verify == "auto" else int(verify)
    found = []
    for _ in range(2):  # the first one warms up
        found = []
        for ids, count in prompts():
            rounds = md.stream(engine, ids, max_tokens=min(tokens, count), verify=widths)
            next(rounds)
            since = clock()
            for _ in rounds:
                pass
            found.append(clock() - since)
    return found


def theirs(path, threads, tokens, clock):
    """The same of llama.cpp, greedily."""
    import llama_cpp as llama
    import numpy as np

    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = 512, threads, threads
    context = llama.llama_init_from_model(model, options)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def decode(ids):
        array = (llama.llama_token * len(ids))(*ids)
        assert llama.llama_decode(context, llama.llama_batch_get_one(array, len(ids))) == 0
        return int(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (vocab,)).argmax())

    for _ in range(2):
        found = []
        for ids, count in prompts():
            llama.llama_memory_clear(llama.llama_get_memory(context), True)
            token = decode(ids)
            since = clock()
            for _ in range(min(tokens, count) - 1):  # as many as ours, whichever they are
                token = decode([token])
            found.append(clock() - since)
    return found


def turn(command, threads):
    """One child's seconds a prompt."""
    environment = {**os.environ, "NUMBA_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, __file__, *command], check=True, capture_output=True, text=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    if args.child:
        who, target, weights, verify = args.child
        run = (
            theirs(target, args.threads, args.tokens, clock)
            if who == "llama.cpp"
            else ours(target, None if weights == "own" else weights, verify, args.tokens, clock)
        )
        print(json.dumps(run))
        return
    import record
    from minidflash.weights.default import GGUF_FILE, default_target

    q4_1 = default_target() / GGUF_FILE
    with tempfile.TemporaryDirectory() as folder:
        q8_0 = Path(folder) / "q8_0.gguf"
        as_q8_0(q4_1, q8_0)
        ways = {f"llama.cpp {name}": ("llama.cpp", path, "own", "1") for name, path in
                (("q4_1", q4_1), ("q8_0", q8_0))}  # fmt: skip
        for weights in ("file", "bf16"):
            for verify in (PLAIN, "auto", *FIXED):
                ways[f"{weights} {verify}"] = ("ours", "default", weights, str(verify))
        common = ["--threads", str(args.threads), "--tokens", str(args.tokens), "--clock", args.clock]
        times = {way: [] for way in ways}
        for _ in range(args.repeat):
            for way, (who, target, weights, verify) in ways.items():
                times[way].append(turn([*common, "--child", who, str(target), weights, verify], args.threads))
                print(way, [round(s, 3) for s in times[way][-1]], flush=True)
    seconds = {way: [median(one) for one in zip(*runs, strict=True)] for way, runs in times.items()}
    found = {
        "clock": args.clock, "threads": args.threads, "seconds": seconds,
        "over": {way: {peer: round(sum(seconds[peer]) / sum(own), 3) for peer in seconds
                       if peer.startswith("llama.cpp")} for way, own in seconds.items()},
    }  # fmt: skip
    print(record.write("peer-cpu", found, tokens=args.tokens, repeat=args.repeat))


if __name__ == "__main__":
    main()
