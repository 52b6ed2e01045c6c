"""llama.cpp through the package llama-cpp-python, for bench/peers/cpu.py. Ways: q4_1 plain, q8_0 plain.

The package is built from its sources here (CMAKE_ARGS=-DGGML_NATIVE=ON). q4_1 is the default target's file;
q8_0 is made of its numbers, once, by the package gguf.
"""

from pathlib import Path

import job
import llama_cpp as llama
import numpy as np


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


def file_of(given, kind):
    """The target's file in blocks of a kind, made where it is missing."""
    own = next(Path(given["target"]).glob("*.gguf"))
    if kind == "q4_1":
        return own
    path = Path(given["scratch"]) / f"{own.stem}.{kind}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        as_q8_0(own, part)
        part.replace(path)
    return path


def open_model(path, threads):
    """(context, size of the vocabulary)."""
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = 1024, threads, threads
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    return llama.llama_init_from_model(model, options), vocab


def main():
    given = job.read()
    clock, (kind, _) = job.clock_of(given), given["way"].split()
    context, vocab = open_model(file_of(given, kind), given["threads"])

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
    job.answer(seconds, tokens, None, ["llama-cpp-python"])


if __name__ == "__main__":
    main()
