"""No kernel of a published pair is the plain one: passes at true shape on a backend that writes down which
variant took a call, for the cards that kernels are compiled for. Nothing is computed."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from minidflash.kernels.gpu.fast import tiles_of
from minidflash.kernels.ops import Ops
from minidflash.kernels.sizes import SIZES
from minidflash.kernels.weight import EXPERT_PAIRS, PAIRS, Weight
from minidflash.weights import drafter_names, names

from minidflash import drafter as draft
from minidflash import engine as engine_module
from minidflash import target as target_pass
from minidflash.rope import rope_tables
from minidflash.state import device_ids, make_state
from tests.test_ladder import Recorder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
import shapes

CTX, CHUNK, BLOCK = 300, 128, 16


class Card(Recorder):
    """Weights are packed and have no numbers. arch: of a card; it holds two blocks a multiprocessor."""

    def __init__(self, arch):
        super().__init__("bf16")
        self.sms = self.device.sms = 132
        self.device.arch, self.device.holds = arch, lambda *_: 264
        self.took = set()

    def weight(self, parts, role="", experts=0):
        rows, cols = sum(part.shape[0] for part in parts), int(np.prod(parts[0].shape[1:]))
        is_paired = role in (PAIRS, EXPERT_PAIRS)
        shape = (experts, rows // experts, cols) if experts else (rows, cols)
        kind = "mxfp4" if parts[0].dtype == "MXFP4" else "bf16"
        data = np.zeros((experts or tiles_of(rows, is_paired), 1), np.uint16)
        return Weight(shape, kind, "packed pairs" if is_paired else "packed", (data,))

    def _run(self, row, *args):
        super()._run(row, *args)
        self.took.add((row, self.variants[row]))


@pytest.fixture
def no_numbers(monkeypatch):
    """Vectors are made without reading a tensor."""
    monkeypatch.setattr(engine_module, "vector", lambda ops, bound: ops.array(bound.shape, "f32"))


def kinds_of(config):
    """The config with one layer of each kind."""
    return replace(config, layers=tuple(dict.fromkeys(config.layers)))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", [name for name in SIZES if name != "toy"])
def test_true_shapes_run_no_plain_kernel(name, arch, no_numbers):
    backend = Card(arch)
    ops, (target, drafter) = Ops(backend), map(kinds_of, shapes.configs(name, CTX))
    bounds = names.foretell_target(target), drafter_names.foretell_drafter(drafter)
    big, small = (
        engine_module.build(
            ops, one, bound, {kind: rope_tables(ops, *kind, CTX + 64) for kind in one.rotations}
        )
        for one, bound in zip((target, drafter), bounds, strict=True)
    )
    for model in big, small:
        model.embed, model.head = big.weights["embed"], big.weights.get("head", big.weights["embed"])
        model.ids = target.vocab
    s = make_state(ops, target, drafter, 0, 1, CTX, BLOCK, CHUNK, rejects=True)
    for count in (1, 4, BLOCK):
        rows, pick = s.rows.first(count), device_ids(ops, range(count))
        target_pass.forward(ops, big, s, rows, (0,))
        for choice in ("likeliest", "scored"):
            target_pass.choose(ops, big, s, rows, pick, s.choice[:count], choice)
        target_pass.accept_or_redraw(ops, big, s, rows, s.choice[:count], "scored")
        draft.inject(ops, small, s, s.taps[:count], s.context_slot[:count], s.context_pos[:count])
    draft.draft_rows(ops, small, s)
    draft.choose_drafts(ops, small, s, device_ids(ops, range(1, BLOCK)))
    control = {"stage", "stage_context", "accept"}
    slow = {one for one in backend.took if one[1] == "plain" and one[0] not in control}
    assert not slow and {"qkv", "attend", "embed", "head", "sample"} <= {row for row, _ in backend.took}

    prompt = ops.for_prefill
    backend.took.clear()
    pos, s.taps = s.rows.pos[:CHUNK], s.prompt_taps
    target_pass.forward(prompt, big, s, s.rows.first(CHUNK), (0,))
    draft.inject(prompt, small, s, s.taps[:CHUNK], pos, pos)
    assert not {one for one in backend.took if one[1] == "plain"}
    wanted = {"qkv", "linear_add", "fuse", "inject"} | (
        {"gate_up"} if target.layers[0].ffn != "experts" else set()
    )
    assert {row: backend.variants[row] for row in wanted} == dict.fromkeys(wanted, "prefill")
