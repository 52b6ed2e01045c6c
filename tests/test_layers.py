"""What every layer of a run is given is what its own model's config says: windows, causality, eps, tables.

Models of one kind of layer, or a drafter with its target's eps, do not show whose value a kernel got.
"""

import json

import numpy as np
import pytest

import minidflash as md
from tests.random_pair import write_random

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def change(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture
def engine_calls(tmp_path, monkeypatch):
    """(engine, function that returns [(kernel, arguments by name)] of a prompt and of a drafting round)."""
    from minidflash.kernels.table import ROWS

    target, draft = write_random(tmp_path, family="qwen3", windows=(KINDS, 9, None))
    change(
        target,
        layer_types=KINDS[::-1][:2] + KINDS[:1],
        sliding_window=7,
        use_sliding_window=True,
        rms_norm_eps=1e-3,
    )
    change(draft, rms_norm_eps=1e-2, rope_theta=500.0)
    engine = md.load(str(target), drafter=str(draft), warm=False, ctx=64, activations="f32", backend="numba")
    found = []

    def watch(name, function):
        def call(*args):
            found.append((name, dict(zip((a.name for a in ROWS[name].args), args, strict=True))))
            function(*args)

        return call

    for name in ROWS:
        monkeypatch.setattr(engine.ops.backend, name, watch(name, getattr(engine.ops.backend, name)))

    def watched():
        list(md.stream(engine, [1, 2, 3], max_tokens=3, verify=4, block=4))
        return found

    return engine, watched


@pytest.fixture
def calls(engine_calls):
    """The same, called."""
    engine, watched = engine_calls
    return engine, watched()


def test_windows_and_causality_are_the_layers_own(calls):
    engine, found = calls
    target, drafter = engine.target.config, engine.drafter.config
    assert (
        set(target.each("window")) == {0, 7}
        and set(drafter.each("window")) == {0, 9}
        and len(set(drafter.each("causal"))) == 2
    )
    of_target = [(w, 1) for w in target.each("window")]
    of_drafter = [(w, int(c)) for w, c in zip(drafter.each("window"), drafter.each("causal"), strict=True)]
    given = [(a["window"], a["causal"]) for name, a in found if name == "attend"]
    assert given[:9] == [*of_target, *of_drafter, *of_target]


def test_sinks_are_the_layers_own(engine_calls):
    """Where a layer has them: of no other layer, and of no other model."""
    engine, watched = engine_calls
    layers, ops = engine.target.layers, engine.ops
    sinks = [ops.array((engine.target.config.layers[0].heads,), "f32") for _ in range(2)]
    layers[0]["sinks"], layers[2]["sinks"] = sinks
    given = [args["sinks"] for name, args in watched() if name == "attend"]
    assert given[0] is given[6] is sinks[0] and given[2] is given[8] is sinks[1]
    assert [g is None for g in given[:6]] == [False, True, False, True, True, True]


def test_eps_and_tables_are_the_models_own(calls):
    engine, found = calls
    layers = len(engine.target.layers)
    own = {"inject": engine.drafter, "fuse": engine.drafter}
    for name in ("qkv", "gate_up"):
        given = [a for kernel, a in found if kernel == name][: 3 * layers]
        models = [engine.target] * layers + [engine.drafter] * layers + [engine.target] * layers
        for args, model in zip(given, models, strict=True):
            assert args["eps"] == model.config.eps, name
            assert name != "qkv" or args["cos"] is model.tables[0][0]
    for name, model in own.items():
        given = [a for kernel, a in found if kernel == name]
        assert given and {a["eps"] for a in given} == {model.config.eps}, name
        assert name != "inject" or all(a["cos"] is model.tables[0][0] for a in given)
    heads = [a["eps"] for kernel, a in found if kernel == "head"]
    assert heads[:3] == [engine.target.config.eps, engine.drafter.config.eps, engine.target.config.eps]
    assert not np.array_equal(engine.target.tables[0][0], engine.drafter.tables[0][0])
