"""Output told by channel: only the final message is text, at every cut into rounds, up to the terminal."""

import json
import random

import pytest

import minidflash as md
from minidflash.channels import FinalStream, WholeStream, open_stream, without_final
from minidflash.stats import Round
from minidflash.text import RoundText
from minidflash.tokenizer import TextStream, open_tokenizer
from tests import harmony

THOUGHT = "<|channel|>analysis<|message|>Is it the cat? 😀<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>It is 34 — the cat's 😀.<|return|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    harmony.backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    return open_tokenizer(folder)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Name -> the flags of a pair that answers, and of one that calls a tool."""
    tables = {"answer": harmony.ANSWER, "call": harmony.CALL}
    built = {name: harmony.build(tmp_path_factory.mktemp(name), table) for name, table in tables.items()}
    return {name: ["--target", target, "--drafter", draft] for name, (target, draft) in built.items()}


@pytest.fixture
def generate(mdf, pairs):
    def call(*argv, pair="answer"):
        return mdf("generate", *pairs[pair], *argv)

    return call


def spell(ids):
    return " ".join(map(str, ids))


def parts(ids, rng, most=7):
    """ids cut at random."""
    while ids:
        count = rng.randint(1, most)
        yield ids[:count]
        ids = ids[count:]


def streamed(stream, ids, rng):
    return "".join([stream.push(part) for part in parts(ids, rng)]) + stream.finish()


def test_the_tokenizer_is_read_as_published(tokenizer):
    assert tokenizer.decode(tokenizer.encode(ANSWER)) == "assistantfinalIt is 34 — the cat's 😀."
    number = tokenizer.encode("34")
    assert len(number) == 1 and not set(number) & set(tokenizer.encode("1234"))  # three digits at most: 123 4
    assert tokenizer.encode("can't")[-1] == tokenizer.encode("'t")[0]
    assert tokenizer.encode("THE the")[-1] == tokenizer.encode(" the")[0]
    ids = tokenizer.encode_rendered("<|start|>user<|message|>final<|end|>")
    marks = tokenizer.marks
    assert (ids[0], ids[-3], ids[-1]) == (
        marks.start,
        marks.message,
        tokenizer.backend.token_to_id("<|end|>"),
    )
    assert tokenizer.stop_ids == {tokenizer.backend.token_to_id("<|return|>")} < marks.ends


@pytest.mark.parametrize("lost", ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"])
def test_channels_are_what_a_tokenizer_with_all_marks_has(lost, tmp_path):
    special = {text: len(harmony.RANKS) + i for i, text in enumerate(harmony.SPECIAL) if text != lost}
    harmony.backend(special=special).save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.marks is None
    for raw in (False, True):
        assert type(open_stream(tokenizer, [], raw)) is TextStream


def test_marks_are_no_text_where_a_file_does_not_call_them_special(tmp_path):
    special = {text: len(harmony.RANKS) + i for i, text in enumerate(harmony.SPECIAL)}
    harmony.backend(special=special, is_special=False).save(str(tmp_path / "tokenizer.json"))
    tokenizer, rng = open_tokenizer(tmp_path), random.Random(0)
    ids = tokenizer.encode(THOUGHT + "<|start|>assistant<|channel|>final<|message|>a<|message|>b<|return|>")
    assert streamed(FinalStream(tokenizer), ids, rng) == "ab"
    assert streamed(WholeStream(tokenizer), ids, rng) == tokenizer.decode(ids)


# Output behind "<|start|>assistant" -> its text
OUTPUTS = {
    "answer at once": ("<|channel|>final<|message|>the 😀<|return|>", "the 😀"),
    "thought first": (THOUGHT + ANSWER, "It is 34 — the cat's 😀."),
    "a call": (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "",
    ),
    "a form": ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}"),
    "a form, no blank": ("<|channel|>final<|constrain|>json<|message|>{}<|return|>", "{}"),
    "two answers": ("<|channel|>final<|message|>a<|end|>" + ANSWER, "aIt is 34 — the cat's 😀."),
    "more behind the end": ("<|channel|>final<|message|>a<|return|>b<|start|>user<|message|>c<|end|>d", "a"),
    "no end mark": ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "b"),
    "no channel": ("<|message|>a<|return|>", ""),
    "another's turn": ("<|channel|>final<|message|>a<|end|><|start|>user<|message|>b", "a"),
    "a turn without end mark": ("<|channel|>final<|message|>a<|start|>user<|message|>b<|end|>", "a"),
    "a name like it": ("<|channel|>finally<|message|>a<|return|>", ""),
    "a mark in the body": ("<|channel|>final<|message|>a<|message|>b<|constrain|>c<|return|>", "abc"),
    "no marks": ("the final cat", ""),
    "header alone": ("<|channel|>final", ""),
    "empty": ("", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_text_is_the_final_channel_s_however_it_is_cut(name, tokenizer):
    output, text = OUTPUTS[name]
    ids, rng = tokenizer.encode_rendered(output), random.Random(name)
    prompt = tokenizer.encode_rendered(
        "<|start|>assistant<|channel|>final<|message|>old<|end|><|start|>assistant"
    )
    for _ in range(20):
        assert streamed(FinalStream(tokenizer, prompt), ids, rng) == text
        assert streamed(WholeStream(tokenizer), ids, rng) == output


def test_pieces_come_at_once_and_no_character_breaks(tokenizer):
    stream, ids = FinalStream(tokenizer), tokenizer.encode_rendered(THOUGHT + ANSWER)
    pieces = [stream.push([i]) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces) and stream.finish() == ""
    text = OUTPUTS["thought first"][1]
    assert sum(map(bool, pieces)) == len(tokenizer.encode(text)) - text.count("—") * 2 - text.count("😀") * 2
    cut = tokenizer.encode_rendered("<|channel|>final<|message|>") + tokenizer.encode("a😀")[:-1]
    for behind in ([], tokenizer.encode_rendered("<|return|>")):
        stream = FinalStream(tokenizer)
        pieces = stream.push(cut + behind), stream.finish()
        assert "".join(pieces) == "a\ufffd" and (pieces[1] == "") == bool(behind)


def test_an_output_goes_on_where_its_prompt_left_off(tokenizer):
    def told(prompt, output):
        ids = tokenizer.encode_rendered(output)
        return streamed(FinalStream(tokenizer, tokenizer.encode_rendered(prompt)), ids, random.Random(0))

    begun = "<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>"
    assert told(begun + "final<|message|>It is", " the cat<|return|>") == " the cat"
    assert told(begun + "fi", "nal<|message|>the cat<|return|>") == "the cat"
    assert told(begun + "analysis<|message|>hm", " so<|end|>" + ANSWER) == OUTPUTS["thought first"][1]
    assert told(begun + "final<|message|>a<|end|><|start|>user<|message|>b", "c<|end|>") == ""
    assert told("<|channel|>final<|message|>a<|start|>", "assistant<|message|>c<|end|>") == ""


def stopped(tokenizer, ids, stops, rng, raw=False):
    """What a loop yields for ids in rounds cut at random: (tokens, text), and the rounds."""
    text, out, rest = RoundText(tokenizer, stops, [], raw), [], list(parts(ids, rng))
    while rest and not text.is_stopped:
        part = rest.pop(0)
        out += text.push(Round(part), is_last=not rest)
    return ([i for r in out for i in r.tokens], "".join(r.text for r in out)), out


@pytest.mark.parametrize("stop", ["cat", " the", "It", "😀", "34 —", "assistant", "Is it", "never", "final"])
def test_stop_texts_are_of_the_shown_text(stop, tokenizer):
    ids, text = tokenizer.encode_rendered(THOUGHT + ANSWER), OUTPUTS["thought first"][1]
    begin = len(tokenizer.encode_rendered(THOUGHT + ANSWER[: ANSWER.index("It")]))
    cut = text.find(stop) if stop in text else None
    found = {str(stopped(tokenizer, ids, [stop], random.Random(seed))[0]): seed for seed in range(40)}
    assert len(found) == 1, "the cut into rounds changes nothing"
    (tokens, shown), rounds = stopped(tokenizer, ids, [stop], random.Random(0))
    assert shown == text[:cut] and tokens == ids[: len(tokens)]
    if cut is None:
        assert tokens == ids
    else:
        assert rounds[-1].finish_reason == "stop"
        assert len(tokens) == begin + len(tokenizer.encode(text[:cut]))  # what was thought stays


def test_stop_texts_see_all_channels_when_raw(tokenizer):
    ids = tokenizer.encode_rendered(THOUGHT + ANSWER)
    assert stopped(tokenizer, ids, ["<|end|>"], random.Random(0), raw=True)[0][1] == THOUGHT[:-7]
    assert stopped(tokenizer, ids, ["cat"], random.Random(0), raw=True)[0][1] == THOUGHT.split("cat")[0]


def test_thinking_is_not_held_back_for_a_stop_text(tokenizer):
    text = RoundText(tokenizer, ["never"])
    for token in tokenizer.encode_rendered(THOUGHT):
        assert [r.tokens for r in text.push(Round([token]))] == [[token]]


def test_what_there_is_without_an_answer_is_counted(tokenizer):
    def words(output, prompt=""):
        return without_final(tokenizer, *map(tokenizer.encode_rendered, (prompt, output)))

    count = len(tokenizer.encode("Is it the cat? 😀"))
    assert words(THOUGHT) == f"{count} tokens of 'analysis'"
    call = "<|start|>assistant<|channel|>commentary to=f<|message|>a<|call|>"
    assert words(THOUGHT + call) == f"{count} tokens of 'analysis', 1 token of 'commentary'"
    assert words("<|message|>a<|return|>") == "1 token of no channel"
    assert words("ab") == "2 tokens, in no message"
    assert words("", "<|channel|>final<|message|>") is None
    assert words("<|channel|>final<|message|>") is None, "it has begun"
    assert words(THOUGHT + ANSWER) is None


def test_the_command_line_shows_the_answer_alone(generate):
    prompt = "--tokens", spell(harmony.THINKING)
    for more in ((), ("--no-stream",), ("--verify", 1), ("--verify", 3), ("--block", 2)):
        assert generate(*prompt, "-q", *more) == (0, "t10 t11 t12\n", "")
    found = json.loads(generate(*prompt, "--json")[1])
    ids = [6, 7, 53, 50, 43, 51, 41, 52, 10, 11, 12, 54]
    assert (found["text"], found["tokens"], found["finish_reason"]) == ("t10 t11 t12", ids, "stop")
    whole = "t6 t7<|end|><|start|>assistant<|channel|>final<|message|>t10 t11 t12<|return|>"
    assert generate(*prompt, "--raw")[1] == whole + "\n"
    assert json.loads(generate(*prompt, "--raw", "--json")[1])["text"] == whole
    assert generate(*prompt, "--stop", "t7", "--stop", " t12")[1] == "t10 t11\n"


def test_an_answer_that_does_not_come_is_told_on_stderr(generate):
    prompt = "--tokens", spell(harmony.THINKING)
    for more in ((), ("--no-stream",)):
        code, out, err = generate(*prompt, "-n", 2, *more)
        assert (code, out) == (0, "")
        assert err == "minidflash: the answer ended before its final channel: 2 tokens of 'analysis'\n"
        assert generate(*prompt, "-n", 2, "-q", *more) == (0, "", "")
        assert generate(*prompt, "-n", 8, *more) == (0, "\n", ""), "it has begun"
    code, out, err = generate(*prompt, "-n", 2, "--json")
    assert json.loads(out)["text"] == "" and len(err.splitlines()) == 1
    assert generate(*prompt, "-n", 2, "--raw") == (0, "t6 t7\n", "")
    assert generate(*prompt, "-n", 0) == (0, "", "")
    for more in ((), ("--no-stream",)):
        code, out, err = generate(*prompt, "-n", 2, "--temperature", 1e-9, "--samples", 2, *more)
        assert (code, out) == (0, "")
        assert [line[:20] for line in err.splitlines()] == ["minidflash: answer 0", "minidflash: answer 1"]
        assert generate(*prompt, "-n", 8, "--temperature", 1e-9, "--samples", 2, *more)[1] == "\n\n\n"


def test_a_call_ends_a_run_because_the_files_say_so(generate):
    found = json.loads(generate("--tokens", spell(harmony.THINKING), "--json", pair="call")[1])
    assert (found["tokens"][-2:], found["finish_reason"], found["text"]) == ([13, 55], "stop", "")
    err = generate("Hi", pair="call")[2]
    assert err == "minidflash: the answer ended before its final channel: 1 token of 'commentary'\n"


def test_a_chat_is_rendered_with_what_is_set_and_answered(generate):
    code, out, err = generate("Hi", "--show-prompt", "--chat-template-arg", "reasoning_effort=low", "-q")
    assert (code, out) == (0, "t10 t11 t12\n")
    assert "Reasoning: low" in err and "<|start|>user<|message|>Hi<|end|><|start|>assistant\n" in err
    assert "Reasoning: medium" in generate("Hi", "--show-prompt")[2]


def test_the_library_yields_the_final_channel_or_all(pairs):
    _, target, _, draft = pairs["answer"]
    engine = md.load(target, drafter=draft)
    for raw, start in ((False, "t10"), (True, "t6 t7<|end|>")):
        rounds = list(md.stream(engine, harmony.THINKING, raw=raw))
        result = md.generate(engine, harmony.THINKING, raw=raw)
        assert "".join(r.text for r in rounds) == result.text and result.text.startswith(start)
        assert [i for r in rounds for i in r.tokens] == result.tokens and len(result.tokens) == 12
    assert md.generate(engine, [{"role": "user", "content": "Hi"}]).text == "t10 t11 t12"
    assert md.generate(engine, [50, 43, 51, 41, 52, 10]).text == "t11 t12", "the prompt began the answer"
