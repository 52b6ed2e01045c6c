"""House rules that a reader counts on: short files and lines, headers of kernels, one name an argument."""

import ast
import inspect
import re

import pytest
from minidflash.kernels import cpu, oracle
from minidflash.kernels.table import ROWS

from minidflash.cli import ladder
from tests.test_packaging import PROJECT, ROOT

FIELDS = ["Grid", "Moves", "Source", "Truth"]
MOST_LINES, MOST_COLUMNS = 400, 110
CODE = ".py", ".cu", ".cuh", ".cpp", ".h"
FOLDERS = "minidflash", "kernels", "weights", "tests", "bench"
SOURCES = sorted(f"kernels/cuda/{path.name}" for path in (ROOT / "kernels" / "cuda").glob("*.cu"))


def code():
    """(name, lines) of every file of code."""
    paths = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.name.endswith(CODE))
    return [(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8").splitlines()) for p in paths]


def test_files_are_short():
    found = [f"{name}: {len(lines)}" for name, lines in code() if len(lines) > MOST_LINES]
    assert not found, f"over {MOST_LINES} lines: {found}"


def test_lines_are_short():
    found = [
        f"{name}:{number}: {len(line)}"
        for name, lines in code()
        for number, line in enumerate(lines, 1) if len(line) > MOST_COLUMNS
    ]  # fmt: skip
    assert not found, f"over {MOST_COLUMNS} columns: {found}"


def test_formatters_and_rules_agree():
    assert PROJECT["tool"]["ruff"]["line-length"] == MOST_COLUMNS
    assert "E501" in PROJECT["tool"]["ruff"]["lint"]["extend-select"]
    settings = (ROOT / ".clang-format").read_text(encoding="utf-8")
    assert f"ColumnLimit: {MOST_COLUMNS}\n" in settings


def header_of(name):
    """The comment that a file begins with."""
    found = re.match(r"/\*.*?\*/", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{name} does not begin with a comment"
    return found[0]


@pytest.mark.parametrize("name", SOURCES)
def test_a_kernel_says_its_grid_its_traffic_and_its_truth(name):
    header = header_of(name)
    found = re.findall(r"^ \* ([A-Z][a-z]+): ", header, re.MULTILINE)
    known = [field for field in found if field in FIELDS]
    assert known in (FIELDS, [field for field in FIELDS if field != "Source"])
    within = re.findall(rf"\b({'|'.join(FIELDS)}): ", header)
    assert within == known, "a field that does not begin a line"
    truths = re.findall(r"oracle(?:_\w+)?\.py ([\w, ]+)", header)
    assert not [word for names in truths for word in names.split(", ") if not hasattr(oracle, word)]


def test_the_formatter_leaves_these_comments_alone():
    """A comment that clang-format's CommentPragmas finds is not reflowed."""
    pattern = re.search(r'^CommentPragmas: "(.*)"$', (ROOT / ".clang-format").read_text(), re.MULTILINE)[1]
    assert not [name for name in SOURCES if not re.search(pattern, header_of(name))]


def given(function):
    """Names of arguments without a default, but for `backend`; of what a function passes its *args on to."""
    kinds = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in kinds):
        calls = [c for c in ladder.calls_of(function) if any(isinstance(a, ast.Starred) for a in c.args)]
        other = ladder.called(function, calls[0]) if calls else ladder.compiled_by(function)[0]
        return given(getattr(other, "py_func", other))
    return [
        p.name
        for p in kinds
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "backend"
    ]


@pytest.mark.parametrize("name", ROWS)
def test_an_argument_has_one_name(name):
    row = ROWS[name]
    names, inputs = [arg.name for arg in row.args], [arg.name for arg in row.inputs]
    assert given(getattr(oracle, name)) == (names if row.fills_outputs else inputs), "oracle"
    assert given(cpu.function_of(name)) == names, "numba"
    for variant, function in ladder.gpu_functions(name).items():
        assert given(function) == names, variant
