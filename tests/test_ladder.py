"""The way from the command line to a kernel: as README tells it, as `minidflash kernels` prints it,
as the code goes."""

import ast
import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from minidflash.kernels import cpu, open_ops, source
from minidflash.kernels.gpu import EmulateBackend, GpuBackend, fast, prefill
from minidflash.kernels.ops import Ops
from minidflash.kernels.table import ROWS

from minidflash.cli import kernels_bench, ladder
from minidflash.cli.kernels_bench import arguments

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"D": 64, "H": 4, "G": 2, "K": 64, "F": 96, "V": 208, "L": 2, "C": 192, "E": 6, "U": 2}


def told():
    """[(hop, file, function)] of README's table."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Five hops")[1].split("\n## ")[0]
    found = []
    for line in re.findall(r"^\| \d.*", text, re.MULTILINE):
        hop, names = (cell.strip() for cell in line.split("|")[1:3])
        for name in re.findall(r"`([^`]+)`", names):
            if "/" in name:
                file = name
            else:
                found.append((hop, file, name))
    return found


def python_path():
    """[(file, function)] of README's hops 1 to 3."""
    return [(file, name) for hop, file, name in told() if hop in "123"]


def calls_in(file, name):
    """Calls in the source of a function, or a class's method, of a file."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        (found,) = [node for node in body if getattr(node, "name", None) == part]
        body = found.body
    return [node for node in ast.walk(found) if isinstance(node, ast.Call)]


def named(file, calls):
    """Last names of what is called; of MIXERS[...](...), those of the dictionary's values."""
    module = import_module(file.removesuffix(".py").replace("/", "."))
    for call in calls:
        if isinstance(call.func, ast.Subscript):
            yield from (value.__name__ for value in getattr(module, ast.unparse(call.func.value)).values())
        else:
            yield ast.unparse(call.func).split(".")[-1]


def test_the_readme_tells_five_hops_to_both_kernels():
    hops = dict.fromkeys(hop for hop, _, _ in told())
    assert list(hops) == ["1", "2", "3", "4", "5, CPU", "5, GPU"]


def test_every_function_of_the_first_hops_calls_the_next():
    steps = python_path()
    assert len(steps) >= 4
    for (file, name), (_, following) in pairwise(steps):
        called = set(named(file, calls_in(file, name)))
        assert following.split(".")[-1] in called, f"{file}: {name} does not call {following}"
    last = [ast.unparse(call.func) for call in calls_in(*steps[-1])]
    assert "ops.qkv" in last


def test_the_readme_and_the_command_tell_the_same_last_hops(mdf):
    code, out, err = mdf("kernels", "qkv")
    assert code == 0, err
    printed, who = {}, None
    for line in out.split("from the row to the code")[1].splitlines()[1:]:
        *first, where, name = line.split()
        who = first[0] if first else who
        printed.setdefault(who, []).append((where.partition(":")[0], name))
    assert list(printed) == ["all", "oracle", "numba", "prefill", "wide", "fast", "plain"]
    by_hop = {}
    for hop, file, name in told():
        by_hop.setdefault(hop, []).append((file, name))
    assert by_hop["4"] == printed["all"][1:]
    assert by_hop["5, CPU"] == printed["numba"]
    assert by_hop["5, GPU"] == printed["fast"]


def test_backends_call_what_the_ladder_names():
    """Between Ops and the functions lie a lookup and, on a GPU, the methods that the ladder names."""
    looked_up = ast.walk(ast.parse((ROOT / "kernels/ops.py").read_text()))
    assert "getattr(self.backend, name)" in [ast.unparse(n) for n in looked_up if isinstance(n, ast.Call)]
    backend = open_ops("numba", threads=1).backend
    recorder = Recorder("bf16")
    for name in ROWS:
        inside = [cell.cell_contents for cell in getattr(backend, name).__closure__]
        assert cpu.function_of(name) in inside
        assert getattr(recorder, name).func.__func__ is ladder.asked_by("fast")
        assert getattr(prefill.Prefill(recorder), name).func.__func__ is ladder.asked_by("prefill")


class Recorder(EmulateBackend):
    """A GPU backend whose launches are written down, and do nothing."""

    def __init__(self, activations, frame=None):
        device = SimpleNamespace(
            sms=4, arch="emulated", function=lambda *_: None, holds=lambda *_: 64, synchronize=lambda: None
        )
        GpuBackend.__init__(self, activations, device)
        self.launched, self.prefill_frame = [], frame

    def launch(self, file, kernel, *args, **how):
        self.launched.append((f"kernels/cuda/{file}", kernel))


def launched(name, activations, is_prompt=False, frame=None):
    """(variant, {(file, kernel)}) of a call of a row."""
    backend = Recorder(activations, frame)
    ops = Ops(backend)
    given = arguments(ops, ROWS[name], SMALL, 5, 40)
    backend.launched.clear()
    getattr(ops.for_prefill if is_prompt else ops, name)(*given)
    return backend.variants[name], set(backend.launched)


@pytest.mark.parametrize("name", ROWS)
def test_a_ladder_names_what_is_launched(name, monkeypatch):
    found = ladder.ladders(name)
    kernels = {
        who: {(s.file, s.name) for s in steps if s.file.endswith(".cu")} for who, steps in found.items()
    }
    variant, seen = launched(name, "f32")
    monkeypatch.setattr(kernels_bench, "NOT_TIMED", ())  # what is left out of times is asked for too
    monkeypatch.setattr(kernels_bench, "CURVE", {"multiplier": 0.5, "cap": 30.0})
    assert variant == "plain" and seen | launched(name, "f32")[1] == kernels["plain"]
    monkeypatch.undo()
    assert ("fast" in found) == (name in fast.FAST) and ("prefill" in found) == (name in prefill.PREFILL)
    if "fast" in found:
        variant, seen = launched(name, "bf16")
        assert variant == "fast" and seen and seen <= kernels["fast"]
    if "prefill" in found:
        for frame in ("mma", "wgmma"):
            variant, seen = launched(name, "bf16", True, frame)
            assert variant == "prefill" and seen and seen <= kernels["prefill"]


@pytest.mark.parametrize("name", ROWS)
def test_every_step_is_there(name):
    for who, steps in {"all": ladder.entry(name), **ladder.ladders(name)}.items():
        assert len(steps) > 1 or who in ("oracle", "numba")
        for step in steps:
            lines = (ROOT / step.file).read_text(encoding="utf-8").splitlines()
            if step.file.endswith(".cu"):
                assert step.name in source.kernel_names("\n".join(lines[step.line - 1 :])[:400]), step
            else:
                here = " ".join(lines[step.line - 1 : step.line + 2])
                assert f"def {step.name.split('.')[-1]}(" in here or f'"{step.name}":' in here, step


def test_a_launch_that_cannot_be_told_is_refused():
    with pytest.raises(LookupError, match=r"kernels/gpu/prefill\.py:\d+ launches what cannot be told"):
        list(ladder.launched_by(prefill.launch))
    with pytest.raises(LookupError, match="kernels/cuda/qkv.cu defines no kernel attend"):
        ladder.kernel_step("qkv.cu", "attend")


def test_the_source_of_a_row_is_its_files(mdf):
    code, out, _ = mdf("kernels", "embed", "--source")
    files = ["kernels/cpu/embed.py", "kernels/cuda/embed_fast.cu", "kernels/cuda/embed.cu"]
    assert code == 0 and re.findall("^==> (.*) <==$", out, re.MULTILINE) == files
    for file in files:
        assert (ROOT / file).read_text(encoding="utf-8") in out
