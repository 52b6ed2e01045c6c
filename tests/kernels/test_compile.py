"""Every .cu compiles for every card it is for, keeps to registers, and holds the instructions it names.

Needs NVRTC and nvdisasm (extra `test`), no GPU and no driver.
"""

import ctypes
import importlib
import os
import re
import subprocess
import sys
from importlib import resources, util
from pathlib import Path
from types import SimpleNamespace

import pytest
from minidflash.kernels import compiler, diskcache, launch, source

from minidflash.errors import UserError
from tests.conftest import FULL
from tests.disassembly import SM90, SM100, assert_instructions, cards, disassemble, disassemble_all

SAMPLES = Path(__file__).parent / "samples"
needs_nvrtc = pytest.mark.skipif(
    not util.find_spec("cuda") or not util.find_spec("cuda.bindings"), reason="cuda-bindings is not installed"
)


# Whose tests compile them for both kinds of cards under defines of their own: here for one, by turns.
ELSEWHERE = {
    *(f"{name}_fast" for name in ("qkv", "linear", "linear_add", "gate_up", "head", "head_margin", "fuse",
                                  "inject", "attend", "experts_up", "experts_down", "route")),
    "experts_up_few", "experts_down_few", "route_few", "attend_whole",
    "linear_prefill", "linear_add_prefill", "gate_up_prefill", "wide_sums", "wide_gate_up", "wide_head",
}  # fmt: skip
CAPPED = "sample", "reject", "head_logits"  # test_plain compiles them for the other kind, with a cap


def arches_of(path, turn):
    """The cards a file is compiled for: _sm90 and _sm100 files name theirs, the others run on all."""
    if path.stem.endswith("_sm90") or (path.stem in CAPPED and not FULL):
        return [SM90]
    if path.stem in ELSEWHERE and not FULL:
        return [cards(turn)[turn // 2 % 2]]
    return SM100 if path.stem.endswith("_sm100") else cards(turn)


def pairs():
    files = sorted(source.CUDA_FOLDER.glob("*.cu")) + sorted(SAMPLES.glob("*.cu"))
    return [
        pytest.param(path, arch, id=f"{path.stem}-{arch}")
        for turn, path in enumerate(files)
        for arch in arches_of(path, turn)
    ]


def test_no_source_tells_two_cards_apart():
    """So that what one compiles, the other does: they take turns in the tests below."""
    for path in source.CUDA_FOLDER.iterdir():
        assert not re.search(r"SM10[03]|SM_10[03]|\b10[03]0\b", source.strip_comments(path.read_text())), (
            path.name
        )


@needs_nvrtc
@pytest.mark.parametrize("path, arch", pairs())
def test_every_kernel_compiles_and_stays_in_registers(path, arch):
    _, log = compiler.compile_cubin(path, arch)
    found = compiler.resources(log)
    assert set(found) >= set(source.kernel_names(path.read_text())), log
    for name, used in found.items():
        planted = path.parent == SAMPLES and name == "overflows_stack"
        assert planted or (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), f"{name}: {used}"


@needs_nvrtc
@pytest.mark.parametrize("arch", compiler.ARCHES.values())
def test_the_end_of_a_round_in_a_while_node_links(arch, monkeypatch):
    """NVRTC alone leaves the device runtime's function unresolved and says nothing."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    linked = importlib.import_module("loops").linked(arch)
    assert linked[:4] == b"\x7fELF" and b"cudaGraphSetConditional" in linked and len(linked) > 100_000


@needs_nvrtc
@pytest.mark.parametrize("arch", compiler.ARCHES.values())
def test_no_kernel_has_local_memory(arch, tmp_path):
    """The machine code of all of the above: they come from the cache."""
    paths = [p.values[0] for p in pairs() if p.values[1] == arch]
    cubins = [compiler.compile_cubin(path, arch)[0] for path in paths]
    for path, kernels in zip(paths, disassemble_all(cubins, tmp_path), strict=True):
        assert kernels.keys() >= set(source.kernel_names(path.read_text())), path.name
        for name, instructions in kernels.items():
            if name != "overflows_stack":
                assert_instructions(instructions, [])


@needs_nvrtc
@pytest.mark.parametrize("arch", compiler.ARCHES.values())
def test_wrappers_become_their_instructions(arch, tmp_path):
    files = "tiles.cu", "grid.cu", "rmsnorm.cu"
    cubins = [compiler.compile_cubin(SAMPLES / file, arch)[0] for file in files]
    tiles, grid, plain = disassemble_all(cubins, tmp_path)
    assert_instructions(tiles["gemm_direct"], ["HMMA.16816.F32.BF16", "LDG.E 128 NA LTC256B CONSTANT"])
    assert_instructions(tiles["gemm_cp_async"], ["HMMA", "LDGSTS", "LDGDEPBAR", "DEPBAR", "LDS 128"])
    assert_instructions(tiles["gemm_bulk"], ["UBLKCP", "SYNCS", "HMMA", "LDS 128"], ["LDL", "STL", "LDGSTS"])
    assert_instructions(tiles["matrices"], ["LDSM 4", "LDSM MT88 4", "LDSM 2", "LDSM MT88 2"])
    assert_instructions(grid["produce"], ["ACQBULK", "PREEXIT"])
    assert_instructions(grid["cluster_sum"], ["UCGABAR_ARV", "UCGABAR_WAIT"])
    assert_instructions(grid["hand_over"], ["BAR.ARV", "BAR.SYNC"])
    assert_instructions(grid["sum_last_block"], ["ATOMG.E.ADD.STRONG.GPU"])
    assert_instructions(plain["rmsnorm"], ["F2FP.BF16", "SHFL.BFLY", "MUFU.RSQ"])


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_sm100_wrappers_become_their_instructions(arch, tmp_path):
    wide = disassemble(compiler.compile_cubin(SAMPLES / "wide_sm100.cu", arch)[0], tmp_path)
    assert_instructions(wide["unpack_fp4"], ["LDG.E 256", "F2FP.F16.E2M1.UNPACK_B"])


@needs_nvrtc
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_wgmma_becomes_its_instruction(columns, tmp_path):
    defines = {"COLUMNS": columns}
    cubin, _ = compiler.compile_cubin(SAMPLES / "warpgroup_sm90.cu", "sm_90a", defines)
    wanted = [f"HGMMA.64x{columns}x16.F32.BF16", "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR"]
    assert_instructions(disassemble(cubin, tmp_path)["product"], wanted)


@needs_nvrtc
def test_a_spill_is_found(tmp_path):
    cubin, log = compiler.compile_cubin(SAMPLES / "mistakes.cu", "sm_90a")
    assert compiler.resources(log)["overflows_stack"].stack > 100_000
    with pytest.raises(AssertionError, match="unwanted"):
        assert_instructions(disassemble(cubin, tmp_path)["overflows_stack"], [])


@needs_nvrtc
def test_the_cache_is_used_and_is_optional(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDFLASH_CACHE", str(tmp_path))
    file = tmp_path / "own.cu"
    file.write_text('#include "common.cuh"\nextern "C" __global__ void own(float* y) { y[0] = FACTOR; }\n')
    first = compiler.compile_cubin(file, "sm_90a", {"FACTOR": 2})
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.compile_cubin(file, "sm_90a", {"FACTOR": 2}) == first
    for arch, factor in (("sm_100a", 2), ("sm_90a", 3)):
        with pytest.raises(pytest.fail.Exception, match="compiled again"):
            compiler.compile_cubin(file, arch, {"FACTOR": factor})
    monkeypatch.undo()
    monkeypatch.setenv("MINIDFLASH_CACHE", str(file / "not a folder"))
    assert diskcache.folder("cubin") is None
    assert compiler.compile_cubin(file, "sm_90a", {"FACTOR": 2})[0] == first[0]


@needs_nvrtc
def test_what_does_not_compile_is_quoted(tmp_path):
    file = tmp_path / "broken.cu"
    file.write_text('extern "C" __global__ void broken(float* y) { y[0] = undeclared; }\n')
    with pytest.raises(RuntimeError, match=r"could not compile broken.cu(.|\n)*undeclared"):
        compiler.compile_cubin(file, "sm_90a")


@pytest.mark.parametrize("capability", [(8, 9), (12, 0), (7, 5), (10, 1)])
def test_other_cards_are_refused_with_a_way_out(capability):
    with pytest.raises(UserError, match="compute capability.*written for 9.0, 10.0, 10.3") as caught:
        compiler.choose_arch(*capability)
    assert caught.value.code == 3 and "numba" in caught.value.hint


def test_known_cards():
    assert [compiler.choose_arch(*c) for c in ((9, 0), (10, 0), (10, 3))] == ["sm_90a", "sm_100a", "sm_103a"]


def in_new_python(code, **environment):
    root = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env=os.environ | environment,
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


MESSAGE = (
    "from minidflash.kernels import compiler, launch\nfrom minidflash.errors import UserError\n"
    "try:\n    {call}\nexcept UserError as error:\n    print(error.code, error, '|', error.hint)\n"
)


def test_import_loads_nothing_of_cuda():
    code = "import sys, minidflash.kernels.launch\nprint([m for m in ('cuda', 'cupy') if m in sys.modules])"
    assert in_new_python(code) == "[]"


def test_missing_bindings_name_the_package(tmp_path):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("raise ImportError('hidden by the test')\n")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + MESSAGE.format(call="launch.CudaDevice()")
    text = in_new_python(code)
    assert text.startswith("3 ") and "pip install 'cuda-bindings>=13,<14'" in text and "\n" not in text


@needs_nvrtc
def test_missing_nvrtc_names_the_package():
    code = (
        "from cuda.bindings import nvrtc\n"
        "def gone(): raise RuntimeError('not found')\n"
        "nvrtc.nvrtcVersion = gone\n" + MESSAGE.format(call="compiler.open_nvrtc()")
    )
    text = in_new_python(code)
    assert text.startswith("3 CUDA's compiler NVRTC is not installed") and "nvidia-cuda-nvrtc==13.0.*" in text


@needs_nvrtc
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="needs a machine without an NVIDIA driver")
def test_without_a_driver_one_line_says_so():
    text = in_new_python(MESSAGE.format(call="launch.CudaDevice()"))
    assert text == "3 no NVIDIA driver (libcuda.so.1) on this machine | use --backend numba"


class StubDriver:
    """The driver's types and enums, with calls that record what they get: an H100 that runs nothing."""

    def __init__(self):
        from cuda.bindings import driver

        self.real, self.launches, self.opted_in = driver, [], []

    def __getattr__(self, name):
        if not re.match("cu[A-Z]", name):
            return getattr(self.real, name)
        answers = {"cuDeviceGetCount": 1, "cuStreamCreate": self.real.CUstream(7), "cuFuncGetAttribute": 24,
                   "cuOccupancyMaxActiveBlocksPerMultiprocessor": 2,
                   "cuOccupancyMaxActiveClusters": 30}  # fmt: skip
        return lambda *_: (self.real.CUresult.CUDA_SUCCESS, answers.get(name, 0))

    def cuDeviceGetAttribute(self, attribute, _):
        value = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132}
        short = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        return self.real.CUresult.CUDA_SUCCESS, value.get(short, 232448)

    def cuFuncSetAttribute(self, _, name, value):
        self.opted_in.append((name.name, value))
        return (self.real.CUresult.CUDA_SUCCESS,)

    def cuLaunchKernelEx(self, config, _, parameters, __):
        pointers = (ctypes.c_void_p * 5).from_address(parameters)
        values = [t.from_address(p).value for t, p in zip(self.types, pointers, strict=True)]
        self.launches.append((config, values))
        return (self.real.CUresult.CUDA_SUCCESS,)


@needs_nvrtc
def test_a_launch_says_to_the_driver_what_was_asked(monkeypatch):
    driver = StubDriver()
    driver.types = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_float, ctypes.c_uint64, ctypes.c_int]
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    device = launch.CudaDevice()
    assert (device.arch, device.sms, device.shared_limit) == ("sm_90a", 132, 232448)
    function = device.function(SAMPLES / "rmsnorm.cu", "rmsnorm")
    args = [
        SimpleNamespace(data=SimpleNamespace(ptr=1 << 40), flags=SimpleNamespace(c_contiguous=True)),
        5,
        1e-6,
        None,
        -3,
    ]
    device.launch(function, 16, 32, 0, args)
    own = device.driver_stream
    device.use(driver.real.CUstream(9))
    device.launch(function, (8, 2), 64, 60000, args, cluster=4, dependent=True)
    device.use(own)
    device.launch(function, 1, 64, 50000, args)
    (plain, values), (full, _), _ = driver.launches
    assert values == [1 << 40, 5, ctypes.c_float(1e-6).value, 0, -3]
    assert (plain.gridDimX, plain.gridDimY, plain.blockDimX, plain.blockDimY) == (16, 1, 32, 1)
    assert (plain.numAttrs, int(plain.hStream), plain.sharedMemBytes) == (0, 7, 0)
    assert (full.gridDimX, full.gridDimY, int(full.hStream), full.sharedMemBytes) == (8, 2, 9, 60000)
    kinds = [a.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_") for a in full.attrs]
    assert kinds == ["CLUSTER_DIMENSION", "PROGRAMMATIC_STREAM_SERIALIZATION"]
    cluster, dependent = (a.value for a in full.attrs)
    assert (cluster.clusterDim.x, cluster.clusterDim.y, cluster.clusterDim.z) == (4, 1, 1)
    assert dependent.programmaticStreamSerializationAllowed == 1
    names = "PREFERRED_SHARED_MEMORY_CARVEOUT", "MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert driver.opted_in == [
        (f"CU_FUNC_ATTRIBUTE_{n}", v) for n, v in zip(names, (100, 60000), strict=True)
    ]
    with pytest.raises(
        UserError, match="asks for 232472 bytes of shared memory a block, the limit here is 232448"
    ):
        device.launch(function, 1, 64, 232448, args)
    with pytest.raises(UserError, match="do not divide grid"):
        device.launch(function, 9, 64, 0, args, cluster=2)
    before = len(driver.launches)
    for _ in range(2):  # the second time from what is kept; its arguments are its own
        device.launch(function, 16, 64, 0, [*args[:4], before], dependent=True)
    (first, _), (second, values) = driver.launches[before:]
    assert first is second and values[-1] == before
    for grid in range(1, 2 * launch.MOST_CONFIGS):
        device.launch(function, grid, 64, 0, args)
    assert len(function.configs) <= launch.MOST_CONFIGS


@needs_nvrtc
def test_how_many_blocks_a_card_holds(monkeypatch):
    driver = StubDriver()
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    device = launch.CudaDevice()
    function = device.function(SAMPLES / "rmsnorm.cu", "rmsnorm")
    assert [device.holds(function, 64, 0), device.holds(function, 64, 0, cluster=8)] == [264, 240]
    driver.launches.clear()
    assert device.holds(function, 64, 0, cluster=8) == 240 and not driver.launches


def test_ptx_lives_in_the_wrappers_only():
    for path in resources.files("minidflash.kernels").joinpath("cuda").iterdir():
        if path.name not in ("common.cuh", "sm90.cuh", "sm100.cuh", "wgmma.cuh"):
            assert not re.search(r"\basm\b", source.strip_comments(path.read_text())), path.name
