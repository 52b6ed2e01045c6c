"""The table of published pairs: its facts resolve, what it says of minidflash is so, its page is current."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from minidflash.kernels.sizes import SIZES
from minidflash.weights import drafter_names

from minidflash.config import read_drafter, read_target
from minidflash.costs import parameters
from minidflash.errors import UserError
from tests.golden_files import golden
from tests.published import checkpoints

ROOT = Path(__file__).resolve().parent.parent
FACTS, PUBLISHED = checkpoints.facts(), checkpoints.read()
KEYS = {  # a fact -> how a refusal names it
    "layers": "num_hidden_layers", "width": "hidden_size", "ffn": "intermediate_size", "block": "block_size",
    "heads": "num_attention_heads", "taps": "target_layer_ids", "mask_id": "mask_token_id",
    "theta": "rope_theta",
}  # fmt: skip
# What a test puts where a page states nothing.
STAND_INS = {
    "layers": 2, "width": 64, "ffn": 96, "heads": [2, 1, 32], "block": 16, "taps": [1], "mask_id": 0,
    "theta": 1e4,
}  # fmt: skip
SIZELESS = "block", "mask_id", "theta"
# Names of the cases that tests of whole models compare with.
TESTED = set(
    re.findall(r'"([\w-]+)"', "".join(p.read_text() for p in (ROOT / "tests").glob("test_golden*.py")))
)


def by(test):
    return pytest.mark.parametrize("one", [pytest.param(p, id=p.draft) for p in PUBLISHED if test(p)])


def refusal(do):
    """The line that `do` is refused with; None: it is not."""
    try:
        do()
    except UserError as error:
        return str(error)
    return None


def test_the_page_is_made_of_the_facts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", "--check"])
    assert checkpoints.main() == 0, capsys.readouterr().err
    assert "weights/CHECKPOINTS.md" in (ROOT / "README.md").read_text()


@by(lambda one: not one.missing)
def test_stated_facts_resolve(one):
    found = read_drafter(one.config(form=one.form["runs"]))
    assert (list(found.taps), found.mask_id, found.block) == (one.taps, one.mask_id, one.block)
    assert found.target_layers == one.target_layers
    assert list(found.each("window")) == (one.windows or [0] * one.layers)


def filled(one, but=None):
    """The pair with stand-ins for all that its page does not state, but one."""
    return replace(one, **{name: STAND_INS[name] for name in one.missing if name != but})


def convolutions_and_selector(one):
    """Parameters of DFlash 2 beside those of v1."""
    nested, width = one.form["nested"], one.width
    taps, groups = nested["conv_kernel_size"], one.width // nested["conv_group_size"]
    convolution = 2 * taps * width + 2 * taps * groups * width
    return 2 * one.layers * convolution + nested["selector_rank"] * (2 * one.vocab + width)


@by(lambda one: one.parameters)
def test_stated_sizes_make_the_stated_count(one):
    assert set(one.missing) <= set(SIZELESS)
    whole = filled(one)
    count = parameters(drafter_names.foretell_drafter(read_drafter(whole.config(form=False))))
    count += convolutions_and_selector(one) if "selector_rank" in one.form.get("nested", {}) else 0
    is_exact = one.parameters % 1
    assert count / 1e6 == one.parameters if is_exact else round(count / 1e6) == one.parameters
    if one.form["runs"]:
        assert parameters(drafter_names.foretell_drafter(read_drafter(whole.config()))) == count


@by(lambda one: one.missing)
def test_what_no_page_states_has_no_default(one):
    assert read_drafter(filled(one).config(form=False))
    for name in one.missing:
        said = refusal(lambda name=name: read_drafter(filled(one, but=name).config(form=False)))
        assert said and f"{KEYS[name]} is missing" in said, f"{name}: {said}"


@pytest.mark.parametrize("name", FACTS["family"])
def test_a_family_is_told_to_run_where_it_is_built(name):
    family = FACTS["family"][name]
    for kind in family["model_types"]:  # a family that is built lacks keys here, another is refused as such
        is_built = "architecture" not in refusal(lambda kind=kind: read_target({"model_type": kind}))
        assert family["runs"] == (is_built and family["golden"] in TESTED), f"{kind}: see [family.{name}]"
    if family["runs"]:
        config = json.loads((golden(family["golden"]) / "config.json").read_text())
        assert read_target(config).family in family["model_types"]


@pytest.mark.parametrize("name", FACTS["form"])
def test_a_form_is_told_to_run_where_it_is_built(name):
    form = FACTS["form"][name]
    for one in PUBLISHED:
        if one.form == form and not one.missing:
            is_built = refusal(lambda one=one: read_drafter(one.config())) is None
            assert form["runs"] == (is_built and form["golden"] in TESTED), f"see [form.{name}]"
    if form["runs"]:
        config = json.loads((golden(form["golden"]) / "config.json").read_text())
        assert read_drafter(config).taps


TIMED = {
    "qwen3-4b": "Qwen3-4B-DFlash-b16", "qwen3-8b": "Qwen3-8B-DFlash-b16",
    "llama-3.1-8b": "LLaMA3.1-8B-Instruct-UltraChat", "qwen3-coder-30b-a3b": "Qwen3-Coder-30B-A3B",
    "gpt-oss-20b": "gpt-oss-20b", "gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip


@pytest.mark.parametrize("name", TIMED)
def test_sizes_that_are_timed_are_the_published_ones(name):
    ours, one = SIZES[name], next(one for one in PUBLISHED if one.draft == TIMED[name])
    found = ours.drafter
    assert (found.layers, found.F, [found.H, found.G, found.K]) == (one.layers, one.ffn, one.heads)
    assert (list(found.taps), found.block, ours.D) == (one.taps, one.block, one.width)
    assert ours.layers == one.target_layers and one.theta in (None, ours.theta)
