"""The inner loop of every product on the CPU: tiles of weights times a few token rows, sums in registers.

A kind of weights has its loops in one module of LLVM, compiled once and kept on disk. Numba's code calls them
by name and holds none of it: else every kernel would optimise all bodies again, and a block's is long.
"""

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .. import diskcache
from . import jit
from .lanes import kind_of, source_of
from .vector import F32, I64, LANES, PREFETCH, VF, ZERO, _broadcast, _fma, _loop, _number, _pointer

# Sums of 16 lanes that registers hold beside the weights: (tokens, tiles) at once, for rows of a block.
IS_WIDE = "+avx512f" in jit.TARGET[2]
ONE = 4 if IS_WIDE else 2  # tiles at once for a single row
SHAPES = [(1, ONE), (1, 1), (4, 1)] + [(4, 4), (8, 2), (8, 1), (16, 1)] * IS_WIDE
FAR = 1 << 16  # bytes: tiles of blocks side by side ask for their next tiles where these are nearer
_loaded = {}  # kind -> the engine that holds its code


def _name(kind, tokens, tiles):
    return f"minidflash_dot_{kind}_{tokens}x{tiles}"


def _add_loop(module, kind, tokens, tiles):
    """What make_tile_dot describes. Arguments: w, bytes of a tile, bytes of a step of plain weights, x,
    x_step, count, out, out_stride."""
    byte, real = ir.IntType(8).as_pointer(), F32.as_pointer()
    form = ir.FunctionType(ir.VoidType(), [byte, I64, I64, real, I64, I64, real, I64])
    function = ir.Function(module, form, _name(kind, tokens, tiles))
    function.attributes.add("nounwind")  # llvmlite writes alignstack beside another one only
    function.attributes.alignstack = 64  # else what spills may lie across cache lines, by chance
    w, tile_stride, step, x, x_step, count, out, out_stride = function.args
    for argument in (w, x, out):
        argument.add_attribute("noalias")
    builder = ir.IRBuilder(function.append_basic_block())
    fma, source = _fma(builder, True), source_of(kind, IS_WIDE)
    first = [builder.gep(w, [builder.mul(tile_stride, _number(i))]) for i in range(tiles)]
    x_step = _number(1) if tokens == 1 else x_step
    ahead = _number(PREFETCH)
    if tiles > 1 and source.step > 1:
        group = builder.mul(tile_stride, _number(tiles))
        ahead = builder.select(builder.icmp_signed("<=", group, _number(FAR)), group, ahead)

    def add(readers, inputs, at, sums):
        """The sums with so many inputs more, from input `at` on."""
        row, sums = builder.gep(x, [builder.mul(at, x_step)]), list(sums)
        for j in range(inputs):
            weights = [value(j) for value in readers]
            for m in range(tokens):
                token = _broadcast(builder, builder.load(builder.gep(row, [_number(m)])))
                for i in range(tiles):
                    at = m * tiles + i
                    sums[at] = builder.call(fma, [weights[i], token, sums[at]])
            row = builder.gep(row, [x_step])
        return sums

    def body(k, sums):
        opened = [source.open(builder, tile, k, step, ahead) for tile in first]
        begin, inputs = builder.mul(k, _number(source.step)), source.step // source.turns

        def turn(i, sums):
            at = builder.add(begin, builder.mul(i, _number(inputs)))
            return add([one(i) for one in opened], inputs, at, sums)

        if source.turns == 1:
            return turn(_number(0), sums)
        return _loop(builder, _number(source.turns), 1, sums, turn)[1]

    steps = builder.sdiv(count, _number(source.step))
    _, sums = _loop(builder, steps, 1, [ZERO] * (tokens * tiles), body)
    if source.has_tail:
        done = builder.mul(steps, _number(source.step))

        def tail(k, sums):
            at = builder.add(done, k)
            return add([source.at(builder, tile, at, ahead) for tile in first], 1, at, sums)

        _, sums = _loop(builder, builder.sub(count, done), 1, sums, tail)
    for index, vector in enumerate(sums):
        at = builder.add(builder.mul(out_stride, _number(index // tiles)), _number(index % tiles * LANES))
        builder.store(vector, builder.bitcast(builder.gep(out, [at]), VF.as_pointer()), align=4)
    builder.ret_void()


def module_of(kind):
    """The loops of a kind as LLVM's text."""
    module = ir.Module(kind)
    module.triple = jit.TARGET[0]
    for tokens, tiles in SHAPES:
        _add_loop(module, kind, tokens, tiles)
    return str(module)


def provide(kind):
    """Make the loops of a kind known to compiled code, by name: before a kernel that calls them is loaded."""
    if kind in _loaded:
        return
    _loaded[kind] = engine = loaded(f"dot-{kind}", module_of(kind))
    for tokens, tiles in SHAPES:
        name = _name(kind, tokens, tiles)
        llvm.add_symbol(name, engine.get_function_address(name))


def loaded(name, text):
    """An engine that holds a module's code, compiled once and kept on disk by this name and its text."""
    path = jit.CACHE_FOLDER and jit.CACHE_FOLDER / f"{name}-{diskcache.digest(text, *jit.TARGET)}.o"
    code = path and diskcache.load(path)
    if not code:
        code = compiled(text)
        if path:
            diskcache.store(path, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def provide_for(signature):
    """The same for all kinds that a kernel of this signature may call."""
    for kind in signature:
        if isinstance(kind, types.BaseTuple):
            provide_for(kind)
        elif isinstance(kind, types.Array) and (name := kind_of(kind)):
            provide(name)


def target_machine():
    """LLVM's, for this processor as Numba sees it."""
    triple, cpu, features = jit.TARGET
    reloc = "static" if triple.startswith("x86") else "default"
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc=reloc, codemodel="jitdefault", jit=True
    )


def _optimised(text):
    """(the module, its machine)."""
    module, machine = llvm.parse_assembly(text), target_machine()
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.slp_vectorization = False  # all is vectors already
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    return module, machine


def compiled(text):
    """Machine code (an object file) of a module's text."""
    module, machine = _optimised(text)
    return machine.emit_object(module)


def assembly(kind):
    """The loops of a kind in assembly language."""
    module, machine = _optimised(module_of(kind))
    return machine.emit_assembly(module)


def make_tile_dot(tokens, tiles):
    """out[m][tile][lane] = sum_k w[tile][k][lane] * x[k][m], k ascending, one fused multiply-add a term.

    tokens, tiles: how many accumulators of 16 lanes live in registers. Arguments of what is returned:
    (w, w_at, tile_stride, step, x, x_at, x_step, count, out, out_at, out_stride); steps: elements from one k
    to the next; `step` is of plain weights, x_step of one token is 1. With an x_step below `tokens`, the last
    tokens are junk, and so is what comes out of them. count: inputs, whole blocks of them.
    """

    @intrinsic
    def tile_dot(typingctx, w, w_at, tile_stride, step, x, x_at, x_step, count, out, out_at, out_stride):
        n, kind = types.intp, kind_of(w)
        provide(kind)

        def codegen(context, builder, signature, args):
            w, w_at, tile_stride, step, x, x_at, x_step, count, out, out_at, out_stride = args
            w_kind, x_kind, out_kind = (signature.args[i] for i in (0, 4, 8))
            size = _number(context.get_abi_sizeof(context.get_data_type(w_kind.dtype)))
            w, x, out = (
                _pointer(context, builder, kind, array, at)
                for kind, array, at in ((w_kind, w, w_at), (x_kind, x, x_at), (out_kind, out, out_at))
            )
            byte, real = ir.IntType(8).as_pointer(), F32.as_pointer()
            form = ir.FunctionType(ir.VoidType(), [byte, I64, I64, real, I64, I64, real, I64])
            loop = cgutils.get_or_insert_function(builder.module, form, _name(kind, tokens, tiles))
            strides = builder.mul(tile_stride, size), builder.mul(step, size)
            w = builder.bitcast(w, byte)
            builder.call(loop, [w, *strides, x, x_step, count, out, out_stride])
            return context.get_dummy_value()

        return types.void(w, n, n, n, x, n, n, n, out, n, n), codegen

    return tile_dot
