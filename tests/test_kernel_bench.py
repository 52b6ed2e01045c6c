"""kernels --bench: rows are timed at true shapes, and bytes, of which bandwidth is a share,
are counted right."""

import json
from importlib import resources

import pytest
from minidflash.kernels import open_ops
from minidflash.kernels.roofline import FUSED, PEAKS, bound, traffic
from minidflash.kernels.sizes import SIZES
from minidflash.kernels.table import ROWS

from minidflash.cli import main
from minidflash.cli.kernels_bench import arguments

SMALL = {"D": 64, "H": 4, "G": 2, "K": 16, "F": 96, "V": 208, "L": 2, "C": 192, "E": 6, "U": 2}

PRODUCTS = ("qkv", "attend", "linear", "linear_add", "gate_up", "head", "sample", "propose", "reject",
            "head_logits", "fuse", "inject", "route", "experts_up", "experts_down")  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_arguments_bytes_and_words(name):
    ops = open_ops("numba", threads=1)
    args = arguments(ops, ROWS[name], SMALL, 5, 40)
    getattr(ops, name)(*args)
    moved, flops = traffic(name, args, 40)
    assert moved > 0 and name in FUSED
    assert (flops > 0) == (name in PRODUCTS)


def test_bytes_of_a_product_are_the_weights_and_the_rows():
    ops = open_ops("numba", threads=1)
    moved, flops = traffic("gate_up", arguments(ops, ROWS["gate_up"], SMALL, 5, 40))
    weights, x, norm, h = 2 * 2 * 96 * 64, 4 * 5 * 64, 4 * 64, 4 * 5 * 96
    assert moved == weights + x + norm + h and flops == 2 * 5 * 2 * 96 * 64


@pytest.mark.parametrize("kind, bits", [("bf16", 16), ("mxfp4", 4.25)])
def test_bytes_of_experts_are_those_that_have_a_pair(kind, bits):
    ops = open_ops("numba", threads=1)
    for rows in (1, 2):
        args = arguments(ops, ROWS["experts_up"], SMALL, rows, 40, experts=kind)
        touched = len(set(args[3].reshape(-1)))
        moved, flops = traffic("experts_up", args)
        assert flops == 2 * 2 * rows * 2 * 96 * 64
        integers, u, h = 4 * (2 * rows + 7 + 2 * rows), 4 * rows * 64, 4 * 2 * rows * 96
        assert moved == touched * 2 * 96 * 64 * bits / 8 + integers + u + h
        ops.experts_up(*args)


def test_a_skinny_product_is_bound_by_memory_and_a_wide_one_by_arithmetic():
    ops = open_ops("numba", threads=1)
    for rows, what in ((16, "memory"), (4096, "arithmetic")):
        shape = SMALL | {"D": 512, "F": 1024}
        args = arguments(ops, ROWS["gate_up"], shape, rows, 1)
        assert bound("gate_up", args, "H100")[1] == what
    assert set(PEAKS) == {"H100", "H200", "B200"}


def test_names_are_looked_up_where_there_are_some():
    """widen puts names in the place of ids: they stay ids of the reduced head, run after run."""
    ops, row = open_ops("numba", threads=1), ROWS["widen"]
    for context in (64, 50_000):
        args = arguments(ops, row, SIZES["smollm2-135m"].dims, 16, context)
        named = dict(zip([arg.name for arg in row.args], args, strict=True))
        for _ in range(9):
            assert 0 <= named["ids"].min() and named["ids"].max() < len(named["names"])
            ops.widen(*args)


def test_the_command_prints_a_row(capsys):
    assert main(["kernels", "stage", "--bench", "--backend", "numba", "--context", "64"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("| ")] == ["row", "stage"]
    assert "copy" in out
    assert main(["kernels", "stage", "--bench", "--shape", "nonsense"]) == 2
    assert "there are: " + ", ".join(SIZES) in capsys.readouterr().err
    assert main(["kernels", "experts_up", "--bench", "--shape", "qwen3-8b"]) == 2
    assert "qwen3-8b has no experts" in capsys.readouterr().err


# Billions of parameters, counted from the architectures (models.md 9),
# and millions of drafters (dflash.md 2.2).
COUNTED = {
    "smollm2-135m": (0.1345, None), "qwen3-4b": (4.02, 537), "qwen3-8b": (8.19, 1049),
    "llama-3.1-8b": (8.03, 1049),
    "gemma-4-31b": (30.7, 1536), "gemma-4-26b-a4b": (25.2, 430),
    "qwen3-coder-30b-a3b": (30.5, 474), "gpt-oss-20b": (20.9, 785), "gpt-oss-120b": (116.8, 785),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_sizes_are_those_of_the_published_models(name):
    m, d = SIZES[name], SIZES[name].drafter
    mlp = 3 * m.F * m.D
    if m.E:
        mlp = m.E * (mlp + m.D + m.bias * (2 * m.F + m.D + 1)) + 3 * m.dense * m.D  # a router too
    layer = 2 * (m.H + m.G) * m.K * m.D + m.bias * (m.H * m.K + 2 * m.G * m.K + m.D) + mlp
    counted, drafted = COUNTED[name]
    total = m.layers * layer
    if m.full:  # values are the keys there
        groups, size = m.full
        total += m.windows.count(0) * m.D * ((2 * m.H + groups) * size - 2 * (m.H + m.G) * m.K)
    assert (2 - m.tied) * m.V * m.D + total == pytest.approx(1e9 * counted, rel=2e-3)
    if drafted:
        drafter = d.layers * (2 * (d.H + d.G) * d.K * m.D + 3 * d.F * m.D) + len(d.taps) * m.D**2
        assert drafter == pytest.approx(1e6 * drafted, rel=2e-3)


def test_the_embedded_drafter_is_the_one_that_is_timed():
    m, d = SIZES["smollm2-135m"], SIZES["smollm2-135m"].drafter
    config = json.loads((resources.files("minidflash.weights") / "default" / "config.json").read_text())
    keys = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"
    assert [config[key] for key in keys] == [d.layers, d.H, d.G, d.K, d.F]
    assert tuple(config["dflash_config"]["target_layer_ids"]) == d.taps
    assert (config["hidden_size"], config["vocab_size"]) == (m.D, m.V)
    assert (config["num_target_layers"], config["rope_theta"]) == (m.layers, m.theta)


@pytest.mark.parametrize("name", SIZES)
def test_what_is_timed_is_a_model(name):
    """Letters as the rows have them; a drafter's heads are its target's, since there is one set of letters,
    but where layers differ."""
    m, d = SIZES[name], SIZES[name].drafter
    assert ((d.H, d.G, d.K) == (m.H, m.G, m.K) or m.full) and m.dims["C"] == len(d.taps) * m.D
    assert max(d.taps) < m.layers and list(d.taps) == sorted(set(d.taps))
    assert bool(m.E) == bool(m.U) == bool(m.experts) == ("E" in m.dims) and m.U <= m.E
    assert len(m.windows) == m.layers and set(m.windows) <= {0, m.window}
    ways = {"qkv": m.H * m.K + 2 * m.G * m.K, "head": m.V, "inject": 2 * d.layers * d.G * d.K}
    assert {row: m.products[row] for row in ways} == {row: (rows, m.D) for row, rows in ways.items()}
    assert m.products["o"] == (m.D, m.H * m.K) and m.products["fuse"] == (m.D, m.dims["C"])
    assert m.products["gate_up"] == (2 * m.products["down"][1], m.D)
