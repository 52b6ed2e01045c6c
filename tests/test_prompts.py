"""Prompt files: the layouts of public benchmarks are read as what they are, others are refused by name;
and what bench writes as CSV."""

import csv
import io
import json

import pytest

from minidflash.cli import bench as measure
from minidflash.cli.prompts import LAYOUTS, read_prompts
from minidflash.errors import UserError
from tests import automaton

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = {  # rows of our own, in the layouts of the published files
    "GSM8K": {"question": "Ann has 3 pears and buys {2}.", "answer": "3+2=5\n#### 5"},
    "HumanEval": {
        "task_id": "HumanEval/900", "prompt": 'def twice(x):\n    """2 * x"""\n', "entry_point": "twice",
        "canonical_solution": "    return 2 * x\n", "test": "assert twice(1) == 2",
    },
    "MT-Bench": {"question_id": 900, "category": "writing", "turns": ["t9 t5", "t5 t9 t9"]},
    "MATH-500": {"problem": "What is $1+1$?", "solution": "It is 2.", "answer": "2", "unique_id": "x/1"},
}  # fmt: skip
READ = {
    "GSM8K": {"kind": "gsm8k", "prompt": "Ann has 3 pears and buys {2}.\nPlease reason step by step, and "
              "put your final answer within \\boxed{}."},
    "HumanEval": {"kind": "humaneval", "prompt": "Write a solution to the following problem and make sure "
                  'that it passes the tests:\n```python\ndef twice(x):\n    """2 * x"""\n\n```'},
    "MT-Bench": {"kind": "writing", "prompt": "t9 t5", "then": ["t5 t9 t9"]},
    "MATH-500": {"kind": "math-500", "prompt": "What is $1+1$?\nPlease reason step by step, and put your "
                 "final answer within \\boxed{}."},
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target, draft = automaton.build(tmp_path_factory.mktemp("FX-B"), "FX-B")
    (target / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    return ["--target", target, "--drafter", draft]


def written(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_each_layout_is_read_as_what_it_is(tmp_path):
    assert set(ROWS) == set(READ) == {layout.name for layout in LAYOUTS}
    own = {"kind": "a", "tokens": [5, 9]}, {"prompt": "t9"}
    found = read_prompts(written(tmp_path / "p.jsonl", *ROWS.values(), *own))
    assert found == [*(READ[name] for name in ROWS), own[0], {"kind": "all", "prompt": "t9"}]


@pytest.mark.parametrize("row, words", [
    ({"query": "t9", "reply": "t5"}, "its keys are query, reply, which no layout has"),
    ({"question": "t9"}, "its keys are question, which no layout has"),
    ({"problem": "t9", "level": 5}, "its keys are problem, level, which no layout has"),
    ({"turns": ["t9"], "category": "a"}, "its keys are turns, category, which no layout has"),
    ({}, "its keys are none"),
    ([1], "a JSON list, not an object"),
    ({"question": "", "answer": "5"}, 'its "question" holds no text'),
    (ROWS["MT-Bench"] | {"turns": ["t9", 5]}, 'its "turns" holds no text'),
    (ROWS["MT-Bench"] | {"turns": []}, 'its "turns" holds no text'),
    (ROWS["MT-Bench"] | {"turns": "t9"}, 'its "turns" holds no text'),
    (ROWS["MT-Bench"] | {"category": 5}, "its kind is 5, not text"),
    ({"kind": ["a"], "prompt": "t9"}, "its kind is ['a'], not text"),
    ({"prompt": 5}, "neither text nor a list, but 5"),
])  # fmt: skip
def test_an_unknown_layout_is_refused_by_what_was_found(tmp_path, row, words):
    path = written(tmp_path / "p.jsonl", {"prompt": "t9"}, row)
    with pytest.raises(UserError) as error:
        read_prompts(path)
    assert f"{path}, line 2: this is no prompt: {words}" in str(error.value)
    for name in ROWS:
        assert name in error.value.hint


def test_the_turns_of_a_dialogue_are_asked_behind_the_plain_answers(tmp_path, monkeypatch):
    asked = []

    def measured(engine, prompt, args):
        asked.append(prompt["prompt"])
        return {"text": f"answer {len(asked)}"}

    monkeypatch.setattr(measure, "measure", measured)
    (prompt,) = read_prompts(written(tmp_path / "p.jsonl", ROWS["MT-Bench"]))
    assert len(measure.dialogue(None, prompt, None)) == 2
    first = {"role": "user", "content": "t9 t5"}
    then = {"role": "user", "content": "t5 t9 t9"}
    assert asked == [[first], [first, {"role": "assistant", "content": "answer 1"}, then]]


def test_csv_says_what_json_says(mdf, pair, tmp_path):
    rows = {"kind": "b, c", "tokens": [9, 5]}, ROWS["MT-Bench"]
    path = written(tmp_path / "p.jsonl", *rows)
    argv = ["bench", *pair, "--prompts", path, "-n", 6, "-r", 1, "--verify", 8]
    code, out, _ = mdf(*argv, "-o", "csv")
    assert code == 0
    lines = list(csv.DictReader(io.StringIO(out)))
    told = json.loads(mdf(*argv, "-o", "json")[1])
    assert [line["kind"] for line in lines] == ["b, c", "writing", "all"] == [r["kind"] for r in told["rows"]]
    assert [line["prompts"] for line in lines] == ["1", "2", "3"]
    shared = {name: value for name, value in told.items() if name != "rows"}
    for line, row in zip(lines, told["rows"], strict=True):
        assert set(line) == set(row) | set(shared)
        for name in (
            "tau",
            "prompts",
            "is_lossless",
            "distinct_ratio",
            "target",
            "drafter",
            "machine",
            "repeat",
        ):
            assert line[name] == str((row | shared)[name]), name
        assert line["block"] == "" and float(line["speedup"]) > 0
