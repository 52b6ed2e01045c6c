"""Chat templates of strangers: bounded in steps, text and time; what published templates use renders as
before."""

import time
import tracemalloc

import pytest

from minidflash.chat import MAX_SOURCE, read_templates, render_chat
from minidflash.errors import UserError
from minidflash.sandbox import GROWTH, METHODS, TEXT

USER = [{"role": "user", "content": "Hi"}]
DOUBLED = "{{% set ns = namespace(l=['x']) %}}{{% for i in range(18) %}}{} %}}{{% endfor %}}{{{{ ns.l }}}}"


def render(source, messages=USER, **args):
    return render_chat(source, messages, {"bos_token": "<s>"}, args)


ENDLESS = "does not come to an end"
LONG = "a text of more than"
BOMBS = {
    "nested loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                     ENDLESS),
    "nested loops without calls": (
        "{% set r = range(999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        ENDLESS,
    ),
    "loop without a pass": (
        "{% for j in range(9999) %}{% for i in range(99999) if false %}{% endfor %}{% endfor %}",
        ENDLESS,
    ),
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        ENDLESS,
    ),
    "recursion": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
    "range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "filters over filters": ("{{ range(99999)" + "|map('string')" * 50 + "|list|length }}", ENDLESS),
    "tests": ("{{ range(99999)|select('in', [1])|list }}" * 9, ENDLESS),
    "a text as a list": ("{{ ('x' * 16000000)|list|length }}", ENDLESS),
    "split": ("{{ ('ab ' * 5000000).split()|length }}", ENDLESS),
    "search from the right": ("{{ ('a' * 8000000).rfind('b' + 'a' * 4000000) }}", ENDLESS),
    "strip": ("{{ ('a' * 8000000).strip('b' * 4000000 + 'a') }}", ENDLESS),
    "times": ("{{ 'x' * 10**10 }}", LONG),
    "list times": ("{{ ['x' * 1000000] * 1000 }}", LONG),
    "power": ("{{ 10 ** 9999 }}", "number of more than"),
    "powers": (("{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}"
                "{% endfor %}"),
               "number of more than"),
    "joined": (
        "{% set ns = namespace(s='xxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        LONG,
    ),
    "slices": (
        ("{% set s = 'x' * 10000000 %}{% set ns = namespace() %}{% for i in range(999) %}"
         "{% set ns.a = s[1:] %}{% endfor %}"),
        "too much text",
    ),
    "output": ("{% set s = 'x' * 10000000 %}{% for i in range(999) %}{{ s }}{% endfor %}", LONG),
    "output of a macro": (
        ("{% set l = ['x' * 10000000] %}{% macro f() %}{% for i in range(999) %}{{ l }}{% endfor %}"
         "{% endmacro %}{{ f() }}"),
        "too much text",
    ),
    "width": ("{{ '%99999999999d' % 1 }}", LONG),
    "width from a value": ("{{ '%*d' % (10**9, 1) }}", "widths from its values"),
    "width in a width": ("{{ '{:>{}}'.format(1, 10**9) }}", "widths from its values"),
    "many widths": ("{{ ('%9999d' * 10000)|format(1) }}", LONG),
    "format": ("{{ ('{0}' * 100000).format('x' * 100000) }}", LONG),
    "format by attr": ("{{ ('{:999999999}'|attr('format'))(1) }}", LONG),
    "ljust": ("{{ 'x'.ljust(10**10) }}", LONG),
    "center": ("{{ 'x'|center(10**10) }}", LONG),
    "constant center": ("{{ 'x'|center(9999999999) }}", LONG),
    "indent": ("{{ ('x\n' * 9999)|indent(100000) }}", LONG),
    "replace": ("{{ ('x' * 1000000).replace('x', 'y' * 1000) }}", LONG),
    "join": ("{{ range(9999)|join('x' * 100000) }}", LONG),
    "join of a method": ("{{ ('x' * 100000).join(range(9999)|map('string')) }}", LONG),
    "batch": ("{{ [1]|batch(10**9, 'x')|list }}", LONG),
    "tojson": ("{{ {'a': [1] * 10}|tojson(indent=10**8) }}", "characters between values"),
    "strftime": ("{{ strftime_now('%Y' * 10**6) }}", "form of at most"),
    "strftime width": ("{{ strftime_now('%999999999d') }}", "without widths"),
    "sum": ("{{ ([[1] * 100] * 100)|sum(start=[]) }}", LONG),
    "round": ("{{ 1.5|round(10**9, 'ceil') }}", LONG),
    "bytes": ("{{ (1).to_bytes(10**9, 'big') }}", "not offered"),
    "translate": ("{{ 'x'.translate({120: 'y' * 9}) }}", "not offered"),
    "fromkeys": ("{{ {}.fromkeys([1], 2) }}", "not offered"),
    "lipsum": ("{{ lipsum(n=10**5) }}", "undefined"),
    "list in lists": (DOUBLED.format("{% set ns.l = [ns.l, ns.l]"), ENDLESS),
    "tuple in tuples": (DOUBLED.format("{% set ns.l = (ns.l, ns.l)"), ENDLESS),
    "items in items": (DOUBLED.format("{% set ns.l = {1: ns.l, 2: ns.l}.items()"), ENDLESS),
    "dict call": (DOUBLED.format("{% set ns.l = dict(a=ns.l, b=ns.l)"), ENDLESS),
    "defaults": (DOUBLED.format("{% set ns.l = [{}, {}]|map(attribute='q', default=ns.l)|list"), ENDLESS),
    "arguments": (
        "{% macro f() %}{% set ns.l = varargs %}{% endmacro %}" + DOUBLED.format("{% set x = f(ns.l, ns.l)"),
        ENDLESS,
    ),
    "deep list": (DOUBLED.replace("18", "99999").format("{% set ns.l = [ns.l]"), ENDLESS),
    "deep expression": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "failed"),
    "autoescape": ("{% autoescape true %}x{% endautoescape %}", "not offered"),
    "a long template": ("x" * (MAX_SOURCE + 1), "characters, at most"),
    "terminal": ("{{ raise_exception('\\x1b[2J\n\\x07 boo' ~ 'x' * 9999) }}", r"\x1b[2J \x07 boo"),
}  # fmt: skip


def refused(source, words):
    """Render a template that is refused: in one line, in a second or so."""
    since = time.thread_time()
    with pytest.raises(UserError) as error:
        render(source)
    message = str(error.value)
    assert words in message and message.isprintable() and len(message) <= 400 and error.value.code == 2
    assert time.thread_time() - since < 5


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_not_end_is_refused_in_one_line(name, monkeypatch):
    monkeypatch.setattr("minidflash.sandbox.STEPS", 50_000)
    refused(*BOMBS[name])


def test_limits_are_as_published():
    refused(*BOMBS["nested loops"])


@pytest.mark.parametrize(
    "name",
    ["a text as a list", "split", "joined", "slices", "output", "output of a macro", "join", "strftime"],
)
def test_what_is_refused_takes_little_memory(name, monkeypatch):
    monkeypatch.setattr("minidflash.sandbox.STEPS", 50_000)
    tracemalloc.start()
    try:
        refused(*BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 180e6
    finally:
        tracemalloc.stop()


def test_the_clock_ends_what_is_slow_in_few_steps(monkeypatch):
    monkeypatch.setattr("minidflash.sandbox.SECONDS", 0.1)
    refused("{% set l = range(9999)|list %}" + "{{ range(9999)|select('in', l)|list }}" * 4, ENDLESS)


RENDERED = [
    (("{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index %}"
      "{% endfor %}{{ ns.n }}"), "1"),
    ("{% for a, b in [(1, 2), (3, 4)] if a > 1 %}{{ a ~ '-' ~ b }}{% else %}none{% endfor %}", "3-4"),
    (("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"
      "{{ i }}{% endfor %}"), "02"),
    ("{% generation %}a{% endgeneration %}{% set b %}<{{ bos_token }}>{% endset %}{{ b }}", "a<<s>>"),
    (("{% macro m(x, y='z') %}{{ x + y }}{{ caller() if caller }}{% endmacro %}{{ m('a') }}"
      "{% call m('b', y='c') %}!{% endcall %}"), "azbc!"),
    ("{{ {'b': '<é>', 'a': [1, none]}|tojson }}", '{"b": "<é>", "a": [1, null]}'),
    ("{{ {'b': 1}|tojson(indent=4) }}", '{\n    "b": 1\n}'),
    ("{{ {'b': 1, 'a': 'é'}|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
     '{"a":"\\u00e9","b":1}'),
    (("{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}"
      "{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{% endfor %}"), "b1a2ab"),
    ("{{ [{'a': 2}, {'a': 1}]|sort(attribute='a')|map(attribute='a')|join(', ') }}", "1, 2"),
    (("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
      "{{ messages|rejectattr('role', 'in', ['user'])|first is undefined }}"), "1True"),
    ("{{ '%s: %05.1f' % ('a', 1.25) }} {{ '{} {x:>4}|'.format('b', x=1) }} {{ '%d'|format(7) }}",
     "a: 001.2 b    1| 7"),
    ("{% for m in messages %}{{ m.content.replace('i', 'ey').upper().split('E')[-1] }}{% endfor %}", "Y"),
    (("{{ 'a </think> b'.split('</think>')[-1].lstrip('\\n').strip() }}{{ ' x\n'|trim }}"
      "{{ 'abc'.startswith('a') }}"), "bxTrue"),
    ("{{ ', '.join(['a', 'b']) }}{{ [1, 2] + [3] }}{{ 'ab' * 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}",
     "a, b[1, 2, 3]abab31024"),
    ("{{ 'line\nline'|indent(2) }}{{ [1, 2, 3]|sum }}{{ 2.567|round(1) }}{{ [3, 1]|max }}",
     "line\n  line62.63"),
    ("{{ [1, 2, 3]|batch(2, 0)|list }}{{ 'x'|center(3) }}{{ ['a', 'a']|unique|list }}",
     "[[1, 2], [3, 0]] x ['a']"),
    ("{{ none }}{{ nothing }}{{ nothing|default('d') }}{{ 'y' if messages[0]['content'] is string }}",
     "Nonedy"),
    ("{{ messages[0].get('name', 'n') }}{{ 'tools' in messages[0] }}{{ dict(a=1).keys()|list }}",
     "nFalse['a']"),
    ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% block c %}d{% endblock %}{{ self.c() }}", "ABdd"),
    (("{% for i in [[1], [2]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}"
      "{{ loop is defined }}"), "12False"),
]  # fmt: skip


@pytest.mark.parametrize("source, text", RENDERED)
def test_what_published_templates_use_is_rendered(source, text):
    assert render(source) == text


def test_a_long_conversation_is_not_refused_for_its_length():
    messages = [{"role": "user", "content": f"word {i} " * 50} for i in range(400)]
    source = (  # quadratic in messages
        "{% set ns = namespace(s='') %}{% for m in messages %}{% for n in messages %}{% endfor %}"
        "{% set ns.s = ns.s + m.content|trim %}{% endfor %}{{ ns.s }}{{ messages|tojson|length }}"
    )
    text = "".join(m["content"].strip() for m in messages)
    assert render(source, messages).startswith(text)
    whole = [{"role": "user", "content": "x" * (TEXT + 10)}]
    assert render("{{ messages[0].content }}", whole) == whole[0]["content"]
    whole[0]["itself"] = whole
    with pytest.raises(UserError, match="failed"):  # a list that holds itself has no text
        render("{{ messages|tojson }}", whole)


def test_every_method_of_text_is_thought_of():
    """A method that makes more than it is given, or is given much to look for, must have a bound."""
    quiet = {
        "capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index", "isalnum",
        "isalpha",
        "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
        "istitle",
        "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex",
        "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title",
        "upper",
    }  # fmt: skip
    assert METHODS[str] <= quiet | set(GROWTH)


def test_a_template_argument_does_not_replace_the_conversation():
    with pytest.raises(UserError, match="'messages' would replace"):
        render_chat("{{ messages }}", USER, {}, {"messages": []})


def test_template_files_are_read_as_text(tmp_path):
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"\xef\xbb\xbfa {{ messages }}")
    assert read_templates(tmp_path, {}) == {"default": "a {{ messages }}"}
    for data, words in (
        ("a".encode("utf-16"), "is UTF-16"),
        (b"a\xff", "is not UTF-8"),
        (b"x" * 10**6, "at most"),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError, match=words) as error:
            read_templates(tmp_path, {})
        assert path.name in str(error.value)
    path.unlink()
    for wrong in ([{"name": [], "template": "x"}], [{"name": "default", "template": 5}], [3], 3, {"a": "b"}):
        with pytest.raises(UserError, match="chat_template in tokenizer_config"):
            read_templates(tmp_path, {"chat_template": wrong})
