"""What a chat template gets of a prompt: messages, the system's first, and what the user sets."""

from types import SimpleNamespace

import pytest

from minidflash.chat import render_chat
from minidflash.errors import UserError
from minidflash.request import OPTIONS, render

HI = {"role": "user", "content": "Hi"}


def rendered(prompt, **options):
    """(messages, arguments) as the tokenizer gets them."""
    tokenizer = SimpleNamespace(has_chat_template=True, render=lambda messages, **given: (messages, given))
    return render(SimpleNamespace(tokenizer=tokenizer), prompt, OPTIONS | options)


def test_a_text_becomes_a_chat():
    assert rendered("Hi") == ([HI], {})
    told = {"role": "system", "content": "Be brief."}
    assert rendered("Hi", system="Be brief.") == ([told, HI], {})
    assert rendered([HI], template_args={"deep": True}) == ([HI], {"deep": True})
    assert rendered("Hi", raw=True) == "Hi"
    with pytest.raises(UserError, match="--system"):
        rendered([HI], system="Be brief.")


def test_what_is_set_reaches_the_template():
    source = (
        "{{ bos_token }}{{ messages[0].content }}{% if deep %} deep{% endif %}{{ add_generation_prompt }}"
    )
    assert render_chat(source, [HI], {"bos_token": "<s>"}, {"deep": True}) == "<s>Hi deepTrue"
    assert render_chat(source, [HI], {"bos_token": "<s>"}, {}) == "<s>HiTrue"
    assert render_chat(source, [HI], {"bos_token": "<s>"}, {"add_generation_prompt": False}) == "<s>HiFalse"
