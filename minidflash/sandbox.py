"""The sandbox of chat templates, which are code of strangers: bounded in steps, in text and in time.

jinja2's own sandbox keeps a template away from Python; it may still run for ever or fill the memory. Here
each pass of a loop, each call, filter and test is a step, and each value that a template makes is measured:
before it is made where its parts tell the size, else right after. Limits grow with the conversation, so that
a long one is never refused for its length. No thread, signal or process is needed:
a library renders anywhere.
"""

import json
import re
import sys
import time
from collections.abc import Mapping, MappingView
from collections.abc import Set as AbstractSet
from datetime import datetime
from functools import wraps
from types import GeneratorType

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

SECONDS, SECONDS_EACH = 2.0, 3e-6  # of this thread; published templates take milliseconds
STEPS, STEPS_EACH = 500_000, 64  # half a second; the second number is for each character that was given
TEXT, TEXT_EACH = 1 << 24, 16  # characters of one value: a hundred times the longest context of today
MADE, MADE_EACH = 1 << 27, 256  # bytes of all values that were made
BITS = 1024  # of a whole number
WIDTH = 200  # characters of a date's form, or of what tojson puts between values

# Filters and methods that look at every item or line of their value, so each of these is a step
EACH = {
    "batch", "dictsort", "groupby", "indent", "items", "join", "list", "map", "max", "min", "reject",
    "rejectattr", "rsplit", "select", "selectattr", "slice", "sort", "split", "splitlines", "sum", "title",
    "unique", "wordcount",
}  # fmt: skip
# Those whose work may be the product of two lengths
SEARCHES = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"}
# What they may add to their value, in characters or items, from the same arguments
GROWTH = {
    "batch": lambda value, linecount, fill_with=None: linecount,
    "center": lambda value, width=80, fill=" ": width,
    "expandtabs": lambda value, tabsize=8: value.count("\t") * tabsize,
    "indent": lambda value, width=4, *_, **__: len(value) * (width if isinstance(width, int) else len(width)),
    "ljust": lambda value, width, fill=" ": width,
    "replace": lambda value, old, new, count=-1: str(value).count(str(old)) * len(str(new)),
    "rjust": lambda value, width, fill=" ": width,
    "round": lambda value, precision=0, method="": 1000 * abs(precision),  # it computes 10 ** precision
    "sum": lambda value, attribute=None, start=0: 0 if isinstance(start, (int, float)) else TEXT**2,
    "zfill": lambda value, width: width,
}
METHODS = {
    str: {name for name in dir(str) if name[0] != "_"} - {"encode", "maketrans", "translate"},
    dict: {"copy", "get", "items", "keys", "values"},
    list: {"copy", "count", "index"},
    tuple: {"count", "index"},
    float: {"is_integer"},
}
# Slow on long text, and of no use to a prompt
NO_FILTERS = {"forceescape", "pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr"}


class TooMuch(jinja2.TemplateRuntimeError):
    """A template went past a limit."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The jinja2 environment that published templates expect, for one rendering.

    given: the values that the template will read; the limits grow with their size. Errors: compiling and
    rendering raise whatever jinja2 raises, TooMuch past a limit. Source: Hugging Face chat templates.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, given):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, finalize=self.shown,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )  # fmt: skip
        size = _given_size(given)
        self._end = time.thread_time() + SECONDS + SECONDS_EACH * size
        self._looks = 0  # at the clock, which costs more than a step
        self._steps, self._made = STEPS + STEPS_EACH * size, MADE + MADE_EACH * size
        self._text = TEXT + TEXT_EACH * size
        self.filters = {
            name: self._guarded(name, f) for name, f in self.filters.items() if name not in NO_FILTERS
        }
        self.tests = {name: self._guarded(name, test) for name, test in self.tests.items()}
        self.filters["tojson"] = self.tojson
        del self.globals["lipsum"]
        self.globals |= {"namespace": Names, "raise_exception": _refuse, "strftime_now": _strftime_now}

    def _parse(self, source, name, filename):
        tree = Bounds().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)

    def step(self, count=1):
        """Count steps. Returns True. Errors: TooMuch."""
        self._steps -= count
        self._looks += 1
        if self._steps < 0 or (self._looks % 16 == 0 and time.thread_time() > self._end):
            raise TooMuch("it does not come to an end")
        return True

    def each(self, items):
        """The items, a step for each."""
        for item in items:
            self.step()
            yield item

    def allow(self, length):
        """Errors: TooMuch for a text of more than this many characters."""
        if length > self._text:
            raise TooMuch(f"it makes a text of more than {self._text} characters")

    def size(self, value):
        """Characters of value written out; what a list holds twice counts twice. Errors: TooMuch."""
        total, stack = 0, [[value]]
        while stack:
            items = stack.pop()
            self.step(len(items))
            for item in [*items.keys(), *items.values()] if isinstance(items, Mapping) else items:
                total += 4  # quotes, comma, space
                if isinstance(item, str):
                    total += len(item)
                elif isinstance(item, int):
                    total += item.bit_length() // 3
                elif isinstance(item, (Mapping, list, tuple, AbstractSet, MappingView)):
                    stack.append(item)
            self.allow(total)
        return total

    def measured(self, value):
        """value, which a template has just made, once it is counted. Errors: TooMuch."""
        if isinstance(value, str):
            self.allow(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.size(value)
        elif isinstance(value, int) and value.bit_length() > BITS:
            raise TooMuch(f"it makes a number of more than {BITS} bits")
        else:
            return value
        self._made -= sys.getsizeof(value)
        if self._made < 0:
            raise TooMuch("it makes too much text")
        return value

    def shown(self, value):
        """What `{{ value }}` writes."""
        return value if isinstance(value, str) else self.measured(str(value))

    def joined(self, *values):
        """What `a ~ b ~ c` makes."""
        return self.concat(map(self.shown, values))

    def concat(self, pieces):
        """Pieces of text, joined; a generator is left where the text becomes too long."""
        found, length = [], 0
        for piece in pieces:
            length += len(piece)
            self.allow(length)
            found.append(piece)
        return self.measured("".join(found))

    def tojson(self, value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        """JSON as a model has seen it: jinja2's own filter escapes <, > and & for HTML."""
        wide = max(
            len(text) if isinstance(text, str) else text or 0 for text in (indent, *(separators or ()))
        )
        if wide > WIDTH:
            raise TooMuch(f"tojson with {wide} characters between values")
        self.allow(6 * self.size(value))  # \u0000
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return self.measured(encoder.encode(value))
        return self.concat(self.each(encoder.iterencode(value)))

    def call_binop(self, context, operator, left, right):
        """An operator that may make much of little."""
        if operator == "*":
            for many, count in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(count, int):
                    self.allow((len(many) if isinstance(many, str) else self.size(many)) * count)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > BITS:
                raise TooMuch(f"it makes a number of more than {BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, "%", right)
        return self.measured(super().call_binop(context, operator, left, right))

    def call(self, context, function, /, *args, **kwargs):
        """A call that the template writes."""
        owner = getattr(function, "__self__", None)
        if owner is self:  # written by Bounds
            return function(*args)
        self.step()
        named = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
        if isinstance(owner, (*METHODS, int, bytes, bytearray, type)):
            args = self._check_method(owner, function.__name__, args, named)
        elif isinstance(function, Macro) and (function.catch_varargs or function.catch_kwargs):
            self.size([*args, *named.values()])  # it makes a list of them
        return self.measured(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value):
        """A text's format method, which jinja2 3.1.5 and later hand out already wrapped."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args, **kwargs):
            return wrapped(*self._check_method(value.__self__, value.__name__, args, kwargs), **kwargs)

        return bounded

    def _guarded(self, name, function):
        """A filter or test, counted and measured."""
        place = int(hasattr(function, "jinja_pass_arg"))  # the value comes after a context

        @wraps(function)
        def guarded(*args, **kwargs):
            before, (value, *more) = args[:place], args[place:]
            if name == "join":
                value = self._check_join(value, *more, **kwargs)
            elif name == "format":
                self._check_format(str(value), "%", [more, kwargs])
            self._check_work(name, value, more, kwargs)
            found = function(*before, value, *more, **kwargs)
            return self.each(found) if isinstance(found, GeneratorType) else self.measured(found)

        return guarded

    def _check_work(self, name, value, args, kwargs):
        """Count what a filter or method will do, refuse what it would make."""
        self.step(len(value) if name in EACH and hasattr(value, "__len__") else 1)
        if name in SEARCHES and args:
            self.step(len(value) * len(args[0] or "") // 1000)
        if name in GROWTH:
            self.allow(GROWTH[name](value, *args, **kwargs))

    def _check_method(self, owner, name, args, kwargs):
        """Refuse a method of a built-in type that templates have no use for, or its work. Returns args."""
        if not any(isinstance(owner, kind) and name in names for kind, names in METHODS.items()):
            raise jinja2.TemplateRuntimeError(f"{type(owner).__name__}.{name} is not offered to templates")
        if isinstance(owner, str):
            if name in ("format", "format_map"):
                self._check_format(owner, "{", [args, kwargs])
            elif name == "join" and args:
                return (self._check_join(args[0], owner),)
            self._check_work(name, owner, args, kwargs)
        return args

    def _check_join(self, items, separator="", attribute=None):
        """items as a list, once their text is not too long."""
        items = items if isinstance(items, (str, list, tuple)) else list(items)
        self.allow(len(str(separator)) * len(items) + self.size(items))
        return items

    def _check_format(self, form, mark, values):
        """Refuse a format that makes much of little. mark: what begins a field."""
        fields = re.findall(r"\{[^{}]*" if mark == "{" else r"%(?:\([^)]*\))?[^a-zA-Z%]*", form)
        if any("*" in field for field in fields) or re.search(r"\{[^{}]*:[^{}]*\{", form):
            raise TooMuch("a format takes its widths from its values")
        widths = sum(int(digits[:9]) for field in fields for digits in re.findall(r"\d+", field))
        self.allow(len(form) + widths + len(fields) * (self.size(values) + 400))  # 1e308 has 309 digits


class Bounds(NodeTransformer):
    """Puts the sandbox's counting into a template's tree, where jinja2 offers no hook."""

    def visit_For(self, node):
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_ask(node, "step"), lineno=node.lineno))
        if node.test is not None:  # a loop whose test is never true has no pass
            node.test = nodes.And(_ask(node, "step"), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node):
        self.generic_visit(node)
        return _ask(node, "joined", *node.nodes)

    def visit_Getitem(self, node):
        self.generic_visit(node)
        return _ask(node, "measured", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node):
        self.generic_visit(node)
        is_made = getattr(node, "ctx", "load") == "load"  # a tuple may be a loop's target
        has_parts = any(not isinstance(part, nodes.Const) for part in node.items)
        return _ask(node, "measured", node) if is_made and has_parts else node

    visit_Tuple = visit_Dict = visit_List

    def visit_ScopedEvalContextModifier(self, node):
        raise jinja2.TemplateSyntaxError("autoescape is not offered to templates", node.lineno)


def _ask(node, name, *args):
    """A call of the sandbox's own method, as a node."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None, lineno=node.lineno)


class Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here only its body counts."""

    tags = frozenset(["generation"])

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Names(Namespace):
    """A namespace that does not write out what it holds: it may hold itself, or another one many times."""

    def __repr__(self):
        return "<Namespace>"


def _refuse(message):
    raise jinja2.TemplateError(str(message))


def _strftime_now(form):
    if len(form) > WIDTH or re.search(r"%[^a-zA-Z%]*\d", form):
        raise TooMuch(f"strftime_now takes a form of at most {WIDTH} characters, without widths")
    return datetime.now().strftime(form)


def _given_size(given):
    """Characters of what the user gives, each list counted once: it may even hold itself."""
    total, stack, seen = 0, [given], set()
    while stack:
        item = stack.pop()
        total += 4 + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            stack += [*item, *item.values()] if isinstance(item, dict) else item
    return total
