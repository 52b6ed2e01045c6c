"""md.Chat: what is said, kept and reused, on an automaton whose words are t0, t1 ..."""

import pytest

import minidflash as md
from minidflash.errors import UserError
from tests import automaton, harmony
from tests.test_lossless import embedded

pytestmark = pytest.mark.usefixtures("one_thread")
# t40 begins a system text, t41 a user's, t42 a reply; behind its t5 the automaton says t20 for ever.
TEMPLATE = """{% for m in messages %}{% if m.role == "assistant" %}t42 t5 {{ m.content }} t43 {% else %}
{{- "t40 " if m.role == "system" else "t41 " }}{{ m.content }} t43 {% endif %}{% endfor %}t42 t5"""
FORGETS = TEMPLATE.replace("{{ m.content }} t43 {% else %}", "{{ m.content.split()[-1] }} t43 {% else %}")
OPTIONS = {"max_tokens": 12, "verify": 8}


def build(folder, template=TEMPLATE):
    """FX-B with a chat template: (target folder, drafter folder)."""
    target, drafter = automaton.build(folder, "FX-B")
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    return target, drafter


def opened(folder, **options):
    if not (folder / "target").exists():
        build(folder)
    names = [str(folder / name) for name in ("target", "draft")]
    return md.load(names[0], drafter=names[1], **{"warm": False, "ctx": 256} | options)


@pytest.fixture
def engine(tmp_path):
    return opened(tmp_path)


def assert_fresh(chat, result, **options):
    """A reply is the run of the messages before it, and is what the conversation keeps."""
    *said, reply = chat.messages
    fresh = md.generate(chat.engine, said, **chat.options | options)
    assert (result.tokens, result.text) == (fresh.tokens, fresh.text)
    assert reply == {"role": "assistant", "content": result.text}
    assert result.prompt_tokens == result.stats.rows_reused + result.stats.rows_run


def test_a_turn_runs_what_was_said_since(engine):
    chat = md.Chat(engine, "t30 t31", **OPTIONS)
    first = chat.say("t9 t9")
    assert first.text == " ".join(["t20"] * 12) and first.rounds == [8, 3]
    assert (first.stats.rows_reused, first.stats.rows_run) == (0, 10)
    second = chat.say("t9")
    # The last token has no row; six words are new.
    assert (second.stats.rows_reused, second.stats.rows_run) == (10 + 12 - 1, 1 + 6)
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert second.to_json()["stats"]["rows_run"] == 7
    assert_fresh(chat, second)
    third = chat.say("t9 t10", temperature=1.0, seed=4, max_tokens=5)
    assert third.stats.rows_reused == 39 and len(third.tokens) == 5
    assert_fresh(chat, third, temperature=1.0, seed=4, max_tokens=5)
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "t30 t31"}]
    fourth = chat.say("t9 t9")
    assert fourth.tokens == first.tokens and fourth.stats.rows_run == 1  # nothing else is new: the last row


def test_a_conversation_with_the_embedded_pair():
    """A published tokenizer and template: a reply's text is read as the ids that it was."""
    chat = md.Chat(embedded(), "Answer in one sentence.", max_tokens=24, verify=4)
    first = chat.say("My name is Ada. Greet me.")
    second = chat.say("What is the sea?")
    new = second.prompt_tokens - first.prompt_tokens - len(first.tokens)
    assert second.stats.rows_run == new + 1 < 20
    assert_fresh(chat, second)


def test_what_was_said_may_be_changed(engine):
    chat = md.Chat(engine, **OPTIONS)
    chat.say("t9 t9")
    chat.messages[-1] = {"role": "assistant", "content": "t20 t21"}
    result = chat.say("t9")
    assert result.stats.rows_reused == 7  # t41 t9 t9 t43 t42 t5 t20
    assert_fresh(chat, result)


def test_a_template_that_changes_old_turns(tmp_path):
    build(tmp_path, FORGETS)
    chat = md.Chat(opened(tmp_path), **OPTIONS)
    for number in range(3):
        result = chat.say("t9")
        assert result.stats.rows_reused == (0, 6, 13)[number]
        assert_fresh(chat, result)


def test_others_use_the_engine_between_turns(engine):
    one, other = md.Chat(engine, "t30", **OPTIONS), md.Chat(engine, "t31", **OPTIONS)
    for text in ("t9 t9", "t9", "t9 t9 t9"):
        for chat in (one, other):
            assert_fresh(chat, chat.say(text))
            md.generate(engine, [40, 30, 43, 41, 9, 7, 7], max_tokens=3)
    assert one.messages[2] == other.messages[2]
    assert one.say("t9").stats.rows_reused == 5  # what they have alike


def test_a_reply_of_channels_is_its_final_one(tmp_path):
    target, drafter = harmony.build(tmp_path)
    template = (  # words of its own; a reply begins within its analysis
        "{% for m in messages %}{% if m.role == 'assistant' %}<|start|> assistant <|channel|> final "
        "<|message|> {{ m.content }} <|end|> {% else %}<|start|> t9 <|message|> {{ m.content }} <|end|> "
        "{% endif %}{% endfor %}<|start|> assistant <|channel|> analysis <|message|> t5"
    )
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    engine = md.load(str(target), drafter=str(drafter), warm=False, ctx=256)
    chat = md.Chat(engine, max_tokens=40, verify=8)
    for reused in (0, 8):
        result = chat.say("t9")
        assert result.text == "t10 t11 t12" and len(result.tokens) > 6
        assert result.stats.rows_reused == reused  # up to <|channel|>, behind which the analysis is left out
        assert_fresh(chat, result)
    cut = chat.say("t9", max_tokens=2)
    assert cut.text == "" and chat.messages[-1]["content"] == "" and cut.finish_reason == "length"


# ---- replies that do not end -------------------------------------------------------------------------------


def test_a_stopped_reply_keeps_what_was_said(engine):
    chat = md.Chat(engine, **OPTIONS)
    for count in range(4):
        rounds = chat.stream("t9", verify=4)
        text = "".join(r.text for _, r in zip(range(count), rounds, strict=False))
        rounds.close()
        assert [m["content"] for m in chat.messages] == (["t9", text] if count else [])
        assert not engine.is_busy
        chat.messages += [] if count else [{"role": "user", "content": "t9"}]
        assert_fresh(chat, chat.say("t9 t9"))
        chat.reset()


def test_ctrl_c_between_rounds_keeps_what_was_said(engine):
    chat = md.Chat(engine, **OPTIONS)
    rounds = chat.stream("t9", verify=1, max_tokens=100)
    text = next(rounds).text
    engine.is_interrupted = True
    last = list(rounds)
    assert last[-1].finish_reason == "interrupted"
    assert chat.messages[-1]["content"] == text + "".join(r.text for r in last)
    assert_fresh(chat, chat.say("t9"))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("at", range(5))
def test_a_reply_that_fails_at_any_round(tmp_path, kind, at):
    engine = opened(tmp_path)
    chat, backend, calls = md.Chat(engine, **OPTIONS), engine.ops.backend, []

    def failing(*args, accept=backend.accept):
        accept(*args)
        calls.append(1)
        if len(calls) == at:
            raise kind

    backend.accept = failing
    try:
        result = chat.say("t9", verify=4)
        assert result.finish_reason == ("interrupted" if at else "length")
    except MemoryError:
        assert kind is MemoryError and at
    count = 1 + 4 * (at - 2) if at else 12  # tokens that were given out; at the first call none was
    said = ["t9", " ".join(["t20"] * count)] if count > 0 else []
    assert [m["content"] for m in chat.messages] == said
    assert_fresh(chat, chat.say("t9 t9"))


def test_a_stream_that_was_never_begun_says_nothing(engine):
    chat = md.Chat(engine, **OPTIONS)
    late = chat.stream("t9 t9")
    assert chat.messages == []
    chat.say("t9")
    with pytest.raises(UserError, match="went on since") as refusal:
        next(late)
    assert refusal.value.hint == "ask again" and len(chat.messages) == 2
    running = chat.stream("t9")
    next(running)
    with pytest.raises(UserError, match="generating already"):
        chat.say("t9")
    running.close()
    assert len(chat.messages) == 4


# ---- what is refused ---------------------------------------------------------------------------------------


def test_a_full_context_is_said_and_nothing_is_lost(tmp_path):
    chat = md.Chat(opened(tmp_path, ctx=40), **OPTIONS)
    chat.say("t9")
    before = list(chat.messages)
    with pytest.raises(UserError, match="34 prompt tokens and 12 new ones need 46 positions") as refusal:
        chat.say("t9 " * 12)
    assert refusal.value.hint == (
        "raise --ctx or lower --max-tokens or begin the conversation anew: /reset, or reset() of the Chat"
    )
    assert chat.messages == before
    with pytest.raises(UserError) as refusal:
        chat.say("t9 " * 60)
    assert "max-tokens" not in refusal.value.hint and "/reset" in refusal.value.hint
    assert_fresh(chat, chat.say("t9"))


@pytest.mark.parametrize(
    "options, words",
    [({"samples": 2, "temperature": 1.0}, "a turn has one reply"), ({"raw": True}, "who speaks"),
     ({"max_tokens": -1}, "max-tokens is -1"), ({"system": 5}, "system is 5")],
)  # fmt: skip
def test_what_has_no_place_in_a_conversation(engine, options, words):
    with pytest.raises(UserError, match=words):
        md.Chat(engine, **options)
    if "system" not in options:
        with pytest.raises(UserError, match=words):
            md.Chat(engine).say("t9", **options)
    with pytest.raises(TypeError, match="unknown keyword 'tokens'"):
        md.Chat(engine, tokens=5)


@pytest.mark.parametrize("text", ["", " \n", None, 5, [1]])
def test_a_message_is_a_text(engine, text):
    with pytest.raises(UserError, match="the message is"):
        md.Chat(engine).say(text)


def test_a_checkpoint_that_cannot_chat(tmp_path):
    target, drafter = automaton.build(tmp_path, "FX-B")
    engine = md.load(str(target), drafter=str(drafter), warm=False, ctx=64)
    with pytest.raises(UserError, match="has no chat template, so it cannot chat") as refusal:
        md.Chat(engine)
    assert "minidflash generate" in refusal.value.hint
    engine.tokenizer = None
    with pytest.raises(UserError, match="has no tokenizer.json, so it cannot chat"):
        md.Chat(engine)
