"""What llama.cpp runs from, for llama_loop.py, each made where it is missing: the target and the drafter as
GGUF in Q8_0 blocks, by the package gguf; the program of llama_dflash.cpp, by the C++ compiler, with the
headers of the sources that the package llama-cpp-python was built from.
"""

import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np

# What llama.cpp calls the tensors of a drafter (its src/llama-arch.cpp and conversion/qwen.py, DFlashModel).
NAMES = (
    (r"^hidden_norm", "enc.output_norm"), (r"^norm", "output_norm"), (r"^layers\.", "blk."),
    (r"input_layernorm", "attn_norm"), (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.o_proj", "attn_output"), (r"self_attn\.(\w)_proj", r"attn_\1"),
    (r"self_attn\.(\w)_norm", r"attn_\1_norm"), (r"mlp\.(\w+)_proj", r"ffn_\1"),
)  # fmt: skip


def made(path, make):
    """The path, after make(a path beside it) where there is nothing yet."""
    if not path.exists():
        part = path.with_name(path.name + ".part")
        make(part)
        part.replace(path)
    return path


def digest(*paths):
    """Of the bytes of files, for the name of what is made of them."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]


def copy_keys(reader, writer, keep):
    """The keys that keep(key) wants, from one file to another."""
    for key, found in reader.fields.items():
        if keep(key):
            value, form = found.contents(), found.types[0]
            if form == gguf.GGUFValueType.ARRAY:
                writer.add_array(key, value)
            else:
                writer.add_key_value(key, value, form)


def write(writer, tensors):
    """tensors: (name, numbers); matrices become Q8_0 blocks, vectors stay F32."""
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, array in tensors:
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_q8_0(source, path):
    """The default target's numbers in Q8_0 blocks."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, "llama")
    left = "general.architecture", "general.file_type"
    copy_keys(reader, writer, lambda key: not key.startswith("GGUF.") and key not in left)
    tensors = ((one, gguf.quants.dequantize(one.data, one.tensor_type)) for one in reader.tensors)
    write(writer, ((one.name, array.reshape([int(n) for n in one.shape[::-1]])) for one, array in tensors))


def target(folder, kind, scratch):
    """The default target in blocks of a kind: its own file, or one made of it."""
    own = next(Path(folder).glob("*.gguf"))
    if kind == "q4_1":
        return own
    return made(scratch / f"{own.stem}.{kind}.gguf", lambda path: as_q8_0(own, path))


def numbers_of(folder):
    """(name, f32 array) of every bf16 tensor in a folder's safetensors files."""
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = (start + n for n in entry["data_offsets"])
                halves = np.frombuffer(data[first:last], np.uint16).astype(np.uint32)
                yield name, (halves << 16).view(np.float32).reshape(entry["shape"])


def as_drafter(folder, target, path):
    """A folder's drafter in Q8_0 blocks, with the tokenizer of the target's file. llama.cpp's taps are what
    goes into a layer."""
    config, writer = json.loads((folder / "config.json").read_text()), gguf.GGUFWriter(path, "dflash")
    copy_keys(gguf.GGUFReader(target), writer, lambda key: key.startswith("tokenizer."))
    writer.add_mask_token_id(config["dflash_config"]["mask_token_id"])
    writer.add_array("dflash.target_layers", [tap + 1 for tap in config["dflash_config"]["target_layer_ids"]])
    writer.add_uint32("dflash.block_size", config["block_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    write(writer, ((spelled(name), array) for name, array in numbers_of(folder)))


def drafter(folder, own, scratch):
    """The drafter's file. own: a file of its target."""
    folder = Path(folder)
    made_of = digest(*sorted(folder.glob("*.safetensors")), folder / "config.json", Path(__file__))
    return made(scratch / f"drafter-{made_of}.q8_0.gguf", lambda path: as_drafter(folder, own, path))


def spelled(name):
    """llama.cpp's name of a drafter's tensor."""
    for pattern, new in NAMES:
        name = re.sub(pattern, new, name)
    return name


def do(*command, given=None):
    """What a command prints. given: its standard input. Errors: RuntimeError with the line that says why."""
    done = subprocess.run(command, check=False, input=given, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no words"]
        why = (line for line in lines if re.search("error|fail|assert", line, re.IGNORECASE))
        raise RuntimeError(f"{Path(command[0]).name}, exit code {done.returncode}: {next(why, lines[-1])}")
    return done.stdout


def headers(scratch):
    """The folder of llama.cpp in the sources of the version that is installed; its headers only."""
    number = version("llama-cpp-python")
    name = f"llama_cpp_python-{number}"

    def unpack(folder):
        pip = sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"
        do(*pip, "-d", str(scratch), f"llama-cpp-python=={number}")
        with tarfile.open(scratch / f"{name}.tar.gz") as packed:
            packed.extractall(folder, [one for one in packed if one.name.endswith(".h")], filter="data")

    return made(scratch / f"{name}-headers", unpack) / name / "vendor" / "llama.cpp"


def program(scratch):
    """The program of llama_dflash.cpp, linked to the libraries that the package was built with."""
    code = Path(__file__).with_name("llama_dflash.cpp")

    def build(path):
        found, libraries = headers(scratch), Path(sysconfig.get_path("purelib")) / "lib"
        do(
            "c++", "-O2", "-std=c++17", "-pthread", str(code), "-o", str(path),
            *(f"-I{found / name}" for name in ("common", "include", "ggml/include")),
            f"-L{libraries}", f"-Wl,-rpath,{libraries},--disable-new-dtags",
            "-lllama-common", "-lllama", "-lggml", "-lggml-base",
        )  # fmt: skip

    return made(scratch / f"llama_dflash-{version('llama-cpp-python')}-{digest(code)}", build)
