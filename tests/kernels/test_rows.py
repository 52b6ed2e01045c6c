"""Row r of every kernel has the same bits whatever the number of rows, the other rows,
and the threads (playbook 11).

This is what makes drafted text equal plain text: verify runs the plain round's rows in wider company.
"""

import numpy as np
import pytest
from minidflash.kernels.ops import storage
from minidflash.kernels.table import GELU_TANH, ROWS, SILU

from tests.cases import Make, Matrix, run, stored
from tests.compare import assert_same_bits
from tests.conftest import open_or_skip, parameters

MOST = 64
COUNTS = [*range(1, 18), MOST]
N, S, EPS = 2, 150, 1e-6


def make(name, rng, activations, weights):
    """A case of 64 rows. Sizes are odd, so that tails of tiles and vectors take part."""
    make = Make(rng, activations, weights)
    T, D, F, V, H, G, K, L = MOST, 77, 53, 131, 6, 2, 24, 3
    cells = rng.permutation(N * S)[:T]
    slot, pos = (cells // S).astype(np.int32), (cells % S).astype(np.int32)
    cos, sin = make.tables(S, K // 2)
    kinds = {"A": storage(activations)}
    norm = {"norm": make.v(D, around=1), "eps": EPS}
    bare = {"multiplier": 1.0, "cap": 0.0}
    turn = {"cos": cos, "sin": sin, "slot": slot, "pos": pos}
    if name == "embed":
        ids = rng.integers(0, V, T).astype(np.int32)
        return {"ids": ids, "table": make.w(V, D), "scale": 1.5}, {"D": D}
    if name == "qkv":
        caches = {"cache_" + c: np.zeros((N, G, S, K), kinds["A"]) for c in "kv"}
        heads = {"q_norm": make.v(K, around=1), "k_norm": make.v(K, around=1)}
        w = {"wq": make.w(H * K, D), "wkv": make.w(2 * G * K, D)}
        bias = {"q_bias": make.v(H * K), "kv_bias": make.v(2 * G * K)}
        return {"x": make.a(T, D), **norm, **w, **bias, **heads, **turn, **caches}, {"H": H}
    if name == "attend":
        caches = {"cache_" + c: make.a(N, G, S, K) for c in "kv"}
        where = {"slot": slot, "pos": pos, "begin": pos, "end": pos + 1}
        return {"q": make.a(T, H, K), **caches, **where, "window": 0, "causal": 1, "scale": K**-0.5,
                "sinks": make.v(H)}, {}  # fmt: skip
    if name == "linear":
        return {"a": make.a(T, F), "w": make.w(D, F), "bias": make.v(D)}, {}
    if name == "linear_add":
        no_end = {"norm": None, "eps": EPS, "scale": None}
        taps = {"tap_row": np.arange(T, dtype=np.int32), "tap_at": 3}
        rest = {"x": make.a(T, D), "taps": np.zeros((T, D + 7), kinds["A"])}
        return {"a": make.a(T, F), "w": make.w(D, F), "bias": make.v(D), **no_end, **taps, **rest}, {}
    if name == "join":
        D = 76  # whole pieces of 4 numbers
        norms = {one: make.v(D, around=1) for one in ("a_norm", "b_norm", "norm")}
        end = {"eps": EPS, "scale": np.float32([0.6]), "tap_row": np.arange(T, dtype=np.int32), "tap_at": 3}
        rest = {"x": make.a(T, D), "taps": np.zeros((T, D + 7), kinds["A"])}
        return {"a": make.a(T, D), "b": make.a(T, D), **norms, **end, **rest}, {}
    if name == "gate_up":
        return {"x": make.a(T, D), **norm, "act": SILU, "w": make.w(2 * F, D)}, {"F": F}
    if name == "head":
        ids = {"limit": V, "ids": np.zeros(T, np.int32)}
        return {"x": make.a(T, D), "pick": np.arange(T, dtype=np.int32), **norm, "w": make.w(V, D), **ids}, {}
    if name in ("sample", "propose"):
        law = np.array([[1.0, 1.0, 0.0], [0.8, 0.9, 0.05]], np.float32)
        key = np.array([[3, 1, 0, 0], [3, 1, 0, 40]], np.int32)
        where = {
            "pick": np.arange(T, dtype=np.int32),
            "slot": slot,
            "pos": pos,
            "limit": V,
            "key": key,
            "law": law,
        }
        out = {"ids": np.zeros(T, np.int32)}
        out |= (
            {"logprob": np.zeros((T, 2), np.float32)}
            if name == "sample"
            else {"mass": np.zeros((T, V), np.float32)}
        )
        return {"x": make.a(T, D), **where, **norm, **bare, "w": make.w(V, D), **out}, {}
    if name == "head_logits":
        return {"x": make.a(T, D), **norm, **bare, "w": make.w(V, D)}, {}
    if name == "fuse":
        return {"taps": make.a(T, 2 * D), "w": make.w(D, 2 * D), **norm}, {}
    if name == "inject":
        caches = {"cache_" + c: np.zeros((L, N, G, S, K), kinds["A"]) for c in "kv"}
        w = {
            "wkv": make.w(L * 2 * G * K, D),
            "kv_bias": make.v(L * 2 * G * K),
            "k_norm": make.v(L, K, around=1),
        }
        return {"f": make.a(T, D), **w, "eps": EPS, **turn, **caches}, {}
    raise KeyError(name)


# The rows of reject are a slot's, one behind the other, those of experts are grouped: their files ask the
# same.
OTHERS = "reject", "route", "experts_up", "experts_down"
ROW_KERNELS = [
    name for name, row in ROWS.items() if any(spec.type in "AW" for spec in row.args) and name not in OTHERS
]


def without_values(case):
    """Half of wkv: values are the raw keys, and are normed."""
    rows = case["wkv"].array
    half = {"wkv": Matrix(np.ascontiguousarray(rows[: len(rows) // 2])), "kv_bias": None}
    return half | {"v_norm": np.linspace(0.5, 1.5, 24, dtype=np.float32)}


# Other forms of a row: what optional arguments and kinds make of it. "ROW FORM" -> arguments, or a function
# of the case.
FORMS = {
    "qkv shared": without_values,
    "qkv bare": {"norm": None}, "gate_up bare": {"norm": None}, "gate_up gelu": {"act": GELU_TANH},
    "linear_add normed": {"norm": np.linspace(0.5, 1.5, 77, dtype=np.float32), "scale": np.float32([0.6])},
    "head ranked": {"margin": np.zeros(MOST, np.float32)},
    "sample capped": {"multiplier": 0.7, "cap": 1.5}, "head_logits capped": {"multiplier": 0.7, "cap": 1.5},
}  # fmt: skip
PROMPT_FORMS = [form for form in FORMS if form.split()[1] in ("shared", "bare", "gelu")]  # in a prompt


def make_form(form, rng, activations, weights):
    """(row, case, sizes) of a row's name or of a form of it."""
    name = form.split()[0]
    case, sizes = make(name, rng, activations, weights)
    more = FORMS.get(form, {})
    return name, case | (more(case) if callable(more) else more), sizes


def row_args(name):
    """Arguments with one entry a row."""
    row = ROWS[name]
    return [s.name for s in row.args if s.dims and s.dims[0] in ("T", "M")]


def some_rows(name, case, rows):
    """The case with these rows of it alone."""
    part = dict(case)
    for arg in row_args(name):
        if case.get(arg) is not None:
            part[arg] = np.ascontiguousarray(case[arg][rows])
    if "pick" in case:
        part["pick"] = np.arange(len(rows), dtype=np.int32)
    return part


def seen(name, case, got, rows):
    """What a call wrote for each of its rows: outputs, cache cells, taps."""
    found = {}
    for what, value in got.items():
        if what.startswith("cache_"):
            at = case["slot"], case["pos"]
            found[what] = np.stack([value[..., s, :, p, :] for s, p in zip(*at, strict=True)])
        elif what == "taps":
            found[what] = value[case["tap_row"]]
        else:
            found[what] = value[: len(rows)]
    return found


def compare(name, whole, part, rows, words):
    for what, value in part.items():
        assert_same_bits(value, np.ascontiguousarray(whole[what][rows]), f"{name}: {what}, {words}")


@pytest.mark.parametrize("weights", ["bf16", "f32"])
@pytest.mark.parametrize("form", [*ROW_KERNELS, *FORMS])
def test_bits_do_not_depend_on_how_many_rows_there_are(ops, rng, form, weights):
    name, case, sizes = make_form(form, rng, ops.activations, weights)
    everyone = range(MOST)
    whole = seen(name, case, run(ops, name, case, **sizes), everyone)
    for count in COUNTS:
        first = int(rng.integers(0, MOST - count + 1))
        rows = list(range(first, first + count))
        part = some_rows(name, case, rows)
        compare(name, whole, seen(name, part, run(ops, name, part, **sizes), rows), rows, f"{count} rows")


@pytest.mark.parametrize("form", [name for name in (*ROW_KERNELS, *FORMS) if name != "embed"])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("other", [np.nan, np.inf, 1e30])
def test_bits_do_not_depend_on_what_other_rows_hold(ops, rng, form, other):
    name, case, sizes = make_form(form, rng, ops.activations, "bf16")
    whole = seen(name, case, run(ops, name, case, **sizes), range(MOST))
    bad = rng.permutation(MOST)[:20]
    good = np.setdiff1d(np.arange(MOST), bad)
    first = next(s.name for s in ROWS[name].args if s.type == "A")
    case = case | {first: case[first].copy()}
    case[first][bad] = stored(other, ops.activations)
    after = seen(name, case, run(ops, name, case, **sizes), range(MOST))
    compare(
        name,
        whole,
        {what: np.ascontiguousarray(v[good]) for what, v in after.items()},
        good,
        f"{other} beside",
    )


@pytest.mark.parametrize("ops", parameters(["numba"]), indirect=True)
@pytest.mark.parametrize("form", [*ROW_KERNELS, *FORMS])
def test_bits_do_not_depend_on_the_threads(ops, rng, form):
    name, case, sizes = make_form(form, rng, ops.activations, "bf16")
    runs = []
    for threads in (1, 2, 3):
        other = open_or_skip("numba", ops.activations, threads=threads)
        runs.append(
            [run(other, name, some_rows(name, case, list(range(m))), **sizes) for m in (1, 5, 17, MOST)]
        )
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            for what in one:
                assert_same_bits(two[what], one[what], f"{name}: {what}")
