"""kernels --bench: rows are timed at true shapes, and the bytes that a share of the bandwidth is taken of are right."""

import pytest
from minidflash.kernels import open_ops
from minidflash.kernels.roofline import FUSED, PEAKS, bound, traffic
from minidflash.kernels.table import ROWS

from minidflash.cli import main
from minidflash.cli.kernels_bench import SHAPES, arguments

SMALL = {"D": 64, "H": 4, "G": 2, "K": 16, "F": 96, "V": 208, "L": 2, "taps": 3}

PRODUCTS = ("qkv", "attend", "linear", "linear_add", "gate_up", "head", "sample", "propose", "reject", "head_logits", "fuse",
            "inject")  # fmt: skip


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


def test_a_skinny_product_is_bound_by_memory_and_a_wide_one_by_arithmetic():
    ops = open_ops("numba", threads=1)
    for rows, what in ((16, "memory"), (4096, "arithmetic")):
        shape = SMALL | {"D": 512, "F": 1024}
        args = arguments(ops, ROWS["gate_up"], shape, rows, 1)
        assert bound("gate_up", args, "H100")[1] == what
    assert set(PEAKS) == {"H100", "H200", "B200"}


def test_the_command_prints_a_row(capsys):
    assert main(["kernels", "stage", "--bench", "--backend", "numba", "--context", "64"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("| ")] == ["row", "stage"]
    assert "copy" in out
    assert main(["kernels", "stage", "--bench", "--shape", "nonsense"]) == 2
    assert "there are: " + ", ".join(SHAPES) in capsys.readouterr().err
