"""The signature table: its grammar, and that Ops refuses what differs."""

import numpy as np
import pytest
from minidflash.kernels.ops import expected
from minidflash.kernels.table import CLAMPED, ROWS, SILU, TABLE, parse

from tests.cases import Make, put


def test_rows_parse_to_what_they_say():
    row = parse("example", "x:A[T,D] w:W[2*D,D] b:f32[D]? eps:f32 &cache:A[N,B+3] -> y:i32[T]")
    assert [(a.name, a.type, a.dims, a.inplace, a.optional) for a in row.args] == [
        ("x", "A", ("T", "D"), False, False), ("w", "W", ("2*D", "D"), False, False),
        ("b", "f32", ("D",), False, True), ("eps", "f32", None, False, False),
        ("cache", "A", ("N", "B+3"), True, False), ("y", "i32", ("T",), False, False),
    ]  # fmt: skip
    assert (
        expected("2*D", {"D": 7}) == 14
        and expected("B+3", {"B": 4}) == 7
        and expected("L*2*G", {"L": 3, "G": 5}) == 30
    )


@pytest.mark.parametrize("word", ["x", "x:f64", "x:A[T", "*x:A[T]", "X:A[T]", "x:A[T]!", "x:A [T]"])
def test_words_outside_the_grammar_are_refused(word):
    with pytest.raises(ValueError, match="cannot read"):
        parse("row", f"{word} -> y:A[T]")


def test_rows_are_consistent():
    for row in ROWS.values():
        given = [spec.name for spec in row.args]
        assert len(set(given)) == len(given), row.name
        assert row.outputs or any(spec.inplace for spec in row.inputs), f"{row.name} writes nothing"
        assert not any(spec.inplace for spec in row.outputs), row.name
        if "slot" in given:
            assert given[given.index("slot") + 1] == "pos", f"{row.name}: an address is slot, then pos"


def test_nothing_else_is_a_kernel(ops):
    with pytest.raises(AttributeError, match="no kernel 'rmsnorm'"):
        ops.rmsnorm  # noqa: B018
    for name in TABLE:
        assert callable(getattr(ops, name))


@pytest.fixture
def call(ops, rng):
    """Arguments of linear_add by name, all right, and what calls it with some of them changed."""
    make = Make(rng, ops.activations)
    T, F, D = 3, 24, 16
    right = {
        "a": put(ops, make.a(T, F), "A"), "w": ops.weight([make.w(D, F)]), "bias": put(ops, make.v(D), "f32"),
        "norm": put(ops, make.v(D), "f32"), "eps": 1e-6, "scale": put(ops, make.v(1), "f32"),
        "tap_row": put(ops, np.arange(T, dtype=np.int32), "i32"), "tap_at": 0,
        "x": put(ops, make.a(T, D), "A"),
        "taps": ops.array((T, 2 * D), "A"), "work": ops.array((ops.backend.work_size(T, F, D),), "f32"),
    }  # fmt: skip

    def changed(**values):
        return ops.linear_add(*(right | values).values())

    changed.right = right
    return changed


def test_right_arguments_pass(call):
    call()
    call(bias=None, norm=None, scale=None, taps=None, tap_row=None)


def test_wrong_counts_are_refused(ops, call):
    with pytest.raises(TypeError, match="linear_add takes 11 arguments, 10 given"):
        ops.linear_add(*list(call.right.values())[:-1])


def test_wrong_kinds_are_refused_by_name(ops, call):
    integers = ops.array((3, 24), "i32")
    other = np.zeros((3, 24), np.uint16 if ops.activations == "f32" else np.float32)
    for what, value, error, words in [
        ("a", None, TypeError, "a is None"), ("w", None, TypeError, "w is None"),
        ("w", call.right["a"], TypeError, "w must be a Weight"),
        ("tap_at", None, TypeError, "tap_at must be a number|tap_at is None"),
        ("tap_at", "0", TypeError, "tap_at must be a number"),
        ("a", integers, TypeError, "a must be .*, not int32"), ("a", other, TypeError, "a must be"),
        ("bias", ops.array((16,), "i32"), TypeError, "bias must be float32"),
        ("tap_row", ops.array((3,), "f32"), TypeError, "tap_row must be int32"),
        ("a", [1.0], TypeError, "a must be"),
    ]:  # fmt: skip
        with pytest.raises(error, match=f"linear_add: {words}"):
            call(**{what: value})


def test_wrong_shapes_are_refused_by_name(ops, call):
    for what, value, words in [
        ("a", ops.array((3, 25), "A"), "w: F is 24, elsewhere 25"),
        ("x", ops.array((4, 16), "A"), "x: T is 4, elsewhere 3"),
        ("x", ops.array((3, 17), "A"), "x: D is 17, elsewhere 16"),
        ("a", ops.array((3, 24, 1), "A"), "a must have 2 dims"),
        ("bias", ops.array((15,), "f32"), "bias: D is 15, elsewhere 16"),
        ("tap_row", ops.array((2,), "i32"), "tap_row: T is 2, elsewhere 3"),
    ]:
        with pytest.raises(ValueError, match=f"linear_add: {words}"):
            call(**{what: value})


def test_other_kinds_than_a_row_has_are_refused_by_name(ops, rng):
    make = Make(rng, ops.activations)
    x, norm = put(ops, make.a(3, 24), "A"), put(ops, make.v(24), "f32")
    work, h = ops.array((ops.backend.work_size(3, 24, 32),), "f32"), ops.array((3, 16), "A")
    for act in (CLAMPED, 3):
        with pytest.raises(ValueError, match=rf"gate_up: act is {act}, needed one of \(0, 2\)"):
            ops.gate_up(x, norm, 1e-6, act, ops.weight([make.w(32, 24)]), work, h)


def test_views_with_holes_are_refused(ops, call):
    with pytest.raises(ValueError, match="linear_add: a must be contiguous"):
        call(a=ops.array((3, 48), "A")[:, ::2])
    with pytest.raises(ValueError, match="linear_add: x must be contiguous"):
        call(x=ops.array((6, 16), "A")[::2])


def test_products_of_sizes_are_checked(ops, rng):
    make = Make(rng, ops.activations)
    x, norm = put(ops, make.a(3, 24), "A"), put(ops, make.v(24), "f32")
    work = ops.array((ops.backend.work_size(3, 24, 32),), "f32")
    with pytest.raises(ValueError, match="gate_up: w: 2\\*F is 31, needed 32"):
        ops.gate_up(x, norm, 1e-6, SILU, ops.weight([make.w(31, 24)]), work, ops.array((3, 16), "A"))
    record, one = ops.array((1, 10), "i32"), ops.array((1,), "i32")
    with pytest.raises(ValueError, match="accept: record: 2\\*B\\+3 is 10, needed 19"):
        ops.accept(
            ops.array((1, 8), "i32"), ops.array((8,), "i32"), record, one, one, one, one, one, record, one
        )


def test_a_recording_runs_nothing_until_launched(ops, rng):
    make = Make(rng, ops.activations)
    table, ids = ops.weight([make.w(9, 24)]), put(ops, np.array([3, 8], np.int32), "i32")
    x = ops.array((2, 24), "A")
    program = ops.program(lambda: ops.embed(ids, table, 1.0, x))
    assert not ops.download(x).any()
    program.launch()
    first = ops.download(x)
    assert first.any()
    ops.upload(ids, np.array([0, 1], np.int32))
    program.launch()
    assert (ops.download(x) != first).any(), "a replay reads its buffers anew"
    with pytest.raises(RuntimeError, match="already open"), ops.record(), ops.record():
        pass
    ops.embed(ids, table, 1.0, x)
