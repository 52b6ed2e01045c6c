"""A checkpoint that thinks in channels: tokenizer with o200k's split, template, an answering automaton.

The template is ours, with the constructs of gpt-oss's own: macros, namespaces, strftime_now,
reasoning_effort, model_identity, builtin_tools, tools, and thinking that later turns lose.
"""

import json
from itertools import pairwise

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from tests import automaton

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TAIL = "('s|'S|'t|'T|'re|'rE|'Re|'RE|'ve|'vE|'Ve|'VE|'m|'M|'ll|'lL|'Ll|'LL|'d|'D)?"
SPLIT = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_TAIL}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_TAIL}",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    ]
)  # fmt: skip
SPECIAL = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>", "<|endofprompt|>",
)  # fmt: skip
RANKS = [bytes([b]) for b in range(256)] + [
    b"fi", b"na", b"nal", b"final", b"an", b"ly", b"is", b"34", b" t", b"he", b" the", b"'t", b"\xf0\x9f",
]  # fmt: skip


def backend(ranks=RANKS, special=None, is_special=True):
    """A tokenizers.Tokenizer in the form of a published one. ranks: bytes of the tokens, single bytes first.

    special: {text: id}, by default SPECIAL behind the ranks. is_special: whether they are so called.
    """
    letters = _byte_letters()
    vocab, merges, known = {}, [], {}
    for rank, token in enumerate(ranks):
        if len(token) > 1:
            left, right = _halves(token, known)
            merges.append(("".join(letters[b] for b in left), "".join(letters[b] for b in right)))
        known[token] = rank
        vocab["".join(letters[b] for b in token)] = rank
    found = tokenizers.Tokenizer(models.BPE(vocab, merges))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    if special is None:
        found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
        return found
    whole = json.loads(found.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole["added_tokens"] = [
        {"id": i, "content": text, "special": is_special, **flags} for text, i in special.items()
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(whole))


def _byte_letters():
    """byte -> the letter that stands for it: printable ones for themselves, the others from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(rest)}


def _halves(token, known):
    """The two tokens of lower rank whose merge makes this one."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        ranks = [known.get(a + b, len(known)) for a, b in pairwise(parts)]
        at = ranks.index(min(ranks))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


TEMPLATE = """
{#- Takes reasoning_effort, model_identity and builtin_tools besides messages and tools. #}
{%- macro kind(spec) -%}
  {%- if spec.type == "array" -%}
    {{- kind(spec["items"]) + "[]" }}
  {%- elif spec.enum -%}
    {{- '"' + spec.enum | join('" | "') + '"' }}
  {%- else -%}
    {{- {"integer": "number", "object": "object"}.get(spec.type, spec.type or "any") }}
  {%- endif -%}
{%- endmacro -%}
{%- macro listed(space, tools) -%}
  {{- "## " + space + "\\n\\nnamespace " + space + " {\\n\\n" }}
  {%- for tool in tools %}
    {%- set tool = tool.function %}
    {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: {\\n" }}
    {%- for name, spec in tool.parameters.properties.items() %}
      {{- name + ("" if name in (tool.parameters.required or []) else "?") + ": " + kind(spec) }}
      {{- (", // default: " + spec.default | tojson if spec.default is defined else "") + ",\\n" }}
    {%- endfor %}
    {{- "}) => any;\\n\\n" }}
  {%- endfor %}
  {{- "} // namespace " + space }}
{%- endmacro -%}
{%- macro system() -%}
  {%- if model_identity is not defined %}{% set model_identity = "You are a machine." %}{% endif %}
  {%- if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}
  {{- model_identity + "\\nCurrent date: " + strftime_now("%Y-%m-%d") + "\\n\\nReasoning: " }}
  {{- reasoning_effort + "\\n\\n" }}
  {%- if builtin_tools %}
    {%- set has = namespace(python=false) %}
    {%- for tool in builtin_tools %}
      {%- if tool == "python" %}{% set has.python = true %}{% endif %}
    {%- endfor %}
    {{- "# Tools\\n\\n" + ("## python\\n\\n" if has.python else "") }}
  {%- endif %}
  {{- "# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" + system() + "<|end|>" }}
{%- set told = messages[0].content if messages[0].role in ["system", "developer"] else "" %}
{%- set turns = messages[1:] if told else messages %}
{%- if told or tools %}
  {{- "<|start|>developer<|message|>" + ("# Instructions\\n\\n" + told + "\\n\\n" if told else "") }}
  {{- ("# Tools\\n\\n" + listed("functions", tools) if tools else "") + "<|end|>" }}
{%- endif %}
{%- set last = namespace(call=none) %}
{%- for m in turns -%}
  {%- if "<|channel|>" in (m.content or "") | string %}
    {{- raise_exception("a message holds <|channel|> tags: thinking goes into the field 'thinking'") }}
  {%- endif %}
  {%- if m.role == "assistant" and "tool_calls" in m %}
    {%- set later = namespace(final=false) %}
    {%- for n in turns[loop.index:] %}
      {%- if n.role == "assistant" and "tool_calls" not in n %}{% set later.final = true %}{% endif %}
    {%- endfor %}
    {%- set call = m.tool_calls[0].function or m.tool_calls[0] %}
    {%- if m.thinking and not later.final %}
      {{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}
    {%- endif %}
    {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
    {{- call.arguments | tojson + "<|call|>" }}
    {%- set last.call = call.name %}
  {%- elif m.role == "assistant" %}
    {%- set is_end = loop.last and not add_generation_prompt %}
    {%- if is_end and "thinking" in m %}
      {{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}
    {%- endif %}
    {{- "<|start|>assistant<|channel|>final<|message|>" + m.content }}
    {{- "<|return|>" if is_end else "<|end|>" }}
  {%- elif m.role == "tool" %}
    {%- if last.call is none %}{{ raise_exception("there was no previous call of a tool") }}{% endif %}
    {{- "<|start|>functions." + last.call + " to=assistant<|channel|>commentary<|message|>" }}
    {{- m.content | tojson + "<|end|>" }}
  {%- else %}
    {{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""

# The automaton's words besides t0 ...: what it says depends on the last token alone.
WORDS = {40: "analysis", 41: "final", 42: "commentary", 43: "assistant"}
MARKS = {
    50: "<|start|>",
    51: "<|channel|>",
    52: "<|message|>",
    53: "<|end|>",
    54: "<|return|>",
    55: "<|call|>",
}
ANSWER = {5: 6, 6: 7, 7: 53, 53: 50, 50: 43, 43: 51, 51: 41, 41: 52, 52: 10, 10: 11, 11: 12, 12: 54, 54: 54}
CALL = ANSWER | {51: 42, 42: 52, 52: 13, 13: 55, 55: 55}
THINKING = [9, 9, 9, 50, 43, 51, 40, 52, 5]  # a prompt that ends within the channel analysis


def build(folder, successor=ANSWER):
    """An automaton pair with channels. Returns (target folder, drafter folder)."""
    target, draft = automaton.write_pair(folder, successor=successor, eos=54)
    file = target / "tokenizer.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    whole["model"]["vocab"] = {(WORDS | MARKS).get(i, f"t{i}"): i for i in range(automaton.VOCAB)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole["added_tokens"] = [
        {"id": i, "content": text, "special": True, **flags} for i, text in MARKS.items()
    ]
    file.write_text(json.dumps(whole), encoding="utf-8")
    (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [54, 55]}))
    (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return target, draft
