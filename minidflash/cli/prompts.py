"""Prompt files of `bench` and `verify`: JSON lines, in our own layout or in that of a public benchmark."""

import json
from dataclasses import dataclass
from pathlib import Path

from ..encoding import read_text
from ..errors import UserError

BUILT_IN = [
    {"kind": "chat", "prompt": "Why is the sky blue?"},
    {"kind": "code", "prompt": "Write a Python function that reverses the words of a sentence."},
    {
        "kind": "maths",
        "prompt": "A train goes 180 km in 2 hours. How far does it go in 5 hours? Show each step.",
    },
    {"kind": "languages", "prompt": "Écris trois phrases sur la mer en automne."},
]


class NoPrompt(Exception):
    """A row of a file that is none, and why."""


@dataclass(frozen=True)
class Layout:
    """A benchmark's rows. keys: those that tell it from others. text: the key that holds the task.
    kind: what its rows are counted as, or the key that says it. before, after: what the public DFlash
    benchmark puts around a task, so that tau is that of the same prompts."""

    name: str
    keys: tuple
    text: str
    kind: str
    before: str = ""
    after: str = ""

    def prompt(self, row):
        """The row as a prompt. Errors: NoPrompt with what is wrong with it."""
        turns = row[self.text] if self.text == "turns" else [row[self.text]]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise NoPrompt(f'its "{self.text}" holds no text')
        kind = row.get(self.kind, self.kind)
        first, *later = turns
        return {"kind": kind, "prompt": self.before + first + self.after} | ({"then": later} if later else {})


STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
LAYOUTS = (
    Layout("MT-Bench", ("question_id", "category", "turns"), "turns", "category"),
    Layout("HumanEval", ("task_id", "prompt"), "prompt", "humaneval", TASK, "\n```"),
    Layout("GSM8K", ("question", "answer"), "question", "gsm8k", after=STEPS),
    Layout("MATH-500", ("problem", "answer"), "problem", "math-500", after=STEPS),
)
HINT = 'ours: {"kind": "chat", "prompt": "..."} or {"tokens": [5, 9]}; others: ' + "; ".join(
    f"{layout.name} ({', '.join(layout.keys)})" for layout in LAYOUTS
)


def read_prompts(path=None):
    """Prompts: list of {"kind", "prompt"} or {"kind", "tokens"}; "then": the later turns of a dialogue.

    path: a file of JSON lines; None: the checkout's bench/prompts.jsonl, else four built in.
    Errors: UserError naming the line, the keys found there, and the layouts that are known.
    """
    if path is None:
        kept = Path(__file__).resolve().parents[2] / "bench" / "prompts.jsonl"
        if not kept.is_file():
            return BUILT_IN
        path = kept
    prompts = []
    for number, line in enumerate(read_text(path, f"prompts {path}").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(prompt_of(json.loads(line)))
        except NoPrompt as why:
            raise UserError(f"{path}, line {number}: this is no prompt: {why}", HINT) from None
        except ValueError:
            raise UserError(f"{path}, line {number}: this is no prompt, and no JSON", HINT) from None
    if not prompts:
        raise UserError(f"prompts {path}: the file is empty")
    return prompts


def prompt_of(row):
    """One row of a file as a prompt. Errors: NoPrompt saying what was found."""
    if not isinstance(row, dict):
        raise NoPrompt(f"a JSON {type(row).__name__}, not an object")
    layout = next((one for one in LAYOUTS if all(key in row for key in one.keys)), None)
    found = layout.prompt(row) if layout else {"kind": "all", **row}
    given = found.get("tokens") or found.get("prompt")
    if given is None:
        raise NoPrompt(f"its keys are {', '.join(row) or 'none'}, which no layout has")
    if not isinstance(given, (str, list)):
        raise NoPrompt(f"neither text nor a list, but {given!r}")
    if not isinstance(found["kind"], str):
        raise NoPrompt(f"its kind is {found['kind']!r}, not text")
    return found
