"""What decides in which order a row is summed must not know how many rows there are.

It is written down for 1 to 64 of them. Bits that differ only at some numbers of rows, on some card, are not
found by trying a few; what reaches the choice is.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from minidflash.kernels import source
from minidflash.kernels.gpu import EmulateBackend, attend_fast, fast, prefill, split, wide
from minidflash.kernels.ops import Ops

from tests.cases import run
from tests.conftest import open_or_skip
from tests.fast_rows import Fast
from tests.kernels import test_fast_attend, test_reject, test_rows
from tests.kernels.test_fast_prefill import Prompt, even

COUNTS, SMS = range(1, 65), 8
# Of a launch, what follows the number of rows and shows in no bit (test_fast_bits.py, test_fast_attend.py,
# test_attend_whole.py, test_attend_cluster.py, test_fast_prefill.py, test_wide.py): how many rows there are,
# how many share a block or a cluster, where pieces of attention meet, how far ahead weights and keys are
# asked for, and whether a step's chunks need branches.
ROWS = {"rows", "T", "M", "tokens", "group", "waits", "early", "width", "B"}
TILES = {"TOKEN_TILES", "STEP_CHUNKS", "STEPS_AHEAD", "EVEN_STEPS", "TOKENS", "WEIGHT_TILES", "STAGES"}
TILES |= {"CLUSTER", "KEPT", "SIDES"}


class Card:
    """Launches nothing; `told` holds what could show in the bits of each launch."""

    arch, sms = "emulated", SMS

    def __init__(self):
        self.told = set()

    def function(self, file, name, defines=None):
        text = source.find(file).read_text(encoding="utf-8")
        return SimpleNamespace(name=name, defines=defines or {}, parameters=source.parameters(text, name))

    def holds(self, *_):
        return 10**6

    def synchronize(self):
        pass

    def launch(self, function, grid, block, shared, args, cluster=1, **_):
        defines = {name: value for name, value in function.defines.items() if name not in TILES}
        scalars = {
            parameter.name: value
            for parameter, value in zip(function.parameters, args, strict=True)
            if parameter.scalar is not None and parameter.name not in ROWS
        }
        threads, cluster = (None, None) if "TOKENS" in function.defines else (block, cluster)
        self.told.add((function.name, *map(str, (defines, scalars, threads, cluster))))


@pytest.fixture
def card(monkeypatch):
    """Function of activations -> (Ops that launch nothing, their Card); `chosen`: what reached a choice."""
    open_or_skip("emulate", "f32")
    chosen = set()

    def choose(outputs, cols, sms, whole=False):
        """Any cut would do; one of several slices shows who has slices of its own."""
        chosen.add((outputs, cols, sms, whole))
        return split.Split(1 if whole else min(3, -(-cols // split.CHUNK)), 2, 8)

    monkeypatch.setattr(split, "choose", choose)

    def make(activations):
        backend = EmulateBackend(activations)
        backend.device, backend.sms = Card(), SMS
        return Ops(backend), backend.device

    make.chosen = chosen
    return make


def assert_one_set(card, device, call, counts=COUNTS):
    """call(T) for every T: the same launches but for ROWS and TILES, from the same choices."""
    first = None
    for count in counts:
        card.chosen.clear(), device.told.clear()
        call(count)
        found = set(device.told), set(card.chosen)
        first = first or found
        for now, before, what in zip(found, first, ("launches", "choices"), strict=True):
            assert now == before, f"{what} at {count} rows, and not at {counts[0]}: {now ^ before}"
    assert first[0]


OFFERED = {"fast": fast.FAST, "wide": wide.WIDE, "prompt": prefill.PREFILL}
VARIANTS = [(name, kind) for name in test_rows.ROW_KERNELS for kind in ("fast", "wide", "plain", "prompt")
            if kind == "plain" or name in OFFERED[kind] and name != "attend"]  # fmt: skip


@pytest.mark.parametrize("name, kind", VARIANTS)
def test_no_choice_knows_the_rows(card, rng, name, kind):
    activations = "f32" if kind == "plain" else "bf16"
    ops, device = card(activations)
    make = even(test_rows.make) if kind in ("wide", "prompt") else test_rows.make
    case, sizes = make(name, rng, activations, "bf16")
    if name == "attend":
        case["pos"][:] = case["begin"][:] = 3  # one place for all, so that nothing but their number changes
        case["end"][:] = 4
    called = {"fast": Fast, "wide": Fast, "prompt": Prompt, "plain": lambda ops, name: ops}[kind](ops, name)
    ops.backend.wide, variants = kind == "wide", set()

    def call(count):
        run(called, name, test_rows.some_rows(name, case, list(range(count))), **sizes)
        variants.add(ops.backend.variants[name])

    assert_one_set(card, device, call, range(33, 65) if kind == "wide" else COUNTS)
    assert variants == {"prefill" if kind == "prompt" else kind}


@pytest.mark.parametrize("activations", ["f32", "bf16"])
def test_rejection_does_not_either(card, rng, activations):
    ops, device = card(activations)
    ops.backend.wide = False
    _, case = test_reject.random_case(ops, rng, 1, 64, 64, 40, 77)

    def call(count):
        part = case | {name: case[name][:count] for name in ("x", "pos", "ids", "logprob")}
        run(Fast(ops, "reject") if activations == "bf16" else ops, "reject", part)

    assert_one_set(card, device, call)


@pytest.mark.parametrize("window", [0, 130])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (4, 1, 64), (64, 8, 64)], ids=str)
@pytest.mark.parametrize("kind", ["units", "whole", "prompt"])
def test_attention_is_cut_the_same_way(card, rng, heads, window, kind):
    """By each of its kernels: which one runs depends on the rows, so that both have the same bits is asked of
    test_fast_attend.py."""
    ops, device = card("bf16")
    case = test_fast_attend.make(rng, [1000] * 64, heads, window=window)
    case["sinks"] = np.zeros(64, np.float32) if heads == (64, 8, 64) else None

    def call(count):
        part = test_fast_attend.some(case, slice(0, count))
        shape = part["q"].shape
        work = np.zeros(ops.backend.work_size(count, shape[1] * shape[2], 0), np.float32)
        args = ops.backend, *test_fast_attend.put(ops, part), work, np.empty(shape, np.uint16)
        if kind == "prompt":
            assert attend_fast.attend_prompt(*args)
        else:
            assert attend_fast.attend(*args, whole=kind == "whole")

    assert_one_set(card, device, call)
