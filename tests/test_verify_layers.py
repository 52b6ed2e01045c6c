"""`minidflash verify --layers` with mistakes planted: the stage in which each is made is named.

Three kinds of witness: what a loop, its wiring or a kernel does wrong is found by the oracle's own loop; a
number that is read wrongly from config.json by a second reading; files that are read wrongly by golden
numbers. tests/faults/layers.toml plants the same ten as changes of the source.
"""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from minidflash.kernels.weight import PAIRS
from safetensors.numpy import load_file, save_file

import minidflash as md
from minidflash.cli import verify_layers as check
from minidflash.cli.equations import check_known
from minidflash.cli.findings import STAGES, Place, by_stage, compare
from minidflash.errors import UserError
from minidflash.rope import Rope, rope_tables
from tests.golden_files import golden
from tests.models import engine_of, numbers, target_of

PAIR, SLIDING, MIXTURE = "dflash-qwen3-trained", "dflash-qwen3-swa-tiny", "dflash-gpt-oss-mxfp4-tiny"


def looked(engine, pair):
    """Findings of prompt p1 and three rounds of block 8, beside a pair that nobody has touched."""
    prompt = numbers(pair)["b8.p1.output_ids"][:-48].tolist()
    truth = engine_of(target_of(pair), pair, "oracle", "f32")
    return check.look(engine, truth, prompt, {"block": 8}, "auto")[1]


def fresh(pair, backend="oracle"):
    """An engine that may be spoiled."""
    return md.load(str(golden(target_of(pair))), drafter=str(golden(pair)), backend=backend, warm=False)


def first_off(findings):
    return next((one for one in findings if one.is_off), None)


@pytest.mark.parametrize("backend", ["oracle", "numba"])
@pytest.mark.parametrize("pair", [PAIR, SLIDING, MIXTURE])
def test_nothing_is_off_where_nothing_is_wrong(pair, backend):
    findings = looked(engine_of(target_of(pair), pair, backend, "f32"), pair)
    worst = by_stage(findings)
    assert not first_off(findings), first_off(findings).told()
    assert max(one.share for one in worst.values()) < 0.3  # far from the tolerance, so it means something
    assert {place.round for place in (one.place for one in findings)} == {0, 1, 2, 3}
    expected = set(STAGES) - {"calls"} - (set() if pair == MIXTURE else {"route", "experts"})
    assert set(worst) == expected


@pytest.mark.parametrize("block, verify, chunk", [(8, 1, None), (16, 3, 3)])
def test_plain_rounds_short_ones_and_a_prompt_in_pieces(block, verify, chunk):
    folders = {"target": str(golden(target_of(PAIR))), "drafter": str(golden(PAIR)), "backend": "oracle"}
    engine, truth = (md.load(**folders, prefill_chunk=size, warm=False) for size in (chunk, None))
    _, findings, witness = check.look(engine, truth, [5, 9, 9, 2, 7, 5, 3], {"block": block}, verify)
    assert not first_off(findings), first_off(findings).told()
    assert witness.round == check.ROUNDS and witness.at == len(witness.calls)


# ---- ten mistakes of a loop, its wiring or its kernels -----------------------------------------------------


def tap_off_by_one(engine):
    engine.drafter.config = replace(engine.drafter.config, taps=(0, 1))


def rope_base(engine):
    rope = Rope(engine.target.config.ropes[0].theta * 10)
    tables = rope_tables(engine.ops, rope, engine.target.config.layers[0].head_size, engine.ctx + 8)
    engine.target.tables[2] = tables


def missing_k_norm(engine):
    engine.target.layers[1].pop("k_norm")


def wider_window(engine):
    layers = list(engine.drafter.config.layers)
    layers[1] = replace(layers[1], window=layers[1].window + 1)
    engine.drafter.config = replace(engine.drafter.config, layers=tuple(layers))


def after(engine, row, spoil):
    """Behind every call of a kernel, spoil(its arguments by name)."""
    from minidflash.kernels.table import ROWS

    right, names = getattr(engine.ops.backend, row), [arg.name for arg in ROWS[row].args]

    def spoiled(*args):
        right(*args)
        spoil(dict(zip(names, args, strict=True)))

    setattr(engine.ops.backend, row, spoiled)


def wrong_crop(engine):
    """A rejected row stays."""

    def longer(given):
        if given["record"][0, 1] < given["choice"].shape[0] - 1:
            given["start"] += 1

    after(engine, "accept", longer)


def dropped_context_row(engine):
    def shorter(given):
        last = np.flatnonzero(given["pos"] >= 0)[-1:]
        given["pos"][last] = -1

    after(engine, "stage_context", shorter)


def stale_anchor(engine):
    """A pass of the target begins with the anchor of the round before."""
    seen = []

    def older(given):
        if given["fill"][0, 1] != engine.drafter.config.mask_id:
            seen.append(int(given["ids"][0]))
            given["ids"][0] = seen[-2] if len(seen) > 1 else seen[-1]

    after(engine, "stage", older)


def swapped_gate_and_up(engine):
    weight = engine.target.layers[2]["gate_up"]
    rows = np.roll(weight.data, len(weight.data) // 2, 0).astype(np.float32)
    part = SimpleNamespace(array=rows, dtype="F32", shape=rows.shape, drop=lambda: None)
    engine.target.layers[2]["gate_up"] = engine.ops.weight([part], PAIRS)


def wrong_eps(engine):
    engine.target.config = replace(engine.target.config, eps=1e-5)


def mask_id(engine):
    engine.drafter.config = replace(engine.drafter.config, mask_id=0)


MISTAKES = [
    (tap_off_by_one, "taps", "drafter, prompt"),
    (rope_base, "rope", "target layer 2, prompt"),
    (missing_k_norm, "qkv", "target layer 1, prompt"),
    (wider_window, "attention", "drafter layer 1, round 1"),
    (wrong_crop, "accept", "round 1"),
    (dropped_context_row, "inject", "drafter, round 2"),
    (stale_anchor, "rows", "target, round 2"),
    (swapped_gate_and_up, "mlp", "target layer 2, prompt"),
    (wrong_eps, "norm", "target layer 0, prompt"),
    (mask_id, "rows", "drafter, round 1"),
]


@pytest.mark.parametrize("plant, stage, place", MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_of_the_run_is_named(plant, stage, place):
    pair = SLIDING if plant is wider_window else PAIR
    engine = fresh(pair)
    plant(engine)
    found = first_off(looked(engine, pair))
    assert found and (found.stage, str(found.place)) == (stage, place), found and found.told()


def test_a_run_that_breaks_is_told_by_the_stage_that_made_it_break():
    engine = fresh(PAIR)
    engine.target.layers[1]["attn_norm"] = engine.target.layers[1]["attn_norm"] * np.float32(np.nan)
    found = first_off(looked(engine, PAIR))
    assert found.told().startswith("qkv: target layer 1, prompt, v position 0, head 0, element 0 is nan")


def test_a_run_that_breaks_without_a_stage_that_is_off_breaks_here_too():
    engine = fresh(PAIR)

    def breaks(given):
        raise RuntimeError("out of order")

    after(engine, "stage_context", breaks)
    with pytest.raises(RuntimeError, match="out of order"):
        looked(engine, PAIR)


def test_kernels_in_another_order_are_named(monkeypatch):
    """Context features that are never injected."""
    from minidflash import drafter

    monkeypatch.setattr(drafter, "inject_fresh", lambda *args: None)
    found = first_off(looked(fresh(PAIR), PAIR))
    assert found.told() == "calls: round 1, stage is called, stage_context expected"


def test_activations_of_bf16_have_tolerances_of_their_own():
    """Where tiny errors drown, whole ones are still named."""
    engine = md.load(str(golden(target_of(PAIR))), drafter=str(golden(PAIR)), backend="oracle",
                     activations="bf16", warm=False)  # fmt: skip
    findings = looked(engine, PAIR)
    assert not first_off(findings), first_off(findings).told()
    assert max(one.error for one in findings) > 1e-3
    swapped_gate_and_up(engine)
    assert first_off(looked(engine, PAIR)).stage == "mlp"


def test_a_mistake_has_one_name():
    """What follows has the inputs that the run had, so nothing behind the mistake is off."""
    engine = fresh(PAIR)
    swapped_gate_and_up(engine)
    off = [one for one in looked(engine, PAIR) if one.is_off]
    assert {(one.stage, one.place.layer, one.what) for one in off} == {("mlp", 2, "h")}


# ---- the same of the files: config.json read once more, and golden numbers ---------------------------------


@pytest.fixture
def verify(tmp_path, mdf):
    """(pair, what to change in a config, what to change in the tensors, flags) -> (code, last line of stdout)
    of `verify --layers` on a copy of the drafter."""

    def run(pair, config=None, tensors=None, *flags):
        folder = tmp_path / "drafter"
        shutil.copytree(golden(pair), folder, dirs_exist_ok=True)
        stated = json.loads((folder / "config.json").read_text())
        nested = config or {}
        stated |= {k: v for k, v in nested.items() if k != "dflash_config"}
        stated["dflash_config"] |= nested.get("dflash_config", {})
        (folder / "config.json").write_text(json.dumps(stated))
        if tensors:
            save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
        code, out, err = mdf("verify", "--layers", "--target", golden(target_of(pair)), "--drafter", folder,
                             "--backend", "oracle", "--reference", golden(pair) / "golden.safetensors",
                             *flags)  # fmt: skip
        assert err == "" or "written to" in err
        return code, out.splitlines()

    return run


def without_k_norm(tensors):
    name = "layers.1.self_attn.k_norm.weight"
    return tensors | {name: np.ones_like(tensors[name])}


def with_gate_as_up(tensors):
    gate, up = (f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    return tensors | {gate: tensors[up], up: tensors[gate]}


@pytest.mark.parametrize(
    "pair, config, tensors, says",
    [
        (PAIR, {"dflash_config": {"target_layer_ids": [0, 1]}}, None, "taps: drafter, prompt, column"),
        (PAIR, {"rope_theta": 1e5}, None, "rope: drafter layer 0, round 1, k"),
        (PAIR, None, without_k_norm, "inject: drafter layer 1, round 1, length of k's pair"),
        (SLIDING, {"sliding_window": 10}, None, "attention: drafter layer 0, round 1"),
        (PAIR, None, with_gate_as_up, "mlp: drafter layer 0, round 1, stream"),
        (PAIR, {"rms_norm_eps": 1e-2}, None, "fuse: drafter, prompt, feature"),
        (PAIR, {"dflash_config": {"mask_token_id": 7}}, None, "rows: drafter, round 1, embedded block"),
    ],
    ids=["tap", "rope base", "k-norm", "window", "gate and up", "eps", "mask id"],
)
def test_another_file_is_named_by_the_reference(verify, pair, config, tensors, says):
    code, lines = verify(pair, config, tensors)
    assert code == 1 and lines[-1].startswith(f"FAILED  {says}"), lines[-1]
    assert f"{pair} has " in lines[-1]


def test_a_number_of_config_json_that_is_not_the_one_used_is_named(monkeypatch):
    """Both sides read it wrongly, so no run would show it."""
    from minidflash.pair import open_pair

    pair = open_pair(str(golden(target_of(SLIDING))), str(golden(SLIDING)))
    assert not first_off(list(check.config_checks(pair)))
    config, rope = pair.drafter.config, pair.drafter.config.ropes[0]
    layers = tuple(replace(layer, window=layer.window and layer.window + 1) for layer in config.layers)
    for wrong, stage in (
        ({"eps": 1e-5}, "norm"), ({"ropes": (replace(rope, theta=1e4),)}, "rope"), ({"taps": (0, 1)}, "taps"),
        ({"mask_id": 1}, "rows"), ({"block": 8}, "rows"), ({"layers": layers}, "attention"),
    ):  # fmt: skip
        pair.drafter.config = replace(config, **wrong)
        off = [one for one in check.config_checks(pair) if one.is_off]
        assert [one.stage for one in off] == [stage] and "config.json" in off[0].told()


# ---- the subcommand ----------------------------------------------------------------------------------------


def test_a_table_and_numbers_for_machines(verify, tmp_path):
    code, lines = verify(PAIR, None, None, "--json", tmp_path / "found.json")
    assert code == 0 and lines[-1] == "all stages agree"
    found = json.loads((tmp_path / "found.json").read_text())
    stages = [line.split()[1] for line in lines[2:-1]]
    assert len(stages) == len(found["stages"]) and set(found["stages"]) <= set(STAGES)
    assert found["first"] is None and found["rounds"] == 3
    assert {"error", "ulps", "index", "layer", "round"} <= set(found["stages"]["qkv"])
    assert verify(PAIR, None, None, "-q") == (0, ["all stages agree"])


@pytest.mark.parametrize("target", ["qwen3-tiny", "gemma4-moe-tiny"])
def test_a_target_beside_its_own_golden_numbers(mdf, target):
    code, out, _ = mdf("verify", "--layers", "--target", golden(target), "--backend", "oracle", "--reference",
                       golden(target) / "golden.safetensors", "-q")  # fmt: skip
    assert (code, out) == (0, "all stages agree\n")


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--reference", "x"], "--reference has no effect without --layers"),
        (["--shape", "T=3"], "--shape has no effect without --kernel"),
        (["--json", "x"], "--json has no effect"),
        (["--layers", "--kernel", "qkv"], "two checks"),
        (["--layers", "--reference", "nowhere"], "nowhere cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(mdf, flags, says):
    code, out, err = mdf("verify", *flags)
    assert code == 2 and not out and says in err.splitlines()[0] and "hint: " in err


def test_a_reference_without_a_run_is_refused(mdf, tmp_path):
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "other.safetensors")
    code, _, err = mdf("verify", "--layers", "--reference", tmp_path / "other.safetensors")
    assert code == 2 and "holds no golden run" in err


def test_a_layer_that_nobody_wrote_down_is_refused():
    config = engine_of("qwen3-tiny", None, "oracle", "f32").target.config
    with pytest.raises(UserError, match="does not know the mixer delta"):
        check_known(replace(config, layers=(replace(config.layers[0], mixer="delta"),)))


# ---- one comparison ----------------------------------------------------------------------------------------


def test_the_first_element_that_is_off_is_said_and_the_largest_error():
    expected = np.ones((3, 4))
    found = expected + [[0, 0, 0, 1e-9], [0, 0, 2e-3, 0], [5e-3, 0, 0, 0]]
    one = compare("mlp", Place("target", 3, 2), "h", found, expected, 1e-3, ("position",), [7, 8, 9])
    assert one.is_off and one.index == "position 8, element 2" and one.error == pytest.approx(5e-3)
    assert one.ulps == pytest.approx(5e-3 / 2.0**-23) and one.share == pytest.approx(5)
    assert one.told() == "mlp: target layer 3, round 2, h position 8, element 2 is 1.002, oracle has 1"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_off_and_is_null_in_json(bad):
    one = compare("norm", Place("target"), "x", np.array([1.0, bad]), np.ones(2), 1e9)
    assert one.is_off and one.to_json()["found"] is None and one.to_json()["is_off"]
    longer = compare("accept", Place(), "tokens", [5], [5, 6], 0.5)
    assert longer.is_off and longer.index == "element 1" and longer.expected == 6
    with pytest.raises(UserError, match="another model"):
        compare("norm", Place(), "x", np.ones((2, 2)), np.ones((2, 3)), 1)
    assert compare("norm", Place(), "x", np.ones(0), np.ones(0), 1) is None


def test_a_rotation_keeps_the_lengths_of_pairs(rng):
    """What tells rope from qkv."""
    from minidflash.cli.equations import rotated

    x = rng.standard_normal((5, 2, 16))
    turned = rotated(x, Rope(1e4), np.arange(5) + 3)
    np.testing.assert_allclose(np.hypot(turned[..., :8], turned[..., 8:]), np.hypot(x[..., :8], x[..., 8:]))
    assert np.abs(turned - x).max() > 0.1
