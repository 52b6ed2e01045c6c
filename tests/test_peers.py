"""bench/peers/cpu.py: every way takes its turn in a process of its own, and one that fails is told of; what
llama.cpp gets of the embedded pair."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from minidflash.weights.safetensors_io import open_tensors

from tests.compare import real

PEERS = Path(__file__).resolve().parent.parent / "bench" / "peers"
GIVEN = {"prompts": [[1, 2], [3]], "tokens": 4, "threads": 1, "clock": "wall"}
CHILD = """import sys; sys.path.insert(0, {folder!r})
import job
given = job.read()
{body}
"""


def loaded(name):
    """A script of bench/peers as a module."""
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return loaded("cpu")


@pytest.fixture
def files():
    pytest.importorskip("gguf")
    return loaded("llama_files")


@pytest.fixture
def llama(files, monkeypatch):
    """llama_loop.py, without the package that it drives."""
    monkeypatch.syspath_prepend(PEERS)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "llama_files", files)
    monkeypatch.delitem(sys.modules, "job", raising=False)
    return loaded("llama_loop")


@pytest.fixture
def programs(cpu, monkeypatch, tmp_path):
    """write(name, ways, body): a program whose process runs these lines."""
    monkeypatch.setattr(cpu, "PROGRAMS", {})

    def write(name, ways, body):
        (tmp_path / f"{name}.py").write_text(CHILD.format(folder=str(PEERS), body=body))
        cpu.PROGRAMS[name] = str(tmp_path / f"{name}.py"), (), ways

    return write


WORKS = """
def generate(ids):
    return job.clock_of(given)(), [*ids, len(given["way"])], 2
job.answer(*job.timed(given, generate), ["numpy"])
"""


def test_what_fails_is_told_and_the_others_go_on(cpu, programs):
    programs("works", ("a", "bb"), WORKS)
    programs("fails", ("c",), "raise ValueError('no such model')")
    programs("mute", ("e",), "print('not JSON')")
    answers, failed = cpu.all_turns(GIVEN, list(cpu.PROGRAMS), 2, 60, say=lambda words: None)
    assert set(answers) == {("works", "a"), ("works", "bb")}
    assert [len(found) for found in answers.values()] == [2, 2]
    assert answers["works", "bb"][0]["tokens"] == [[1, 2, 2], [3, 2]]
    assert failed["fails c"].startswith("exit code 1: ValueError: no such model")
    assert failed["mute e"].startswith("gave no answer: ")


def test_what_does_not_end_is_ended_and_told(cpu, programs):
    programs("hangs", ("d",), "import time; time.sleep(10)")
    answers, failed = cpu.all_turns(GIVEN, ["hangs"], 1, 0.5, say=lambda words: None)
    assert (answers, failed) == ({}, {"hangs d": "did not end within 0.5 s"})


def test_a_row_counts_tokens_behind_the_first(cpu):
    answers = [
        {
            "tokens": [[1, 2, 3], [4, 5, 6]],
            "rounds": [1, 1],
            "seconds": [1.0, seconds],
            "versions": {"x": "1"},
        }
        for seconds in (1.0, 3.0, 0.6)
    ]
    row = cpu.summary("dflash", "float32 drafted", answers, [[1, 2, 3], [4, 5, 7]])
    assert row["tokens_per_s"] == 2.0 and row["spread"] == 0.75
    assert row["tau"] == 2.0 and row["same_as_reference"] == 1
    text = "\n".join(
        cpu.table({"ways": [row], "prompts": ["a", "b"], "failed": {"llama.cpp q8_0": "no words"}})
    )
    assert "| dflash | float32 drafted | 2.0 ± 0.8 | 2.00 | 1 of 2 |" in text
    assert "| llama.cpp q8_0 | failed: no words |" in text


def test_what_cannot_be_installed_is_told(cpu, monkeypatch):
    def environment(installs):
        if installs:
            raise cpu.subprocess.CalledProcessError(1, "pip", stderr="no such package\n")
        return sys.executable

    monkeypatch.setattr(cpu, "environment", environment)
    programs, failed = cpu.installed(["minidflash", "llama.cpp"])
    assert programs == ["minidflash"]
    assert failed == {"llama.cpp": "cannot be installed: exit code 1: no such package"}


def test_the_first_prompts_of_each_kind_are_asked(cpu, tmp_path):
    rows = [{"kind": kind, "prompt": f"{kind}{i}"} for i in range(3) for kind in "ab"]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = [prompt["prompt"] for prompt in cpu.prompts_of(str(tmp_path / "p.jsonl"), 2)]
    assert asked == ["a0", "a1", "b0", "b1"]


def test_the_golden_prompts_are_asked_all(cpu):
    found = cpu.prompts_of("golden", 1)
    assert [prompt["kind"] for prompt in found] == [f"p{i}" for i in range(6)]
    assert found[0]["prompt"] == "Why is the sky blue?"


def test_what_went_wrong_in_a_command_is_told(files):
    assert files.do(sys.executable, "-c", "print(input())", given="5\n") == "5\n"
    with pytest.raises(RuntimeError, match="exit code 3: error: no such header"):
        code = "import sys; sys.stderr.write('hm\\nerror: no such header\\ncleaned up\\n'); sys.exit(3)"
        files.do(sys.executable, "-c", code)


def test_a_file_is_made_once_and_whole(files, tmp_path):
    def fails(path):
        path.write_text("half")
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        files.made(tmp_path / "x", fails)
    assert not (tmp_path / "x").exists()
    assert files.made(tmp_path / "x", lambda path: path.write_text("whole")).read_text() == "whole"
    assert files.made(tmp_path / "x", fails).read_text() == "whole"


def test_llama_cpp_gets_the_drafter_in_its_own_words(files, tmp_path):
    """Names and keys are those that llama.cpp's src/models/dflash.cpp asks for; numbers are ours, in Q8_0."""
    gguf, folder = files.gguf, PEERS.parent.parent / "weights" / "default"
    target = gguf.GGUFWriter(tmp_path / "target.gguf", "llama")
    target.add_tokenizer_model("gpt2")
    target.add_token_list(["a", "b"])
    target.add_block_count(30)
    files.write(target, [("output_norm.weight", np.ones(4, np.float32))])
    found = gguf.GGUFReader(files.drafter(folder, tmp_path / "target.gguf", tmp_path))
    keys = {key: field.contents() for key, field in found.fields.items()}
    assert keys["general.architecture"] == "dflash" and keys["dflash.block_size"] == 16
    assert keys["dflash.target_layers"] == [2, 9, 15, 21, 28]  # what goes into a layer: behind 1, 8, 14, ...
    assert keys["tokenizer.ggml.mask_token_id"] == 16 and keys["tokenizer.ggml.tokens"] == ["a", "b"]
    assert not [key for key in keys if key.startswith("llama.")]
    layer = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm",
             "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")  # fmt: skip
    names = {f"blk.{i}.{name}.weight" for i in range(5) for name in layer}
    tensors = {one.name: one for one in found.tensors}
    assert set(tensors) == names | {"fc.weight", "enc.output_norm.weight", "output_norm.weight"}
    ours = open_tensors(folder)[0]
    for theirs, name in (("enc.output_norm.weight", "hidden_norm.weight"), ("fc.weight", "fc.weight"),
                         ("blk.4.attn_k.weight", "layers.4.self_attn.k_proj.weight")):  # fmt: skip
        want = real(ours[name].array)
        got = gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        step = np.abs(want).max() / 127 if want.ndim == 2 else 0  # of the widest block, whose scale is f16
        assert got.shape == want.shape and np.abs(got - want).max() <= (0.5 + 127 / 2048) * step


STUB = """#!{python}
import json, sys
given = [line.split() for line in sys.stdin]
for number, (count, *ids) in enumerate(given):
    print(json.dumps({{"wall": number, "processor": -number, "rounds": len(ids), "tokens": sys.argv[1:]}}))
"""


def test_llama_cpp_drafts_a_block_of_the_width_and_warms_up(llama, monkeypatch, tmp_path):
    (tmp_path / "stub").write_text(STUB.format(python=sys.executable))
    (tmp_path / "stub").chmod(0o755)
    monkeypatch.setattr(llama.llama_files, "program", lambda scratch: tmp_path / "stub")
    monkeypatch.setattr(llama.llama_files, "drafter", lambda folder, target, scratch: "D.gguf")
    given = GIVEN | {"scratch": str(tmp_path), "drafter": "D"}
    seconds, tokens, rounds = llama.dflash(given, "T.gguf", "16")
    assert seconds == [1, 2] and rounds == [2, 1]  # the first prompt once before, not counted
    said = dict(zip(tokens[0][::2], tokens[0][1::2], strict=True))
    assert said["-m"] == "T.gguf" and said["-md"] == "D.gguf" and said["--spec-type"] == "draft-dflash"
    assert said["--spec-draft-n-max"] == "15" and said["--temp"] == "0" and said["-t"] == said["-td"] == "1"
    assert llama.dflash(given | {"clock": "processor"}, "T.gguf", "4")[0] == [-1, -2]


def test_every_way_of_llama_cpp_is_one_that_its_script_takes(cpu):
    for way in cpu.PROGRAMS["llama.cpp"][2]:
        kind, name, *width = way.split()
        assert kind in ("q4_1", "q8_0") and (name, len(width)) in (("plain", 0), ("dflash", 1))
