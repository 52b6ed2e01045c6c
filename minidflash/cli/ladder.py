"""From a row of the table down to the code that computes it, on every backend, found in the code that runs.

Which function a backend calls is what the backend itself looks up; what that function launches is read from
its source, by following its calls with the names of files and kernels that they pass on.
"""

import ast
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import FunctionType, ModuleType


@dataclass(frozen=True)
class Step:
    """A function or kernel: its file below kernels/, the line where it begins, its name."""

    file: str
    line: int
    name: str

    def __str__(self):
        return f"{f'{self.file}:{self.line}':<36}{self.name}"


def folder():
    """Where kernels/ lies."""
    from minidflash.kernels import table

    return Path(table.__file__).parent


def step_of(function):
    """Step of a Python function."""
    path = Path(function.__code__.co_filename).relative_to(folder()).as_posix()
    return Step(f"kernels/{path}", function.__code__.co_firstlineno, function.__qualname__)


def entry(name):
    """Steps that all backends share: the table's row, and the method of Ops that checks arguments against
    it."""
    from minidflash.kernels import ops, table

    tree = ast.parse(Path(table.__file__).read_text(encoding="utf-8"))
    row = next(n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == name)
    return [Step("kernels/table.py", row.lineno, name), step_of(ops.Ops.__getattr__)]


def ladders(name):
    """Who computes a row -> its steps, the backend's function first, then what that compiles or launches.

    On a GPU, and emulated, variants are asked in turn: "prefill" (a prompt's rows), "wide" (many rows of many
    texts), "fast", "plain".
    Errors: LookupError where the source does not tell a launch's file or kernel;
    UserError as `check_threads`.
    """
    from minidflash.kernels import check_threads, oracle

    check_threads()  # before Numba is imported
    from minidflash.kernels import cpu

    on_cpu = cpu.function_of(name)
    found = {"oracle": [step_of(getattr(oracle, name))]}
    found["numba"] = [step_of(on_cpu), *map(step_of, dict.fromkeys(compiled_by(on_cpu)))]
    for variant, function in gpu_functions(name).items():
        kernels = [kernel_step(file, kernel) for file, kernel in dict.fromkeys(launched_by(function))]
        found[variant] = [step_of(asked_by(variant)), step_of(function), *kernels]
    return found


def gpu_functions(name):
    """Variant -> the function of a row, in the order in which a GPU backend asks them."""
    from minidflash.kernels.gpu import fast, plain, prefill, wide

    offered = {"prefill": prefill.PREFILL, "wide": wide.WIDE, "fast": fast.FAST}
    found = {variant: offers.get(name) for variant, offers in offered.items()} | {
        "plain": getattr(plain, name)
    }
    return {variant: function for variant, function in found.items() if function}


def asked_by(variant):
    """The method of a GPU backend that calls such functions."""
    from minidflash.kernels import gpu

    return (gpu.prefill.Prefill if variant == "prefill" else gpu.GpuBackend)._run


@cache
def calls_of(function):
    """Calls in the source of a function, in the order of the text."""
    tree = ast.parse(dedent(inspect.getsource(function)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def called(function, call):
    """What a call in the source of a function names: a global of its module, or an attribute of one;
    else None."""
    known = function.__globals__
    if isinstance(call.func, ast.Name):
        return known.get(call.func.id)
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        module = known.get(call.func.value.id)
        return getattr(module, call.func.attr, None) if isinstance(module, ModuleType) else None
    return None


def compiled_by(function):
    """Python functions behind the compiled ones that a function of kernels/cpu names."""
    tree = ast.parse(dedent(inspect.getsource(function)))
    found = (function.__globals__.get(node.id) for node in ast.walk(tree) if isinstance(node, ast.Name))
    return [compiled.py_func for compiled in found if hasattr(compiled, "py_func")]


def launched_by(function, known=None):
    """(file, kernel) of every `backend.launch` that a function of kernels/gpu may come to,
    whatever the branch.

    known: its parameters whose text the caller gave.
    """
    known = known or {}
    for call in calls_of(function):
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) == "backend.launch":
            pair = tuple(text_of(arg, known) for arg in call.args[:2])
            if None in pair:
                here = step_of(function)
                raise LookupError(f"{here.file}:{here.line + call.lineno - 1} launches what cannot be told")
            yield pair
            continue
        other = called(function, call)
        if isinstance(other, FunctionType) and Path(other.__code__.co_filename).parent == folder() / "gpu":
            given = dict(zip(inspect.signature(other).parameters, call.args, strict=False))
            given |= {word.arg: word.value for word in call.keywords if word.arg}
            texts = {name: text_of(value, known) for name, value in given.items()}
            yield from launched_by(other, {name: text for name, text in texts.items() if text is not None})


def text_of(node, known):
    """The text that an expression gives, or None where it needs more than known parameters."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, known)
    if isinstance(node, ast.JoinedStr):
        parts = [text_of(part, known) for part in node.values]
        return None if None in parts else "".join(parts)
    return None


def kernel_step(file, kernel):
    """Step of a kernel of a .cu. Errors: LookupError where the file does not define it."""
    text = (folder() / "cuda" / file).read_text(encoding="utf-8")
    found = re.search(rf"\b__global__\b[^;{{}}]*?\b{re.escape(kernel)}\s*\(", text)
    if not found:
        raise LookupError(f"kernels/cuda/{file} defines no kernel {kernel}")
    return Step(f"kernels/cuda/{file}", text.count("\n", 0, found.start()) + 1, kernel)
