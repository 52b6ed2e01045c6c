"""Tokenizer: prompts, templates, and text that comes out piece by piece exactly as decoded whole."""

import json
import os
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from minidflash.chat import parse_template_arg
from minidflash.errors import UserError
from minidflash.stats import Round
from minidflash.text import RoundText, StopText
from minidflash.tokenizer import open_tokenizer

TEXT = (
    "The quick brown fox — café 😀😀, 日本語 naïve  two  spaces\n\tdef f(x): return x  # 1234 👩‍👩‍👧 Ω\n" * 3
)
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|a|>system\nBe kind<|b|>\n{% endif "
    "%}<|a|>{{ m['role'] }}\n{{ m['content'] }}<|b|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|a|>assistant\n{% if enable_thinking is defined and not enable_thinking "
    "%}<think></think>{% endif %}{% endif %}"
)


def save(folder, backend, **config):
    """Write a backend and its config as a checkpoint folder, open it."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return open_tokenizer(folder)


def byte_level():
    """Byte-level BPE, as SmolLM2, Qwen and Llama 3 have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=alphabet,
        special_tokens=["<|e|>", "<|a|>", "<|b|>"],
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend


def byte_fallback():
    """SentencePiece-like BPE with byte tokens and a stripped first space, as Llama 2 and Gemma have it."""
    words = ["▁The", "▁quick", "▁", "x", "▁fox", "e", "q"]
    vocab = {
        t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *words])
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def words(decoder=None, mark=""):
    """Whole words t0..t63 as tokens; without a decoder they are joined with spaces."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({f"t{i}{mark}": i for i in range(64)}, unk_token=f"t0{mark}")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        backend.decoder = decoder
    return backend


def metaspace():
    """Unigram words with a word mark."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁a", -1.0), ("b", -1.0), ("▁▁c", -1.0), ("d", -3.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<x>"])
    return backend


def with_bos(backend, bos="<|a|>"):
    """The same tokenizer with a rule that puts BOS first."""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return backend


KINDS = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "metaspace": metaspace,
    "words": words,
    "wordpiece": lambda: words(decoders.WordPiece(prefix="##")),
    "suffix": lambda: words(decoders.BPEDecoder(suffix="</w>"), "</w>"),
}


def chunks(rng, ids, most):
    """ids cut into random pieces, some empty."""
    while ids:
        count = rng.randint(0, most)
        yield ids[:count]
        ids = ids[count:]


@pytest.mark.parametrize("kind", KINDS)
def test_stream_joins_to_the_decoded_whole(kind, tmp_path):
    tokenizer = save(tmp_path, KINDS[kind]())
    rng = random.Random(kind)
    for _ in range(200):
        span = tokenizer.vocab_size + 5  # ids above it are padding rows of a model
        ids = [rng.randrange(span) for _ in range(rng.randint(0, 40))]
        if kind == "byte-level":  # real text, so that characters span tokens, with some rubbish between
            start = rng.randrange(60)
            ids = tokenizer.encode(TEXT[start : start + rng.randint(0, 80)])[: rng.randint(0, 70)] + ids[:3]
        stream, pieces = tokenizer.stream(), []
        for part in chunks(rng, ids, rng.choice([1, 5, 16])):
            pieces.append(stream.push(part))
        pieces.append(stream.finish())
        assert "".join(pieces) == tokenizer.decode(ids), ids


def test_stream_shows_no_broken_character_and_shows_words_at_once(tmp_path):
    tokenizer = save(tmp_path, byte_level())
    stream, text = tokenizer.stream(), TEXT * 20
    seen = [stream.push([i]) for i in tokenizer.encode(text)]
    assert "".join(seen) == text and stream.finish() == ""
    assert not any("\ufffd" in piece for piece in seen)
    assert max(len(list(group)) for group in _runs(seen)) < 4 * 5  # nothing waits longer than one character
    assert len(stream._window) < 40, "the window stays short however long the text is"


def _runs(pieces):
    """Runs of empty pieces."""
    run = []
    for piece in pieces:
        if piece:
            yield run
            run = []
        else:
            run.append(piece)
    yield run


def test_cut_character_is_shown_as_decode_shows_it(tmp_path):
    tokenizer = save(tmp_path, byte_level())
    ids = tokenizer.encode("ab Ж😃")[:-1]
    stream = tokenizer.stream()
    shown = stream.push(ids)
    assert "\ufffd" not in shown and shown.startswith("ab ")
    assert shown + stream.finish() == tokenizer.decode(ids)
    assert tokenizer.decode(ids).endswith("\ufffd")


def test_the_last_round_gives_out_what_was_held_back(tmp_path):
    tokenizer = save(tmp_path, byte_level())
    ids = tokenizer.encode("ab Ж😃")[:-1]
    for stops in ((), ("zz",)):
        text = RoundText(tokenizer, stops)
        rounds = [text.push(Round([i]), is_last=at == len(ids) - 1) for at, i in enumerate(ids)]
        assert "".join(r.text for given in rounds for r in given) == tokenizer.decode(ids)


def test_special_tokens_are_not_text(tmp_path):
    tokenizer = save(tmp_path, byte_level(), eos_token={"content": "<|e|>"})
    ids = tokenizer.encode("one<|e|> two<|b|>")
    assert tokenizer.decode(ids) == "one two"
    stream = tokenizer.stream()
    assert [stream.push([i]) for i in ids if i in tokenizer.stop_ids] == [""]


def test_stop_ids_come_from_config_or_special_map(tmp_path):
    backend = byte_level()
    tokenizer = save(tmp_path / "a", backend, eos_token="<|e|>")
    assert tokenizer.stop_ids == {backend.token_to_id("<|e|>")}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|b|>"}}')
    assert save(tmp_path / "b", backend).stop_ids == {backend.token_to_id("<|b|>")}
    assert save(tmp_path / "c", backend).stop_ids == frozenset()
    with pytest.raises(UserError, match="<nowhere>"):
        save(tmp_path / "d", backend, eos_token="<nowhere>")


def test_one_bos_in_raw_and_chat(tmp_path):
    plain = save(tmp_path / "plain", byte_level(), bos_token="<|a|>")
    ids, bos = plain.encode("hi"), plain.backend.token_to_id("<|a|>")
    assert ids[0] != bos
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = save(tmp_path / "bos", with_bos(byte_level()), bos_token="<|a|>", chat_template=template)
    assert tokenizer.encode("hi") == [bos, *ids]
    assert tokenizer.encode("<|a|>hi") == [bos, *ids]
    assert tokenizer.encode("") == [bos]
    rendered = tokenizer.render([{"role": "user", "content": "hi"}])
    assert tokenizer.encode_rendered(rendered) == [bos, *ids]
    wanted = save(tmp_path / "wanted", byte_level(), bos_token="<|a|>", add_bos_token=True)
    assert wanted.encode("hi") == wanted.encode("<|a|>hi") == [bos, *ids]
    unwanted = save(tmp_path / "no", with_bos(byte_level()), bos_token="<|a|>", add_bos_token=False)
    assert unwanted.encode("hi") == ids


def test_prompt_is_never_cut_or_padded_and_keeps_line_ends(tmp_path):
    backend = byte_level()
    ids = save(tmp_path / "a", backend).encode("a\r\nb\n")
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    tokenizer = save(tmp_path / "b", backend)
    assert tokenizer.encode("a\r\nb\n") == ids and tokenizer.decode(ids) == "a\r\nb\n"
    assert tokenizer.encode("") == []
    with pytest.raises(UserError, match="UTF-8"):
        tokenizer.encode("a\udcff")


def test_template_arguments_and_sources(tmp_path):
    user = [{"role": "user", "content": "Hi"}]
    tokenizer = save(tmp_path / "a", byte_level(), chat_template=CHATML)
    text = tokenizer.render(user)
    assert text == "<|a|>system\nBe kind<|b|>\n<|a|>user\nHi<|b|>\n<|a|>assistant\n"
    assert tokenizer.render(user, enable_thinking=False) == text + "<think></think>"
    assert tokenizer.render(user, add_generation_prompt=False) + "<|a|>assistant\n" == text
    with pytest.raises(UserError, match="enable_thinkng"):
        tokenizer.render(user, enable_thinkng=False)
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "T{{ tools|tojson }}"}]
    tokenizer = save(tmp_path / "b", byte_level(), chat_template=named)
    assert tokenizer.render(user) == text and tokenizer.render(user, tools=["<é>"]) == 'T["<é>"]'
    (tmp_path / "a" / "chat_template.jinja").write_text("from the file: {{ messages[0].content }}")
    assert open_tokenizer(tmp_path / "a").render(user) == "from the file: Hi"
    assert parse_template_arg("a=false") == ("a", False) and parse_template_arg("a=False") == ("a", False)
    assert parse_template_arg("a=3") == ("a", 3) and parse_template_arg("a=low b=c") == ("a", "low b=c")
    assert parse_template_arg("a=none") == ("a", None)
    with pytest.raises(UserError, match="NAME=VALUE"):
        parse_template_arg("a")


def test_template_environment_is_the_published_one(tmp_path):
    template = (
        "  {% for i in [1, 2, 3] %}\n{% if i == 2 %}{% continue %}{% endif %}\n{{ i }}{% endfor %}"
        "{% generation %}G{% endgeneration %}{{ {'b': '<'}|tojson }}{{ strftime_now('%Y')|length }}"
    )
    tokenizer = save(tmp_path, byte_level(), chat_template=template)
    assert tokenizer.render([{"role": "user", "content": "Hi"}]) == '1\n3G{"b": "<"}4'.replace("1\n", "1")


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{% if %}", "the chat template failed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_template_errors_are_one_line(template, message, tmp_path):
    tokenizer = save(tmp_path, byte_level(), chat_template=template)
    with pytest.raises(UserError, match=message) as error:
        tokenizer.render([{"role": "user", "content": "Hi"}])
    assert "\n" not in str(error.value) and error.value.code == 2


def test_refusals(tmp_path):
    assert open_tokenizer(tmp_path) is None
    base = save(tmp_path / "base", byte_level())
    assert not base.has_chat_template
    with pytest.raises(UserError, match="no chat template"):
        base.render([{"role": "user", "content": "Hi"}])
    chat = save(tmp_path / "chat", byte_level(), chat_template=CHATML)
    for messages in ([], "Hi", [{"content": "x"}], [{"role": "user"}], ["x"]):
        with pytest.raises(UserError):
            chat.render(messages)
    with pytest.raises(UserError, match="chat_template"):
        save(tmp_path / "odd", byte_level(), chat_template=3)
    (tmp_path / "base" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer.json") as error:
        open_tokenizer(tmp_path / "base")
    assert "\n" not in str(error.value)


def run_rounds(tokenizer, ids, sizes, stops, is_last=True):
    """What a loop yields for ids committed in rounds of these sizes: (tokens, text, rounds, stopped)."""
    text, out, ids = RoundText(tokenizer, stops), [], list(ids)
    while ids:
        size = sizes.pop(0) if sizes else 1
        part, ids = ids[:size], ids[size:]
        out += text.push(Round(part, verify=size), is_last=is_last and not ids)
        if text.is_stopped:
            break
    return [t for r in out for t in r.tokens], "".join(r.text for r in out), out, text.is_stopped


def test_stop_string_on_a_word_bound_cuts_ids_and_text_alike(tmp_path):
    tokenizer = save(tmp_path, words())
    tokens, text, rounds, stopped = run_rounds(tokenizer, [6, 7, 8], [1, 2], [" t7"])
    assert (tokens, text, stopped) == ([6], "t6", True) and rounds[-1].finish_reason == "stop"
    assert tokenizer.decode(tokens) == text
    # the space before t7 comes with t7's token, so that token carries the last shown character
    assert run_rounds(tokenizer, [6, 7, 8], [3], ["t7"])[:2] == ([6, 7], "t6 ")
    tokens, text, rounds, stopped = run_rounds(tokenizer, [7, 8], [1, 1], ["t7"])
    assert (tokens, text, stopped) == ([], "", True) and rounds[-1].finish_reason == "stop"
    assert run_rounds(tokenizer, [6, 5, 8], [3], ["t7"])[:2] == ([6, 5, 8], "t6 t5 t8")


@pytest.mark.parametrize(
    "stops", [["fox"], [" fo", "café"], ["\U0001f600"], ["日本", "zzz"], ["\n\tdef"], ["zzz"]]
)
def test_stops_do_not_depend_on_how_rounds_fall(stops, tmp_path):
    tokenizer = save(tmp_path, byte_level())
    ids, rng = tokenizer.encode(TEXT), random.Random(0)
    whole = tokenizer.decode(ids)
    cut = min([at for at in map(whole.find, stops) if at >= 0], default=len(whole))
    first = None
    for _ in range(40):
        sizes = [1] + [rng.randint(1, 16) for _ in ids]
        tokens, text, _, stopped = run_rounds(tokenizer, ids, sizes, stops)
        assert text == whole[:cut] and stopped == (cut < len(whole))
        assert ids[: len(tokens)] == tokens and tokenizer.decode(tokens).startswith(text)
        assert len(tokenizer.decode(tokens[:-1]).rstrip("\ufffd")) < len(text), "one token less would not do"
        first = first or tokens
        assert tokens == first


def test_stop_found_where_the_budget_ends_and_interrupts_lose_nothing(tmp_path):
    tokenizer = save(tmp_path, words())
    assert run_rounds(tokenizer, [6, 7], [2], [" t7"])[:2] == ([6], "t6")
    text = RoundText(tokenizer, [" t7 t9"])
    assert len(text.push(Round([6]))) == 1
    assert text.push(Round([7])) == [], "may be the start of the stop, so it is held"
    assert [r.text for r in text.finish()] == [" t7"]


def test_of_two_stops_in_one_token_the_first_in_the_text_counts():
    for stops in (["cd", "b"], ["b", "cd"]):
        stop = StopText(stops)
        assert stop.push("abcde") and (stop.kept_chars, stop.kept_tokens) == (1, 1)


def test_stop_refusals(tmp_path):
    with pytest.raises(UserError, match="empty"):
        StopText(["a", ""])
    with pytest.raises(UserError, match="list"):
        RoundText(save(tmp_path, words()), "t7")
    with pytest.raises(UserError, match="tokenizer"):
        RoundText(None, ["t7"])
    assert RoundText(None).push(Round([1]))[0].text is None


@pytest.fixture(scope="module")
def smollm2():
    """The tokenizer of the default target, fetched and converted at the first use."""
    from minidflash.weights.default import default_target

    try:
        return open_tokenizer(default_target())
    except UserError as error:
        if error.code != 3 or os.environ.get("CI"):
            raise
        pytest.skip(f"the default target cannot be had here: {error}")


@pytest.mark.slow
def test_smollm2_renders_and_decodes_as_published(smollm2):
    from safetensors.numpy import load_file

    root = (
        Path(__file__).resolve().parent.parent
    )  # a committed copy, else where CI and developers keep all of it
    places = [
        root / "tests" / "golden",
        os.environ.get("MINIDFLASH_GOLDEN"),
        root.parent / "shared" / "golden",
    ]
    golden = next(
        (Path(p) / "smollm2-135m" for p in places if p and (Path(p) / "smollm2-135m").is_dir()), None
    )
    if golden is None:
        pytest.skip("no reference data: set MINIDFLASH_GOLDEN")
    tensors = load_file(golden / "golden.safetensors")
    for name, case in json.loads((golden / "prompts.json").read_text(encoding="utf-8")).items():
        rendered = smollm2.render([{"role": "user", "content": case["prompt"]}])
        assert rendered == case["rendered"]
        assert smollm2.encode_rendered(rendered) == tensors[f"{name}.input_ids"].tolist()
        ids = tensors[f"{name}.plain_ids"].tolist()
        assert smollm2.decode(ids) == case["output"]
        stream = smollm2.stream()
        assert "".join(stream.push([i]) for i in ids) + stream.finish() == case["output"]
