"""The safetensors reader: bits in, bits out; torn, overlapping and foreign files refused by name."""

import gc
import json
import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from minidflash.weights import open_checkpoint
from minidflash.weights.safetensors_io import DTYPES, INDEX, SINGLE, open_tensors, read_file

from minidflash.errors import UserError
from tests.automaton import build, write_safetensors
from tests.golden_files import ROOT


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def refused(path, *words):
    with pytest.raises(UserError) as error:
        read_file(path)
    assert error.value.code == 2 and "\n" not in str(error.value)
    for word in (path.name, *words):
        assert word in f"{error.value} {error.value.hint}"


def test_every_bf16_pattern_survives(tmp_path):  # F50
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    write_safetensors(tmp_path / SINGLE, {"all": bits})
    tensor = read_file(tmp_path / SINGLE)["all"]
    assert tensor.dtype == "BF16" and tensor.array.dtype == np.uint16 and np.array_equal(tensor.array, bits)
    wide = (tensor.array.astype(np.uint32) << 16).view(np.float32)
    truth = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(np.isnan(wide), np.isnan(truth))
    assert np.array_equal(
        wide.view(np.uint32)[~np.isnan(wide)], truth.view(np.uint32)[~np.isnan(wide)]
    )  # -0 too


def test_the_library_s_files_read_alike(tmp_path):
    rng = np.random.default_rng(0)
    kinds = np.float32, np.float16, np.float64, np.int8, np.int32, np.int64, np.uint8, np.bool_
    arrays = {f"t{i}": rng.standard_normal((5, 7, i)).astype(kind) for i, kind in enumerate(kinds)}
    arrays["scalar"] = np.full((), 3, np.float32)
    arrays["bf16"] = rng.standard_normal((3, 11)).astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file(arrays, tmp_path / SINGLE, metadata={"format": "pt"})
    tensors = read_file(tmp_path / SINGLE)
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        found = tensors[name].array
        assert found.shape == array.shape and found.tobytes() == array.tobytes() and not found.flags.writeable
        assert tensors[name].nbytes == array.nbytes


def test_arrays_are_views_and_survive_dropping(tmp_path):
    data = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)
    write_safetensors(tmp_path / SINGLE, {"a": data, "b": data + 1})
    tensors = read_file(tmp_path / SINGLE)
    assert not tensors["b"].array.flags.owndata
    for tensor in tensors.values():
        tensor.drop()
    array = tensors["b"].array
    del tensors, tensor
    gc.collect()
    assert np.array_equal(array, data + 1)  # an array keeps its mapping alive


def test_bytes_are_read_without_the_map(tmp_path):
    values = np.arange(1000, dtype=np.uint16)
    safetensors.numpy.save_file({"a": values[:10], "w": values}, tmp_path / SINGLE)
    tensor = read_file(tmp_path / SINGLE)["w"]
    buffer = bytearray(600)
    tensor.read_into(memoryview(buffer), 500)
    assert bytes(buffer) == values.tobytes()[500:1100]
    (tmp_path / SINGLE).unlink()  # a snapshot may be replaced while it is open
    tensor.read_into(memoryview(buffer), 1400)
    assert bytes(buffer) == values.tobytes()[1400:]


def test_a_read_past_the_end_is_refused(tmp_path):
    safetensors.numpy.save_file({"w": np.zeros(100, np.uint16)}, tmp_path / SINGLE)
    tensor = read_file(tmp_path / SINGLE)["w"]
    os.truncate(tmp_path / SINGLE, tensor.start + 120)
    with pytest.raises(UserError, match="cut off while it was read, in tensor w") as error:
        tensor.read_into(memoryview(bytearray(200)), 0)
    assert tmp_path.name in str(error.value) and error.value.hint


def test_descriptors_are_closed_with_the_maps(tmp_path):
    safetensors.numpy.save_file({"w": np.zeros(100, np.uint16)}, tmp_path / SINGLE)
    descriptor = (tensor := read_file(tmp_path / SINGLE)["w"]).file
    os.fstat(descriptor)
    del tensor
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_misaligned_file_still_reads(tmp_path):
    header = {"u": entry("U8", (3,), (0, 3)), "f": entry("F32", (2,), (3, 11))}
    text = json.dumps(header).encode()
    write(tmp_path / "x", text, b"abc" + np.float32([1.5, -2]).tobytes())
    array = read_file(tmp_path / "x")["f"].array
    assert array.tolist() == [1.5, -2] and array.flags.aligned


GOOD = {"a": entry(), "b": entry(offsets=(8, 16))}


@pytest.mark.parametrize("header, size, word", [
    ({**GOOD, "b": entry(offsets=(4, 12))}, 12, "overlaps"),
    ({**GOOD, "b": entry(offsets=(0, 8))}, 8, "overlaps"),
    ({**GOOD, "b": entry(offsets=(12, 20))}, 20, "unused"),
    ({"a": entry(offsets=(4, 12))}, 12, "unused"),
    (GOOD, 15, "cut off"),
    (GOOD, 0, "cut off"),
    (GOOD, 17, "after the last"),
    ({}, 3, "after the last"),
    ({"a": entry(shape=(3,))}, 8, "tensor a"),
    ({"a": entry(shape=(-2,))}, 8, "shape"),
    ({"a": entry(shape=(True, 2))}, 8, "shape"),
    ({"a": entry(shape=(2.0,))}, 8, "shape"),
    ({"a": {**entry(), "shape": "2"}}, 8, "shape"),
    ({"a": entry(shape=[1] * 40 + [2])}, 8, "dimensions"),
    ({"a": entry(shape=(2**40, 2**40))}, 8, "tensor a"),
    ({"a": entry(offsets=(8, 0))}, 8, "data_offsets"),
    ({"a": entry(offsets=(0, 8, 9))}, 8, "data_offsets"),
    ({"a": entry(offsets=(-8, 0))}, 8, "data_offsets"),
    ({"a": entry(dtype="F33")}, 8, "F33"),
    ({"a": entry(dtype=None)}, 8, "dtype"),
    ({"a": {"dtype": "F32", "shape": [2]}}, 8, "data_offsets"),
    ({"a": 5}, 8, "tensor a"),
    ({"__metadata__": [], **GOOD}, 16, "__metadata__"),
    (b"[1]", 0, "object"),
    (b"{", 0, "JSON"),
    (b"\xff\xfe{}", 0, "JSON"),
    (b"[" * 100_000, 0, "JSON"),
    (b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": 1}', 0, "twice"),
    (b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [0], "data_offsets": [0, 0]}}', 0, "twice"),
])  # fmt: skip
def test_broken_files_are_refused(tmp_path, header, size, word):
    refused(write(tmp_path / "x.safetensors", header, bytes(size)), word)


def test_broken_lengths_are_refused(tmp_path):  # F46
    refused(write(tmp_path / "a", GOOD, bytes(16), length=2**63), "cut off")
    refused(write(tmp_path / "b", GOOD, bytes(16), length=10**6), "cut off")
    (tmp_path / "c").write_bytes(b"")
    refused(tmp_path / "c", "cut off")
    (tmp_path / "d").write_bytes(b"1234")
    refused(tmp_path / "d", "cut off")
    refused(tmp_path / "absent", "cannot read")
    (tmp_path / "e").write_bytes(b"version https://git-lfs\noid sha256:0\nsize 5\n" + bytes(100))
    refused(tmp_path / "e", "Git LFS")
    big = tmp_path / "f"
    with big.open("wb") as file:  # sparse: no such size on disk
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)
    refused(big, "header")


def split(folder, names=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")):
    """Split folder/model.safetensors in two shards with an index; returns the weight map."""
    tensors = {name: tensor.array.copy() for name, tensor in read_file(folder / SINGLE).items()}
    keys = list(tensors)
    halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
    for name, half in zip(names, halves, strict=True):
        write_safetensors(folder / name, {key: tensors[key] for key in half})
    (folder / SINGLE).unlink()
    place = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": place}))
    return place


@pytest.fixture
def target(tmp_path):
    return build(tmp_path)[0]


ODD = ("model.safetensors-00001-of-00002.safetensors", "the other half")


@pytest.mark.parametrize("names", [None, ODD])
def test_shards_follow_the_index(target, names):  # F47
    whole, _ = open_tensors(target)
    whole = {name: tensor.array.copy() for name, tensor in whole.items()}
    split(target, *([names] if names else []))
    write_safetensors(target / "stray.safetensors", {"stray": np.ones(3)})
    tensors, files = open_tensors(target)
    assert dict(tensors).keys() == whole.keys() and len(files) == 2 and len(tensors) == len(whole)
    assert all(np.array_equal(tensors[name].array, array) for name, array in whole.items())
    assert all(size == path.stat().st_size for path, size in files)


def test_incomplete_shards_are_named(target):  # F46
    place = split(target)
    second = max(place.values())
    torn = (target / second).read_bytes()
    (target / second).write_bytes(torn[:-10])
    with pytest.raises(UserError, match=second):
        open_tensors(target)
    (target / second).unlink()
    with pytest.raises(UserError, match=f"1 of 2 .* missing .*{second}") as error:
        open_tensors(target)
    assert "download" in error.value.hint


@pytest.mark.parametrize("shard", ["../model.safetensors", "/model.safetensors", "a/b", "..", "", 3, None])
def test_an_index_stays_in_its_folder(target, shard):
    place = split(target)
    (target / INDEX).write_text(json.dumps({"weight_map": place | {"model.norm.weight": shard}}))
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        open_tensors(target)


def test_an_index_at_odds_with_its_shards_is_refused(target):
    place = split(target)
    first, second = sorted(set(place.values()))
    (target / INDEX).write_text(json.dumps({"weight_map": place | {"ghost": first}}))
    with pytest.raises(UserError, match="ghost"):
        open_tensors(target)
    name = next(name for name, shard in place.items() if shard == first)
    (target / INDEX).write_text(json.dumps({"weight_map": place | {name: second}}))
    with pytest.raises(UserError, match=re.escape(name)):
        open_tensors(target)
    for content in ("{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "no json", '{"a": 1, "a": 2}'):
        (target / INDEX).write_text(content)
        with pytest.raises(UserError, match=INDEX):
            open_tensors(target)


def test_a_folder_without_weights_says_what_it_has(target, tmp_path):  # F45
    (target / SINGLE).rename(target / "pytorch_model.bin")
    with pytest.raises(UserError, match="no weights found") as error:
        open_checkpoint(target, "target")
    assert "pytorch_model.bin" in error.value.hint
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"config\.json"):
        open_checkpoint(tmp_path / "empty", "target")
    (target / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json .* not valid JSON"):
        open_checkpoint(target, "target")


def test_a_checkpoint_tells_its_files(target):
    (target / "generation_config.json").write_text('{"eos_token_id": [2, 40]}')
    checkpoint = open_checkpoint(str(target), "target")
    assert checkpoint.name == str(target) and checkpoint.folder == target
    assert checkpoint.generation == {"eos_token_id": [2, 40]}
    assert checkpoint.files == [(target / SINGLE, (target / SINGLE).stat().st_size)]
    assert all(tensor.dtype in DTYPES for tensor in checkpoint.tensors.values())


MEASURE = """
import sys, re
sys.path.insert(0, sys.argv[1])
from minidflash.weights.safetensors_io import read_file
def kib(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
import numpy as np
before = kib()
copies = []
for tensor in read_file(sys.argv[2]).values():
    copies.append(tensor.array.copy())
    tensor.drop()
print(kib() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads VmHWM from /proc")
def test_copying_and_dropping_stays_near_the_file_s_size(tmp_path):  # F51
    path = tmp_path / SINGLE
    write_safetensors(path, {f"t{i}": np.full((1024, 1024), i, np.float32) for i in range(24)})
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(ROOT), str(path)], capture_output=True, check=True
    )
    assert int(out.stdout) * 1024 < 1.3 * path.stat().st_size
