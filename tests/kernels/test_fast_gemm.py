"""The fast kernels over packed weights: the tests of their rows again, in bf16, with other tolerances and every cut.

Each test asserts that the fast variant ran. C_NORMED: the norm's scale is multiplied in before the product and that is
rounded to bf16, half of 2^-7 of each term; the f32 sums are far below.
"""

import numpy as np
import pytest
from minidflash.kernels import launch
from minidflash.kernels.gpu import fast, split
from minidflash.kernels.ops import Ops
from minidflash.kernels.table import ROWS as ROW_TABLE

from tests.cases import JUNK, Make, Matrix, check, dot_terms, normed, run, slip, stored, truth
from tests.compare import assert_same_bits, real
from tests.conftest import parameters
from tests.kernels import (
    test_embed,
    test_fuse,
    test_gate_up,
    test_head,
    test_head_logits,
    test_inject,
    test_linear_add,
    test_qkv,
    test_rows,
)
from tests.kernels.test_compile import assert_instructions, disassemble, needs_nvrtc

C, C_NORMED = 16, 2**15
ROLES = {"embed": "embed", "gate_up": "gate_up", "head": "head", "head_logits": "head", "fuse": "fc"}
ROWS = [name for name in fast.FAST if name != "attend"]
PRODUCTS = [name for name in ROWS if name != "embed"]
on_gpu_backends = pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
CUTS = [
    split.Split(1, 2, 8), split.Split(3, 2, 8, 4, 1), split.Split(2, 1, 16, 1, 4), split.Split(4, 2, 4, 2, 2),
    split.Split(2, 2, 3, 3, 1),
]  # fmt: skip


class Fast(Ops):
    """Ops whose weights get the role that a row gives them; `done` asserts that the fast variant ran."""

    def __init__(self, ops, name):
        super().__init__(ops.backend)
        self.weight = lambda parts: ops.backend.weight(parts, ROLES.get(name, "down"))


def fast_run(ops, name, case, **sizes):
    ops.backend.variants.pop(name, None)
    got = run(Fast(ops, name), name, case, **sizes)
    assert ops.backend.variants[name] == "fast"
    return got


def fast_check(ops, name, case, terms, c, **sizes):
    ops.backend.variants.pop(name, None)
    got = check(Fast(ops, name), name, case, terms, c, **sizes)
    assert ops.backend.variants[name] == "fast"
    return got


@pytest.fixture
def cut(request, monkeypatch):
    """Every product is cut this way, as far as its K allows."""

    def choose(outputs, cols, sms, whole=False):
        chunks, wanted = -(-cols // split.CHUNK), request.param
        slices = 1 if whole else min(wanted.slices, chunks)
        return split.Split(slices, wanted.blocks, wanted.warps, wanted.chunks, wanted.ahead)

    monkeypatch.setattr(split, "choose", choose)
    return request.param


# ---- against the oracle ------------------------------------------------------------------------------------------


@on_gpu_backends
@pytest.mark.parametrize("rows, cols", [(16, 32), (576, 576), (37, 77), (8, 24), (130, 4096), (1, 3)])
@pytest.mark.parametrize("role", ["down", "gate_up"])
def test_a_packed_weight_unpacks_to_itself(ops, rng, rows, cols, role):
    rows += rows % 2 if role == "gate_up" else 0
    plain = rng.integers(0, 65536, (rows, cols)).astype(np.uint16)
    backend, weight = ops.backend, ops.backend.weight([Matrix(plain)], role)
    assert weight.shape == (rows, cols) and weight.layout != "plain"
    half = rows // 2 if role == "gate_up" else min(rows, 8)
    sizes = [half, half, 8] if role == "gate_up" else [rows, rows - half, 16]
    tiles = fast.tiles_of(rows, role == "gate_up")
    back = backend.empty((rows, cols), np.uint16)
    grid = -(-tiles * -(-cols // 32) * 32 // 256)
    backend.launch("pack.cu", "unpack", grid, 256, 0, [back, back[half:], weight.data, *sizes, tiles, cols])
    assert_same_bits(backend.download(back), plain)


@on_gpu_backends
@pytest.mark.parametrize("T, V, D", [(1, 1009, 576), (5, 77, 123), (17, 16, 40), (1, 1, 3)])
def test_embed_matches_oracle(ops, rng, T, V, D):
    ids = rng.integers(0, V, T).astype(np.int32)
    ids[0], ids[-1] = V - 1, 0
    table = Make(rng, "bf16").w(V, D)
    case = {"ids": ids, "table": table, "scale": 8.485281}
    terms = {"x": np.abs(case["scale"] * table.real[ids])}
    fast_check(ops, "embed", case, terms, test_embed.C, T=T, D=D)


@on_gpu_backends
@pytest.mark.parametrize("bias, tap_at", [(False, None), (True, 11)])
@pytest.mark.parametrize("T, D, F", [*test_linear_add.SHAPES, (32, 96, 320), (33, 16, 32)])
def test_linear_add_matches_oracle(ops, rng, T, D, F, bias, tap_at):
    case = test_linear_add.make(ops, rng, T, D, F, "bf16", bias, tap_at)
    got = fast_check(ops, "linear_add", case, test_linear_add.terms_of(case), C)
    if tap_at is not None:
        want = case["taps"].copy()
        for t, row in enumerate(case["tap_row"]):
            if row >= 0:
                want[row, tap_at : tap_at + D] = got["x"][t]
        assert_same_bits(got["taps"], want, "taps")


@on_gpu_backends
@pytest.mark.parametrize(
    "T, D, F",
    [(1, 576, 1536), (16, 576, 400), (5, 123, 77), (17, 80, 24), (3, 37, 13), (1, 4096, 112), (2, 8, 1)],
)
def test_gate_up_matches_oracle(ops, rng, T, D, F):
    case = test_gate_up.make(ops, rng, T, D, F, "bf16")
    fast_check(ops, "gate_up", case, test_gate_up.terms_of(case), C_NORMED, F=F)


@on_gpu_backends
def test_gate_up_of_large_gates_saturates(ops, rng):
    case = test_gate_up.make(ops, rng, 3, 40, 24, "bf16") | {"norm": np.full(40, 200, np.float32)}
    got = fast_check(ops, "gate_up", case, test_gate_up.terms_of(case), C_NORMED, F=24)
    assert np.isfinite(real(got["h"])).all()


@on_gpu_backends
@pytest.mark.parametrize("norms, bias", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("shape", test_qkv.SHAPES, ids=str)
def test_qkv_matches_oracle(ops, rng, shape, norms, bias):
    case = test_qkv.make(ops, rng, shape, "bf16", norms, bias)
    got = fast_check(ops, "qkv", case, test_qkv.terms_of(case), C_NORMED, H=shape[2])
    is_active = case["pos"] >= 0
    assert (got["q"][~is_active] == 0).all(), "inactive rows give zeros"
    for name in ("cache_k", "cache_v"):
        written = np.zeros(case[name].shape, bool)
        written[case["slot"][is_active], :, case["pos"][is_active]] = True
        assert_same_bits(got[name][~written], case[name][~written], f"{name}: rows of others")
        assert not np.isnan(real(got[name][written])).any()


@on_gpu_backends
@pytest.mark.parametrize("norm, bias", [(True, False), (False, True)])
@pytest.mark.parametrize("shape", test_inject.SHAPES, ids=str)
def test_inject_matches_oracle(ops, rng, shape, norm, bias):
    case = test_inject.make(ops, rng, shape, "bf16", norm, bias)
    got = fast_check(ops, "inject", case, test_inject.terms_of(case), C)
    for name in ("cache_k", "cache_v"):
        written = np.zeros(case[name].shape, bool)
        for s, p in zip(case["slot"], case["pos"], strict=True):
            if p >= 0:
                written[:, s, :, p] = True
        assert_same_bits(got[name][~written], case[name][~written], f"{name}: rows of others")


@on_gpu_backends
@pytest.mark.parametrize("T, D, C_", [(1, 576, 2880), (5, 77, 123), (17, 80, 240), (3, 13, 37), (37, 24, 48)])
def test_fuse_matches_oracle(ops, rng, T, D, C_):
    case = test_fuse.make(ops, rng, T, D, C_, "bf16")
    fast_check(ops, "fuse", case, test_fuse.terms_of(case), C)


HEAD_SHAPES = [(1, 576, 5003), (16, 576, 384), (5, 123, 77), (17, 80, 509), (3, 37, 1), (1, 4096, 320)]


@on_gpu_backends
@pytest.mark.parametrize("T, D, V", HEAD_SHAPES)
def test_head_is_the_argmax_of_head_logits(ops, rng, T, D, V):
    case = test_head_logits.make(ops, rng, T, D, V, "bf16")
    case["w"].array[-1] = case["w"].array[V // 2]  # a tie wherever it leads
    terms = test_head_logits.terms_of(case)
    logits = fast_check(ops, "head_logits", case, terms, C_NORMED)["logits"]
    picked = case | {
        "pick": np.arange(T, dtype=np.int32)[::-1].copy(), "limit": V, "ids": np.full(T, JUNK["i32"], np.int32)
    }  # fmt: skip
    assert fast_run(ops, "head", picked)["ids"].tolist() == logits.argmax(1).tolist()


@on_gpu_backends
@pytest.mark.parametrize("pick", [[0], [4, 1], [*range(1, 16), 17], []])
def test_head_writes_picked_rows_only(ops, rng, pick):
    case = test_head.make(ops, rng, 18, 40, 61, pick=pick)
    got = fast_run(ops, "head", case)["ids"]
    whole = fast_run(ops, "head", case | {"pick": np.arange(18, dtype=np.int32)})["ids"]
    assert got[pick].tolist() == whole[pick].tolist()
    assert (np.delete(got, pick) == JUNK["i32"]).all()


@on_gpu_backends
@pytest.mark.parametrize("limit", [1, 15, 16, 17, 60])
def test_head_never_chooses_ids_from_the_limit_on(ops, rng, limit):
    case = test_head.make(ops, rng, 5, 40, 61, limit=limit)
    case["w"].array[limit:] = stored(normed(case["x"], case["norm"], test_head.EPS)[0] * 9, "bf16")
    assert test_head.logits(case)[0].argmax() >= limit
    got = fast_run(ops, "head", case)["ids"]
    assert (got < limit).all()
    values = test_head.logits(case)[:, :limit]
    slack = (
        2 * C_NORMED * 2.0**-23 * dot_terms(normed(case["x"], case["norm"], test_head.EPS), case["w"]).max(1)
    )
    assert (values[np.arange(5), got] >= values.max(1) - slack).all()


@on_gpu_backends
@pytest.mark.parametrize("same", [(3, 4), (15, 16), (0, 60), (17, 33, 49), (5, 13)])
def test_head_ties_go_to_the_smallest_id(ops, rng, same):
    case = test_head.make(ops, rng, 3, 40, 61)
    for row in same:
        case["w"].array[row] = stored(normed(case["x"], case["norm"], test_head.EPS)[1], "bf16")
    assert fast_run(ops, "head", case)["ids"][1] == min(same)


@on_gpu_backends
def test_head_nan_never_wins(ops, rng):
    case = test_head.make(ops, rng, 3, 40, 61)
    case["w"].array[7] = stored(np.nan, "bf16")
    case["x"][2] = stored(np.nan, "bf16")
    got = fast_run(ops, "head", case)["ids"]
    assert got[:2].tolist() == truth("head", case)["ids"][:2].tolist() and got[2] == 0
    case["x"][:] = 0
    assert fast_run(ops, "head", case)["ids"].tolist() == [0] * 3


def test_sees_wrong_kernels(rng):
    """With the tolerance of the normed products too."""
    ops = type("Bf16", (), {"activations": "bf16"})
    case = test_gate_up.make(ops, rng, 5, 123, 77, "bf16")
    wrong = {
        "norm scale dropped": {"norm": np.ones(123, np.float32)},
        "gate and up swapped": {"w": Matrix(np.roll(case["w"].array, 77, 0))},
    }
    for what, change in wrong.items():
        assert slip(ops, "gate_up", case, change, test_gate_up.terms_of(case), C_NORMED) > 10, what
    case = test_qkv.make(ops, rng, (5, 123, 6, 2, 24, 12), norms=True, bias=True)
    wrong = {
        "norm scale dropped": {"norm": np.ones(123, np.float32)},
        "k and v swapped": {"wkv": Matrix(np.roll(case["wkv"].array, 48, 0))},
        "rotated the other way": {"sin": -case["sin"]},
        "position off by one": {"cos": np.roll(case["cos"], 1, 0), "sin": np.roll(case["sin"], 1, 0)},
        "q norm dropped": {"q_norm": None}, "q bias dropped": {"q_bias": None},
    }  # fmt: skip
    for what, change in wrong.items():
        assert slip(ops, "qkv", case, change, test_qkv.terms_of(case), C_NORMED) > 10, what
    case = test_head_logits.make(ops, rng, 5, 123, 77, "bf16")

    def dropped(x, norm, eps, w, work):
        return x @ w.data.T

    for change in (dropped, {"norm": np.ones(123, np.float32)}):
        assert slip(ops, "head_logits", case, change, test_head_logits.terms_of(case), C_NORMED) > 10


# ---- bits ----------------------------------------------------------------------------------------------------------


def rows_alone(ops, name, case, sizes, rows):
    part = test_rows.some_rows(name, case, list(rows))
    return test_rows.seen(name, part, fast_run(ops, name, part, **sizes), list(rows))


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[:2], indirect=True, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_bits_do_not_depend_on_how_many_rows_there_are(ops, rng, cut, name):
    case, sizes = test_rows.make(name, rng, "bf16", "bf16")
    whole = rows_alone(ops, name, case, sizes, range(64))
    for count in (*range(1, 18), 31, 32, 33):
        first = int(rng.integers(0, 65 - count))
        rows = range(first, first + count)
        test_rows.compare(name, whole, rows_alone(ops, name, case, sizes, rows), list(rows), f"{count} rows")


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[1:2], indirect=True, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_bits_do_not_depend_on_what_other_rows_hold(ops, rng, cut, name):
    case, sizes = test_rows.make(name, rng, "bf16", "bf16")
    whole = rows_alone(ops, name, case, sizes, range(20))
    first = next(spec.name for spec in ROW_TABLE[name].args if spec.type == "A")
    case[first] = case[first].copy()
    case[first][3:9] = stored(np.nan, "bf16")
    good = [*range(3), *range(9, 20)]
    after = {what: value[good] for what, value in rows_alone(ops, name, case, sizes, range(20)).items()}
    test_rows.compare(name, whole, after, good, "NaN beside")


@pytest.mark.parametrize("ops", parameters(["emulate"], ["bf16"]), indirect=True)
@pytest.mark.parametrize("cut", CUTS[:2], indirect=True, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_every_order_of_blocks_warps_and_lanes_gives_the_same_bits(ops, rng, cut, name):
    case, sizes = test_rows.make(name, rng, "bf16", "bf16")
    want = rows_alone(ops, name, case, sizes, range(11))
    for seed in range(1, 5):
        shuffled = Ops(type(ops.backend)("bf16", seed=seed))
        got = rows_alone(shuffled, name, case, sizes, range(11))
        test_rows.compare(name, want, got, list(range(11)), f"seed {seed}")


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS, indirect=True, ids=str)
@pytest.mark.parametrize("T", [3, 16, 27])
def test_every_cut_is_right(ops, rng, cut, T):
    case = test_linear_add.make(ops, rng, T, 123, 700, "bf16", True)
    fast_check(ops, "linear_add", case, test_linear_add.terms_of(case), C)
    case = test_gate_up.make(ops, rng, T, 330, 77, "bf16")
    fast_check(ops, "gate_up", case, test_gate_up.terms_of(case), C_NORMED, F=77)
    case = test_qkv.make(ops, rng, (T, 330, 5, 1, 24, 12), "bf16", True, True)
    fast_check(ops, "qkv", case, test_qkv.terms_of(case), C_NORMED, H=5)
    case = test_fuse.make(ops, rng, T, 77, 330, "bf16")
    fast_check(ops, "fuse", case, test_fuse.terms_of(case), C)
    case = test_head_logits.make(ops, rng, T, 330, 77, "bf16")
    fast_check(ops, "head_logits", case, test_head_logits.terms_of(case), C_NORMED)


# ---- dependent launch ------------------------------------------------------------------------------------------------


@on_gpu_backends
@pytest.mark.parametrize("cut", CUTS[1:2], indirect=True, ids=str)
def test_dependent_launches_read_nothing_too_early(ops, rng, cut, monkeypatch):
    """A chain of kernels that share the workspace; the emulator poisons what the predecessor wrote until the wait."""
    T, D, H, G, K, F, V, S = 5, 96, 3, 1, 32, 80, 70, 12
    make = Make(rng, "bf16")
    shapes = {"q": (H * K, D), "kv": (2 * G * K, D), "o": (D, H * K), "gate_up": (2 * F, D), "down": (D, F)}
    w = {
        role: ops.backend.weight([make.w(*shape)], role)
        for role, shape in (shapes | {"head": (V, D)}).items()
    }
    cos, sin = make.tables(S, K // 2)
    host = {"x": make.a(T, D), "taps": np.zeros((T, D), np.uint16), "h": np.zeros((T, F), np.uint16)}
    host |= {name: np.zeros((1, G, S, K), np.uint16) for name in ("cache_k", "cache_v")}
    host |= {"q": np.zeros((T, H, K), np.uint16), "norm": make.v(D, around=1), "cos": cos, "sin": sin}
    host |= {"slot": np.zeros(T, np.int32), "pos": np.arange(T, dtype=np.int32), "ids": np.zeros(T, np.int32)}
    host["work"] = np.zeros(ops.backend.work_size(T, D, 2 * F), np.float32)

    def chain():
        kinds = {"uint16": "A", "float32": "f32", "int32": "i32"}
        b = {name: ops.array(value.shape, kinds[str(value.dtype)]) for name, value in host.items()}
        for name, value in host.items():
            ops.upload(b[name], value)
        where = b["cos"], b["sin"], b["slot"], b["pos"], b["cache_k"], b["cache_v"], b["work"], b["q"]
        for _ in range(2):
            ops.qkv(b["x"], b["norm"], 1e-6, w["q"], w["kv"], None, None, None, None, *where)
            ops.linear_add(b["q"].reshape(T, -1), w["o"], None, None, 0, b["x"], None, b["work"])
            ops.gate_up(b["x"], b["norm"], 1e-6, w["gate_up"], b["work"], b["h"])
            ops.linear_add(b["h"], w["down"], None, b["pos"], 0, b["x"], b["taps"], b["work"])
            ops.head(b["x"], b["pos"], b["norm"], 1e-6, w["head"], V, b["ids"], b["work"])
        return {name: ops.download(value) for name, value in b.items() if name != "work"}

    want = chain()
    assert not np.isnan(real(want["x"])).any()
    monkeypatch.setattr(ops.backend, "dependent", True, raising=False)
    for what, value in chain().items():
        assert_same_bits(value, want[what], what)


# ---- what is compiled --------------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("arch", launch.ARCHES.values())
@pytest.mark.parametrize("token_tiles", split.TOKEN_TILES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_kernels_keep_to_registers_and_stream(name, token_tiles, arch, tmp_path):
    file = "head_fast.cu" if name == "head_logits" else f"{name}_fast.cu"
    defines = fast.defines_of(split.Split(4, 2, 8), token_tiles)
    cubin, log = launch.compile_cubin(file, arch, {key: str(value) for key, value in defines.items()})
    used = launch.resources(log)[f"{name}_fast"]
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert used.registers <= 96, "two blocks of 9 warps fit a multiprocessor"
    wanted = [
        "LDG.E 128 NA LTC256B CONSTANT",
        "HMMA.16816.F32.BF16",
        "LDS 128",
        "SYNCS",
        "ACQBULK",
        "PREEXIT",
    ]
    assert_instructions(disassemble(cubin, tmp_path)[f"{name}_fast"], wanted)


# ---- cuts ------------------------------------------------------------------------------------------------------------


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
    for whole in (False, True)[: 1 + (cols <= 12288)]:
        cut = split.choose(outputs, cols, sms, whole)
        tiles, most = fast.tiles_of(outputs), cut.most_rows(cols)
        assert 1 <= cut.slices <= -(-cols // split.CHUNK) and (cut.slices == 1 or not whole)
        assert cut.slices == 1 or tiles <= split.MOST_SLICED_TILES < fast.COUNTERS
        assert cut.fits(cols, most // 8) and (whole or outputs > 100000 or most == split.ROWS)
        assert cut.grid(tiles, sms) % cut.slices == 0
        assert cut.grid(tiles, sms) <= max(cut.slices, cut.blocks * sms)
        for rows in (1, 8, 9, 32, 33, 100):
            passes = cut.passes(cols, rows)
            assert sum(count for _, count in passes) == rows
            assert all(8 * cut.token_tiles(count) >= count for _, count in passes)


def test_a_card_is_kept_busy():
    tiles_chunks = [(n // 16, k // 32, split.choose(n, k, 132)) for n, k in SIZES[:6]]
    assert all(split.efficiency(cut, tiles, chunks, 132) > 0.9 for tiles, chunks, cut in tiles_chunks)
