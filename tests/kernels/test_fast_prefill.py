"""The products of a prompt: close to the oracle, and a row's bits are not a matter of chunks,
company or tiles."""

import numpy as np
import pytest
from minidflash.kernels import compiler, source
from minidflash.kernels.gpu import HAS_WGMMA, prefill
from minidflash.kernels.ops import Ops
from minidflash.kernels.table import GELU_TANH, SILU, role_of

from tests.cases import Make, check, run
from tests.compare import assert_same_bits, real
from tests.conftest import FULL, open_or_skip
from tests.disassembly import assert_instructions, cards, disassemble_all
from tests.fast_rows import C_NORMED, C, on_gpu_backends
from tests.kernels import (
    test_fuse,
    test_gate_up,
    test_inject,
    test_linear,
    test_linear_add,
    test_qkv,
    test_rows,
)
from tests.kernels.test_compile import needs_nvrtc


def use_frame(ops, monkeypatch, kind):
    """One of the frames of kernels for many rows, or a skip where the card has not got it."""
    if kind == "wgmma" and ops.backend.device.arch not in HAS_WGMMA:
        pytest.skip(f"needs wgmma, which sm_90a alone has: this is {ops.backend.device.arch}")
    monkeypatch.setattr(ops.backend, "prefill_frame", kind)


@pytest.fixture(params=prefill.TILES)
def frame(request, ops, monkeypatch):
    """Each frame of prefill.cuh that the card has."""
    use_frame(ops, monkeypatch, request.param)
    return request.param


class Prompt(Ops):
    """Ops of a prompt whose weights get the role that a row gives them."""

    def __init__(self, ops, name):
        super().__init__(prefill.Prefill(ops.backend))
        self.weight = lambda parts: ops.backend.weight(parts, role_of(name, "w"))


def prompt_check(ops, name, case, terms, c, variant="prefill", **sizes):
    ops.backend.variants.pop(name, None)
    got = check(Prompt(ops, name), name, case, terms, c, **sizes)
    assert ops.backend.variants[name] == variant
    return got


def prompt_run(ops, name, case, **sizes):
    got = run(Prompt(ops, name), name, case, **sizes)
    assert ops.backend.variants[name] == "prefill"
    return got


@on_gpu_backends
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("T, D, F", [(1, 80, 64), (70, 200, 40), (130, 72, 576), (300, 16, 8)])
def test_linear_matches_oracle(ops, frame, rng, T, D, F, bias):
    case = test_linear.make(ops, rng, T, D, F, "bf16", bias)
    prompt_check(ops, "linear", case, test_linear.terms_of(case), C)


@on_gpu_backends
@pytest.mark.parametrize("bias, tap_at", [(False, None), (True, 11)])
@pytest.mark.parametrize("T, D, F", [(1, 80, 64), (70, 200, 40), (130, 72, 576), (300, 16, 8)])
def test_linear_add_matches_oracle(ops, frame, rng, T, D, F, bias, tap_at):
    case = test_linear_add.make(ops, rng, T, D, F, "bf16", bias, tap_at)
    got = prompt_check(ops, "linear_add", case, test_linear_add.terms_of(case), C)
    if tap_at is not None:
        want = case["taps"].copy()
        for t, row in enumerate(case["tap_row"]):
            if row >= 0:
                want[row, tap_at : tap_at + D] = got["x"][t]
        assert_same_bits(got["taps"], want, "taps")


@on_gpu_backends
@pytest.mark.parametrize("T, D, F", [(1, 64, 40), (70, 96, 100), (16, 576, 13)])
@pytest.mark.parametrize("act", [SILU, GELU_TANH])
def test_gate_up_matches_oracle(ops, frame, rng, T, D, F, act):
    case = test_gate_up.make(ops, rng, T, D, F, "bf16", act=act)
    prompt_check(ops, "gate_up", case, test_gate_up.terms_of(case), C_NORMED, F=F)


@on_gpu_backends
@pytest.mark.parametrize("act, norm", [(SILU, 200), (GELU_TANH, 200), (GELU_TANH, 1e13)])
def test_gate_up_of_large_gates_saturates(ops, frame, rng, act, norm):
    case = test_gate_up.make(ops, rng, 3, 40, 24, "bf16", act=act) | {"norm": np.full(40, norm, np.float32)}
    got = prompt_check(ops, "gate_up", case, test_gate_up.terms_of(case), C_NORMED, F=24)
    assert np.isfinite(real(got["h"])).all()


@on_gpu_backends
@pytest.mark.parametrize("norms, bias", [(False, False), (True, True)])
@pytest.mark.parametrize(
    "shape",
    [(5, 128, 5, 1, 24, 12), (16, 512, 8, 4, 128, 64), (70, 40, 3, 3, 64, 32), (5, 40, 2, 1, 64, 16)],
    ids=str,
)
def test_qkv_matches_oracle(ops, frame, rng, shape, norms, bias):
    case = test_qkv.make(ops, rng, shape, "bf16", norms, bias)
    got = prompt_check(ops, "qkv", case, test_qkv.terms_of(case), C_NORMED, H=shape[2])
    assert (got["q"][case["pos"] < 0] == 0).all()
    for name in ("cache_k", "cache_v"):
        assert np.isnan(real(got[name])).any(), "cells of others stay as they were"


@on_gpu_backends
def test_without_a_norm_rows_are_as_they_are(ops, frame, rng):
    """Nothing is rounded before the product then."""
    for shape in ((5, 128, 5, 1, 24, 12), (70, 40, 3, 3, 64, 32)):
        case = test_qkv.make(ops, rng, shape, "bf16", True, True) | {"norm": None}
        prompt_check(ops, "qkv", case, test_qkv.terms_of(case), C, H=shape[2])
    for T, D, F in ((1, 64, 40), (70, 96, 100)):
        case = test_gate_up.make(ops, rng, T, D, F, "bf16") | {"norm": None, "eps": 1e6}
        prompt_check(ops, "gate_up", case, test_gate_up.terms_of(case), C, F=F)


@on_gpu_backends
@pytest.mark.parametrize("T, D, columns", [(3, 24, 80), (70, 37, 64)])
def test_fuse_matches_oracle(ops, frame, rng, T, D, columns):
    case = test_fuse.make(ops, rng, T, D, columns, "bf16")
    prompt_check(ops, "fuse", case, test_fuse.terms_of(case), C, D=D)


@on_gpu_backends
@pytest.mark.parametrize("shape", [(5, 80, 3, 1, 24, 12), (17, 40, 1, 3, 80, 40)], ids=str)
def test_inject_matches_oracle(ops, frame, rng, shape):
    case = test_inject.make(ops, rng, shape, "bf16", True, True)
    prompt_check(ops, "inject", case, test_inject.terms_of(case), C)


@on_gpu_backends
@pytest.mark.parametrize("norm, scale, D, variant", [
    (True, False, 16, "prefill"), (False, True, 16, "prefill"), (True, True, 264, "prefill"),
    (True, True, 18, "fast"),
])  # fmt: skip
def test_a_norm_and_a_scale_at_a_layers_end(ops, frame, rng, norm, scale, D, variant):
    """Rows that are no whole pieces of 4 numbers are decoding's."""
    case = test_linear_add.make(ops, rng, 5, D, 80, "bf16", True, 3, norm, scale)
    prompt_check(ops, "linear_add", case, test_linear_add.terms_of(case), C, variant)


@on_gpu_backends
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    "shape", [(5, 64, 4, 2, 64, 32), (3, 64, 2, 1, 256, 128), (3, 72, 3, 1, 512, 256)], ids=str
)
def test_qkv_of_normed_or_shared_values(ops, frame, rng, shape, shares):
    _, D, H, G, K, _ = shape
    case = test_qkv.make(ops, rng, shape, "bf16", True, True)
    case["v_norm"] = 1 + 0.1 * np.arange(K, dtype=np.float32)
    if shares:
        case |= {"wkv": Make(rng, "bf16").w(G * K, D), "kv_bias": case["kv_bias"][: G * K]}
    prompt_check(ops, "qkv", case, test_qkv.terms_of(case), C_NORMED, H=H)


@on_gpu_backends
def test_odd_columns_are_left_to_the_other_kernels(ops, frame, rng):
    case = test_linear_add.make(ops, rng, 5, 16, 77, "bf16", False, None)
    prompt_check(ops, "linear_add", case, test_linear_add.terms_of(case), C, "fast")


CHUNKED = ["linear", "linear_add", "gate_up", "qkv", "fuse", "inject", *test_rows.PROMPT_FORMS]


@on_gpu_backends
@pytest.mark.parametrize("form", CHUNKED)
def test_a_row_alone_has_the_bits_of_a_chunk(ops, frame, rng, form, monkeypatch):
    """Rows of a chunk of 64, in chunks of 1 and 17, under every tile; emulated, a row under every other one,
    the next row under those between."""
    monkeypatch.setattr(test_rows, "make", even(test_rows.make))
    name, case, sizes = test_rows.make_form(form, rng, "bf16", "bf16")
    whole = test_rows.seen(name, case, prompt_run(ops, name, case, **sizes), range(64))
    chunks = range(1), range(40, 57), range(63, 64), range(3, 5)
    ways = list(zip(chunks, prefill.TILES[frame], strict=True))
    if ops.name == "emulate" and not FULL:
        ways = ways[CHUNKED.index(form) % 2 :: 2]
    for rows, tile in ways:
        monkeypatch.setattr(prefill, "choose", lambda *_, tile=tile: tile)
        part = test_rows.some_rows(name, case, list(rows))
        got = test_rows.seen(name, part, prompt_run(ops, name, part, **sizes), rows)
        test_rows.compare(name, whole, got, list(rows), f"tile {tile}")


def even(make):
    """test_rows.make with K a multiple of 8, as these kernels want."""

    def made(name, rng, activations, weights):
        case, sizes = make(name, rng, activations, weights)
        for what in ("x", "a", "taps", "f"):
            if what in case and what == {"linear": "a", "linear_add": "a", "fuse": "taps", "inject": "f"}.get(
                name, "x"
            ):
                cols = case[what].shape[1] // 8 * 8
                case[what] = np.ascontiguousarray(case[what][:, :cols])
        for what in ("w", "wq", "wkv"):
            if what in case:
                case[what] = type(case[what])(np.ascontiguousarray(case[what].array[:, :cols]))
        if case.get("norm") is not None and name != "fuse":
            case["norm"] = case["norm"][:cols]
        return case, sizes

    return made


@on_gpu_backends
def test_dependent_launch_reads_nothing_early(ops, frame, rng, monkeypatch):
    case = test_gate_up.make(ops, rng, 20, 64, 40, "bf16")
    want = prompt_run(ops, "gate_up", case, F=40)["h"]
    monkeypatch.setattr(ops.backend, "dependent", True)
    assert_same_bits(prompt_run(ops, "gate_up", case, F=40)["h"], want)


@pytest.mark.parametrize("frame", prefill.TILES)
def test_the_tile_grows_with_the_work(frame):
    assert prefill.choose(132, 2048, 24576, frame)[:2] == (256, 8)
    assert prefill.choose(132, 64, 4096, frame)[0] == 64
    for rows in (1, 63, 64, 65, 256, 2048):
        assert prefill.choose(132, rows, 4096, frame) in prefill.TILES[frame]


# (rows, outputs): us of each wgmma tile on an H100, K = 4096 for 6,144 outputs, else 12,288
MEASURED = {
    (16, 6144): (27, 34, 35, 43), (64, 6144): (30, 34, 36, 43), (128, 6144): (31, 35, 38, 44),
    (256, 6144): (35, 40, 39, 47), (512, 6144): (76, 75, 73, 48), (1024, 6144): (162, 120, 112, 98),
    (16, 4096): (65, 92, 94, 115), (128, 4096): (70, 94, 97, 118), (256, 4096): (75, 93, 99, 119),
    (512, 4096): (172, 107, 100, 119), (1024, 4096): (337, 235, 194, 130),
}  # fmt: skip


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_rule_takes_the_tile_that_was_fastest(case):
    tiles = prefill.TILES["wgmma"]
    assert prefill.choose(132, *case, "wgmma") == min(zip(MEASURED[case], tiles, strict=True))[1]


def test_ops_of_a_prompt_share_everything_but_rows():
    emulate, numba = open_or_skip("emulate", "bf16"), open_or_skip("numba", "f32")
    assert numba.for_prefill is numba
    prompt = emulate.for_prefill
    assert prompt is emulate.for_prefill and prompt.name == "emulate" and prompt.activations == "bf16"
    assert isinstance(prompt.backend, prefill.Prefill) and prompt.backend.variants is emulate.backend.variants


FILES = [
    ("linear_prefill", {}), ("linear_prefill", {"OUT": "bf16"}), ("linear_add_prefill", {}),
    ("gate_up_prefill", {}), ("gate_up_prefill", {"NORMED": 0}), ("gate_up_prefill", {"ACT": GELU_TANH}),
]  # fmt: skip
WANTED = {
    "mma": ["HMMA.16816.F32.BF16", "LDGSTS", "LDS 128", "ACQBULK"],
    "wgmma": ["HGMMA", "UBLKCP", "SYNCS", "LDS 128", "ACQBULK"],
}


@needs_nvrtc
@pytest.mark.parametrize(
    "turn, file, others, arch",
    [pytest.param(i, file, others, arch, id=f"{file}-{others}-{arch}")
     for i, (file, others) in enumerate(FILES) for arch in cards(i)],
)  # fmt: skip
def test_compiles_without_spills(turn, arch, file, others, tmp_path):
    """Nor with a fence of the card's memory: an arrival of the cluster's scope puts one into every stage.
    In the largest tile, which takes most registers, and by turns in one of the others."""
    cubins, frame = [], "wgmma" if arch in HAS_WGMMA else "mma"
    *others_tiles, largest = prefill.TILES[frame]
    some = [others_tiles[turn % len(others_tiles)], largest]
    for tile in prefill.TILES[frame] if FULL else some:
        defines = prefill.defines_of(frame, tile) | others
        cubin, log = compiler.compile_cubin(source.find(f"{file}.cu"), arch, defines)
        cubins.append(cubin)
        for name, used in compiler.resources(log).items():
            assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), f"{name} {defines}: {used}"
        assert "Potential Performance Loss" not in log, log  # ptxas made wgmma wait for each other
    for kernels in disassemble_all(cubins, tmp_path):
        assert_instructions(kernels[file], WANTED[frame], ("LDL", "STL", "MEMBAR"))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_wgmma_is_refused_where_there_is_none(arch):
    with pytest.raises(RuntimeError, match="wgmma is sm_90a's alone"):
        compiler.compile_cubin(source.find("gate_up_prefill.cu"), arch, {"WGMMA": 1})
