"""Published pairs from their config.json alone: sizes, taps, mask ids, memory, and that a card holds them."""

import json
import math
from itertools import product

import pytest
from minidflash.kernels import open_ops
from minidflash.weights import drafter_names, names, open_checkpoint

from minidflash import costs, fit
from minidflash.config import read_drafter, read_target
from minidflash.pair import open_pair
from tests.published import PAIRS, checkpoints
from tests.published_tensors import DRAFTERS, LISTINGS

# Parameters of target and drafter, and bytes of the target's weights: models.md 9, dflash.md 2.2.
KNOWN = {
    "Qwen3-Coder-30B-A3B": (30.5e9, 474e6, 61.1e9),
    # 6.95 and 29.9 billion linear weights of a byte and 1/256; tables, and routers, of two
    "Qwen3-8B-FP8": (8.19e9, 1049e6, 9.46e9),
    "Qwen3-Coder-30B-A3B-FP8": (30.5e9, 474e6, 31.3e9),
    "gpt-oss-20b": (20.9e9, 785e6, 13.8e9),
    "gpt-oss-120b": (116.8e9, 785e6, 65.2e9),
    "gemma-4-31B": (30.7e9, 1536e6, 61.4e9),
    "gemma-4-26B-A4B": (25.2e9, 430e6, 50.4e9),
}
DENSE = "gemma-4-31B", "Qwen3-8B-FP8"


@pytest.fixture
def folders(tmp_path):
    """name -> (target's folder, drafter's) with config.json alone."""

    def write(name):
        found = []
        for role, config in zip(("target", "drafter"), PAIRS[name], strict=True):
            (tmp_path / role).mkdir()
            (tmp_path / role / "config.json").write_text(json.dumps(config))
            found.append(str(tmp_path / role))
        return found

    return write


@pytest.mark.parametrize("name", PAIRS)
def test_info_resolves_a_pair_without_weights(mdf, folders, name):
    target, drafter = folders(name)
    code, out, err = mdf("info", "--target", target, "--drafter", drafter, "--json", "--ctx", 8192)
    assert (code, err) == (0, "")
    found = json.loads(out)
    whole, small, _ = KNOWN[name]
    assert found["target"]["parameters"] == pytest.approx(whole, rel=3e-3)
    assert found["drafter"]["parameters"] == pytest.approx(small, rel=3e-3)
    own, facts = PAIRS[name][1], found["drafter"]["facts"]
    assert facts["taps"]["value"] == own["dflash_config"]["target_layer_ids"]
    assert facts["mask_id"]["value"] == own["dflash_config"]["mask_token_id"]
    assert facts["block"]["value"] == own["block_size"]
    text = mdf("info", "--target", target, "--drafter", drafter, "--ctx", 8192)[1]
    assert "no weights here" in text and "pays from tau" in text
    assert ("experts a layer expected" in text) == (name not in DENSE)


@pytest.mark.parametrize("name", PAIRS)
def test_weights_have_the_bytes_that_are_published(folders, name):
    pair = open_pair(*folders(name), needs_weights=False)
    target = sum(bound.nbytes for bound in pair.target.bound.values())
    assert target == pytest.approx(KNOWN[name][2], rel=5e-3)
    parts = costs.weight_parts(pair)
    assert sum(parts.values()) == pair.weights and (name in DENSE or parts["experts"] > 0.7 * target)


def test_the_largest_fits_one_card_of_80_gb_with_a_context_of_8192(folders):
    pair = open_pair(*folders("gpt-oss-120b"), needs_weights=False)
    plan = fit.make_plan(open_ops("numba", "bf16"), pair, ctx=8192, chunk=2048)
    assert sum(plan.memory.values()) < fit.FILLED * 80e9


@pytest.mark.parametrize("name, rows, experts, gigabytes", [
    ("Qwen3-Coder-30B-A3B", 16, 82, 40), ("Qwen3-Coder-30B-A3B-FP8", 16, 82, 20.4),
    ("gpt-oss-20b", 16, 28, 11.4), ("gpt-oss-120b", 16, 51, 27), ("gemma-4-26B-A4B", 16, 82, 34),
])  # fmt: skip
def test_expected_experts_and_bytes_of_a_pass_are_those_of_the_spec(folders, name, rows, experts, gigabytes):
    """models.md 9: weights of a verify pass of 16 rows whose routing is independent."""
    pair = open_pair(*folders(name), needs_weights=False)
    head = pair.target.bound.get("head", pair.target.bound["embed"]).nbytes
    step = costs._verify("verify", pair.target, rows, head, 0, 2)
    assert step.experts == pytest.approx(experts, abs=0.6)
    assert step.bytes == pytest.approx(gigabytes * 1e9, rel=0.03)


def test_a_target_without_weights_is_for_info_alone(mdf, folders):
    target, drafter = folders("gpt-oss-20b")
    code, out, err = mdf("generate", "--tokens", "9", "--target", target, "--drafter", drafter)
    assert (code, out) == (2, "") and "no weights found" in err


def test_the_page_names_the_headers_that_are_read():
    text = checkpoints.PAGE.read_text(encoding="utf-8").partition("were, of ")[2].partition(": a test")[0]
    named = text.replace("\n", " ").replace(" and the drafter ", ", ").split(", ")
    assert named == [*LISTINGS, *DRAFTERS]


READ = {  # role -> config of the files, tensors bound, tensors foretold
    "target": (
        lambda files: read_target(files.config, files.generation, files.tensors),
        names.bind_target, names.foretell_target,
    ),
    "drafter": (
        lambda files: read_drafter(files.config, files.tensors),
        drafter_names.bind_drafter, drafter_names.foretell_drafter,
    ),
}  # fmt: skip


@pytest.mark.parametrize("role, name", [*product(["target"], LISTINGS), *product(["drafter"], DRAFTERS)])
def test_a_published_header_is_read_whole(tmp_path, role, name):
    """Names, shapes and dtypes of the real files: all known, none missing, sizes as foretold."""
    listing = (LISTINGS | DRAFTERS)[name]
    shapes = [shape for _, _, shape in listing.each()]
    assert (len(shapes), sum(map(math.prod, shapes))) == (listing.tensors, listing.numbers)
    files, (read, bind, foretell) = open_checkpoint(str(listing.write(tmp_path / role)), role), READ[role]
    config = read(files)
    sizes = [
        {part: one.nbytes for part, one in found.items()}
        for found in (bind(config, files.tensors), foretell(config, None))
    ]
    assert sizes[0] == sizes[1]
