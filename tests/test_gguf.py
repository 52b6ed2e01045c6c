"""The GGUF reader against the `gguf` package, and its refusals."""

import numpy as np
import pytest
from minidflash.weights.gguf_io import half_split, read_gguf

from minidflash.errors import UserError

gguf = pytest.importorskip("gguf")
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q6_K"]


@pytest.fixture
def written(tmp_path):
    """A file with every tensor type and metadata type, and the arrays that the package reads back."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_int8("a.i8", -7)
    writer.add_uint64("a.u64", 2**40)
    writer.add_float32("a.f32", 1e-5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "häß\n")
    writer.add_array("a.strings", ["Ġ t", "", "x" * 300])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    for kind in KINDS:
        number = gguf.GGMLQuantizationType[kind]
        if kind == "Q6_K":  # which the package does not make; any bytes are one
            data = rng.integers(0, 256, (7, 3, 210), np.uint8)
            data[..., 208:] = rng.standard_normal((7, 3, 1)).astype(np.float16).view(np.uint8)
            writer.add_tensor(kind, data.reshape(7, 630), raw_dtype=number)
            continue
        array = (rng.standard_normal((7, 96)) * 3).astype(np.float32)
        array[2, :32] = 0  # a block without range
        array[3, 5] = 300
        writer.add_tensor(kind, gguf.quants.quantize(array, number), raw_dtype=number)
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "x.gguf"


def test_tensors_equal_the_package_s(written):
    _, tensors = read_gguf(written)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(written).tensors}
    assert tensors.keys() == theirs.keys()
    for name, tensor in tensors.items():
        truth = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
        found = tensor.widened()
        assert found.dtype == np.float32 and tensor.dtype == theirs[name].tensor_type.name
        assert found.shape == tensor.shape == tuple(map(int, theirs[name].shape[::-1]))
        assert np.array_equal(found, truth.reshape(found.shape)), name


def test_metadata_equals_the_package_s(written):
    metadata, _ = read_gguf(written)
    for key, theirs in gguf.GGUFReader(written).fields.items():
        if not key.startswith("GGUF."):
            assert metadata[key] == theirs.contents(), key
    assert metadata["a.string"] == "häß\n" and metadata["a.bool"] is True


def test_torn_files_are_refused(written, tmp_path):
    whole = written.read_bytes()
    for size in [1, 4, 7, 20, 60, 200, len(whole) // 2, len(whole) - 40]:
        (tmp_path / "torn").write_bytes(whole[:size])
        with pytest.raises(UserError, match="cut off"):
            read_gguf(tmp_path / "torn")
    for content, word in [
        (b"GGML" + whole[4:], "no GGUF"), (whole[:4] + b"\x09" + whole[5:], "version"), (b"", "cannot read"),
    ]:  # fmt: skip
        (tmp_path / "torn").write_bytes(content)
        with pytest.raises(UserError, match=word):
            read_gguf(tmp_path / "torn")


def test_other_tensor_types_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    number = gguf.GGMLQuantizationType.Q5_0
    writer.add_tensor(
        "odd.weight", gguf.quants.quantize(np.ones((2, 32), np.float32), number), raw_dtype=number
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"odd\.weight is Q5_0"):
        read_gguf(tmp_path / "x.gguf")


def test_half_split_undoes_the_interleaving():
    heads, size = 3, 10
    half = np.arange(heads * size * 2).reshape(heads * size, 2)
    interleaved = np.empty_like(half)
    for head in range(heads):
        for j in range(size // 2):
            for part in range(2):
                interleaved[head * size + 2 * j + part] = half[head * size + j + part * size // 2]
    assert np.array_equal(half_split(interleaved, heads), half)
