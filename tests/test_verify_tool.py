"""`minidflash verify` with mistakes planted: what it claims to find it finds, names, and ends with code 1."""

import json

import numpy as np
import pytest
from minidflash.kernels import table
from minidflash.kernels.gpu import fast, prefill

import minidflash as md
from minidflash.cli import ladder
from minidflash.cli import verify as check
from tests.automaton import build
from tests.conftest import open_or_skip, parameters

PROMPTS = [{"kind": "chat", "tokens": [9] * 20 + [5]}, {"kind": "code", "tokens": [7, 6, 5]}]
CHAIN = {5: 20, 9: 20, 7: 20, 6: 20, **{20 + i: 20 + (i + 1) % 30 for i in range(30)}}


# ---- every row, every array that it writes -----------------------------------------------------------------


class Planted:
    """Ops whose kernel `name` is followed, or replaced, by `spoil`: function of {argument: buffer}."""

    def __init__(self, ops, name, spoil, replaces=False):
        self._ops, self._name, self._spoil, self._replaces = ops, name, spoil, replaces

    def __getattr__(self, name):
        function = getattr(self._ops, name)
        if name != self._name:
            return function

        def call(*args):
            if not self._replaces:
                function(*args)
            self._spoil({arg.name: value for arg, value in zip(table.ROWS[name].args, args, strict=True)})

        return call


def written(name):
    row = table.ROWS[name]
    return [arg for arg in row.args if (arg.inplace or arg in row.outputs) and arg.name != "work"]


ARRAYS = [(name, arg.name) for name in table.ROWS for arg in written(name)]
INTEGERS = [(name, arg.name) for name in table.ROWS for arg in written(name) if arg.type == "i32"]


@pytest.fixture
def problem_of(monkeypatch):
    """(row, spoil) -> what the check of that row says on numba, with the mistake; None: it passes."""

    def ask(name, spoil, activations="f32", replaces=False):
        ops = open_or_skip("numba", activations)
        monkeypatch.setattr(table, "ROWS", {name: table.ROWS[name]})
        try:
            ((said, problem),) = check.kernel_checks(Planted(ops, name, spoil, replaces))
        finally:
            monkeypatch.undo()
        assert said in (f"{name} == oracle (numba)", f"{name} == oracle ()")  # nothing ran to its end
        return problem

    return ask


def one_off(buffer):
    """One element wrong: an integer by one, a number by a twentieth of the largest."""
    flat = buffer.reshape(-1)
    if buffer.dtype == np.int32:
        flat[-1] += 1
        return
    wide = (flat.astype(np.uint32) << 16).view(np.float32) if buffer.dtype == np.uint16 else flat
    wide = np.array(wide)
    wide[np.abs(wide).argmax()] *= 1.05
    flat[:] = (wide.view(np.uint32) >> 16).astype(np.uint16) if buffer.dtype == np.uint16 else wide


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("name, array", ARRAYS, ids=lambda value: value)
def test_one_wrong_element_of_any_array_is_found(problem_of, name, array, activations):
    problem = problem_of(name, lambda given: one_off(given[array]), activations)
    assert problem and problem.startswith(f"{array} ")


@pytest.mark.parametrize(
    "name, array", [pair for pair in ARRAYS if pair not in INTEGERS], ids=lambda value: value
)
def test_nan_is_found(problem_of, name, array):
    problem = problem_of(name, lambda given: given[array].reshape(-1).__setitem__(0, np.nan))
    assert problem and problem.startswith(f"{array} ")


@pytest.mark.parametrize("name", table.ROWS)
def test_a_kernel_that_does_nothing_or_breaks_is_found(problem_of, name):
    assert problem_of(name, lambda given: None, replaces=True)

    def breaks(given):
        raise RuntimeError("out of order")

    assert problem_of(name, breaks, replaces=True).startswith("RuntimeError: out of order (D ")


# ---- which variant ran -------------------------------------------------------------------------------------


def variants_of(name):
    """What the check of a row must have run for bf16: all but the plain variant, where there are others."""
    return [variant for variant in ladder.gpu_functions(name) if variant != "plain"] or ["plain"]


@pytest.fixture
def verify_engine(tmp_path):
    target, drafter = build(tmp_path, successor=CHAIN)
    return md.load(str(target), drafter=str(drafter), backend="numba", warm=False)


@pytest.fixture
def on_gpu(monkeypatch):
    """(rows, widths) -> {row: (words behind it, problem)} of the checks on the emulated kernels with bf16."""

    def ask(rows, widths=None):
        monkeypatch.setattr(table, "ROWS", {name: table.ROWS[name] for name in rows})
        found = list(check.kernel_checks(open_or_skip("emulate", "bf16"), widths))
        return {said.split()[0]: (said, problem) for said, problem in found}

    return ask


@pytest.mark.slow
def test_every_row_runs_its_fast_and_its_prefill_variant(on_gpu):
    rows = dict(table.ROWS)
    expected = {name: (f"{name} == oracle ({', '.join(reversed(variants_of(name)))})", None) for name in rows}
    assert on_gpu(rows, check.SIZES | {"D": 128, "C": 256, "F": 160, "V": 300}) == expected


@pytest.mark.parametrize("variant", ["fast", "prefill"])
def test_a_variant_that_declines_every_shape_is_named(on_gpu, monkeypatch, variant):
    entries = {"fast": fast.FAST, "prefill": prefill.PREFILL}[variant]
    monkeypatch.setitem(entries, "attend", lambda *args: None)
    said, problem = on_gpu(["attend"])["attend"]
    assert problem == f"no shape ran {variant}" and said.startswith("attend == oracle (")


def test_a_model_s_widths_are_checked(verify_engine):
    """Each of them shows in what the rows are called with; logits are cut, as the oracle is slow."""
    target, drafter = verify_engine.target.config, verify_engine.drafter.config
    sizes = check.widths_of(verify_engine)
    assert sizes["D"] == target.width and sizes["C"] == max(2, len(drafter.taps)) * target.width
    layer = target.layers[0]
    assert [sizes[c] for c in "HGKF"] == [layer.heads, layer.kv_heads, layer.head_size, layer.ffn_width]
    assert sizes["V"] == min(target.vocab, check.MOST_LOGITS) and sizes["L"] == len(drafter.layers)


def test_a_mistake_at_a_model_s_width_alone_is_found(monkeypatch):
    ops = open_or_skip("numba", "f32")
    monkeypatch.setattr(table, "ROWS", {"gate_up": table.ROWS["gate_up"]})

    def spoil(given):
        if given["x"].shape[1] == 80:
            one_off(given["h"])

    checks = check.kernel_checks(Planted(ops, "gate_up", spoil), check.SIZES | {"D": 80})
    ((_, problem),) = checks
    assert problem.startswith("h is off by") and problem.endswith("(numba, D 80)")


@pytest.mark.slow
@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
def test_nothing_is_wrong_with_the_kernels_here(ops, capsys):
    """What tests/faults/verify.toml plants must show here, under its row's name."""
    failed = check.tell(check.kernel_checks(ops, check.SIZES | {"J": 32}), is_quiet=True)
    found = capsys.readouterr().out
    assert failed == len(found.splitlines()) == 0, found


# ---- the subcommand ----------------------------------------------------------------------------------------


@pytest.fixture
def verify(tmp_path, monkeypatch, mdf):
    """(what to do with the engine, flags) -> (code, stdout) of `minidflash verify` on a tiny pair."""
    target, drafter = build(tmp_path, successor=CHAIN)
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, PROMPTS)))
    opened = check.open_engine

    def run(plant=lambda engine: None, *flags):
        def open_engine(args):
            engine = opened(args)
            plant(engine)
            return engine

        monkeypatch.setattr(check, "open_engine", open_engine)
        code, out, err = mdf("verify", "--target", target, "--drafter", drafter, "--prompts",
                             tmp_path / "prompts", "-n", 20, "--backend", "numba", *flags)  # fmt: skip
        assert not err
        return code, out

    return run


def failed(out):
    return [line for line in out.splitlines() if line.startswith("FAILED")]


def replace(engine, row, function):
    """The backend's kernel `row` becomes function(the right one, *args)."""
    right = getattr(engine.ops.backend, row)
    setattr(engine.ops.backend, row, lambda *args: function(right, *args))
    engine.ops.__dict__.pop(row, None)  # looked up once, kept there
    engine.programs.clear()  # recorded with the right one


def test_nothing_is_found_where_nothing_is_wrong(verify):
    code, out = verify()
    lines = out.splitlines()
    assert code == 0 and lines[-1] == "all checks passed"
    assert [f"ok      {name} == oracle (numba)" for name in table.ROWS] == lines[: len(table.ROWS)]
    for kind in ("chat", "code"):
        assert sum(f", {kind}: 20 tokens" in line for line in lines) == 3  # whole block, half of it, auto
    assert verify(lambda engine: None, "-q") == (0, "all checks passed\n")


def test_a_wrong_value_names_the_row(verify):
    def off(right, *args):
        right(*args)
        x = args[-3]
        x *= np.float32(1.01)

    code, out = verify(lambda engine: replace(engine, "linear_add", off))
    assert code == 1 and failed(out)[0].startswith("FAILED  linear_add == oracle (numba): x is off by ")
    assert out.splitlines()[-1] == f"{len(failed(out))} checks failed"


def test_a_kernel_that_breaks_is_named_and_the_others_still_count(verify):
    def breaks(right, *args):
        raise RuntimeError("out of order")

    code, out = verify(lambda engine: replace(engine, "gate_up", breaks))
    assert code == 1 and any(
        line.startswith("FAILED  gate_up == oracle (): RuntimeError: out of order (D ")
        for line in failed(out)
    )
    assert (
        sum(line.startswith("ok ") and "== oracle" in line for line in out.splitlines())
        == len(table.ROWS) - 1
    )
    for kind in ("chat", "code"):
        assert any(kind in line and "RuntimeError: out of order" in line for line in failed(out))


def test_a_verified_row_that_differs_from_a_plain_one_names_the_prompt(verify):
    """Wrong in company of seven others alone, which no check of a kernel asks: drafting changes tokens."""

    def crowded(right, x, pick, norm, eps, w, *rest):
        right(x, pick, norm, eps, w, *rest)
        ids = next(value for value in rest if getattr(value, "dtype", None) == np.int32 and value.ndim == 1)
        if len(pick) == 8:
            ids[pick[0]] = 44

    code, out = verify(lambda engine: replace(engine, "head", crowded))
    assert code == 1 and not any("== oracle" in line for line in failed(out)), out
    for kind in ("chat", "code"):
        lines = [line for line in failed(out) if f"verify 8, {kind}" in line]
        assert len(lines) == 1 and " without the drafter, 44 with it" in lines[0], out


@pytest.mark.parametrize("count", [-1, 1])
def test_another_number_of_tokens_is_found(verify, monkeypatch, count):
    generate = check.generate

    def longer(engine, given, **options):
        result = generate(engine, given, **options)
        if options.get("drafter", True):
            result.tokens = result.tokens[:count] if count < 0 else [*result.tokens, 20]
        return result

    monkeypatch.setattr(check, "generate", longer)
    code, out = verify()
    assert code == 1 and len(failed(out)) == 6
    assert all(f"20 tokens without the drafter, {20 + count} with it" in line for line in failed(out))
