"""Programs of the CPU backend: kernels called by machine code do what Python's calls do, in their order."""

from threading import Lock

import numpy as np
import pytest
from minidflash.kernels.cpu.jit import jit
from minidflash.kernels.cpu.program import Program

from tests.cases import Matrix, put
from tests.compare import assert_same_bits
from tests.conftest import open_or_skip


@jit
def collect(out, nested, single, count):
    """All kinds of arguments: arrays of two shapes, tuples in tuples, doubles, floats, integers."""
    (table, (row, double)), n = nested, count
    for i in range(n):
        out[i] += table[i, 1] + row[n - 1 - i] * double + single


@jit
def add_up(x, out):
    for i in range(len(x)):
        out[0] += x[i]


@jit
def take(x):
    pass


@jit
def broken(x):
    if x[0] == 0:
        raise ValueError("not finite")


def test_arguments_arrive_as_from_python(rng):
    table, row = rng.standard_normal((5, 3)), rng.standard_normal(9)[::2]
    args = (table, (row, 0.1)), np.float32(0.3), 5
    wanted, found = np.zeros(5), np.zeros(5)
    program = Program([(collect, (found, *args)), (collect, (found, *args))], Lock())
    for _ in range(2):
        collect(wanted, *args)
        collect(wanted, *args)
        program.launch()
    assert wanted.all()
    np.testing.assert_array_equal(found, wanted)


def test_a_kernel_gets_arrays_of_each_kind(rng):
    """Of one dtype and of two; whole and with gaps: Numba compiles it for each."""
    x = rng.standard_normal(8)
    kinds = [x, x[::2], x.astype(np.float32), np.concatenate([x, x]).astype(np.float32)[::3]]
    found, wanted = np.zeros((4, 1)), np.zeros((4, 1))
    Program([(add_up, pair) for pair in zip(kinds, found, strict=True)], Lock()).launch()
    for pair in zip(kinds, wanted, strict=True):
        add_up(*pair)
    assert wanted.all()
    np.testing.assert_array_equal(found, wanted)


def test_rows_and_functions_run_in_order(rng):
    ops, width, seen = open_or_skip("numba", "f32"), 48, []
    first, second = (ops.weight([Matrix(rng.standard_normal((width, width), np.float32))]) for _ in "ab")
    a = put(ops, rng.standard_normal((3, width), np.float32), "A")
    y, z, work = ops.array((3, width), "A"), ops.array((3, width), "A"), ops.array((9999,), "f32")

    def calls():
        ops.linear(a, first, None, work, y)
        ops._recording.append(("look", lambda: seen.append((y.copy(), z.copy())), ()))
        ops.linear(y, second, None, work, z)

    program = ops.program(calls)
    assert not y.any(), "recorded, not run"
    program.launch()
    found = y.copy(), z.copy()
    ((y_seen, z_seen),) = seen
    assert not z_seen.any(), "the second product came after the look"
    assert_same_bits(y_seen, found[0])
    ops.linear(a, first, None, work, y)
    ops.linear(y, second, None, work, z)
    assert_same_bits(found[0], y)
    assert_same_bits(found[1], z)


def test_a_kernel_that_fails_is_named():
    good, bad = np.ones(1), np.zeros(1)
    with pytest.raises(RuntimeError, match="'broken'"):
        Program([(broken, (good,)), (broken, (bad,))], Lock()).launch()
    Program([(broken, (good,))], Lock()).launch()


def test_other_kinds_of_arguments_are_refused():
    with pytest.raises(TypeError, match="bool"):
        Program([(take, (True,))], Lock())
