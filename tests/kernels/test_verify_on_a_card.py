"""`minidflash verify` on the cuda backend without a GPU (tests/fake_card.py): which variants it tells."""

import pytest
from minidflash.kernels import table
from minidflash.kernels.gpu import fast
from minidflash.kernels.ops import Ops

from minidflash.cli import ladder
from minidflash.cli import verify as check

pytest.importorskip("cuda.bindings")


@pytest.fixture
def checks(opened, monkeypatch):
    """activations -> {row: (words behind it, problem)}; what kernels would compute is not looked at."""
    monkeypatch.setattr(check, "worst", lambda *args: None)

    def ask(activations):
        ops, _ = opened(activations=activations)
        assert isinstance(ops, Ops) and ops.name == "cuda"
        device = ops.backend.device
        monkeypatch.setattr(device, "function", lambda *args: None)
        monkeypatch.setattr(device, "holds", lambda *args: 132)
        monkeypatch.setattr(device, "launch", lambda *args, **how: None)
        found = list(check.kernel_checks(ops))
        return {said.split()[0]: (said.partition(" == ")[2], problem) for said, problem in found}

    return ask


def test_a_card_with_bf16_must_have_run_its_fast_kernels(checks, monkeypatch):
    assert all(problem is None for _, problem in checks("bf16").values())
    for name in ("gate_up", "inject"):
        monkeypatch.setitem(fast.FAST, name, lambda *args: None)
    found = checks("bf16")
    assert {name: problem for name, (_, problem) in found.items() if problem} == {
        "gate_up": "no shape ran fast", "inject": "no shape ran fast",
    }  # fmt: skip
    assert found["gate_up"][0] == "oracle (plain, wide, prefill)"


def test_a_card_with_f32_has_plain_kernels(checks):
    found = checks("f32")
    assert list(found) == list(table.ROWS)
    assert set(found.values()) == {("oracle (plain)", None)}
    assert any("fast" in ladder.gpu_functions(name) for name in found)
