"""Products whose warps have all chunks in every step: the compiler then sees a step as a whole."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from minidflash.kernels import compiler
from minidflash.kernels.gpu import fast, fp8, split

from tests.conftest import FULL
from tests.disassembly import assert_instructions, disassemble_all
from tests.kernels.test_compile import needs_nvrtc
from tests.kernels.test_fast_bits import MEASURED

FP8 = {"qkv": (6144, 4096), "linear_add": (4096, 12288), "gate_up": (24576, 4096)}  # of Qwen3-8B


def even(name, outputs, cols, dtype, token_tiles):
    """-D of a product's kernel whose steps are even, or None."""
    w = SimpleNamespace(dtype=dtype, rows=outputs, cols=cols)
    cut = fp8.cut_of(SimpleNamespace(sms=132), w, whole=name == "head")
    defines = fast.defines_of(cut, token_tiles, w)
    return defines if defines.get("EVEN_STEPS") else None


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("token_tiles", split.TOKEN_TILES)
def test_steps_are_even_where_every_warp_has_all_chunks_of_each(token_tiles, dtype):
    """Counted as skinny_task.cuh deals them out: a slice's chunks in turn."""
    seen = set()
    for outputs, cols, sms in [*split.MEASURED, (4096, 4096 - 32, 132), (640, 100, 132)]:
        w = SimpleNamespace(dtype=dtype, rows=outputs, cols=cols)
        cut = fp8.cut_of(SimpleNamespace(sms=sms), w)
        defines, chunks = fast.defines_of(cut, token_tiles, w), -(-cols // split.CHUNK)
        ends = [chunks * slice_ // cut.slices for slice_ in range(cut.slices + 1)]
        own = {
            len(range(begin + warp, end, cut.warps))
            for begin, end in pairwise(ends)
            for warp in range(cut.warps)
        }
        steps = defines.get("EVEN_STEPS", 0)
        seen.add(steps)
        assert not steps or own == {steps * defines["STEP_CHUNKS"]}, (outputs, cols)
    assert (seen == {0}) if token_tiles == split.TOKEN_TILES[-1] else ({0, 1} <= seen), "both are there"


@needs_nvrtc
@pytest.mark.parametrize("name", MEASURED if FULL else ["qkv", "linear_add"])
def test_of_16_rows_in_bf16_nothing_spills(name):
    """Kernels whose ends take most registers; of builds that differ in what they ask for early alone, one."""
    found = [even(name, outputs, cols, "bf16", 2) for outputs, cols in MEASURED[name]]
    alike = {str(each | {"ASKED_CHUNKS": 0}): each for each in found if each}
    for defines in alike.values():
        _, log = compiler.compile_cubin(f"{name}_fast.cu", "sm_90a", defines)
        used = compiler.resources(log)[f"{name}_fast"]
        assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), defines


@needs_nvrtc
@pytest.mark.parametrize("arch, token_tiles", [("sm_90a", 1), ("sm_90a", 2), ("sm_100a", 1)])
def test_in_fp8_a_stream_spills_nothing(arch, token_tiles, tmp_path):
    """Of 16 rows a few numbers, for which the first weights leave no register, wait in memory until those are
    multiplied: once a launch, not in the stream. On sm_100a qkv's stream of 16 rows keeps one there."""
    cubins = []
    for name, (outputs, cols) in FP8.items():
        defines = even(name, outputs, cols, "fp8", token_tiles)
        assert defines and defines["FP8"] == 1
        cubin, log = compiler.compile_cubin(f"{name}_fast.cu", arch, defines)
        assert token_tiles > 1 or not compiler.resources(log)[f"{name}_fast"].spill_stores
        cubins.append(cubin)
    for name, kernels in zip(FP8, disassemble_all(cubins, tmp_path), strict=True):
        code = kernels[f"{name}_fast"]
        products = [at for at, line in enumerate(code) if line.startswith("HMMA")]
        assert_instructions(code[products[0] : products[-1]], ["HMMA"])
