"""gpt-oss's chat template in our sandbox: what its constructs give, with a template of ours that has them.

MINIDFLASH_HARMONY_TEMPLATE names a file with the published one, which is then held to the same.
"""

import os
from datetime import datetime
from pathlib import Path

import pytest

from minidflash.chat import parse_template_arg, render_chat
from minidflash.errors import UserError
from tests import harmony

PUBLISHED = os.environ.get("MINIDFLASH_HARMONY_TEMPLATE")
TEMPLATES = {"ours": harmony.TEMPLATE}
if PUBLISHED:
    TEMPLATES["published"] = Path(PUBLISHED).read_text(encoding="utf-8")

USER, MORE = {"role": "user", "content": "<2+2> & 'so'?"}, {"role": "user", "content": "And 3+3?"}
THOUGHT = {"role": "assistant", "thinking": "Hm.", "content": "4"}
CALL = {"role": "assistant", "thinking": "Look.", "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}]}  # fmt: skip
FOUND = {"role": "tool", "content": "<sunny>"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": {
    "type": "object", "required": ["city"], "properties": {
        "city": {"type": "string"}, "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "array", "items": {"type": "integer"}},
        "far": {"type": "number", "default": 2.5}}}}}]  # fmt: skip
ASKED = "<|start|>user<|message|><2+2> & 'so'?<|end|>"
OPEN = "<|start|>assistant"
LOOKED = "<|start|>assistant<|channel|>analysis<|message|>Look.<|end|>"
CALLED = (
    '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Zürich"}<|call|>'
)
GAVE = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"<sunny>"<|end|>'


@pytest.fixture(params=TEMPLATES)
def render(request):
    """(messages, arguments) -> (the system's message, the rest)."""

    def call(messages, **args):
        text = render_chat(TEMPLATES[request.param], messages, {}, args)
        system, end, rest = text.partition("<|end|>")
        assert end and system.startswith("<|start|>system<|message|>")
        return system, rest

    return call


def test_the_system_message_takes_effort_identity_and_date(render):
    system, rest = render([USER])
    assert rest == ASKED + OPEN
    assert "\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final." in system
    assert f"\nCurrent date: {datetime.now():%Y-%m-%d}\n" in system
    given = dict(
        [parse_template_arg("reasoning_effort=low"), parse_template_arg("model_identity=You are Bob.")]
    )
    system, rest = render([USER], **given)
    assert "You are Bob.\n" in system and "\n\nReasoning: low\n\n" in system and rest == ASKED + OPEN
    assert "# Tools" not in system
    assert (
        "# Tools\n\n## python" in render([USER], **dict([parse_template_arg('builtin_tools=["python"]')]))[0]
    )
    with pytest.raises(UserError, match="does not read 'reasoning_efort'"):
        render([USER], reasoning_efort="low")


def test_instructions_and_tools_are_the_developer_s(render):
    wanted = "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
    for role in ("system", "developer"):
        assert render([{"role": role, "content": "Be brief."}, USER])[1] == wanted + ASKED + OPEN
    rest = render([USER], tools=TOOLS)[1]
    begin = (
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n// The weather.\n"
    )
    assert rest.startswith(begin) and rest.endswith("// namespace functions<|end|>" + ASKED + OPEN)
    fields = 'city: string,\nunit?: "c" | "f",\ndays?: number[],\nfar?: number, // default: 2.5,\n'
    assert "type weather = (_: {\n" + fields + "}) => any;" in rest


def test_earlier_turns_lose_their_thinking(render):
    told = "<|channel|>final<|message|>4<|end|><|start|>user<|message|>And 3+3?<|end|>"
    assert render([USER, THOUGHT, MORE])[1] == ASKED + OPEN + told + OPEN
    ended = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
    assert render([USER, THOUGHT], add_generation_prompt=False)[1] == ASKED + OPEN + ended


def test_a_call_keeps_its_thinking_until_it_is_answered(render):
    assert render([USER, CALL, FOUND], tools=TOOLS)[1].endswith(ASKED + LOOKED + CALLED + GAVE + OPEN)
    rest = render([USER, CALL, FOUND, THOUGHT, MORE])[1]
    assert rest.startswith(ASKED + CALLED + GAVE + OPEN + "<|channel|>final") and "Look." not in rest


@pytest.mark.parametrize(
    "messages, words",
    [
        ([USER, FOUND], "no previous"),
        ([USER, {"role": "assistant", "content": "<|channel|>final<|message|>4"}, MORE], "<|channel|> tags"),
    ],
)
def test_what_the_template_refuses_is_one_line(render, messages, words):
    with pytest.raises(UserError) as error:
        render(messages)
    assert words in str(error.value) and "\n" not in str(error.value) and error.value.code == 2
