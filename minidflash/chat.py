"""Chat templates: messages -> the text a model was trained on. They are code of strangers: see sandbox.py."""

import json
import re
from pathlib import Path

from .encoding import decoded
from .errors import UserError
from .weights.safetensors_io import read_bytes

RAW = "raw=True or --raw goes without it"
MAX_SOURCE = 1 << 16  # characters of a template; the longest published ones have about 20,000


def parse_template_arg(text):
    """Split one `--chat-template-arg K=V` into its name and its value.

    text: "K=V"; V is read as JSON, so `false`, `3` and `"x"` keep their types; `False` and `None` are
    understood too, because as plain strings they would count as true; anything else is a string.
    Returns (name, value). Errors: UserError without "=" or without a name. Source: engine.md 5, F39.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"--chat-template-arg {text!r} is not NAME=VALUE", hint="e.g. enable_thinking=false")
    if value.lower() in ("true", "false", "none", "null"):
        return name, {"true": True, "false": False}.get(value.lower())
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def read_templates(folder, config):
    """Collect the chat templates of a checkpoint by name.

    folder: Path of the checkpoint. config: its tokenizer_config.json as a dict. A chat_template.jinja file
    wins over the config, as in the published loaders; `default` is the name of a template without one.
    Returns {name: source}, empty for a base model. Errors: UserError when chat_template has another form, or
    the file is not UTF-8.
    Source: Hugging Face chat template format.
    """
    found = config.get("chat_template")
    if found is None:
        templates = {}
    elif isinstance(found, str):
        templates = {"default": found}
    elif isinstance(found, list) and all(
        isinstance(t, dict) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str)
        for t in found
    ):
        templates = {t["name"]: t["template"] for t in found}
    else:
        raise UserError(
            f"chat_template in tokenizer_config.json is a {type(found).__name__}; "
            "a text or a list of {name, template}, both texts, is supported"
        )
    path = Path(folder) / "chat_template.jinja"
    if path.is_file():
        templates["default"] = decoded(read_bytes(path, 4 * MAX_SOURCE), f"chat template {path}")
    return templates


def render_chat(source, messages, variables, template_args):
    """Render a chat template to the prompt text.

    source: the template. messages: list of {"role": str, "content": ...}. variables: the tokenizer's named
    special tokens. template_args: what the user sets; each must occur in the template, so that a misspelt
    switch is not silently without effect. Returns str. Errors: UserError for bad messages, an argument the
    template does not read, and whatever the template itself refuses. Source: Hugging Face chat templates.
    """
    _check_messages(messages)
    for name in template_args:
        if name == "messages":
            raise UserError(
                "a template argument named 'messages' would replace the conversation",
                hint="give the messages as the prompt",
            )
        # tools, documents and add_generation_prompt belong to every template's interface
        if name not in ("tools", "documents", "add_generation_prompt") and not re.search(
            rf"\b{re.escape(name)}\b", source
        ):
            raise UserError(
                f"the chat template does not read {name!r}", hint="see the prompt with --show-prompt"
            )
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **variables, **template_args}
    given["messages"] = messages
    if len(source) > MAX_SOURCE:
        raise UserError(f"the chat template has {len(source)} characters, at most {MAX_SOURCE} are read", RAW)
    try:
        from .sandbox import Sandbox
    except ImportError as error:
        raise UserError(
            "chat templates need the package jinja2", hint="pip install jinja2", code=3
        ) from error
    try:
        return Sandbox(given).from_string(source).render(given)
    except Exception as error:  # a template is foreign code: whatever it raises is the template's refusal
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template failed: {reason}", RAW) from error


def _check_messages(messages):
    """Refuse what no template can read: every message needs a role and something to say."""
    if not isinstance(messages, list) or not messages:
        raise UserError(
            "a chat needs a list with at least one message", hint='[{"role": "user", "content": "Hi"}]'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"message {index} has no role", hint='a message is {"role": "user", "content": "Hi"}'
            )
        if "content" not in message and "tool_calls" not in message:
            raise UserError(
                f"message {index} has no content", hint='a message is {"role": "user", "content": "Hi"}'
            )
