"""What a kernel test needs: random arguments, a checked call on a backend, and the same call in float64.

A case is a dict of a row's inputs by name, on the host: activations in storage (f32, or bf16 bits), f32
vectors, i32 arrays, numbers, `Matrix` or `Experts` for weights. `work` is left out.
`run` calls a backend with it, `truth` the oracle.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from minidflash.kernels import oracle, oracle_moe
from minidflash.kernels.ops import DTYPES, expected, storage
from minidflash.kernels.table import ROWS, role_of
from minidflash.kernels.weight import Weight

from tests.compare import assert_close, real, worst

GUARD = 64  # elements behind the workspace that must stay as they were
JUNK = {"A": np.nan, "f32": np.nan, "i32": -77777}


@dataclass
class Matrix:
    """A checkpoint tensor as the weight reader hands it over. array: f32, or bf16 bits."""

    array: np.ndarray

    @property
    def dtype(self):
        return {np.dtype(np.uint16): "BF16", np.dtype(np.float32): "F32"}[self.array.dtype]

    @property
    def shape(self):
        return self.array.shape

    @property
    def real(self):
        return real(self.array)

    def drop(self):
        pass


@dataclass
class Blocks:
    """An MXFP4 checkpoint tensor (rows, cols). array: u8 (rows, cols/32, 16); scales: u8 (rows, cols/32)."""

    array: np.ndarray
    scales: np.ndarray
    dtype = "MXFP4"

    @property
    def shape(self):
        return len(self.array), 32 * self.array.shape[1]

    @property
    def real(self):
        return oracle.mxfp4(self.array, self.scales).astype(np.float64)

    def drop(self):
        pass


@dataclass
class Fp8(Matrix):
    """An FP8 checkpoint tensor. array: codes u8 (rows, cols); scales: f32 (rows/8, cols/128), rounded up."""

    scales: np.ndarray
    dtype = "FP8"

    @property
    def wide(self):
        """The dequantised f32 numbers, as ml_dtypes reads codes."""
        (rows, cols), each = self.shape, np.repeat(np.repeat(self.scales, 8, 0), 128, 1)
        return self.array.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * each[:rows, :cols]

    @property
    def real(self):
        return self.wide.astype(np.float64)


@dataclass
class Experts:
    """A matrix for each of `count` experts: tensors stacked along rows, expert by expert,
    cut wherever they are."""

    parts: list
    count: int

    @property
    def shape(self):
        rows = sum(part.shape[0] for part in self.parts)
        return self.count, rows // self.count, self.parts[0].shape[1]

    @property
    def real(self):
        return np.concatenate([part.real for part in self.parts]).reshape(self.shape)


def stored(values, kind):
    """values rounded into storage: "f32", or "bf16" as bits."""
    values = np.asarray(values)
    return values.astype(np.float32) if kind == "f32" else values.astype(ml_dtypes.bfloat16).view(np.uint16)


class Make:
    """Random arguments. activations: "f32" or "bf16"; weights: also "fp8", and "mxfp4" of experts alone."""

    def __init__(self, rng, activations="f32", weights="bf16"):
        self.rng, self.activations, self.weights = rng, activations, weights

    def a(self, *shape, scale=1.0):
        """Activations with one outlier, as real ones have."""
        values = self.rng.standard_normal(shape) * scale
        values.reshape(-1)[self.rng.integers(values.size)] *= 20
        return stored(values, self.activations)

    def v(self, *shape, around=0.0):
        """An f32 vector: a bias, or around 1 the scale of a norm."""
        return (around + 0.3 * self.rng.standard_normal(shape)).astype(np.float32)

    def w(self, rows, cols):
        """A weight whose outputs are of size 1."""
        if self.weights == "fp8":
            codes = (
                (100 * self.rng.standard_normal((rows, cols))).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
            )
            codes.reshape(-1)[:3] = 2.0**-9, -7 * 2.0**-9, 448  # two subnormals, the largest
            scales = self.rng.uniform(0.5, 2, (-(-rows // 8), -(-cols // 128))) / (100 * np.sqrt(cols))
            return Fp8(codes.view(np.uint8), scales.astype(np.float32))
        return Matrix(stored(self.rng.standard_normal((rows, cols)) / np.sqrt(cols), self.weights))

    def experts(self, count, rows, cols):
        """Weights of experts whose outputs are of size 1; of mxfp4, cols is a multiple of 32."""
        if self.weights != "mxfp4":
            return Experts([self.w(count * rows, cols)], count)
        middle = 127 - round(np.log2(3 * np.sqrt(cols)))  # 3: the root mean square of e2m1
        blocks = self.rng.integers(0, 256, (count * rows, cols // 32, 16), np.uint8)
        scales = self.rng.integers(middle - 1, middle + 2, (count * rows, cols // 32), np.uint8)
        return Experts([Blocks(blocks, scales)], count)

    def routing(self, rows, experts, used, idle=()):
        """Arguments expert, first and order: random distinct experts for each row but the `idle` ones."""
        expert = np.stack([self.rng.permutation(experts)[:used] for _ in range(rows)]).astype(np.int32)
        expert[list(idle)] = -1
        return grouped(expert, experts)

    def tables(self, positions, pairs, theta=10000.0):
        """cos and sin of a rotary embedding, (positions, pairs)."""
        angle = np.arange(positions)[:, None] / theta ** (np.arange(pairs) / pairs)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def grouped(expert, experts):
    """Arguments expert, first and order for these experts (T, U) of the rows."""
    first, order = oracle_moe.group(expert, experts)
    return {"expert": expert, "first": first.astype(np.int32), "order": order.astype(np.int32)}


def put(ops, values, kind):
    """A buffer of the backend with these values. kind: "A", "f32" or "i32"; values in storage already."""
    want = storage(ops.activations) if kind == "A" else DTYPES[kind]
    values = np.asarray(values)
    assert values.dtype == want, f"{kind} argument is {values.dtype}, not {np.dtype(want)}"
    buffer = ops.array(values.shape, kind)
    ops.upload(buffer, values)
    return buffer


def junk(ops, shape, kind):
    """Poison in storage: what must be overwritten, or must not be touched."""
    if kind == "i32":
        return np.full(shape, JUNK["i32"], np.int32)
    return stored(np.full(shape, np.nan), ops.activations if kind == "A" else "f32")


def addressed(case):
    """The case; a row whose key's number is not given has its position's."""
    return {"at": case["pos"], **case} if "pos" in case else case


def letters(row, case, sizes):
    """Sizes of the dim letters that the arguments show."""
    known = dict(sizes)
    for spec in row.inputs:
        value = case.get(spec.name)
        if spec.dims and value is not None:
            known |= {d: n for d, n in zip(spec.dims, value.shape, strict=True) if d.isalpha()}
    return known


def run(ops, name, case, **sizes):
    """Call kernel `name` on poisoned outputs and workspace; returns what it wrote, by argument, in storage.

    sizes: dim letters of outputs that no argument shows. Asserts that nothing behind a buffer was touched.
    """
    row, case = ROWS[name], addressed(case)
    known, weights = letters(row, case, sizes), [v for v in case.values() if isinstance(v, (Matrix, Experts))]
    args, results, guards, counters = [], {}, [], None

    def poisoned(spec, shape, extra):
        whole = junk(ops, (shape[0] + extra, *shape[1:]), spec.type)
        buffer = put(ops, whole, spec.type)
        guards.append((spec.name, buffer, whole, shape[0]))
        return buffer[: shape[0]]

    for spec in row.inputs:
        if spec.name == "work":
            cols = max([w.shape[-1] for w in weights] or [case["q"].shape[2] * case["q"].shape[1]])
            rows = known["T"] * (known["U"] if "order" in case else 1)
            count = ops.backend.work_size(rows, cols, sum(w.shape[-2] for w in weights))
            args.append(poisoned(spec, (count,), GUARD))
            counters = args[-1][: getattr(ops.backend, "counters", 0)]
            ops.upload(counters, np.zeros(counters.shape, np.float32))
            continue
        value = case.get(spec.name) if spec.optional else case[spec.name]
        if isinstance(value, Experts):
            value = ops.weight(value.parts, role_of(name, spec.name), value.count)
        elif spec.type == "W":
            value = ops.weight([value])
        elif spec.dims is not None and value is not None:
            value = put(ops, value, spec.type)
        args.append(value)
        if spec.inplace and value is not None:
            results[spec.name] = value
    for spec in row.outputs:
        results[spec.name] = poisoned(spec, [expected(d, known) for d in spec.dims], 1)
        args.append(results[spec.name])
    getattr(ops, name)(*args)
    assert counters is None or not ops.download(counters).any(), f"{name} leaves counters that are not zero"
    for what, buffer, whole, count in guards:
        after = ops.download(buffer)[count:]
        assert after.tobytes() == whole[count:].tobytes(), f"{name} wrote behind {what}"
    return {what: ops.download(buffer) for what, buffer in results.items()}


def truth(name, case, function=None, **sizes):
    """The same call in float64, nothing rounded. function: the oracle's unless a wrong one is planted."""
    row, function, case = ROWS[name], function or getattr(oracle, name), addressed(case)
    args, results = [], {}
    for spec in row.inputs:
        value = case.get(spec.name)
        if isinstance(value, (Matrix, Experts)):
            value = Weight(value.shape, "f32", "plain", (value.real,))
        elif isinstance(value, np.ndarray):
            value = value.copy() if spec.type == "i32" else real(value)
        args.append(value)
        if spec.inplace and spec.name != "work" and value is not None:
            results[spec.name] = value
    if row.fills_outputs:
        known = letters(row, case, sizes)
        for spec in row.outputs:
            shape, kind = (
                [expected(d, known) for d in spec.dims],
                np.int32 if spec.type == "i32" else np.float64,
            )
            results[spec.name] = np.full(shape, JUNK[spec.type], kind)
        function(*args, *(results[spec.name] for spec in row.outputs))
        return results
    out = function(*args)
    return results | ({row.outputs[0].name: out} if row.outputs else {})


# ---- sum |terms|: how far rounding of what comes in can move what goes out ---------------------------------


def normed(x, norm, eps):
    """rmsnorm in float64 of rows (T, D); norm None: the rows."""
    return real(x) if norm is None else oracle.rmsnorm(real(x), real(norm), eps)


def dot_terms(y, w, bias=None):
    """sum_k |w_nk y_tk| + |bias|: (T, N)."""
    total = np.abs(y) @ np.abs(w.real).T
    return total if bias is None else total + np.abs(bias)


def norm_terms(y, terms, norm, eps):
    """Terms of rmsnorm(y) when y has `terms`: each element's own share, and its part of the root's."""
    root = np.sqrt((y * y).mean(-1, keepdims=True) + eps)
    share = np.sqrt((terms * terms).mean(-1, keepdims=True)) / root
    return np.abs(norm) * (terms + np.abs(y) * (1 + share)) / root


def rope_terms(terms, cos, sin):
    """Terms of a rotation of (..., K) by (J,) tables, broadcast."""
    j = cos.shape[-1]
    a, b, rest = terms[..., :j], terms[..., j : 2 * j], terms[..., 2 * j :]
    c, s = np.abs(cos), np.abs(sin)
    return np.concatenate([a * c + b * s, b * c + a * s, rest], axis=-1)


# ---- the two questions a kernel test asks ------------------------------------------------------------------


def check(ops, name, case, terms, c, **sizes):
    """Kernel against float64 truth for every argument in `terms`; returns what the kernel wrote."""
    got, want = run(ops, name, case, **sizes), truth(name, case, **sizes)
    for what, bound in terms.items():
        assert_close(got[what], want[what], bound, c, f"{name}: {what}")
    return got


def slip(ops, name, case, wrong, terms, c, **sizes):
    """How many tolerances a wrong kernel is off: `wrong` is a function,
    or arguments it would have misread."""
    change = wrong if isinstance(wrong, dict) else {}
    other = truth(name, case | change, None if change else wrong, **sizes)
    right = truth(name, case, **sizes)
    halves = [spec.name for spec in ROWS[name].args if spec.type == "A"]
    return max(
        worst(stored(other[what], ops.activations if what in halves else "f32"), right[what], bound, c)
        for what, bound in terms.items()
    )
