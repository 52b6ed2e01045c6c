"""The fast kernels' bits under any number of rows, any company, order and cut; dependent launch;
what is compiled."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from minidflash.kernels import compiler
from minidflash.kernels.gpu import fast, split
from minidflash.kernels.ops import Ops
from minidflash.kernels.table import GELU_TANH, SILU
from minidflash.kernels.table import ROWS as TABLE_ROWS

from tests.cases import Make, stored
from tests.compare import assert_same_bits, real
from tests.conftest import FULL, parameters
from tests.disassembly import SM90, assert_instructions, cards, disassemble_all
from tests.fast_rows import C_NORMED, PRODUCTS, ROWS, C, fast_check, fast_run, on_gpu_backends
from tests.kernels import (
    test_fuse,
    test_gate_up,
    test_head_logits,
    test_linear,
    test_linear_add,
    test_qkv,
    test_rows,
)
from tests.kernels.test_compile import needs_nvrtc

FORMS = test_rows.FORMS
CUTS = [
    split.Split(1, 2, 8), split.Split(3, 2, 8, 4, 1), split.Split(2, 1, 16, 1, 4), split.Split(4, 2, 4, 2, 2),
    split.Split(2, 2, 3, 3, 1), split.Split(1, 1, 8, 2, 2, 4), split.Split(2, 1, 4, 4, 1, 2, True),
    split.Split(3, 1, 3, 2, 1, 4, True, True),
]  # fmt: skip
BATCHES = 3, 16, 27  # rows: each has kernels of its own
# Of CUTS, which half of its products a cut has (their index): cuts that are alike have different ones.
HALVES = {2: 0, 3: 4, 4: 0, 5: 4, 6: 4, 7: 0}


@pytest.fixture
def cut(request, monkeypatch):
    """Every product is cut this way, as far as its K allows."""

    def choose(outputs, cols, sms, whole=False):
        chunks, wanted = -(-cols // split.CHUNK), request.param
        slices = 1 if whole else min(wanted.slices, chunks)
        return replace(wanted, slices=slices)

    monkeypatch.setattr(split, "choose", choose)
    return request.param


# ---- bits --------------------------------------------------------------------------------------------------


def rows_alone(ops, name, case, sizes, rows):
    part = test_rows.some_rows(name, case, list(rows))
    return test_rows.seen(name, part, fast_run(ops, name, part, **sizes), list(rows))


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[:2], indirect=True, ids=str)
@pytest.mark.parametrize("form", [*ROWS, *FORMS])
def test_bits_do_not_depend_on_how_many_rows_there_are(ops, rng, cut, form):
    name, case, sizes = test_rows.make_form(form, rng, "bf16", "bf16")
    whole = rows_alone(ops, name, case, sizes, range(64))
    for count in (*range(1, 18), 31, 32, 33):
        first = int(rng.integers(0, 65 - count))
        rows = range(first, first + count)
        test_rows.compare(name, whole, rows_alone(ops, name, case, sizes, rows), list(rows), f"{count} rows")


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[1:2], indirect=True, ids=str)
@pytest.mark.parametrize("form", [*PRODUCTS, *FORMS])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_bits_do_not_depend_on_what_other_rows_hold(ops, rng, cut, form):
    name, case, sizes = test_rows.make_form(form, rng, "bf16", "bf16")
    whole = rows_alone(ops, name, case, sizes, range(20))
    first = next(spec.name for spec in TABLE_ROWS[name].args if spec.type == "A")
    case[first] = case[first].copy()
    case[first][3:9] = stored(np.nan, "bf16")
    good = [*range(3), *range(9, 20)]
    after = {what: value[good] for what, value in rows_alone(ops, name, case, sizes, range(20)).items()}
    test_rows.compare(name, whole, after, good, "NaN beside")


@pytest.mark.parametrize("ops", parameters(["emulate"], ["bf16"]), indirect=True)
@pytest.mark.parametrize("cut", [*CUTS[:2], CUTS[-1]], indirect=True, ids=str)
@pytest.mark.parametrize("form", [*ROWS, *FORMS])
def test_every_order_of_blocks_warps_and_lanes_gives_the_same_bits(ops, rng, cut, form):
    name, case, sizes = test_rows.make_form(form, rng, "bf16", "bf16")
    want = rows_alone(ops, name, case, sizes, range(11))
    for seed in range(1, 5):
        shuffled = Ops(type(ops.backend)("bf16", seed=seed))
        got = rows_alone(shuffled, name, case, sizes, range(11))
        test_rows.compare(name, want, got, list(range(11)), f"seed {seed}")


@on_gpu_backends
@pytest.mark.parametrize(
    "T, cut",
    [
        pytest.param(T, cut, id=f"{T}-cut{i}")
        for i, cut in enumerate(CUTS)
        for T in (BATCHES if FULL else [BATCHES[i % len(BATCHES)]])
    ],
    indirect=["cut"],
)
def test_every_cut_is_right(ops, rng, cut, T):
    """Emulated, a cut whose kernels no other test builds has half of the products, the next one the others:
    so has each product each way to end a tile, with and without clusters. MINIDFLASH_FULL=1: all."""
    D, bare = 330, {"norm": None}
    of = {what: tests.make(ops, rng, T, *shape, "bf16", *more) for what, tests, shape, more in (
        ("linear", test_linear, (123, 700), [True]), ("linear_add", test_linear_add, (123, 700), [True]),
        ("gate_up", test_gate_up, (D, 77), []), ("fuse", test_fuse, (77, D), []),
        ("head_logits", test_head_logits, (D, 77), []),
    )}  # fmt: skip
    of["qkv"] = test_qkv.make(ops, rng, (T, D, 5, 1, 24, 12), "bf16", True, True)
    calls = [  # row, its tests, C, sizes, what is changed
        ("linear", test_linear, C, {}, {}), ("gate_up", test_gate_up, C_NORMED, {"F": 77}, {}),
        ("qkv", test_qkv, C, {"H": 5}, bare), ("fuse", test_fuse, C, {}, {}),
        ("linear_add", test_linear_add, C, {}, {}), ("qkv", test_qkv, C_NORMED, {"H": 5}, {}),
        ("gate_up", test_gate_up, C, {"F": 77}, bare), ("head_logits", test_head_logits, C_NORMED, {}, {}),
    ]  # fmt: skip
    half = HALVES.get(CUTS.index(cut)) if ops.name == "emulate" and not FULL else None
    for row, tests, c, sizes, change in calls if half is None else calls[half:][:4]:
        case = of[row] | change
        fast_check(ops, row, case, tests.terms_of(case), c, **sizes)


@on_gpu_backends
@pytest.mark.parametrize("name", ROWS)
def test_bits_do_not_depend_on_who_ends_a_tile(ops, rng, name, monkeypatch):
    """Finishing warps, clusters and early launch change when sums meet, not in which order. Shapes as those
    of the last of CUTS, whose kernels are there; emulated, of the two ways between by turns one a row."""
    case, sizes = test_rows.make(name, rng, "bf16", "bf16")
    between = [{"finishers": 4}, {"finishers": 2, "cluster": True}]
    if ops.name == "emulate" and not FULL:
        between = [between[ROWS.index(name) % 2]]
    found = []
    for how in ({}, *between, {"finishers": 4, "cluster": True, "early": True}):

        def choose(outputs, cols, sms, whole=False, how=how):
            return split.Split(1 if whole else min(3, -(-cols // split.CHUNK)), 1, 3, 2, 1, **how)

        monkeypatch.setattr(split, "choose", choose)
        found.append(rows_alone(ops, name, case, sizes, range(11)))
        test_rows.compare(name, found[0], found[-1], list(range(11)), str(how))


# ---- dependent launch --------------------------------------------------------------------------------------


@on_gpu_backends
@pytest.mark.parametrize("cut", [CUTS[1], CUTS[-1]], indirect=True, ids=str)
def test_dependent_launches_read_nothing_too_early(ops, rng, cut, monkeypatch):
    """A chain of kernels that share the workspace; the emulator poisons what the predecessor wrote until the
    wait."""
    T, D, H, G, K, F, V, S = 5, 96, 3, 1, 32, 80, 70, 12
    make = Make(rng, "bf16")
    shapes = {"q": (H * K, D), "kv": (2 * G * K, D), "o": (D, H * K), "gate_up": (2 * F, D), "down": (D, F)}
    w = {
        name: ops.backend.weight([make.w(*shape)], "pairs" if name == "gate_up" else "matrix")
        for name, shape in (shapes | {"head": (V, D)}).items()
    }
    cos, sin = make.tables(S, K // 2)
    host = {
        "x": make.a(T, D),
        "taps": np.zeros((T, D), np.uint16),
        "h": np.zeros((T, F), np.uint16),
        "y": np.zeros((T, D), np.uint16),
    }
    host |= {name: np.zeros((1, G, S, K), np.uint16) for name in ("cache_k", "cache_v")}
    host |= {"q": np.zeros((T, H, K), np.uint16), "norm": make.v(D, around=1), "cos": cos, "sin": sin}
    host |= {"slot": np.zeros(T, np.int32), "pos": np.arange(T, dtype=np.int32), "ids": np.zeros(T, np.int32)}
    host["work"] = np.zeros(ops.backend.work_size(T, D, 2 * F), np.float32)

    def chain():
        kinds = {"uint16": "A", "float32": "f32", "int32": "i32"}
        b = {name: ops.array(value.shape, kinds[str(value.dtype)]) for name, value in host.items()}
        for name, value in host.items():
            ops.upload(b[name], value)
        where = (
            b["cos"],
            b["sin"],
            b["slot"],
            b["pos"],
            b["pos"],
            b["cache_k"],
            b["cache_v"],
            b["work"],
            b["q"],
        )
        for _ in range(2):
            ops.qkv(b["x"], b["norm"], 1e-6, w["q"], w["kv"], None, None, None, None, None, *where)
            ops.linear_add(
                b["q"].reshape(T, -1), w["o"], None, None, 0.0, None, None, 0, b["x"], None, b["work"]
            )
            ops.gate_up(b["x"], b["norm"], 1e-6, SILU, w["gate_up"], b["work"], b["h"])
            ops.linear_add(
                b["h"], w["down"], None, None, 0.0, None, b["pos"], 0, b["x"], b["taps"], b["work"]
            )
            ops.linear(b["h"], w["down"], None, b["work"], b["y"])
            ops.head(b["x"], b["pos"], b["norm"], 1e-6, w["head"], V, b["ids"], None, b["work"])
        return {name: ops.download(value) for name, value in b.items() if name != "work"}

    want = chain()
    assert not np.isnan(real(want["x"])).any()
    monkeypatch.setattr(ops.backend, "dependent", True)
    for what, value in chain().items():
        assert_same_bits(value, want[what], what)


# ---- what is compiled --------------------------------------------------------------------------------------


COMPILED = split.Split(4, 2, 8), split.Split(2, 1, 16, 1, 4, 4, True)
OTHERS = [
    ("qkv", {"NORMED": 0}),
    ("gate_up", {"NORMED": 0}),
    ("gate_up", {"ACT": GELU_TANH}),
    ("head_margin", {}),
]  # kernels under defines that are not the default, and of a row's other form
# sample and propose use head_logits_fast, join is no product
VARIANTS = [*((name, {}) for name in PRODUCTS if name not in ("sample", "propose", "join")), *OTHERS]


def builds(turn, arch):
    """Cuts and token tiles of a kernel: the widest tiles, which take most registers, under either cut, one on
    sm_90a and the other on the other card; on sm_90a also fewer tiles under that other cut. What is whose
    changes by turns; all with MINIDFLASH_FULL=1."""
    if FULL:
        return list(itertools.product(COMPILED, split.TOKEN_TILES))
    one, other = COMPILED[turn % 2], COMPILED[(turn + 1) % 2]
    *fewer, most = split.TOKEN_TILES
    return [(one, most), (other, fewer[turn // 2 % len(fewer)])] if arch == SM90 else [(other, most)]


@needs_nvrtc
@pytest.mark.parametrize(
    "turn, name, others, arch",
    [pytest.param(i, *variant, arch, id=f"{variant[0]}-{variant[1]}-{arch}")
     for i, variant in enumerate(VARIANTS) for arch in cards(i)],
)  # fmt: skip
def test_kernels_keep_to_registers_and_stream(turn, name, others, arch, tmp_path):
    file, cubins = "head_fast.cu" if name == "head_logits" else f"{name}_fast.cu", []
    for cut, token_tiles in builds(turn, arch):
        defines = {key: str(value) for key, value in (fast.defines_of(cut, token_tiles) | others).items()}
        cubin, log = compiler.compile_cubin(file, arch, defines)
        used = compiler.resources(log)[f"{name}_fast"]
        assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), defines
        assert used.registers <= 96, f"two blocks of 10 warps fit a multiprocessor: {defines}"
        cubins.append(cubin)
    wanted = [
        "LDG.E 128 NA LTC256B CONSTANT",
        "HMMA.16816.F32.BF16",
        "LDS 128",
        "SYNCS",
        "ACQBULK",
        "PREEXIT",
    ]
    for kernels in disassemble_all(cubins, tmp_path):
        assert_instructions(kernels[f"{name}_fast"], wanted)


# ---- cuts --------------------------------------------------------------------------------------------------


SIZES = [
    (6144, 4096),
    (4096, 12288),
    (24576, 4096),
    (151936, 4096),
    (2560, 4096),
    (4096, 20480),
    (960, 576),
    (16, 8),
]


@pytest.mark.parametrize("sms", [4, 132, 148])
@pytest.mark.parametrize("outputs, cols", SIZES)
def test_a_cut_fits_the_card(outputs, cols, sms):
    for whole in (False, True)[: 1 + (cols <= 10240)]:
        cut = split.choose(outputs, cols, sms, whole)
        tiles, most = fast.tiles_of(outputs), cut.most_rows(cols)
        assert 1 <= cut.slices <= -(-cols // split.CHUNK) and (cut.slices == 1 or not whole)
        assert cut.slices == 1 or tiles <= split.MOST_SLICED_TILES < fast.COUNTERS
        assert cut.fits(cols, most // 8) and (whole or most >= 16)  # a block of 16 is one pass
        assert cut.grid(tiles, sms) % cut.slices == 0
        assert cut.grid(tiles, sms) <= max(cut.slices, cut.blocks * sms)
        for rows in (1, 8, 9, 32, 33, 100):
            passes = cut.passes(cols, rows)
            assert sum(count for _, count in passes) == rows
            assert all(8 * cut.token_tiles(count) >= count for _, count in passes)


def test_a_card_is_kept_busy(monkeypatch):
    """By the rule for shapes that nobody measured: it leaves a fifth idle rather than cut K once more."""
    monkeypatch.setattr(split, "MEASURED", {})
    tiles_chunks = [(n // 16, k // 32, split.choose.__wrapped__(n, k, 132)) for n, k in SIZES[:6]]
    assert all(split.efficiency(cut, tiles, chunks, 132) > 0.8 for tiles, chunks, cut in tiles_chunks)


# The kernel of each measured product: a shape is measured for one row of one model.
MEASURED = {
    "qkv": [(6144, 4096), (6144, 2560), (960, 576), (5120, 2048), (5120, 2880), (6144, 2816), (8192, 2816),
            (9216, 2816)],
    "linear_add": [(4096, 4096), (4096, 12288), (2560, 4096), (2560, 9728), (4096, 14336), (576, 576),
                   (576, 1536), (2048, 4096), (2880, 4096), (2048, 6144), (2816, 2112), (2816, 4096),
                   (2816, 5632), (2816, 8192), (2880, 7680)],
    "gate_up": [(24576, 4096), (19456, 2560), (28672, 4096), (3072, 576), (4224, 2816), (11264, 2816),
                (12288, 2048), (15360, 2880)],
    "head": [(151936, 4096), (128256, 4096), (151936, 2560), (49152, 576), (201088, 2880), (262144, 2816)],
    "fuse": [(4096, 20480), (2560, 12800), (576, 2304), (2816, 16896), (2880, 14400)],
    "inject": [(10240, 4096), (10240, 2560), (1536, 576), (8192, 2048), (8192, 2880), (10240, 2816)],
}  # fmt: skip


NORMED = "qkv", "gate_up", "head"  # products whose kernels norm their token rows


def test_every_measured_product_has_its_kernel():
    assert sorted(shape for shapes in MEASURED.values() for shape in shapes) == sorted(
        (outputs, cols) for outputs, cols, _ in split.MEASURED
    )


@needs_nvrtc
@pytest.mark.parametrize("name", MEASURED)
def test_measured_cuts_keep_to_registers(name):
    """With the most token rows that fit, which take most registers; with all numbers of them by
    MINIDFLASH_FULL=1. Of kernels that differ in their warps alone, or in what they ask for early, the one of
    most warps, whose threads have fewest registers."""
    builds = {}
    for outputs, cols in MEASURED[name]:
        cut = split.choose(outputs, cols, 132, whole=name == "head")
        fit = [tiles for tiles in split.TOKEN_TILES if cut.fits(cols, tiles, is_normed=name in NORMED)]
        assert max(fit) >= 2, "a block of 16 is one pass"
        for token_tiles in fit if FULL else fit[-1:]:
            defines = fast.defines_of(cut, token_tiles)
            left = () if FULL else ("STREAM_WARPS", "ASKED_CHUNKS")
            alike = tuple((key, value) for key, value in defines.items() if key not in left)
            if cut.warps >= builds.get(alike, defines)["STREAM_WARPS"]:
                builds[alike] = defines
    for defines in builds.values():
        _, log = compiler.compile_cubin(
            f"{name}_fast.cu", "sm_90a", {key: str(value) for key, value in defines.items()}
        )
        used = compiler.resources(log)[f"{name}_fast"]
        assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), f"{defines}: {used}"
