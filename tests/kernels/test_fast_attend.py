"""attend on tensor cores: that it runs, that no neighbour, order or place shows in a row's bits,
what it compiles to.

What a row sees, and how close it comes to float64, is asked of every variant in test_attend.py.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from minidflash.kernels import compiler, source
from minidflash.kernels.gpu import COUNTERS, attend_fast, split

from tests import cases
from tests.cases import GUARD, Make, Matrix, stored
from tests.compare import assert_close, assert_same_bits, real
from tests.conftest import FULL, open_or_skip, parameters
from tests.disassembly import SM90, cards
from tests.kernels.test_attend import CASE, C, weigh
from tests.kernels.test_compile import assert_instructions, disassemble, needs_nvrtc

FAST = parameters(["emulate", "cuda"], ["bf16"])
pytestmark = pytest.mark.parametrize("ops", FAST, indirect=True)


def make(rng, pos, heads, slots=1, window=0, causal=1, block=None):
    """A case; rows of a slot are neighbours. block: (begin, end) of every row's block."""
    (H, G, K), T, make = heads, len(pos), Make(rng, "bf16")
    pos = np.array(pos, np.int32)
    begin, end = (pos, pos + 1) if block is None else (np.full(T, x, np.int32) for x in block)
    room = int(max(pos.max(), end.max())) + 3
    return {
        "q": make.a(T, H, K), "cache_k": make.a(slots, G, room, K), "cache_v": make.a(slots, G, room, K),
        "slot": (np.arange(T) // -(-T // slots)).astype(np.int32), "pos": pos, "begin": begin, "end": end,
        "window": window, "causal": causal, "scale": K**-0.5, "sinks": None,
    }  # fmt: skip


def some(case, rows):
    """The case with these rows alone."""
    each = ("q", "slot", "pos", "begin", "end")
    return case | {name: np.ascontiguousarray(case[name][rows]) for name in each}


def put(ops, case):
    """The arguments before work, arrays as buffers of the backend."""
    args = [case[name] for name in CASE]
    for i, value in enumerate(args):
        if np.ndim(value):
            kinds = {np.uint16: "A", np.int32: "i32", np.float32: "f32"}
            args[i] = cases.put(ops, value, kinds[value.dtype.type])
    return args


def call(ops, case, **tuning):
    """o of one call. Counters end at zero, nothing behind the workspace is touched."""
    backend, (T, H, K) = ops.backend, case["q"].shape
    count = backend.work_size(T, H * K, 0)
    work = np.full(count + GUARD, np.nan, np.float32)
    work[:COUNTERS] = 0
    device_work, o = ops.array(work.shape, "f32"), ops.array((T, H, K), "A")
    ops.upload(device_work, work)
    ops.upload(o, np.full((T, H, K), 0x7FC0, np.uint16))
    assert attend_fast.attend(backend, *put(ops, case), device_work[:count], o, **tuning)
    after = ops.download(device_work)
    assert not after[:COUNTERS].view(np.uint32).any(), "a counter is not zero"
    assert np.isnan(after[count:]).all(), "written behind the workspace"
    return ops.download(o)


def check(case, o):
    want, terms = weigh(case)
    assert_close(o, want, terms, C, "attend")


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128), (3, 3, 64), (16, 1, 128), (2, 1, 128)], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
def test_close_to_float64(ops, rng, heads, rows):
    case = make(rng, range(200, 200 + rows), heads)
    check(case, call(ops, case))


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("heads, window, tuning", [
    ((4, 2, 256), 0, {}), ((2, 1, 256), 100, {"splits": 2}), ((2, 1, 256), 0, {"splits": 0}),
    ((8, 1, 512), 0, {"splits": 3}), ((2, 1, 512), 60, {}), ((8, 1, 512), 0, {"splits": 0}),
], ids=str)  # fmt: skip
def test_large_heads(ops, rng, heads, window, tuning, wgmma):
    """Leaves of 48 keys, and two teams of warps for 512: close, and a row alone has the bits of many."""
    case, tuning = make(rng, range(140, 156), heads, window=window), tuning | {"wgmma": wgmma}
    many = call(ops, case, **tuning)
    check(case, many)
    if tuning.get("splits") != 0:
        assert_same_bits(call(ops, case, **tuning, waits=False), many, "merged by the last block")
    for row in (0, 9, 15):
        assert_same_bits(call(ops, some(case, [row]), **tuning)[0], many[row], f"row {row}")


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("heads", [(2, 1, 256), (2, 1, 512)], ids=str)
def test_large_heads_keep_what_a_later_row_holds_to_itself(ops, rng, heads):
    case = make(rng, range(130, 146), heads)
    clean, bad = call(ops, case), case | {"cache_v": case["cache_v"].copy()}
    bad["cache_v"][0, :, 130 + 9] = stored(np.inf, "bf16")
    got = call(ops, bad)
    assert_same_bits(got[:9], clean[:9])
    assert not np.isfinite(real(got[9:])).all()


def test_the_table_row_runs_fast(ops, rng):
    kinds = {(4, 1, 64): "fast", (4, 2, 128): "fast", (4, 1, 24): "plain", (2, 1, 80): "plain"}
    for heads, variant in kinds.items():
        case = make(rng, [3, 9], heads)
        o = ops.array(case["q"].shape, "A")
        ops.attend(*put(ops, case), ops.array((ops.backend.work_size(len(case["q"]), 256, 0),), "f32"), o)
        assert ops.backend.variants["attend"] == variant, heads
        check(case, ops.download(o))


VARIANTS = {
    "the default": {}, "uncut": {"splits": 0}, "units of several leaves": {"splits": 2},
    "no wgmma": {"wgmma": False}, "a block has all units": {"whole": True, "splits": 5},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [0, 130])
def test_one_row_has_the_bits_of_many(ops, rng, variant, window):
    """Playbook 11, across edges of leaves and units: at some a block's rows are cut in different ways."""
    for context in (1, 136, 280, 500, 1000):
        case = make(rng, range(context, context + 16), (4, 1, 64), window=window)
        many = call(ops, case, **VARIANTS[variant])
        check(case, many)
        for row in (0, 7, 15):
            alone = call(ops, some(case, [row]), **VARIANTS[variant])
            assert_same_bits(alone[0], many[row], f"row {row} at {context}")


def test_a_grid_for_few_keys_has_the_same_bits(ops, rng):
    """What a graph of a context's bucket launches: no units past the keys.
    With and without a window, which may begin within a unit."""
    for context, window in ((120, 0), (1000, 0), (1400, 0), (2300, 0), (1400, 700)):
        case = make(rng, range(context, context + 16), (4, 1, 64), window=window)
        whole = call(ops, case, splits=24)
        for keys in (context + 16, context + 300, 9999):
            assert_same_bits(call(ops, case, splits=24, keys=keys), whole, f"{keys} keys at {context}")


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("heads, context, rows, splits, how", [
    ((4, 1, 64), 1400, 16, 6, {}), ((2, 1, 128), 1000, 16, 24, {}), ((4, 1, 64), 860, 5, 3, {"window": 700}),
    ((3, 1, 64), 290, 16, 24, {"causal": 0, "block": (290, 306)}), ((2, 2, 128), 100, 3, 24, {}),
    ((4, 1, 64), 6100, 2, 30, {}),
], ids=str)  # fmt: skip
def test_a_block_of_all_units_has_the_same_bits(ops, rng, heads, context, rows, splits, how, wgmma):
    """Units join in registers as pieces do in the workspace: of one leaf and of several, with fewer rows than
    a warp has, of 42 units, where rows of a block end in different units."""
    case, tuning = make(rng, range(context, context + rows), heads, **how), {"splits": splits, "wgmma": wgmma}
    whole = call(ops, case, whole=True, **tuning)
    check(case, whole)
    assert_same_bits(call(ops, case, whole=False, **tuning), whole)
    assert_same_bits(call(ops, some(case, [rows - 1]), whole=True, **tuning)[0], whole[-1])


def test_sequences_in_any_order_have_the_same_bits_in_one_block(ops, rng):
    """Sets of one group one after the other, one of them inactive; at a batch's size it is the default."""
    case = make(rng, [*range(700, 705), *[-1] * 5, *range(1380, 1385)], (4, 2, 64), slots=3)
    want = call(ops, case, splits=7, whole=False)
    for rows in (np.arange(15), rng.permutation(15)):
        assert_same_bits(call(ops, some(case, rows), splits=7, whole=True), want[rows])
    for width, fewest in (1, 12), (8, 12):
        shape = attend_fast.Shape(64 * width, 32, 8, 128, 64, 132)
        found = [shape.is_whole(width * lanes, 264) for lanes in (1, fewest - 1, fewest, 64)]
        assert found == [False, False, True, True], width
    assert not attend_fast.Shape(64, 32, 8, 128, 64, 132, keys=140).is_whole(64, 264), "one unit is a leaf"


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_a_later_row_holds_stays_with_it_in_a_block_of_all_units(ops, rng):
    case = make(rng, range(570, 586), (4, 1, 64))
    clean = call(ops, case, splits=5, whole=True)
    for name in ("cache_k", "cache_v"):
        bad = case | {name: case[name].copy()}
        bad[name][0, :, 579] = stored(np.inf, "bf16")
        got = call(ops, bad, splits=5, whole=True)
        assert_same_bits(got[:9], clean[:9], name)
        assert not np.isfinite(real(got[9:])).all()


@pytest.mark.parametrize("context, rows, splits", [(3448, 16, 24), (2040, 16, 8), (6100, 4, 30)])
def test_many_pieces_merge(ops, rng, context, rows, splits):
    """Units of one and of two leaves, also in one pass, and more pieces than a warp takes at a time; by all
    blocks, or by the one that came last.
    """
    case = make(rng, range(context, context + rows), (4, 1, 64))
    many = call(ops, case, splits=splits)
    check(case, many)
    assert_same_bits(call(ops, case, splits=splits, waits=False), many)
    for row in (0, rows // 2, rows - 1):
        assert_same_bits(call(ops, some(case, [row]), splits=splits)[0], many[row])


def test_more_blocks_than_the_card_holds_do_not_wait(ops, rng, monkeypatch):
    """Nor does any bit change."""
    case = make(rng, range(1020, 1036), (4, 1, 64))
    want, waits = call(ops, case), []
    launch, held = ops.backend.launch, ops.backend.device.holds
    monkeypatch.setattr(ops.backend, "launch", lambda *a, **k: (waits.append(a[5][-2]), launch(*a, **k)))
    for share in (1, 1000):
        monkeypatch.setattr(ops.backend.device, "holds", lambda *a, n=share: held(*a) // n)
        assert_same_bits(call(ops, case), want)
    assert waits == [True, False]


def test_slots_in_one_pass(ops, rng):
    """Three slots of five rows each, one of them inactive, at different places;
    then rows of slots in any order."""
    pos = [*range(100, 105), *[-1] * 5, *range(1380, 1385)]
    case = make(rng, pos, (4, 2, 64), slots=3)
    whole = call(ops, case)
    check(case, whole)
    assert (whole[5:10] == 0).all()
    order = rng.permutation(15)
    assert_same_bits(call(ops, some(case, order)), whole[order])


def test_what_is_old_for_one_set_is_not_for_the_next(ops, rng):
    """Seven leaves in four units, then six in six: some blocks have keys of the second set alone,
    and load them all."""
    case = make(rng, [1000, 1001, 800], (4, 1, 64), slots=2)
    check(case, call(ops, case, splits=6))


@pytest.mark.parametrize("garbage", [0xFF, 0x3F, 0x80])
def test_rows_that_see_nothing_count_on_nothing(ops, rng, garbage, monkeypatch):
    """A round behind the end of a text has no active row: a group of it has no plan,
    whatever lies where plans lie."""
    if ops.name == "emulate":
        monkeypatch.setattr(ops.backend.device, "garbage", garbage)
    case = make(rng, [-1] * 30, (4, 1, 64))
    for window in (0, 40):
        for rows in (30, 1):
            assert (call(ops, some(case | {"window": window}, range(rows))) == 0).all()
    pos = np.array([-1] * 16 + [*range(300, 314)], np.int32)
    mixed = make(rng, pos, (4, 1, 64))
    whole = call(ops, mixed)
    assert (whole[:16] == 0).all()
    check(mixed, whole)


def test_a_drafters_block(ops, rng):
    """Rows that see the whole block, and a window that bounds the context only."""
    case = make(rng, range(280, 296), (4, 1, 64), causal=0, block=(280, 296))
    check(case, call(ops, case))
    for window in (5, 40):  # one that is shorter than the block
        for causal in (0, 1):
            case = make(rng, range(280, 296), (4, 1, 64), window=window, causal=causal, block=(280, 296))
            check(case, call(ops, case))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("other", [np.nan, np.inf])
@pytest.mark.parametrize("start", [120, 136, 1290])
def test_what_a_later_row_of_the_block_holds_cannot_matter(ops, rng, other, start):
    """V of row 9 is no number: rows 0 to 8 do not see it, though it lies among the keys of their tile.

    In a unit of its own, in the second of two, in one of two leaves.
    """
    case = make(rng, range(start, start + 16), (4, 1, 64))
    clean = call(ops, case)
    for name in ("cache_k", "cache_v"):
        bad = case | {name: case[name].copy()}
        bad[name][0, :, start + 9] = stored(other, "bf16")
        got = call(ops, bad)
        assert_same_bits(got[:9], clean[:9], name)
        alone = call(ops, some(bad, [15]))
        assert (np.isnan(real(got[15])) == np.isnan(real(alone[0]))).all()
        assert not np.isfinite(real(got[9:])).all()


def test_a_long_prompt_goes_in_one_launch(ops, rng):
    case = make(rng, range(200), (4, 1, 64))
    whole = call(ops, case, splits=0)
    check(case, whole)
    assert_same_bits(call(ops, some(case, range(130, 147)), splits=0), whole[130:147])
    check(case, call(ops, case))


def test_any_order_has_the_same_bits(ops, rng):
    """The number of units is a matter of the card, so that stays."""
    if ops.name != "emulate":
        pytest.skip("needs the emulator, which alone shuffles the order of blocks")
    case = make(rng, range(1000, 1016), (4, 2, 128))
    want = call(ops, case, splits=16)
    for seed in (1, 2):
        other = open_or_skip("emulate", "bf16", seed=seed, sms=4)
        assert_same_bits(call(other, case, splits=16), want, f"seed {seed}")


@pytest.mark.parametrize("how", [{}, {"early": False}, {"whole": True}], ids=str)
def test_dependent_launch_reads_nothing_early(ops, rng, how, monkeypatch):
    """Two calls in a row, the second on the first one's output: before its wait the emulator hides that."""
    case = make(rng, range(140, 144), (4, 1, 64))
    first = call(ops, case)
    second = call(ops, case | {"q": first})
    monkeypatch.setattr(ops.backend, "dependent", True)
    q, o, again = (ops.array(first.shape, "A") for _ in range(3))
    ops.upload(q, case["q"])
    work, rest = ops.array((ops.backend.work_size(4, 4 * 64, 0),), "f32"), put(ops, case)[1:]
    for source_q, target in ((q, o), (o, again)):
        attend_fast.attend(ops.backend, source_q, *rest, work, target, **how)
    assert_same_bits(ops.download(o), first)
    assert_same_bits(ops.download(again), second)


def test_old_keys_are_asked_for_before_the_wait(ops, rng, monkeypatch):
    """Behind a qkv that writes the newest keys: the bits of both launches one after the other.

    And qkv lets its successor start late, whatever its cut says.
    """
    D, H, G, K, T, start = 64, 4, 2, 64, 5, 250
    case, make_ = make(rng, range(start, start + T), (H, G, K)), Make(rng, "bf16")
    cos, sin = make_.tables(start + T, K // 2)
    x, parts = make_.a(T, D), [Matrix(make_.a(rows * K, D)) for rows in (H, 2 * G)]
    choose, launched, launch = split.choose, [], ops.backend.launch
    monkeypatch.setattr(split, "choose", lambda *a, **k: replace(choose(*a, **k), early=True))
    monkeypatch.setattr(ops.backend, "launch", lambda *a, **k: (launched.append((a, k)), launch(*a, **k)))

    def layer(dependent):
        monkeypatch.setattr(ops.backend, "dependent", dependent)
        q, k, v, *rest = put(ops, case)
        o, work = ops.array((T, H, K), "A"), ops.array((ops.backend.work_size(T, D, (H + 2 * G) * K),), "f32")
        rows, norm = cases.put(ops, x, "A"), cases.put(ops, np.ones(D, np.float32), "f32")
        tables = [cases.put(ops, a, "f32") for a in (cos, sin)]
        weights = [ops.backend.weight([part], "matrix") for part in parts]
        ops.qkv(
            rows,
            norm,
            1e-6,
            *weights,
            None,
            None,
            None,
            None,
            None,
            *tables,
            *rest[:2],
            rest[1],
            k,
            v,
            work,
            q,
        )
        ops.attend(q, k, v, *rest, work, o)
        assert ops.backend.variants["qkv"] == ops.backend.variants["attend"] == "fast"
        return ops.download(o)

    assert_same_bits(layer(True), layer(False))
    of_qkv, of_attend = launched[-2], launched[-1]
    assert of_qkv[0][1] == "qkv_fast" and of_qkv[0][6]["EARLY_LAUNCH"] == 0
    assert of_attend[0][1] == "attend_fast" and len(of_attend[1]["early"]) == 2


USUAL = [(64, False, False), (128, False, False), (128, True, False), (64, False, True), (64, True, True),
         (128, True, True)]  # fmt: skip
LARGE = [(256, True, False), (512, False, False)]
# Every pair of a head, a window and sinks in one kernel or the other; all at once, in each size, in both.
FEW = {"attend_fast": [*USUAL[:1], USUAL[2], *USUAL[4:], *LARGE], "attend_whole": [USUAL[1], *USUAL[3:]]}


def compiled():
    """(kernel, card, kind): on cards without wgmma those with most registers; all with MINIDFLASH_FULL=1."""
    for name, few in FEW.items():
        for i, kind in enumerate(USUAL + LARGE if name == "attend_fast" else USUAL):
            for arch in cards(i):
                if FULL or kind in (few if arch == SM90 else [USUAL[-1], *LARGE]):
                    yield name, arch, *kind


@needs_nvrtc
@pytest.mark.parametrize("name, arch, size, is_windowed, has_sinks", list(compiled()))
def test_compiles_without_spills_and_two_blocks_fit(ops, name, arch, size, is_windowed, has_sinks, tmp_path):
    """What the compiler adds for alignment counts: 256 bytes once halved the blocks of 16 rows."""
    wgmma = arch in attend_fast.HAS_WGMMA
    shape = attend_fast.Shape(16, 32, 8, size, 1, 132, 128 * is_windowed, has_sinks, wgmma=wgmma)
    cubin, log = compiler.compile_cubin(source.find(f"{name}.cu"), arch, shape.defines)
    used = compiler.resources(log)[name]
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), f"{shape.defines}: {used}"
    assert "Potential Performance Loss" not in log, log  # ptxas made wgmma wait for each other
    static = sum(map(int, re.findall(r"(\d+) bytes smem", log)))  # not named where there is none
    whole = -(-(static + shape.shared + 1024) // 128) * 128
    blocks, threads = (1 if size > 256 else 2), attend_fast.threads_of(size)
    assert blocks * whole <= 233472 and blocks * threads * used.registers <= 65536, shape.defines
    found = disassemble(cubin, tmp_path)[name]
    wanted = ["LDGSTS", "MUFU.EX2", "ACQBULK", "PREEXIT"]
    keys, products = attend_fast.leaf_of(size), ["HMMA.16816.F32.BF16", "LDSM 4", "LDSM MT88 4"]
    assert_instructions(
        found, wanted + ([f"HGMMA.64x{keys}x16.F32.BF16", "HGMMA.64x64x16.F32.BF16"] if wgmma else products)
    )
