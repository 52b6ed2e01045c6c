"""A program of the CPU: compiled kernels one after the other, called by machine code.

A call from Python looks at every argument's type and takes arrays apart anew: 3 us a kernel, and 10 to 30 in
a round, whose weights have driven the interpreter out of the caches. Here that is done once.
"""

import ctypes
from functools import cache
from itertools import groupby

import numpy as np
from llvmlite import ir
from numba import types

from . import jit
from .dot import loaded
from .vector import F32, I32, I64, _number

_CELLS = I64.as_pointer()
_REAL = ir.DoubleType()
_OK = 0, -2  # what a compiled function returns: done, or done with None
_LETTERS = {types.int64: "i", types.float32: "f", types.float64: "d"}
_engines = []  # hold the code of this module for the process
_compiled = {}  # (kernel, kind of its arguments) -> what `_compile` gives


class Program:
    """Steps in order, (compiled kernel or function of Python, its arguments). lock: for kernels."""

    def __init__(self, steps, lock):
        self._lock, self._parts = lock, []
        for is_compiled, run in groupby(steps, lambda step: hasattr(step[0], "py_func")):
            some = list(run)
            self._parts += [Kernels(some)] if is_compiled else some

    def launch(self):
        """Run all. Errors: RuntimeError where a kernel raised one."""
        for part in self._parts:
            if isinstance(part, Kernels):
                with self._lock:
                    part.run()
            else:
                function, args = part
                function(*args)


class Kernels:
    """(Kernel, arguments) that are called without Python between them; compiled for these arguments."""

    def __init__(self, calls):
        self._calls, self._cells, entries, known = calls, [], [], {}
        for kernel, args in calls:
            kind = kernel, _kind_of(args)
            if kind not in _compiled:
                _compiled[kind] = _compile(kernel, args)
            address, caller = _compiled[kind]
            cells = [address]
            _lay(args, cells, known)
            self._cells.append(np.array(cells, np.int64))
            entries.append((caller, self._cells[-1].ctypes.data))
        self._entries = np.array(entries, np.int64)

    def run(self):
        at = _runner()(self._entries.ctypes.data, len(self._entries))
        if at >= 0:
            raise RuntimeError(f"the compiled kernel {self._calls[at][0].__name__!r} failed")


def _kind_of(value):
    """What of an argument, or of a tuple of them, decides about its type of Numba's, which takes 10 to 100
    times as long to find."""
    if type(value) is tuple:
        return tuple([_kind_of(one) for one in value])
    return (value.dtype, value.ndim, value.flags.num) if type(value) is np.ndarray else type(value)


def _compile(kernel, args):
    """(address of a kernel compiled for arguments of these types, that of what calls it)."""
    signature = tuple(kernel.typeof_pyval(arg) for arg in args)
    kernel.compile(signature)
    code = kernel.overloads[signature]
    address = code.library.get_pointer_to_function(code.fndesc.llvm_func_name)
    return address, _caller("".join(map(_letters, signature)))


def _letters(kind):
    """Of the parts in which Numba passes an argument of a type: i, an integer or an address; f, d: a float, a
    double. Errors: TypeError for a type that no kernel takes."""
    if isinstance(kind, types.Array):
        return "i" * (5 + 2 * kind.ndim)
    if isinstance(kind, types.BaseTuple):
        return "".join(map(_letters, kind.types))
    if kind not in _LETTERS:
        raise TypeError(f"no program passes a {kind}")
    return _LETTERS[kind]


def _lay(value, cells, known):
    """Append the bits of an argument's parts, or of those of a tuple of arguments, as i64. known: those of
    arrays by id, since most are arguments of many kernels, and an array's address takes 3 us to ask for."""
    kind = type(value)
    if kind is np.ndarray:
        if id(value) not in known:  # nobody counts references to it
            head = 0, 0, value.size, value.itemsize, value.ctypes.data
            known[id(value)] = *head, *value.shape, *value.strides
        cells += known[id(value)]
    elif kind is tuple:
        for one in value:
            _lay(one, cells, known)
    elif kind is np.float32:
        cells.append(int(np.float32(value).view(np.int32)))
    elif isinstance(value, float):
        cells.append(int(np.float64(value).view(np.int64)))
    else:
        cells.append(int(value))


@cache
def _caller(letters):
    """Address of i32 call(cells): calls the function at cells[0] with the others, as these letters say."""
    module, name = ir.Module(), f"minidflash_call_{letters}"
    function = ir.Function(module, ir.FunctionType(I32, [_CELLS]), name)
    builder, (cells,) = ir.IRBuilder(function.append_basic_block()), function.args
    kinds = {"i": I64, "f": F32, "d": _REAL}
    result = builder.alloca(I64)  # of kernels, which return nothing; and what an error would say
    args, forms = [result, result], [_CELLS, _CELLS]
    for at, letter in enumerate(letters, 1):
        cell = builder.load(builder.gep(cells, [_number(at)]))
        if letter == "f":
            cell = builder.trunc(cell, I32)
        args.append(builder.bitcast(cell, kinds[letter]))
        forms.append(kinds[letter])
    address = builder.inttoptr(builder.load(cells), ir.FunctionType(I32, forms).as_pointer())
    builder.ret(builder.call(address, args))
    return _address("call", module, name)


@cache
def _runner():
    """i64 run(entries, count): calls every entry, (address of its caller, of its cells). Returns which one
    failed, or -1."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(I64, [_CELLS, I64]), "minidflash_run")
    entries, count = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    head, inside, failed, done = (builder.append_basic_block() for _ in range(4))
    before = builder.block
    builder.branch(head)
    builder.position_at_end(head)
    at = builder.phi(I64)
    at.add_incoming(_number(0), before)
    builder.cbranch(builder.icmp_signed("<", at, count), inside, done)
    builder.position_at_end(inside)
    entry = builder.gep(entries, [builder.mul(at, _number(2))])
    caller = builder.inttoptr(builder.load(entry), ir.FunctionType(I32, [_CELLS]).as_pointer())
    cells = builder.inttoptr(builder.load(builder.gep(entry, [_number(1)])), _CELLS)
    status = builder.call(caller, [cells])
    at.add_incoming(builder.add(at, _number(1)), inside)
    good = (builder.icmp_signed("==", status, ir.Constant(I32, code)) for code in _OK)
    builder.cbranch(builder.or_(*good), head, failed)
    builder.position_at_end(failed)
    builder.ret(at)
    builder.position_at_end(done)
    builder.ret(_number(-1))
    form = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)  # without the interpreter's lock
    return form(_address("run", module, "minidflash_run"))


def _address(kind, module, name):
    """Of a function of a module."""
    module.triple = jit.TARGET[0]
    _engines.append(loaded(f"program-{kind}", str(module)))
    return _engines[-1].get_function_address(name)
