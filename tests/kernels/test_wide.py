"""Passes of many rows (kernels/gpu/wide.py): each row has the bits that the skinny family gives it, on data
whose sums show the order in which they were taken."""

import ml_dtypes
import numpy as np
import pytest
from minidflash.kernels import compiler
from minidflash.kernels.gpu import HAS_WGMMA, fp8, split, wide
from minidflash.kernels.table import ROWS as TABLE_ROWS

from tests.cases import Fp8, Matrix, run, stored
from tests.compare import assert_same_bits
from tests.conftest import FULL, parameters
from tests.disassembly import assert_instructions, cards, disassemble_all, leave_first
from tests.fast_rows import counted, fast_run, on_gpu_backends, variant
from tests.kernels import test_rows
from tests.kernels.test_compile import needs_nvrtc
from tests.kernels.test_fast_bits import cut  # noqa: F401 a fixture
from tests.kernels.test_fast_prefill import use_frame
from tests.kernels.test_order_of_sums import cancelling

# Slices that begin within 64 k, as many warps as chunks and more; no slices; a cluster.
CUTS = [split.Split(3, 2, 2), split.Split(1, 1, 4), split.Split(2, 1, 8), split.Split(2, 1, 3, cluster=True)]
FORMS = [*wide.WIDE, "head_logits", "sample", "qkv shared", "qkv bare", "gate_up bare", "gate_up gelu",
         "linear_add normed", "head ranked"]  # fmt: skip
FP8_FORMS = ["qkv", "linear", "linear_add normed", "gate_up", "fuse", "inject"]
UNCUT = "linear_add", "gate_up", "gate_up bare"  # also of one slice
ODD = 57  # rows: more than one pass of the skinny kernels, which are one kernel for either pass
COLS = {"bf16": 360, "fp8": 768}  # 12 chunks, the last one of 8; thirds are whole scales
READ_ONCE = "0x12f00000"  # sm90.cuh's, its upper half
EMULATE = pytest.mark.parametrize("ops", parameters(["emulate"], ["bf16"]), indirect=True)


def name_of(form):
    return form.split()[0]


def in_fp8(matrix, rng):
    """Such a matrix in FP8: huge and opposite terms in its first and last thirds, scales no powers of 2. Of
    whole scales they cancel."""
    (rows, cols), third = matrix.shape, matrix.shape[1] // 3
    numbers = np.abs(rng.standard_normal((rows, cols))) + 1
    numbers[:, -third:] = -numbers[:, :third]
    scales = rng.uniform(1, 2, (-(-rows // 8), -(-cols // 128))).astype(np.float32)
    scales[:, : third // 128] *= 2.0**19
    scales[:, -(third // 128) :] = scales[:, : third // 128]
    return Fp8(numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales)


def many(form, rng, count, cols=None, dtype="bf16"):
    """`count` of the rows of a cancelling case, the 64 over and over where there are more."""
    case, sizes = cancelling(form, rng, cols or COLS[dtype])
    if dtype == "fp8":
        case = {what: in_fp8(v, rng) if isinstance(v, Matrix) else v for what, v in case.items()}
    rows = [i % 64 for i in range(count)]
    part = test_rows.some_rows(name_of(form), case, rows)
    where = np.arange(count, dtype=np.int32)
    if "slot" in part and "cache_k" in part:  # a cell each
        cells = rng.permutation(part["cache_k"].shape[-4] * part["cache_k"].shape[-2])[:count]
        room = part["cache_k"].shape[-2]
        part["slot"], part["pos"] = (cells // room).astype(np.int32), (cells % room).astype(np.int32)
    if part.get("tap_row") is not None:
        part["tap_row"], width = where, part["taps"].shape[1]
        part["taps"] = np.zeros((count, width), part["taps"].dtype)
    if "pick" in part:
        part["pick"] = rng.permutation(count).astype(np.int32)
    for what in ("ids", "margin"):
        if part.get(what) is not None:
            part[what] = np.zeros(count, part[what].dtype)
    return part, sizes


def agree(ops, form, rng, count, tile=None, monkeypatch=None, cols=None, dtype="bf16", scale=None):
    name, (case, sizes) = name_of(form), many(form, rng, count, cols, dtype)
    if scale is not None:
        case["x"] = stored(case["x"].view(ml_dtypes.bfloat16).astype(np.float32) * scale, "bf16")
    want = fast_run(ops, name, case, **sizes)
    if tile:
        monkeypatch.setattr(wide, "choose", lambda *_: tile)
    if monkeypatch:  # each kernel of the chain may start early, and must wait for what it reads
        monkeypatch.setattr(ops.backend, "dependent", True)
    calls = counted(ops.backend, monkeypatch) if monkeypatch else None
    got = run_wide(ops, name, case, sizes)
    assert calls is None or calls.keys() & {"lay_wide", "lay_wide_normed"}
    assert set(got) == set(want)
    for what, value in want.items():
        assert_same_bits(got[what], value, f"{form}: {what}, {count} rows, tile {tile}")


@on_gpu_backends
@pytest.mark.parametrize(
    "form, cut",
    [*((form, CUTS[0]) for form in FORMS), *((form, CUTS[1]) for form in FORMS if FULL or form in UNCUT),
     ("gate_up", CUTS[2]), ("qkv", CUTS[3])],
    indirect=["cut"], ids=str,
)  # fmt: skip
def test_rows_have_the_bits_of_the_skinny_kernels(ops, rng, cut, form, monkeypatch):  # noqa: F811
    agree(ops, form, rng, ODD, monkeypatch=monkeypatch)


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[1:2], indirect=True, ids=str)
def test_long_rows_are_laid_by_several_blocks(ops, rng, cut, monkeypatch):  # noqa: F811
    agree(ops, "linear_add", rng, 35, monkeypatch=monkeypatch, cols=1160)


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[:1], indirect=True, ids=str)
def test_long_rows_are_laid_with_their_norm(ops, rng, cut, monkeypatch):  # noqa: F811
    """Longer than what a thread keeps of the norm's weights."""
    agree(ops, "gate_up", rng, 35, monkeypatch=monkeypatch, cols=4232)


@on_gpu_backends
@pytest.mark.parametrize(
    "form, cut", [*((form, CUTS[0]) for form in FP8_FORMS), ("gate_up", CUTS[1])], indirect=["cut"], ids=str
)
def test_rows_of_fp8_have_the_bits_of_the_skinny_kernels(ops, rng, cut, form, monkeypatch):  # noqa: F811
    agree(ops, form, rng, ODD, monkeypatch=monkeypatch, dtype="fp8")


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[0:4:3], indirect=True, ids=str)
@pytest.mark.parametrize("cols", [776, 840, 936])  # the last scale has 1, 3 and 2 chunks
def test_rows_of_fp8_whose_last_scale_ends_early(ops, rng, cut, cols, monkeypatch):  # noqa: F811
    agree(ops, "linear_add", rng, 41, monkeypatch=monkeypatch, cols=cols, dtype="fp8")


@on_gpu_backends
@pytest.mark.parametrize("cut", [split.Split(1, 1, 5)], indirect=True, ids=str)
def test_rows_of_fp8_walk_its_own_cut(ops, rng, cut, monkeypatch):  # noqa: F811
    assert fp8.recut(cut, 1536) != cut
    agree(ops, "linear_add", rng, 33, monkeypatch=monkeypatch, cols=1536, dtype="fp8")


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[:1], indirect=True, ids=str)
@pytest.mark.parametrize("kind, tile, dtype", [
    (kind, tile, dtype) for kind in wide.TILES for dtype in ("bf16", "fp8")
    for tile in wide.tiles_for(kind, dtype) if FULL or tile[:3] != (64, 8, 8)
])  # fmt: skip  # other tests' tile
def test_frames_and_tiles_have_the_same_bits(ops, rng, cut, kind, tile, dtype, monkeypatch):  # noqa: F811
    use_frame(ops, monkeypatch, kind)
    cols = 1160 if tile[3] > 1 and dtype == "bf16" else None  # a ring that both blocks fill, more than once
    agree(ops, "linear_add", rng, 73, tile, monkeypatch, cols, dtype)


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[1:2], indirect=True, ids=str)
def test_gates_of_every_size(ops, rng, cut, monkeypatch):  # noqa: F811
    """From subnormal ones to those whose exponential overflows, and zeros: divided as one alone is."""
    sizes = np.ldexp(1.0, rng.permuted(np.arange(64) * 3 - 120))[:, None]
    sizes[::7] = 0
    agree(ops, "gate_up bare", rng, 64, monkeypatch=monkeypatch, scale=sizes)


def frames(arch, dtype):
    """Macros of the frame that a card has: for each tile, and trees of one slice and of several."""
    kind = "wgmma" if arch in HAS_WGMMA else "mma"
    for tile in wide.tiles_for(kind, dtype):
        for slices in (1, 4):
            names = dict(zip(("TOKENS", "WEIGHT_TILES", "STAGES", "CLUSTER"), tile, strict=True))
            names |= {"TREE_SLICES": slices, "TREE_WARPS": 12}
            names |= {"FP8": 1, "TREE_SPAN": 4} if dtype == "fp8" else {}
            yield names | ({"WGMMA": 1} if kind == "wgmma" else {})


@needs_nvrtc
@pytest.mark.parametrize("arch", cards(0))
@pytest.mark.parametrize("file, dtype", [
    *((file, "bf16") for file in ("wide_sums", "wide_gate_up", "wide_head")),
    ("wide_sums", "fp8"), ("wide_gate_up", "fp8"),
])  # fmt: skip
def test_compiles_without_spills(arch, file, dtype, tmp_path):
    """Nor does ptxas wait for each product before the next, or ignore setmaxnreg: its log would say so."""
    wanted = ["HGMMA" if arch in HAS_WGMMA else "HMMA", "UBLKCP", "SYNCS", "LDS 128", "ACQBULK"]
    of_one = [names for names in frames(arch, dtype) if file == "wide_sums" or names["TREE_SLICES"] == 1]
    of_one = of_one if FULL else of_one[-2:]
    if file == "wide_gate_up":  # h lies as the next product's tokens
        of_one.append(of_one[-1] | {"LAID_SLICES": 2, "LAID_WARPS": 12, "LAID_SPAN": 1})
    made = [compiler.compile_cubin(f"{file}.cu", arch, names) for names in of_one]
    for kernels, (_, log) in zip(disassemble_all([cubin for cubin, _ in made], tmp_path), made, strict=True):
        assert_instructions(kernels[file], wanted, ("LDL", "STL"))
        assert "serialized" not in log and "setmaxnreg" not in log
        policies = READ_ONCE in "\n".join(kernels[file]), False in leave_first(kernels[file])
        assert policies == (dtype == "bf16", True), "weights of few rows in bf16; tokens have none"


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[:1], indirect=True, ids=str)
@pytest.mark.parametrize("form", ["inject", "gate_up", "head"])
def test_more_rows_are_more_passes(ops, rng, cut, form, monkeypatch):  # noqa: F811
    monkeypatch.setattr(wide, "ROWS", 40)
    agree(ops, form, rng, 64, monkeypatch=monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("ops", parameters(["cuda"], ["bf16"]), indirect=True)
@pytest.mark.parametrize("cut", CUTS[:2], indirect=True, ids=str)
@pytest.mark.parametrize("form", ["qkv", "linear_add", "gate_up", "head", "fuse", "inject"])
def test_of_every_number_of_rows(ops, rng, cut, form):  # noqa: F811
    """1 .. 300 in steps that meet every remainder of a tile, and beyond one pass."""
    for count in (*range(33, 300 if form not in ("qkv", "inject") else 260, 7), 512, 513, 600, 1030):
        if form in ("qkv", "inject") and count > 300:
            continue  # cells of the case's caches
        agree(ops, form, rng, count)


@EMULATE
@pytest.mark.parametrize("cut", CUTS[:1], indirect=True, ids=str)
@pytest.mark.parametrize("form", FORMS if FULL else ["linear_add normed", "gate_up", "head", "inject"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_bits_do_not_depend_on_what_other_rows_hold(ops, rng, cut, form):  # noqa: F811
    name, (case, sizes) = name_of(form), many(form, rng, 40)
    whole = test_rows.seen(name, case, run_wide(ops, name, case, sizes), range(40))
    first = next(spec.name for spec in TABLE_ROWS[name].args if spec.type == "A")
    case[first] = case[first].copy()
    case[first][3:9] = stored(np.nan, "bf16")
    good = [*range(3), *range(9, 40)]
    found = test_rows.seen(name, case, run_wide(ops, name, case, sizes), range(40))
    after = {what: np.ascontiguousarray(value[good]) for what, value in found.items()}
    test_rows.compare(name, whole, after, good, "NaN beside")


def run_wide(ops, name, case, sizes):
    with variant(ops, name, "fast" if name in ("head_logits", "sample") else "wide", wide=True) as wide_ops:
        return run(wide_ops, name, case, **sizes)


@EMULATE
def test_few_rows_and_odd_inputs_stay_with_the_skinny_kernels(ops, rng):
    for rows, cols, wanted in ((32, 64, "fast"), (33, 64, "wide"), (33, 68, "fast")):
        case = {
            "a": stored(rng.standard_normal((rows, cols)), "bf16"),
            "w": Matrix(stored(rng.standard_normal((24, cols)), "bf16")), "bias": None,
        }  # fmt: skip
        with variant(ops, "linear", wanted, wide=True) as some:
            run(some, "linear", case)
