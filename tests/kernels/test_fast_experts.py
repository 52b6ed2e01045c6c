"""The fast kernels of layers with experts: tests of their rows again; bits under any cut, order and company.

The tests of experts_up and experts_down run the fast kernels too, wherever activations are bf16.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from minidflash.kernels import compiler
from minidflash.kernels.gpu import experts
from minidflash.kernels.ops import Ops
from minidflash.kernels.table import CLAMPED, GELU_TANH, SILU

from tests.cases import Make, grouped, run, stored
from tests.compare import assert_same_bits, real
from tests.conftest import FULL, parameters
from tests.disassembly import SM90, assert_instructions, cards, disassemble_all, leave_first
from tests.fast_rows import C, fast_check, fast_run, on_gpu_backends
from tests.kernels import test_experts_down, test_experts_up
from tests.kernels.test_compile import needs_nvrtc

TYPES = pytest.mark.parametrize("weights", ["bf16", "mxfp4"])


# ---- the experts' products ----------------------------------------------------------------------------


def up_case(ops, rng, T, E, U, D, F, weights, idle=()):
    return test_experts_up.make(ops, rng, T, E, U, D, F, weights, "clamped", idle=idle), {"F": F}


def down_case(ops, rng, T, E, U, D, F, weights, idle=()):
    return test_experts_down.make(ops, rng, T, E, U, D, F, weights, tap_at=3, idle=idle), {}


BOTH = pytest.mark.parametrize(
    "name, make, terms, what",
    [
        ("experts_up", up_case, test_experts_up.terms_of, "h"),
        ("experts_down", down_case, test_experts_down.terms_of, "x"),
    ],
    ids=["up", "down"],
)


@on_gpu_backends
@TYPES
@BOTH
@pytest.mark.parametrize("T", [1, 7, 8, 9, 20, 33, 40, 70])
def test_groups_of_any_size_match_oracle(ops, rng, name, make, terms, what, weights, T):
    """Three experts, of which one has all rows; tiles of a prompt come in strips, which end in the middle."""
    case, sizes = make(ops, rng, T, 3, 2, *((216, 301) if name == "experts_up" else (637, 216)), weights)
    case["expert"][:, 0], case["expert"][:, 1] = 1, 2 * (np.arange(T) % 3 > 0)
    case |= grouped(case["expert"], 3)
    fast_check(ops, name, case, terms(case), C, **sizes)


def dealt(how, cols, kind):
    """The Cut with the units that K makes."""
    units = -(-cols // experts.UNIT[kind][0])
    warps = min(how.warps, units)
    return experts.Cut(warps, -(-units // warps), how.ahead, how.finishers, how.asked)


@pytest.fixture
def cut(request, monkeypatch):
    """Every tile is dealt out this way: (Cut without its units, Frame), as far as K allows."""
    how, shape = request.param
    monkeypatch.setattr(experts, "choose", lambda cols, kind, row: dealt(how, cols, kind))
    monkeypatch.setattr(experts, "frame", lambda *_: shape)
    return how


CUTS = [
    (experts.Cut(3, 0, 1, 1), experts.Frame(1, 1, 1)),
    (experts.Cut(3, 0, 2, 2, 3), experts.Frame(2, 2, 2)),
    (experts.Cut(3, 0, 3, 4, 1), experts.Frame(4, 2, 1)),
    (experts.Cut(3, 0, 4, 3), experts.Frame(1, 2, 2)),
    (experts.Cut(3, 0, 1, 4), experts.Frame(1, 2, 2, 1)),
    (experts.Cut(3, 0, 1, 2, 2), experts.Frame(2, 2, 1, 2)),
    (experts.Cut(3, 0, 1, 4), experts.Frame(1, 1, 4, 4, True)),
    (experts.Cut(3, 0, 1, 4), experts.Frame(1, 1, 2, 3, True)),
]


def is_turn(ops_name, turn):
    """Emulated, every second of the cuts, rows and types of weights: all pairs. The others by
    MINIDFLASH_FULL=1."""
    return FULL or ops_name != "emulate" or turn % 2 == 0


@pytest.mark.parametrize("T, cut, name, make, terms, what, weights, ops", [
    pytest.param(T, cut, *both, weights, p.values[0], id=f"{T}-cut{i}-{row}-{weights}-{p.id}", marks=p.marks)
    for i, cut in enumerate(CUTS)
    for j, (both, row) in enumerate(zip(BOTH.args[1], BOTH.kwargs["ids"], strict=True))
    for k, weights in enumerate(TYPES.args[1])
    for p in on_gpu_backends.args[1] if is_turn(p.values[0][0], i + j + k)
    for T in (5, 37)
], indirect=["cut", "ops"])  # fmt: skip
def test_every_cut_is_right(ops, rng, cut, name, make, terms, what, weights, T):
    case, sizes = make(ops, rng, T, 9, 3, 176, 152, weights, idle=[2])
    fast_check(ops, name, case, terms(case), C, **sizes)


@on_gpu_backends
@TYPES
@BOTH
def test_bits_do_not_depend_on_how_a_tile_comes_about(
    ops, rng, name, make, terms, what, weights, monkeypatch
):
    """Groups of rows, tiles ahead, who ends them: none of it shows. Shapes as above: so are the builds."""
    case, sizes = make(ops, rng, 37, 9, 3, 176, 152, weights)
    whole, turn = None, (name == "experts_down") + (weights == "mxfp4")
    for how, shape in [cut for i, cut in enumerate(CUTS) if i == 0 or is_turn(ops.name, i + turn)]:
        monkeypatch.setattr(experts, "choose", lambda cols, kind, row, how=how: dealt(how, cols, kind))
        monkeypatch.setattr(experts, "frame", lambda *_, shape=shape: shape)
        found = fast_run(ops, name, case, **sizes)[what]
        whole = found if whole is None else whole
        assert_same_bits(found, whole, str((how, shape)))


@on_gpu_backends
@TYPES
@BOTH
def test_bits_do_not_depend_on_how_many_rows_there_are(ops, rng, name, make, terms, what, weights):
    case, sizes = make(ops, rng, 40, 7, 3, 104, 88, weights)
    whole = fast_run(ops, name, case, **sizes)[what]
    rows = [spec for spec in ("u", "h", "x", "share", "tap_row") if case.get(spec) is not None]
    for count in (*range(1, 18), 31, 32, 33):
        first = int(rng.integers(0, 41 - count))
        here = slice(first, first + count)
        part = case | {spec: np.ascontiguousarray(case[spec][here]) for spec in rows}
        part |= grouped(np.ascontiguousarray(case["expert"][here]), 7)
        assert_same_bits(fast_run(ops, name, part, **sizes)[what], whole[here], f"{count} rows")


@pytest.mark.parametrize("ops", parameters(["emulate"], ["bf16"]), indirect=True)
@TYPES
@BOTH
@pytest.mark.parametrize("T", [2, 6, 36])
def test_every_order_of_blocks_warps_and_lanes_gives_the_same_bits(
    ops, rng, name, make, terms, what, weights, T
):
    case, sizes = make(ops, rng, T, 7, 3, 104, 88, weights)
    want = fast_run(ops, name, case, **sizes)
    for seed in range(1, 4):
        shuffled = Ops(type(ops.backend)("bf16", seed=seed))
        got = fast_run(shuffled, name, case, **sizes)
        for argument, value in want.items():
            assert_same_bits(got[argument], value, f"seed {seed}: {argument}")


@on_gpu_backends
@BOTH
def test_weights_of_a_k_that_no_warp_holds_are_read_by_the_plain_kernel(ops, rng, name, make, terms, what):
    assert experts.choose(8192, "bf16", name) is None
    sizes = (8192, 8) if name == "experts_up" else (8, 8192)
    case, known = make(ops, rng, 2, 3, 2, *sizes, "bf16")
    run(ops, name, case, **known)
    assert ops.backend.variants[name] == "plain"


@on_gpu_backends
@TYPES
@BOTH
@pytest.mark.parametrize("rows, cols", [(48, 96), (20, 64), (8, 160)])
def test_the_plain_kernel_reads_packed_weights(
    ops, rng, name, make, terms, what, weights, rows, cols, monkeypatch
):
    """To the bit of what it makes of plain ones."""
    sizes = (cols, rows) if name == "experts_up" else (rows, cols)
    case, known = make(ops, rng, 5, 4, 2, *sizes, weights)
    monkeypatch.setattr(experts, "choose", lambda *_: None)
    packed = run(ops, name, case, **known)[what]
    assert ops.backend.variants[name] == "plain"
    monkeypatch.setattr(experts, "pack", lambda *_: None)
    assert_same_bits(run(ops, name, case, **known)[what], packed, what)


# ---- dependent launch ---------------------------------------------------------------------------------


@on_gpu_backends
@TYPES
@pytest.mark.parametrize("T", [2, 5, 35])
def test_dependent_launches_read_nothing_too_early(ops, rng, weights, T, monkeypatch):
    """Two layers, one behind the other; the emulator poisons what the predecessor wrote until the wait."""
    D, E, U, F = 96, 10, 3, 64
    make = Make(rng, "bf16", weights)
    router = ops.backend.weight([Make(rng, "bf16").w(E, D)], "matrix")
    up, down = (
        ops.backend.weight(made.parts, role, E)
        for made, role in ((make.experts(E, 2 * F, D), "expert pairs"), (make.experts(E, D, F), "experts"))
    )
    start, norm = make.a(T, D), make.v(D, around=1)
    pairs = T * U

    def chain():
        x, scale, pos = (
            ops.array(shape, kind) for shape, kind in (((T, D), "A"), ((D,), "f32"), ((T,), "i32"))
        )
        for buffer, values in ((x, start), (scale, norm), (pos, np.arange(T, dtype=np.int32))):
            ops.upload(buffer, values)
        u, h = ops.array((T, D), "A"), ops.array((T, U, F), "A")
        expert, share, first, order, touched = (
            ops.array(shape, kind)
            for shape, kind in (
                ((T, U), "i32"),
                ((T, U), "f32"),
                ((E + 1,), "i32"),
                ((pairs,), "i32"),
                ((1,), "i32"),
            )
        )
        work = ops.array((ops.backend.work_size(pairs, D, 2 * F),), "f32")
        for _ in range(2):
            ops.route(
                x,
                scale,
                None,
                1e-5,
                router,
                None,
                1,
                None,
                pos,
                touched,
                work,
                u,
                expert,
                share,
                first,
                order,
            )
            ops.experts_up(u, up, None, expert, first, order, 0, 0.0, 0.0, work, h)
            ops.experts_down(h, down, None, expert, share, first, order, 1, None, 0, x, None, work)
        assert {ops.backend.variants[row] for row in ("route", "experts_up", "experts_down")} == {"fast"}
        return [ops.download(buffer) for buffer in (x, u, h, expert, share, first, order, touched)]

    want = chain()
    assert not np.isnan(real(want[0])).any()
    monkeypatch.setattr(ops.backend, "dependent", True)
    for got, wanted in zip(chain(), want, strict=True):
        assert_same_bits(got, wanted, "dependent")


# ---- what is compiled ---------------------------------------------------------------------------------

GPT_OSS = {"experts_up": (2880, "mxfp4", 128, CLAMPED), "experts_down": (2880, "mxfp4", 128, 0)}
TRUE = {  # K, type, experts and activation of models.md 3 to 5
    "coder": {"experts_up": (2048, "bf16", 128, SILU), "experts_down": (768, "bf16", 128, 0)},
    "gpt-oss-120b": GPT_OSS,
    "gpt-oss-20b": {row: (cols, kind, 32, act) for row, (cols, kind, _, act) in GPT_OSS.items()},
    "gpt-oss-bf16": {row: (cols, "bf16", 128, act) for row, (cols, _, _, act) in GPT_OSS.items()},
    "gemma-4-26b": {"experts_up": (2816, "bf16", 128, GELU_TANH), "experts_down": (704, "bf16", 128, 0)},
}


CARDS = [(model, arch) for i, model in enumerate(TRUE) for arch in cards(i)]


@needs_nvrtc
@pytest.mark.parametrize("model, arch", CARDS)
def test_true_shapes_keep_to_registers_and_stream(model, arch, tmp_path):
    """For groups of 32 rows, which take most registers, and on sm_90a by turns for fewer; for all numbers
    with MINIDFLASH_FULL=1."""
    cubins, streams = [], []
    fewer = (8, 16)[list(TRUE).index(model) % 2]
    counts = (8, 16, 32) if FULL else (fewer, 32) if arch == SM90 else (32,)
    for row, (cols, kind, count, act) in TRUE[model].items():
        cut = experts.choose(cols, kind, row)
        for rows in counts:
            shape = experts.frame(cut, cols, kind, count, rows)
            defines = experts.defines_of(cut, cols, kind, shape, act, kind == "mxfp4" and rows == 16)
            cubin, log = compiler.compile_cubin(
                f"{row}_fast.cu", arch, {name: str(value) for name, value in defines.items()}
            )
            used_by = compiler.resources(log)
            for name, used in used_by.items():
                assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), f"{name}: {defines}"
            if row == "experts_down" and shape.holds:  # experts_sum waits beside it
                both = (used_by["experts_down_fast"].registers, cut.threads(shape)), (
                    used_by["experts_sum"].registers, experts.SUM_THREADS)  # fmt: skip
                assert sum(-(-each // 8) * 8 * threads for each, threads in both) <= 65536
            cubins.append((f"{row}_fast", cubin))
            streams.append("UBLKCP" if shape.ring else "LDG.E 128 NA LTC256B CONSTANT")
    wanted = ["HMMA.16816.F32.BF16", "LDS 128", "SYNCS", "LDGSTS", "ACQBULK", "PREEXIT"]
    found = disassemble_all([cubin for _, cubin in cubins], tmp_path)
    for (name, _), kernels, stream in zip(cubins, found, streams, strict=True):
        assert_instructions(kernels[name], [stream, *wanted])
        copied = {True} if stream == "UBLKCP" else set()
        assert leave_first(kernels[name]) == copied, "weights do not leave L2 first"


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 2048])
@pytest.mark.parametrize("model", TRUE)
def test_a_frame_fits_the_card_and_a_group_of_32_is_one_run(model, rows):
    for row, (cols, kind, count, act) in TRUE[model].items():
        assert act in (SILU, CLAMPED, GELU_TANH)
        cut = experts.choose(cols, kind, row)
        assert cut.warps * cut.units >= -(-cols // experts.UNIT[kind][0])
        shape = experts.frame(cut, cols, kind, count, rows)
        assert 8 * shape.token_tiles >= (8 if kind == "mxfp4" and rows <= 16 else min(rows, 32))


@pytest.mark.filterwarnings("ignore:invalid value")
@on_gpu_backends
@BOTH
def test_bits_do_not_depend_on_what_other_rows_hold(ops, rng, name, make, terms, what):
    case, sizes = make(ops, rng, 20, 4, 2, 104, 88, "bf16")
    whole = fast_run(ops, name, case, **sizes)[what]
    spoiled = dict(case)
    for spec in ("u", "h", "x"):
        if spec in case:
            spoiled[spec] = case[spec].copy()
            spoiled[spec][3:9] = stored(np.nan, "bf16")
    good = [*range(3), *range(9, 20)]
    assert_same_bits(fast_run(ops, name, spoiled, **sizes)[what][good], whole[good], "NaN beside")


@pytest.mark.parametrize("ops", parameters(["emulate"], ["bf16"]), indirect=True)
def test_the_bench_runs(ops, tmp_path):
    bench = Path(__file__).parents[2] / "bench" / "experts.py"
    command = [sys.executable, bench, "--backend", "emulate", "--models", "toy,toy-mxfp4", "--rows", "2",
               "--routing", "random", "--replays", "1"]  # fmt: skip
    done = subprocess.run(
        command, check=False, capture_output=True, text=True,
        env=os.environ | {"OUT": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "experts-emulate.json").read_text())["results"]
    assert [found["model"] for found in results] == ["toy", "toy-mxfp4"]
    assert all(found["touched"] > 0 and found["layer_us"] > 0 for found in results)
