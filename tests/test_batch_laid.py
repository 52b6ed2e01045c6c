"""A round of many sequences lays its rows ahead (kernels/gpu/laid.py); test_lay_wide.py has the bits."""

import pytest
from minidflash.kernels.gpu import split

import minidflash as md
from minidflash.loop import one_round
from minidflash.request import Shape, hold
from tests.conftest import open_or_skip
from tests.fast_rows import counted
from tests.random_pair import write_random


@pytest.mark.parametrize("backend", ["emulate", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_round_of_many_rows_lays_them_ahead(backend, tmp_path, monkeypatch):
    """All norms but the first of a pass, of its head and of the drafter's features; every h but the last."""
    open_or_skip(backend, "bf16")
    monkeypatch.setattr(split, "choose", lambda *_: split.Split(1, 1, 2))
    target, drafter = write_random(tmp_path, "laid", family="qwen3", block=4)
    engine = md.load(
        str(target), drafter=str(drafter), backend=backend, activations="bf16", ctx=64, warm=False
    )
    s = hold(engine, Shape(12, 64, 4, True)).first(12)
    launched = counted(engine.ops.backend, monkeypatch)
    engine.ops.program(lambda: one_round(engine, s, True, 4, True)).launch()
    want = {
        "end_and_lay": 8,
        "end_linear_add": 2,
        "lay_wide_normed": 4,
        "wide_gate_up laid": 3,
        "wide_gate_up": 2,
    }
    assert {name: launched[name] for name in want} == want, "of 3 and 2 layers"
