"""Statistics: what counts as a round, acceptance by position, and the JSON object against its schema."""

import copy
import json
from importlib.resources import files

import jsonschema
import pytest

from minidflash.stats import SCHEMA, Memory, Result, Round, Stats, Timing

FACTS = {
    "prompt_tokens": 5,
    "backend": "numba",
    "activations": "f32",
    "machine": "two cores",
    "target": "default",
    "drafter": "default",
    "options": {"max_tokens": 33},
}


def speculative():
    """FX-B of the field log at budget 33, block 8: one token from prefill, four rounds of eight."""
    prefill = Round([1], text="a")
    return [prefill, *[Round([2] * 8, text="b" * 8, drafted=[2] * 7, accepted=7, verify=8) for _ in range(4)]]


def schema():
    """The schema as the package carries it."""
    return json.loads((files("minidflash") / "result.schema.json").read_text(encoding="utf-8"))


def test_every_count_is_defined():
    stats = Stats.of(speculative(), block=8)
    assert (stats.accepted, stats.round_count, stats.drafted, stats.tau) == (28, 4, 28, 8.0)
    assert stats.acceptance_by_position == [1.0] * 7 and stats.verify == [8] * 4 and stats.block == 8


def test_acceptance_by_position_counts_only_slots_reached():
    rounds = [
        Round([9]),
        Round([1], drafted=[5, 5, 5], accepted=0, verify=4),  # slot 1 reached and refused
        Round([1, 2, 3], drafted=[1, 2, 5], accepted=2, verify=4),  # slot 3 reached and refused
        Round([1, 2], drafted=[1], accepted=1, verify=2),  # slot 2 was not verified
        Round([1], verify=1),  # nothing drafted
    ]
    stats = Stats.of(rounds, block=5)
    assert stats.acceptance_by_position == [2 / 3, 1.0, 0.0, None]
    assert (stats.round_count, stats.drafted, stats.accepted, stats.tau) == (4, 7, 3, 7 / 4)
    assert stats.verify == [4, 4, 2, 1]


def test_cuts_shorten_tokens_but_not_acceptance():
    rounds = [Round([1]), Round([2, 3], drafted=[2, 3, 4], accepted=3, verify=4, finish_reason="stop")]
    result = Result.of(rounds, block=4, **FACTS)
    assert result.rounds == [2] and result.stats.accepted == 3 and result.finish_reason == "stop"
    assert 1 + sum(result.rounds) == len(result.tokens)


def test_rounds_that_a_stop_emptied_do_not_count():
    rounds = [Round([1], text="a"), Round([], text="", drafted=[7], verify=2, finish_reason="stop")]
    result = Result.of(rounds, block=4, **FACTS)
    assert result.rounds == [] and result.stats.tau is None and result.stats.verify == []
    assert result.finish_reason == "stop" and result.text == "a"


def test_plain_decoding_has_no_rounds():
    rounds = [Round([1], text="a"), Round([2], text="b", verify=1)]
    result = Result.of(rounds, block=None, **{**FACTS, "drafter": None})
    assert result.rounds == [] and result.stats.tau is None and result.stats.round_count == 0
    assert result.stats.block is None and result.stats.acceptance_by_position == []
    assert (result.tokens, result.text, result.finish_reason) == ([1, 2], "ab", "length")


def test_speed_counts_tokens_after_the_first():
    result = Result.of(speculative(), block=8, timing=Timing(decode_s=2.0), **FACTS)
    assert result.timing.tokens_per_s == 16.0
    assert Result.of([], block=8, **FACTS).timing.tokens_per_s is None


def test_facts_are_checked():
    with pytest.raises(TypeError):
        Result.of([], block=8)
    with pytest.raises(TypeError):
        Result.of([], block=8, colour="red", **FACTS)


def examples():
    """Results of every form."""
    yield Result.of(speculative(), block=8, memory_bytes=Memory(weights=7), **FACTS)
    yield Result.of([], block=8, **FACTS)
    yield Result.of([Round([1])], block=8, finish_reason="interrupted", **FACTS)  # no tokenizer
    yield Result.of([Round([1], text="é")], block=None, **{**FACTS, "drafter": None})
    yield Result.of([Round([1], text=""), Round([2], text="", verify=1)], block=1, **FACTS)


@pytest.mark.parametrize("result", list(examples()))
def test_json_fits_the_schema(result):
    found = json.loads(json.dumps(result.to_json(), allow_nan=False))
    jsonschema.validate(found, schema())
    assert found["schema"] == SCHEMA == schema()["properties"]["schema"]["const"]


def test_keys_are_those_of_the_contract_in_its_order():
    found = Result.of(speculative(), block=8, **FACTS).to_json()
    assert " ".join(found) == (
        "schema text tokens finish_reason prompt_tokens rounds stats timing memory_bytes backend activations "
        "machine target drafter options"
    )
    assert " ".join(found["stats"]) == (
        "tau round_count drafted accepted acceptance_by_position verify block rows_reused rows_run"
    )
    assert " ".join(found["timing"]) == "load_s jit_s prefill_s decode_s ttft_s tokens_per_s"
    assert " ".join(found["memory_bytes"]) == "weights rope_tables target_cache drafter_cache workspace"
    assert schema()["required"] == list(found)


@pytest.mark.parametrize("path", ["text", "stats.tau", "timing.ttft_s", "memory_bytes.workspace", "schema"])
def test_schema_refuses_missing_and_unknown_keys(path):
    good = Result.of(speculative(), block=8, **FACTS).to_json()
    *parents, key = path.split(".")
    for change in ("drop", "add"):
        bad = copy.deepcopy(good)
        place = bad
        for parent in parents:
            place = place[parent]
        if change == "drop":
            del place[key]
        else:
            place["surplus"] = 1
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema())
