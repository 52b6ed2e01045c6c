"""Text to ids and back: prompts, chat templates, stop ids, and text that comes out while ids come in."""

import json
import re
from pathlib import Path

from .channels import Marks
from .chat import read_templates, render_chat
from .encoding import without_mark
from .errors import UserError
from .weights.safetensors_io import read_bytes, read_json

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BROKEN = "\ufffd"  # what bytes that are no character decode to
_LONG = 64  # ids; a window without a character bound may become so long


def open_tokenizer(folder, texts=None):
    """Open the tokenizer of a checkpoint.

    folder: path of a checkpoint folder; tokenizer.json, tokenizer_config.json, special_tokens_map.json and
    chat_template.jinja are read from it, or, where texts is given, tokenizer.json and tokenizer_config.json
    are in there as objects. Returns Tokenizer, or None when there is no tokenizer.json: then
    only prompts of ids work and text is None. Errors: UserError when a file is damaged, names an unknown end
    token, or the package tokenizers is missing. Source: Hugging Face tokenizer files.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if texts is not None:
        if "tokenizer.json" not in texts:
            return None
        data, config = json.dumps(texts["tokenizer.json"]).encode(), texts["tokenizer_config.json"]
    elif not path.is_file():
        return None
    else:
        data = without_mark(read_bytes(path), str(path))
        config = _read_optional(folder / "tokenizer_config.json")
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("text needs the package tokenizers", hint="pip install tokenizers", code=3) from error
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise UserError(f"tokenizer.json cannot be read: {reason}", hint=f"fetch {path} again") from error
    special = {**_special_names(_read_optional(folder / "special_tokens_map.json")), **_special_names(config)}
    return Tokenizer(backend, config, special, read_templates(folder, config))


class Tokenizer:
    """One checkpoint's tokenizer.

    stop_ids: frozenset of ids that end a text. vocab_size: ids are below it (the model may have more rows).
    has_chat_template: False for a base model. marks: of channels, None without them. backend: the
    tokenizers.Tokenizer. Source: engine.md 6.
    """

    def __init__(self, backend, config=None, special=None, templates=None):
        """Wrap a backend.

        backend: tokenizers.Tokenizer. config: tokenizer_config.json as a dict. special: {"bos_token": text,
        "eos_token": text ...}. templates: {name: chat template}. Errors: UserError when a named end token is
        not in the vocabulary. Source: none.
        """
        backend.no_truncation()  # files may carry training's settings; a prompt is never cut or filled up
        backend.no_padding()
        self.backend = backend
        self._special = special or {}
        self._templates = templates or {}
        self._add_bos = (config or {}).get("add_bos_token")
        self._bos = backend.token_to_id(self._special["bos_token"]) if "bos_token" in self._special else None
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.stop_ids = frozenset()
        if "eos_token" in self._special:
            stop = backend.token_to_id(self._special["eos_token"])
            if stop is None:
                raise UserError(
                    f"eos_token {self._special['eos_token']!r} is not in tokenizer.json",
                    hint="correct eos_token in tokenizer_config.json",
                )
            self.stop_ids = frozenset([stop])
        added = backend.get_added_tokens_decoder()
        self.marks = Marks.of(backend)
        self._hidden = frozenset(i for i, token in added.items() if token.special)
        # Not the whole tokenizer as text: that takes a step for every number up to the largest id.
        self._has_byte_tokens = (
            backend.decoder is not None and b'"ByteFallback"' in backend.decoder.__getstate__()
        )

    @property
    def has_chat_template(self):
        """True when messages can be rendered."""
        return bool(self._templates)

    def encode(self, text):
        """Ids of a raw prompt, with exactly one BOS where the tokenizer adds one.

        text: str. `add_bos_token` of the config decides where it is given, else the tokenizer's own rule; a
        BOS that the text itself spells is not doubled. Returns list of int, empty for "" without BOS.
        Errors: UserError when text is not valid Unicode. Source: F37.
        """
        body = self._encode(text, with_special=False)
        if self._add_bos is False:
            return body
        ids = self._encode(text, with_special=True)
        if self._add_bos and ids == body and self._bos is not None:  # the file's own rule lacks it
            ids = [self._bos, *body]
        spells_bos = self._bos is not None and body[:1] == [self._bos]
        return ids[1:] if spells_bos and ids[:2] == [self._bos, self._bos] and len(ids) > len(body) else ids

    def encode_rendered(self, text):
        """Ids of a rendered chat template; it writes its own BOS, so none is added.

        text: str. Returns list of int. Errors: UserError when text is not valid Unicode. Source: F37.
        """
        return self._encode(text, with_special=False)

    def render(self, messages, /, **template_args):
        """The prompt text of a chat, ready for the assistant's turn.

        messages: list of {"role": ..., "content": ...}. template_args: what the template reads, e.g.
        enable_thinking=False. Returns str. Errors: UserError for a base model, for bad messages, and when
        the template refuses. Source: Hugging Face chat templates.
        """
        if not self._templates:
            raise UserError(
                "this checkpoint has no chat template, so it cannot chat",
                hint="give a raw prompt: --raw or raw=True",
            )
        name = "tool_use" if template_args.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            known = ", ".join(sorted(self._templates))
            raise UserError(f"no chat template is named {name!r}; there are: {known}")
        return render_chat(self._templates[name], messages, self._special, template_args)

    def decode(self, ids):
        """The text of ids, special tokens left out.

        ids: list of int; ids without a token (padding rows of a model) give nothing. Returns str, with
        U+FFFD where bytes make no character. Errors: none. Source: tokenizers' decoders.
        """
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream(self):
        """A fresh TextStream over this tokenizer.

        Returns TextStream. Errors: none. Source: none.
        """
        return TextStream(self)

    def is_shown(self, token):
        """True when this id gives text.

        token: int. Returns bool. Errors: none. Source: decode's own rule.
        """
        return token not in self._hidden and self.backend.id_to_token(token) is not None

    def is_byte(self, token):
        """True for a token that stands for one raw byte.

        token: int. Returns bool. Errors: none. Source: the ByteFallback decoder's rule.
        """
        return self._has_byte_tokens and bool(_BYTE_TOKEN.fullmatch(self.backend.id_to_token(token) or ""))

    def _encode(self, text, with_special):
        """Ids of text; the library refuses lone surrogates, which a shell makes of bytes that are not
        UTF-8."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError("the prompt is not valid UTF-8 text", hint="convert it to UTF-8") from error
        return list(self.backend.encode(text, add_special_tokens=with_special).ids)


class TextStream:
    """Text as ids come in: pieces that are never taken back and join to exactly decode(all ids).

    Decoding each piece alone would lose or double spaces (F35), so a window is decoded whose head has been
    shown already. Held back: a character whose bytes are not complete, and a run of byte tokens: whatever
    comes next may be a byte with which the ByteFallback decoder turns the whole run into U+FFFD, the
    characters that were complete too. A run is decoded once, when it ends (F109). Source: F35;
    tokenizers' decoders.
    """

    has_begun = True

    def __init__(self, tokenizer):
        """Start empty.

        tokenizer: Tokenizer. Errors: none. Source: none.
        """
        self._tokenizer = tokenizer
        self._window = []  # [shown head .. ids not settled yet], without ids that give no text
        self._head = 0  # how many ids of the window are the shown head; both its ends are character bounds
        self._settled = 0  # how many of its ids are no part of a run of bytes at its end
        self._shown = 0  # characters of the window's text that have been returned

    def push(self, ids):
        """Take ids, return the new text that will not change any more.

        ids: list of int. Returns str, perhaps "". Errors: none. Source: class docstring.
        """
        tokenizer, window, before = self._tokenizer, self._window, self._settled
        for token in ids:
            if tokenizer.is_shown(token):
                window.append(token)
                if not tokenizer.is_byte(token):
                    self._settled = len(window)
        if self._settled == before:
            return ""
        text = tokenizer.decode(window[: self._settled])
        is_clean = not text.endswith(_BROKEN)
        end = len(text) if is_clean else len(text) - 1  # only the last one can still become a character
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        if is_clean or self._settled - self._head > _LONG:
            self._shift(is_clean)
        return piece

    def _shift(self, is_clean):
        """Shorten the window to the ids after its head. Where bytes that are no text leave no character bound
        there, shorten it to the last place that decodes alone as it does in the window."""
        decode, window, start, settled = self._tokenizer.decode, self._window, self._head, self._settled
        if not is_clean:
            whole = decode(window[:settled]).replace(" ", "")  # a first word may lose its space
            for start in range(settled - 1, settled - 9, -1):  # a character has at most four bytes
                if (decode(window[:start]) + decode(window[start:settled])).replace(" ", "") == whole:
                    break
        tail = decode(window[start:settled])
        if tail:  # a head without text (a lone word mark) would make the next word a first word
            del window[:start]
            self._settled -= start
            self._head = self._settled if is_clean else 0
            self._shown = len(tail) if is_clean else len(tail) - 1

    def finish(self):
        """Return what is still held back, as decode gives it, and start over.

        Returns str: a cut character comes as U+FFFD. Errors: none. Source: class docstring.
        """
        piece = self._tokenizer.decode(self._window)[self._shown :]
        self._window, self._head, self._settled, self._shown = [], 0, 0, 0
        return piece


def _read_optional(path):
    """The object in a JSON file, {} when there is no file."""
    return read_json(path) if path.is_file() else {}


def _special_names(named):
    """{"bos_token": text ...} from a config whose values are texts or {"content": text}."""
    special = {}
    for key, value in named.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            special[key] = value
    return special
