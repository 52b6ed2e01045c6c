"""The sampling flags of the command line (F61): each changes what comes out, or is refused."""

import json
from importlib import resources

import jsonschema
import pytest

from minidflash.cli import main
from tests.automaton import build


@pytest.fixture
def mdf(tmp_path, capsys):
    target, draft = build(tmp_path, "FX-S")

    def call(*argv):
        pair = (
            "--target",
            str(target),
            "--drafter",
            str(draft),
            "--tokens",
            "9 9 9 5",
            "-n",
            "24",
            "--ignore-eos",
        )
        code = main(["generate", *pair, *map(str, argv)])
        return code, *capsys.readouterr()

    return call


FLAGS = [
    ("--top-k", 1),
    ("--top-p", 0.3),
    ("--min-p", 0.9),
    ("--seed", 5),
    ("--samples", 2),
    ("--temperature", 3),
]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag[0])
def test_f61_every_flag_changes_what_comes_out_or_is_refused(mdf, flag):
    usual = mdf("--temperature", 1.0)
    assert usual[0] == 0 and mdf("--temperature", 1.0)[1] == usual[1]
    code, out, _ = mdf("--temperature", 1.0, *flag)
    assert code == 0 and out != usual[1]
    if flag[0] != "--temperature":
        code, out, err = mdf(*flag)
        assert (code, out) == (2, "") and f"{flag[0]} has no effect at temperature 0" in err


@pytest.mark.parametrize("flags, words", [
    (("--temperature", -1), "need a number from 0 up"), (("--temperature", "nan"), "need a number from 0 up"),
    (("--temperature", 1, "--top-p", 0), "top-p is 0.0"),
    (("--temperature", 1, "--top-k", -1), "need a whole number"),
    (("--temperature", 1, "--min-p", 2), "need a number from 0 to 1"),
    (("--logprobs",), "--logprobs has no place"),
    (("--temperature", 1, "--accept", "reject"), "--accept reject needs a fixed --verify"),
])  # fmt: skip
def test_bad_flags_are_refused(mdf, flags, words):
    code, out, err = mdf(*flags)
    assert (code, out) == (2, "") and words in err


def test_json_holds_samples_and_logprobs_and_fits_the_schema(mdf):
    schema = json.loads((resources.files("minidflash") / "result.schema.json").read_text(encoding="utf-8"))
    code, out, _ = mdf("--temperature", 1.0, "--samples", 3, "--logprobs", "--json")
    found = json.loads(out)
    jsonschema.validate(found, schema)
    assert code == 0 and len(found["samples"]) == 3 and len(found["logprobs"]) == 24
    assert found["samples"][0] == {name: found[name] for name in found["samples"][0]}
    code, out, _ = mdf("--temperature", 1.0, "--samples", 3)
    assert out == "\n\n".join(one["text"] for one in found["samples"]) + "\n"
    assert mdf("--temperature", 1.0, "--samples", 3, "--no-stream")[1] == out
