"""The kernels of up to 8 pairs of rows and experts: where they run, and that their bits are the others'."""

import numpy as np
import pytest
from minidflash.kernels import compiler
from minidflash.kernels.gpu import experts, experts_few
from minidflash.kernels.gpu.split import SHARED_PER_SM

from tests.compare import assert_same_bits
from tests.disassembly import assert_instructions, cards, disassemble_all, leave_first
from tests.fast_rows import fast_run, on_gpu_backends
from tests.kernels import test_experts_down, test_route
from tests.kernels.test_compile import needs_nvrtc
from tests.kernels.test_fast_experts import BOTH, CARDS, TRUE, TYPES, dealt

USED = {  # of TRUE
    "coder": 8, "gpt-oss-120b": 4, "gpt-oss-20b": 4, "gpt-oss-bf16": 4, "gemma-4-26b": 8,
}  # fmt: skip


@pytest.fixture
def launched(ops, monkeypatch):
    """Names of the kernels that ran, in order."""
    names, launch = [], ops.backend.launch

    def noting(file, kernel, *args, **known):
        names.append(kernel)
        return launch(file, kernel, *args, **known)

    monkeypatch.setattr(ops.backend, "launch", noting)
    return names


def with_few(allowed, monkeypatch, run):
    """What `run` gives where up to so many pairs are few."""
    with monkeypatch.context() as patch:
        patch.setattr(experts_few, "MOST_PAIRS", allowed)
        patch.setattr(experts_few, "MOST_ROUTED", 2 * allowed)
        return run()


@on_gpu_backends
@TYPES
@BOTH
@pytest.mark.parametrize("T, E, U, idle", [(1, 9, 8, ()), (2, 4, 3, ()), (8, 3, 1, (0,))])
def test_few_pairs_have_the_bits_of_many(
    ops, rng, name, make, terms, what, weights, T, E, U, idle, launched, monkeypatch
):
    """Also where rows share experts, and where the two blocks of a cluster have different numbers of them."""
    sizes = (328, 301) if name == "experts_up" else (333, 328)
    case, known = make(ops, rng, T, E, U, *sizes, weights, idle=list(idle))
    few = with_few(8, monkeypatch, lambda: fast_run(ops, name, case, **known))
    assert f"{name}_few" in launched
    launched.clear()
    many = with_few(0, monkeypatch, lambda: fast_run(ops, name, case, **known))
    assert f"{name}_fast" in launched and f"{name}_few" not in launched
    for argument, value in many.items():
        assert_same_bits(few[argument], value, argument)


@on_gpu_backends
@TYPES
@BOTH
def test_a_tile_may_take_several_slots(ops, rng, name, make, terms, what, weights, launched, monkeypatch):
    """Three warps, so that each has two to four units of a tile, and slots of one unit or two."""
    case, known = make(ops, rng, 1, 9, 4, *((328, 77) if name == "experts_up" else (77, 328)), weights)
    cut = dealt(experts.Cut(3, 0, 1), 328, weights)
    monkeypatch.setattr(experts, "choose", lambda *_: cut)
    many = with_few(0, monkeypatch, lambda: fast_run(ops, name, case, **known))
    for units in 1, 2:
        monkeypatch.setattr(experts_few, "MOST_SLOT", units * cut.warps * experts.UNIT[weights][1])
        few = with_few(8, monkeypatch, lambda: fast_run(ops, name, case, **known))
        assert f"{name}_few" in launched
        for argument, value in many.items():
            assert_same_bits(few[argument], value, argument)


@on_gpu_backends
@TYPES
@BOTH
def test_rows_that_all_are_idle(ops, rng, name, make, terms, what, weights):
    sizes = (104, 88) if name == "experts_up" else (88, 104)
    case, known = make(ops, rng, 2, 5, 3, *sizes, weights, idle=[0, 1])
    assert (case["expert"] == -1).all()
    got = fast_run(ops, name, case, **known)[what]
    assert_same_bits(got, np.zeros_like(got) if name == "experts_up" else case["x"], what)


@on_gpu_backends
@pytest.mark.parametrize("first, count", [(0, 2), (2, 2), (4, 2), (0, 6)])
def test_experts_are_added_in_router_order(ops, first, count, launched):
    """By the kernel of few pairs, and by those of many."""
    test_experts_down.assert_added_in_order(
        ops, fast_run, test_experts_down.ORDERS[first : first + count], "bf16"
    )
    assert f"experts_down_{'few' if count == 2 else 'fast'}" in launched


@on_gpu_backends
@BOTH
def test_nine_pairs_are_many(ops, rng, name, make, terms, what, launched):
    sizes = (104, 88) if name == "experts_up" else (88, 104)
    case, known = make(ops, rng, 3, 5, 3, *sizes, "bf16")
    fast_run(ops, name, case, **known)
    assert f"{name}_fast" in launched and f"{name}_few" not in launched


@on_gpu_backends
@pytest.mark.parametrize(
    "T, E, U, D, idle",
    [(1, 128, 8, 2048, ()), (3, 33, 3, 72, (0,)), (10, 40, 4, 304, (9,)), (16, 128, 4, 520, ())],
)
def test_few_rows_are_routed_like_many(ops, rng, T, E, U, D, idle, launched, monkeypatch):
    case, size = test_route.make(ops, rng, T, E, U, D, "bf16", bias=True, normalise=0)
    case["pos"][list(idle)] = -1
    few = with_few(8, monkeypatch, lambda: fast_run(ops, "route", case, **size))
    assert launched.count("route_few") == 1
    many = with_few(0, monkeypatch, lambda: fast_run(ops, "route", case, **size))
    assert launched.count("route_few") == 1 and "route_fast" in launched
    for argument, value in many.items():
        assert_same_bits(few[argument], value, argument)


@on_gpu_backends
@pytest.mark.parametrize("T, E, U, D", [(1, 16, 4, 64), (1, 200, 4, 64), (17, 40, 2, 64), (1, 40, 4, 4104)])
def test_other_sizes_are_routed_by_the_other_kernel(ops, rng, T, E, U, D, launched):
    """One row tile is no cluster; 13 are more than one; a thread has 8 numbers of a row."""
    case, size = test_route.make(ops, rng, T, E, U, D, "bf16", bias=False, normalise=1)
    fast_run(ops, "route", case, **size)
    assert "route_fast" in launched and "route_few" not in launched


# ---- what is compiled ---------------------------------------------------------------------------------


def few_of(model, row):
    """(Few, K, type, activation) of one row of a published model, on a card of 132 multiprocessors."""
    cols, kind, _, act = TRUE[model][row]
    if row == "experts_up":
        return experts_few.choose(cols, kind, row, 1), cols, kind, act
    width = TRUE[model]["experts_up"][0]
    return experts_few.choose(cols, kind, row, USED[model], experts_few.own_bytes(width, 66)), cols, kind, act


@needs_nvrtc
@pytest.mark.parametrize("model, arch", CARDS)
def test_two_neighbours_fit_a_multiprocessor_and_two_of_a_kind_do_not(model, arch, tmp_path):
    """experts_down_few's blocks come while experts_up_few's are there, one each: a second one of
    experts_up_few would do its work twice as late."""
    cubins, registers, shared = [], 0, []
    for row in ("experts_up", "experts_down"):
        few, cols, kind, act = few_of(model, row)
        assert few is not None and few.threads <= 1024
        defines = experts_few.defines_of(few, cols, kind, act)
        cubin, log = compiler.compile_cubin(
            f"{row}_few.cu", arch, {name: str(value) for name, value in defines.items()}
        )
        (used,) = compiler.resources(log).values()
        assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), defines
        registers += few.threads * -(-used.registers // 8) * 8
        shared.append(few.shared + 1024 + experts_few.STATIC)
        cubins.append(cubin)
    assert registers <= 65536 and sum(shared) <= SHARED_PER_SM < 2 * (shared[0] - experts_few.STATIC)
    wanted = ["HMMA.16816.F32.BF16", "LDS 128", "UBLKCP", "SYNCS", "LDGSTS", "ACQBULK", "PREEXIT"]
    for kernels in disassemble_all(cubins, tmp_path):
        (found,) = kernels.values()
        assert_instructions(found, wanted)
        assert leave_first(found) == {True}, "weights do not leave L2 first"


@needs_nvrtc
@pytest.mark.parametrize(
    "rows, arch", [(rows, arch) for i, rows in enumerate((1, 8, 16)) for arch in cards(i)]
)
def test_route_has_room_beside_any_kernel(rows, arch):
    """Of 65,536 registers another block has 46,080 at most (linear_add of Coder's width). Over 4 rows are
    loaded together: that is worth more than to begin beside such a block."""
    defines = {"STREAM_WARPS": str(experts.ROUTE_WARPS), "TOKEN_TILES": "1", "TOKEN_ROWS": str(rows)}
    _, log = compiler.compile_cubin("route_few.cu", arch, defines)
    (used,) = compiler.resources(log).values()
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert used.registers <= (40 if rows <= 4 else 64)
