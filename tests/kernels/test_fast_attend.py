"""attend on tensor cores: that it runs, that how the keys are shared out never shows in a bit, and what it compiles to.

What a row sees, and how close it comes to float64, is asked of every variant in test_attend.py.
"""

from functools import lru_cache

import numpy as np
import pytest
from minidflash.kernels import launch, source
from minidflash.kernels.gpu import attend_fast

from tests.cases import GUARD, Make, stored
from tests.compare import assert_close, assert_same_bits, real
from tests.conftest import open_or_skip, parameters
from tests.kernels.test_attend import CASE, C, weigh
from tests.kernels.test_compile import assert_instructions, disassemble, needs_nvrtc

FAST = parameters(["emulate", "cuda"], ["bf16"])
pytestmark = pytest.mark.parametrize("ops", FAST, indirect=True)
EDGES = [1, 127, 128, 129, 255, 256, 257, 500, 513]


def make(rng, pos, heads, slots=1, window=0, causal=1, block=None):
    """A case; rows of a slot are neighbours. block: (begin, end) of every row's block."""
    (H, G, K), T, make = heads, len(pos), Make(rng, "bf16")
    pos = np.array(pos, np.int32)
    begin, end = (pos, pos + 1) if block is None else (np.full(T, x, np.int32) for x in block)
    room = int(max(pos.max(), end.max())) + 3
    return {
        "q": make.a(T, H, K), "cache_k": make.a(slots, G, room, K), "cache_v": make.a(slots, G, room, K),
        "slot": (np.arange(T) // -(-T // slots)).astype(np.int32), "pos": pos, "begin": begin, "end": end,
        "window": window, "causal": causal, "scale": K**-0.5,
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
            args[i] = ops.array(value.shape, "A" if value.dtype == np.uint16 else "i32")
            ops.upload(args[i], value)
    return args


def workspace(ops, case):
    T, H, K = case["q"].shape
    work = ops.array((ops.backend.work_size(T, H * K, 0),), "f32")
    ops.upload(work, np.zeros(work.shape, np.float32))
    return work


def call(ops, case, slots_of_work=None, **tuning):
    """o of one call, and the level that its plan chose (None where the blocks kept it). Counters end at zero."""
    backend, (T, H, K) = ops.backend, case["q"].shape
    count = backend.work_size(T, H * K, 0)
    if slots_of_work:
        count = attend_fast.COUNTERS + attend_fast.RECORDS + slots_of_work * 64 * (K + 2)
    work = np.full(count + GUARD, np.nan, np.float32)
    work[: attend_fast.COUNTERS] = 0
    device_work, o = ops.array(work.shape, "f32"), ops.array((T, H, K), "A")
    ops.upload(device_work, work)
    ops.upload(o, np.full((T, H, K), 0x7FC0, np.uint16))
    assert attend_fast.attend(backend, *put(ops, case), device_work[:count], o, one_launch=False, **tuning)
    after = ops.download(device_work)
    assert not after[: attend_fast.COUNTERS].view(np.uint32).any(), "a counter is not zero"
    assert np.isnan(after[count:]).all(), "written behind the workspace"
    record = after[attend_fast.COUNTERS :].view(np.int32)
    level = int(record[attend_fast.LEVEL_AT]) if 0 <= record[attend_fast.LEVEL_AT] <= 2 else None
    return ops.download(o), level


def check(case, o):
    want, terms = weigh(case)
    assert_close(o, want, terms, C, "attend")


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128), (3, 3, 64), (16, 1, 128)], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
def test_close_to_float64(ops, rng, heads, rows):
    case = make(rng, range(200, 200 + rows), heads)
    check(case, call(ops, case)[0])


def test_the_table_row_runs_fast(ops, rng):
    kinds = {(4, 1, 64): "fast", (4, 2, 128): "fast", (4, 1, 24): "plain", (2, 1, 80): "plain"}
    for heads, variant in kinds.items():
        case = make(rng, [3, 9], heads)
        o = ops.array(case["q"].shape, "A")
        ops.attend(*put(ops, case), workspace(ops, case), o)
        assert ops.backend.variants["attend"] == variant, heads
        check(case, ops.download(o))


@pytest.mark.parametrize("heads", [(4, 1, 128), (3, 1, 64)], ids=str)
@pytest.mark.parametrize("window", [0, 130])
def test_one_row_has_the_bits_of_many(ops, rng, heads, window):
    """Playbook 11: a plain round's row and the same row of a verify pass, with contexts across edges of leaves,
    chains and spans; 2 leaves a chain and 2 chains a span, so that all edges are near."""
    for context in EDGES:
        case = make(rng, range(context, context + 16), heads, window=window)
        many, _ = call(ops, case, chain=2, span=2)
        check(case, many)
        for row in (0, 1, 7, 15):
            alone, _ = call(ops, some(case, [row]), chain=2, span=2)
            assert_same_bits(alone[0], many[row], f"row {row} at {context}")
    few, _ = call(ops, some(case, range(3, 8)), chain=2, span=2)
    assert_same_bits(few, many[3:8])


def test_levels_tilings_and_rings_have_the_same_bits(ops, rng):
    """Units of one leaf, of a chain, of a span; merged by the last block or by a launch; any ring, any group."""
    case = make(rng, range(1180, 1184), (4, 1, 128))
    found = {}
    for level, how in (
        (0, {"leaf_limit": 99}), (1, {"leaf_limit": 1}), (2, {"leaf_limit": 1, "slots_of_work": 1}),
        (None, {"merge_rows": 64}), (0, {"merge_rows": 0, "leaf_limit": 99, "ring": 6}),
        (1, {"merge_rows": 0, "leaf_limit": 1, "ring": 5}), (0, {"leaf_limit": 99, "blocks": 1, "ring": 3}),
    ):  # fmt: skip
        o, chosen = call(ops, case, chain=2, span=3, **{"merge_rows": 0} | how)
        assert chosen == level
        found[o.tobytes()] = how
    assert len(found) == 1
    check(case, o)


def test_one_term_of_the_probabilities(ops, rng):
    """The faster, coarser variant: 2^-9 of a probability is lost, which is far above the table's tolerance."""
    case = make(rng, range(300, 304), (4, 1, 128))
    want, terms = weigh(case)
    assert_close(call(ops, case, terms=1)[0], want, terms, C * 2**9)


def test_slots_in_one_pass(ops, rng):
    """Three slots of five rows each, one of them inactive, at different places; then rows of slots in any order."""
    pos = [*range(100, 105), *[-1] * 5, *range(380, 385)]
    case = make(rng, pos, (4, 2, 64), slots=3)
    whole, _ = call(ops, case)
    check(case, whole)
    assert (whole[5:10] == 0).all()
    order = rng.permutation(15)
    assert_same_bits(call(ops, some(case, order))[0], whole[order])


def test_a_drafters_block(ops, rng):
    """Rows that see the whole block, and a window that bounds the context only."""
    case = make(rng, range(250, 266), (4, 1, 64), causal=0, block=(250, 266))
    check(case, call(ops, case)[0])
    case = make(rng, range(250, 266), (4, 1, 64), window=40, block=(250, 266))
    check(case, call(ops, case)[0])


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("other", [np.nan, np.inf])
def test_what_a_later_row_of_the_block_holds_cannot_matter(ops, rng, other):
    """V of row 9 is no number: rows 0 to 8 do not see it, though it lies among the keys of their tile."""
    case = make(rng, range(120, 136), (4, 1, 64))
    clean, _ = call(ops, case)
    for name in ("cache_k", "cache_v"):
        bad = case | {name: case[name].copy()}
        bad[name][0, :, 129] = stored(other, "bf16")
        got, _ = call(ops, bad)
        assert_same_bits(got[:9], clean[:9], name)
        alone, _ = call(ops, some(bad, [15]))
        assert (np.isnan(real(got[15])) == np.isnan(real(alone[0]))).all()
        assert not np.isfinite(real(got[9:])).all()


def test_a_long_prefill_goes_in_passes(ops, rng):
    case = make(rng, range(200), (4, 1, 64))
    whole, _ = call(ops, case)
    check(case, whole)
    assert_same_bits(call(ops, some(case, range(130, 147)))[0], whole[130:147])


def test_what_declines_is_no_matter_of_rows(ops, rng, monkeypatch):
    """A workspace for few pieces: rows of many slots are taken one by one, and no count of rows is refused."""
    monkeypatch.setattr(ops.backend, "sms", 1)
    case = make(rng, [40, 130, 260, 390, 5, 77, 78], (4, 2, 64), slots=6)
    want, _ = call(ops, case)
    got, _ = call(ops, case, slots_of_work=1)
    assert_same_bits(got, want)
    assert_same_bits(call(ops, some(case, [2]), slots_of_work=1)[0][0], want[2])
    for rows in (1, 5, 16, 64, 256):
        assert attend_fast.Shape(rows, 32, 8, 128, 1, 400_000).fits(132)
        assert not attend_fast.Shape(rows, 32, 8, 128, 1, 800_000).fits(132)


@lru_cache
def shuffled(seed, sms):
    return open_or_skip("emulate", "bf16", seed=seed, sms=sms)


def test_any_order_and_any_card_has_the_same_bits(ops, rng):
    if ops.name != "emulate":
        pytest.skip("orders are shuffled by the emulator")
    case = make(rng, range(400, 416), (4, 2, 128))
    want, _ = call(ops, case)
    for seed, sms in ((None, 1), (1, 2), (2, 4), (3, 7)):
        assert_same_bits(call(shuffled(seed, sms), case)[0], want, f"seed {seed}, {sms} SMs")


@pytest.mark.parametrize("merge_rows", [0, 64])
def test_dependent_launch_reads_nothing_early(ops, rng, monkeypatch, merge_rows):
    """Two calls in a row, the second on the first one's output: before its wait the emulator hides that."""
    case = make(rng, range(140, 144), (4, 1, 64))
    first, _ = call(ops, case, merge_rows=merge_rows)
    second, _ = call(ops, case | {"q": first}, merge_rows=merge_rows)
    monkeypatch.setattr(ops.backend, "dependent", True, raising=False)
    q, o, again = (ops.array(first.shape, "A") for _ in range(3))
    ops.upload(q, case["q"])
    work, rest = workspace(ops, case), put(ops, case)[1:]
    for source_q, target in ((q, o), (o, again)):
        attend_fast.attend(
            ops.backend, source_q, *rest, work, target, one_launch=False, merge_rows=merge_rows
        )
    assert_same_bits(ops.download(o), first)
    assert_same_bits(ops.download(again), second)


def test_two_blocks_fit_an_sm(ops):
    if ops.name != "emulate":
        pytest.skip("static shared memory is read from the emulator")
    for ratio in (1, 4):
        for size in (64, 128):
            for rows in (1, 4, 16):
                shape = attend_fast.Shape(rows, 8 * ratio, 8, size, 1, 4096)
                own = ops.backend.device.function("attend_fast.cu", "attend_fast", shape.defines).shared
                assert 2 * (own + shape.shared + 1024) <= 233472, (ratio, size, rows)


@needs_nvrtc
@pytest.mark.parametrize("arch", launch.ARCHES.values())
@pytest.mark.parametrize("size", [64, 128])
def test_compiles_without_spills(ops, arch, size, tmp_path):
    for rows in (1, 8, 16):
        defines = attend_fast.Shape(rows, 32, 8, size, 1, 4096).defines
        cubin, log = launch.compile_cubin(source.find("attend_fast.cu"), arch, defines)
        for name, used in launch.resources(log).items():
            assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), f"{name} {defines}: {used}"
        found = disassemble(cubin, tmp_path)
        assert_instructions(
            found["attend_fast"],
            ["HMMA.16816.F32.BF16", "LDGSTS", "LDSM 4", "LDSM MT88 4", "MUFU.EX2", "ACQBULK", "PREEXIT"],
        )
        assert_instructions(found["attend_merge"], ["LDG", "ACQBULK", "PREEXIT"])
