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
_engines = []  # hold the code of this module for the process
_array_types = {}


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
        self._calls, self._cells, entries = calls, [], []
        for kernel, args in calls:
            signature, letters = tuple(_type_of(kernel, arg) for arg in args), ""
            cells = [_address_of(kernel, signature)]
            for kind, arg in zip(signature, args, strict=True):
                for letter, cell in _parts_of(kind, arg):
                    letters += letter
                    cells.append(cell)
            self._cells.append(np.array(cells, np.int64))
            entries.append((_caller(letters), self._cells[-1].ctypes.data))
        self._entries = np.array(entries, np.int64)

    def run(self):
        at = _runner()(self._entries.ctypes.data, len(self._entries))
        if at >= 0:
            raise RuntimeError(f"the compiled kernel {self._calls[at][0].__name__!r} failed")


def _type_of(kernel, value):
    """Numba's type of an argument. Asked once for each kind of array: that took half of a recording."""
    if type(value) is not np.ndarray:
        return kernel.typeof_pyval(value)
    flags = value.flags
    kind = value.dtype, value.ndim, flags.c_contiguous, flags.f_contiguous, flags.writeable, flags.aligned
    if kind not in _array_types:
        _array_types[kind] = kernel.typeof_pyval(value)
    return _array_types[kind]


@cache
def _address_of(kernel, signature):
    """Of a kernel compiled for arguments of these types."""
    kernel.compile(signature)
    code = kernel.overloads[signature]
    return code.library.get_pointer_to_function(code.fndesc.llvm_func_name)


def _parts_of(kind, value):
    """(letter, bits as i64) of the parts in which Numba passes an argument. Letters: i, an integer or an
    address; f, d: a float, a double. Errors: TypeError for a kind that no kernel takes."""
    if isinstance(kind, types.Array):
        head = 0, 0, value.size, value.itemsize, value.ctypes.data  # nobody counts references to it
        for cell in (*head, *value.shape, *value.strides):
            yield "i", cell
    elif isinstance(kind, types.BaseTuple):
        for one, part in zip(kind.types, value, strict=True):
            yield from _parts_of(one, part)
    elif kind == types.int64:
        yield "i", int(value)
    elif kind == types.float64:
        yield "d", int(np.float64(value).view(np.int64))
    elif kind == types.float32:
        yield "f", int(np.float32(value).view(np.int32))
    else:
        raise TypeError(f"no program passes a {kind}")


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
