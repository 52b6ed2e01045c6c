"""Packaging: nothing forgotten in the wheel, nothing heavy at import,
nothing of this machine in the files."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {"minidflash": "minidflash", "kernels": "minidflash/kernels", "weights": "minidflash/weights"}


def tracked(*under):
    """Files that git tracks, as paths relative to the root."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to know which files belong to the project")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *under], cwd=ROOT, capture_output=True, check=True
    )
    names = listed.stdout.decode().split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


def texts():
    """(name, text) of every tracked file that is text."""
    for name in tracked():
        data = (ROOT / name).read_bytes()
        if b"\0" not in data:
            yield name, data.decode("utf-8")


def python(code, cwd, *path):
    """Run code in a fresh interpreter that imports from path first."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_subpackage_is_listed():
    found = set()
    for folder, home in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([*home.split("/"), *inside]))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the tracked files alone, so that leftovers of other builds cannot hide a gap."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(out),
        str(copy),
    ]
    if int(version("setuptools").split(".")[0]) >= 77:
        command.insert(4, "--no-build-isolation")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_packages(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder, home in FOLDERS.items():
        wanted = {f"{home}{name.removeprefix(folder)}" for name in tracked(folder)}
        assert wanted, folder
        assert wanted <= inside, f"not in the wheel: {sorted(wanted - inside)}"
    assert any(name.endswith("/licenses/LICENSE") for name in inside)
    assert "minidflash/result.schema.json" in inside and "minidflash/weights/default/config.json" in inside
    assert not any(name.startswith(("tests/", "bench/", "kernels/", "weights/")) for name in inside)


@pytest.mark.slow
def test_wheel_runs_without_the_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import minidflash, minidflash.kernels.table, minidflash.weights, minidflash.tokenizer;"
        "from importlib.resources import files;"
        "print(minidflash.__file__, (files('minidflash.weights') / 'default' / 'config.json').is_file())"
    )
    place, found = python(code, tmp_path, tmp_path).split()
    assert Path(place).is_relative_to(tmp_path) and found == "True"


def test_import_loads_nothing_heavy():
    code = (
        "import sys, minidflash, minidflash.tokenizer, minidflash.stats;"
        "print([m for m in ('numba', 'tokenizers', 'jinja2', 'cupy', 'cuda', 'torch') if m in sys.modules])"
    )
    assert python(code, ROOT, ROOT).strip() == "[]"


def test_a_broken_cupy_breaks_nothing(tmp_path):
    (tmp_path / "cupy.py").write_text("raise RuntimeError('no driver')\n")
    code = "import minidflash as md; print([name for name in md.__all__ if getattr(md, name) is None])"
    assert python(code, ROOT, tmp_path, ROOT).strip() == "[]"


# Spelt in parts, so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:home|Users|root|opt|work|mnt|srv)/\w|[A-Z]:\\\\?Users\\")
REGISTRY = re.compile(
    "|".join(["py" + r"pi\.org", "python" + r"hosted\.", "py" + r"pi\.nvidia", "arti" + "factory"])
)


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["machine-path", "registry-host"])
def test_files_name_no_machine_and_no_registry(pattern):
    found = [
        f"{name}:{text[: hit.start()].count(chr(10)) + 1}: {hit.group()}"
        for name, text in texts()
        for hit in pattern.finditer(text)
        if name != "tests/test_packaging.py"
    ]
    assert not found, "\n".join(found)


SPECIAL_NAME = re.compile(r"(?i)^(\w+_)?((bos|eos|eot|pad|unk|mask|stop)(_token)?_ids?|bos|eos|eot)$")
SPECIAL_TEXT = re.compile(r"<\|\w+\|>")
# A format is known by its marks, as a config by its keys; their ids are the tokenizer's.
MARKS = {
    "minidflash/channels.py": {
        f"<|{name}|>" for name in ["start", "channel", "message", "end", "return", "call"]
    }
}
IN_CUDA = re.compile(r"(?i)\b\w*(bos|eos|eot|mask_token|mask|stop)(_token)?_id\w*\s*(=|==|!=)\s*-?\d")


def is_number(node):
    """True for an integer, or a list, tuple or set that holds one."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return any(is_number(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    return isinstance(node, ast.Constant) and type(node.value) is int


def name_of(node):
    """The last name of a variable, attribute, key or subscript; "" for anything else."""
    if isinstance(node, ast.Subscript):
        return name_of(node.slice)
    for field in ("id", "attr", "arg"):
        if isinstance(getattr(node, field, None), str):
            return getattr(node, field)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def pairs(tree):
    """(name node, value node) wherever source gives a name a value or compares the two."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.keyword):
            yield getattr(node, "target", node), node.value
        elif isinstance(node, ast.Compare):
            for other in node.comparators:
                yield from ((node.left, other), (other, node.left))
        elif isinstance(node, ast.Dict):
            yield from zip(node.keys, node.values, strict=True)
        elif isinstance(node, ast.arguments):
            names = [*node.posonlyargs, *node.args]
            yield from zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True)
            yield from zip(node.kwonlyargs, node.kw_defaults, strict=True)
        elif isinstance(node, ast.Call) and len(node.args) == 2:  # config.get("eos_token_id", 2)
            yield node.args[0], node.args[1]


def special_ids(source):
    """Lines of Python source that give a special token a number of our own."""
    return [
        name.lineno
        for name, value in pairs(ast.parse(source))
        if name is not None and SPECIAL_NAME.match(name_of(name)) and is_number(value)
    ]


def test_no_special_token_is_hard_coded():
    assert special_ids("eos_token_id = 2") and special_ids("f(stop_ids=[1, 2])") and special_ids("x.eos == 7")
    assert special_ids("c.get('mask_token_id', -1)") and special_ids("def f(a, pad_id=0): pass")
    assert not special_ids("count = 2; mask = 1; eos_token_id = config['eos_token_id']; f(stop_ids=())")
    found = []
    for name in tracked(*FOLDERS):
        if not name.endswith((".py", ".cu", ".cuh", ".cpp", ".h")):
            continue
        source = (ROOT / name).read_text(encoding="utf-8")
        lines = special_ids(source) if name.endswith(".py") else []
        lines += [source[: hit.start()].count("\n") + 1 for hit in SPECIAL_TEXT.finditer(source)
                  if hit.group() not in MARKS.get(name, ())]  # fmt: skip
        if not name.endswith(".py"):
            lines += [source[: hit.start()].count("\n") + 1 for hit in IN_CUDA.finditer(source)]
        found += [f"{name}:{line}" for line in lines]
    assert not found, f"special tokens come from the checkpoint's files: {found}"
