"""Logits that are NaN or infinite end the request with an error that says so;
they never become token 0 (F99, F100)."""

import json

import pytest

import minidflash as md
from minidflash import request
from minidflash.errors import UserError
from tests.automaton import build
from tests.conftest import open_or_skip
from tests.replay import Replay, proposing
from tests.test_field_log_wiring import change_tensors

PROMPT = [9] * 40 + [5]
NAN, INFINITY = 0x7FC0, 0x7F80  # in bf16
WAYS = {
    "plain": {"drafter": False}, "drafted": {"verify": 4}, "auto": {},
    "sampled": {"temperature": 1.0, "verify": 4}, "scored": {"logprobs": True, "verify": 4},
    "rejected": {"temperature": 1.0, "accept": "reject", "verify": 4},
}  # fmt: skip


def poisoned(folder, tensor, row, of="target", bits=NAN, name="FX-B"):
    """An automaton pair with one row of a tensor that is no number; of FX-B 5 -> 20 -> 20 ..."""
    pair = dict(zip(("target", "draft"), build(folder, name), strict=True))

    def change(name, values):
        if name == tensor:
            values = values.copy()
            values[row] = bits
        return values

    change_tensors(pair[of], change)
    return pair["target"], pair["draft"]


def open_pair(pair, backend, activations="f32"):
    open_or_skip(backend, activations)
    target, drafter = pair
    return md.load(
        str(target), drafter=str(drafter), backend=backend, activations=activations, warm=False, ctx=128
    )


@pytest.mark.parametrize(
    "backend", ["oracle", "numba", "emulate", pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("way", WAYS)
def test_what_came_before_is_kept_and_the_error_names_the_position(tmp_path, backend, way):
    """The embedding of 20 is broken: the prompt gives 20, and what follows it is no number."""
    engine = open_pair(poisoned(tmp_path, "model.embed_tokens.weight", 20), backend)
    found = []
    with pytest.raises(UserError, match=f"position {len(PROMPT)} are not finite") as error:
        found.extend(md.stream(engine, PROMPT, max_tokens=20, **WAYS[way]))
    assert [token for r in found for token in r.tokens] == [20]
    assert error.value.code == 1 and error.value.hint
    assert not engine.is_busy
    again = md.generate(engine, [9, 10], max_tokens=2, **WAYS[way])
    assert again.tokens == [30, 31] and again.finish_reason == "length", "the engine goes on"


@pytest.mark.parametrize("backend", ["numba", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_round_gives_the_tokens_that_it_kept_tokens_before(tmp_path, backend):
    """5 -> 6 -> 7 -> 40, as all drafts say; what follows is no number."""
    engine = open_pair(poisoned(tmp_path, "model.embed_tokens.weight", 40, name="FX-L"), backend)
    found, replay = [], Replay([5, 6, 7, 40], 1, 8, 64, plan=7)
    with pytest.raises(UserError, match="position 3 are not finite"), proposing(engine, replay):
        found.extend(md.stream(engine, [5], max_tokens=20, verify=4))
    assert [(r.tokens, r.accepted) for r in found] == [([6], 0), ([7, 40], 2)]


def test_a_sample_without_numbers_breaks_off_behind_those_before_it(tmp_path, monkeypatch):
    pair, told = poisoned(tmp_path, "model.embed_tokens.weight", 21, name="FX-S"), []
    engine = open_pair(pair, "numba")
    for slots in (1, 16):
        monkeypatch.setattr(request, "SIDE_BY_SIDE", slots)
        rounds, options = [], {"temperature": 1.0, "samples": 9, "ignore_eos": True, "verify": 4}
        with pytest.raises(UserError) as error:
            rounds.extend(md.stream(engine, [5], max_tokens=2, **options))
        told.append(([(r.sample, r.tokens, r.finish_reason) for r in rounds], str(error.value)))
        assert not engine.is_busy
    assert told[0] == told[1] and 0 < told[0][0][-1][0] < 8


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("bits", [NAN, INFINITY])
@pytest.mark.parametrize("way", ["plain", "drafted", "sampled"])
def test_a_prompt_without_numbers_gives_no_token(tmp_path, way, bits, activations):
    engine = open_pair(poisoned(tmp_path, "model.norm.weight", 3, bits=bits), "numba", activations)
    with pytest.raises(UserError, match=f"position {len(PROMPT) - 1} are not finite"):
        md.generate(engine, PROMPT, max_tokens=20, **WAYS[way])
    assert not engine.is_busy


@pytest.mark.parametrize("way", ["drafted", "rejected", "sampled"])
@pytest.mark.parametrize("tensor", ["norm.weight", "fc.weight"])
def test_a_drafter_without_numbers_changes_nothing(tmp_path, tensor, way):
    """F127: what it drafts is id 0, the text is the target's."""
    engine = open_pair(poisoned(tmp_path, tensor, 3, "draft"), "numba")
    result = md.generate(engine, PROMPT, max_tokens=12, **WAYS[way])
    assert (
        result.tokens == md.generate(engine, PROMPT, max_tokens=12, drafter=False).tokens or way == "rejected"
    )
    assert all(
        token in range(64)
        for r in md.stream(engine, PROMPT, max_tokens=12, **WAYS[way])
        for token in r.drafted
    )


def test_a_stop_text_before_it_ends_the_run_as_ever(tmp_path):
    engine = open_pair(poisoned(tmp_path, "model.embed_tokens.weight", 20), "numba")
    result = md.generate(engine, PROMPT, max_tokens=20, verify=4, stop=[engine.tokenizer.decode([20])])
    assert result.finish_reason == "stop"


def test_the_command_line_prints_what_came_and_says_why(tmp_path, mdf):
    target, drafter = poisoned(tmp_path, "model.embed_tokens.weight", 20)
    tokens = " ".join(map(str, PROMPT))
    args = "generate", "--target", target, "--drafter", drafter, "--tokens", tokens, "-n", 9
    code, out, err = mdf(*args)
    assert code == 1 and "t20" in out and out.endswith("\n") and "not finite" in err
    trace = tmp_path / "trace.jsonl"
    code, out, err = mdf(*args, "--json", "--logprobs", "--trace", trace)
    assert code == 1 and out == "" and "not finite" in err
    assert [
        json.loads(line, parse_constant=pytest.fail)["ids"] for line in trace.read_text().splitlines()[1:]
    ] == [[20]]
