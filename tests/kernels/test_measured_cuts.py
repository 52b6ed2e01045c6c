"""kernels/gpu/cuts.csv: every line is a cut that can run, and says where it was measured."""

import csv
import importlib
import json
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
from minidflash.kernels.gpu import fast, fp8, split, wide

from tests.kernels.test_fast_bits import MEASURED, NORMED

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = "N,K,sms,weights,slices,blocks,warps,chunks,ahead,finishers,cluster,early,asked,card,commit,source"
TEXT = resources.files("minidflash.kernels.gpu").joinpath("cuts.csv").read_text(encoding="utf-8")
LINES = list(csv.DictReader(TEXT.splitlines()))
MODULES = {
    132: ("NVIDIA H100 80GB HBM3", "NVIDIA H200"),
    148: ("NVIDIA B200",),
}  # cards of so many multiprocessors


@pytest.fixture
def cuts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("cuts")


TABLES = {"bf16": split.MEASURED, "fp8": fp8.MEASURED}


def key(line):
    return int(line["N"]), int(line["K"]), int(line["sms"])


def name_of(line):
    return "x".join(map(str, key(line))) + f"-{line['weights']}"


def cut_of(line):
    return TABLES[line["weights"]][key(line)]


def test_no_product_stands_twice():
    assert TEXT.splitlines()[0] == COLUMNS
    every = [(weights, *known) for weights, table in TABLES.items() for known in table]
    assert sorted((line["weights"], *key(line)) for line in LINES) == sorted(every)


def kernels():
    return [(name, shape) for name, shapes in MEASURED.items() for shape in shapes]


@pytest.mark.parametrize("line", LINES, ids=name_of)
def test_a_line_is_a_cut_that_can_run(line, cuts):
    assert None not in line and None not in line.values() and all(line.values()), "fields"
    assert {line["cluster"], line["early"]} <= {"0", "1"}
    outputs, cols, sms = key(line)
    cut = cut_of(line)
    tiles, chunks = -(-outputs // split.TILE), -(-cols // split.CHUNK)
    (name,) = (name for name, shape in kernels() if shape == (outputs, cols))
    assert cut.fits(cols, 2, is_normed=name in NORMED), "a block of 16 rows is one pass"
    assert 1 <= cut.slices <= min(chunks, 8 if cut.cluster else chunks)
    assert cut.slices == 1 or (tiles <= split.MOST_SLICED_TILES and name != "head")
    assert min(cut.blocks, cut.warps, cut.chunks, cut.ahead, cut.finishers) >= 1 and cut.asked >= 0
    assert cut.threads <= 1024 and (cut.cluster is False or cut.slices > 1)
    told = cuts.line(outputs, cols, sms, cut, line["card"], line["commit"], line["source"], line["weights"])
    assert told.split(",") == list(line.values()), "bench/gemm.py prints such lines"


@pytest.mark.parametrize("line", LINES, ids=name_of)
def test_a_line_says_where_it_was_measured(line, cuts):
    outputs, cols, sms = key(line)
    assert line["card"] in MODULES[sms]
    text = (ROOT / line["source"]).read_text(encoding="utf-8")
    if line["source"] == "bench/NOTES.md":
        told = [row for row in text.splitlines() if row.startswith(f"| {line['commit']} |")]
        assert told and (("H200" in " ".join(told)) == ("H200" in line["card"])), "no such row of NOTES.md"
        return
    found = json.loads(text)
    assert (found["card"], found["commit"]) == (line["card"], line["commit"])
    of_it = [one for one in found["results"] if (one["outputs"], one["cols"]) == (outputs, cols)]
    what = "cuts_at_16_rows_dependent_us"
    tried = [one[what] for one in of_it if what in one]
    assert min(tried[0], key=tried[0].get) == cuts.words(cut_of(line))


def test_what_is_read_is_what_is_chosen():
    """The file in its own words: a changed order of columns changes nothing."""
    names = "sms,asked,early,cluster,finishers,ahead,chunks,warps,blocks,slices,K,N,weights,source"
    text = f"{names}\n132,7,1,0,4,3,2,9,1,1,64,32,bf16,x\n132,7,1,0,4,3,2,8,1,1,64,32,fp8,x\n"
    for warps, weights in (9, "bf16"), (8, "fp8"):
        found = split.Split(1, 1, warps, 2, 3, 4, False, True, 7)
        assert split.read(text, weights) == {(32, 64, 132): found}


def test_weights_of_either_kind_are_cut_as_they_were_measured():
    for dtype, table in TABLES.items():
        for (outputs, cols, sms), cut in table.items():
            w = SimpleNamespace(dtype=dtype, rows=outputs, cols=cols)
            assert fp8.cut_of(SimpleNamespace(sms=sms), w) == cut


def test_the_workspace_holds_the_sums_of_either_kind_of_weights(monkeypatch):
    def sizes():
        backend = SimpleNamespace(sms=132)
        return fast.work_size(backend, 16, 4096, 24576), wide.work_size(512, 4096, 24576, 132)

    before = sizes()
    monkeypatch.setitem(fp8.MEASURED, (24576, 4096, 132), split.Split(16, 1, 16))
    assert all(size > known for size, known in zip(sizes(), before, strict=True))
