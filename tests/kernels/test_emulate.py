"""The emulator: each primitive against NumPy in every order, and each mistake it promises to name."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from minidflash.kernels import emulate
from minidflash.kernels.emulate import EmulatedDevice, EmulationError

from minidflash.errors import UserError

SAMPLES = Path(__file__).parent / "samples"
BF16 = ml_dtypes.bfloat16
pytestmark = pytest.mark.skipif(
    not shutil.which("g++"), reason="the emulator builds kernels with g++: not installed"
)


@pytest.fixture(params=[None, 1, 2, 3], ids=lambda seed: f"seed={seed}")
def device(request):
    return EmulatedDevice(seed=request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def run(device, file, name, grid, block, args, shared=0, defines=None, **how):
    """Build and launch one sample kernel."""
    device.launch(device.function(SAMPLES / file, name, defines), grid, block, shared, args, **how)


def pack_a(w):
    """Rows (N, K) as A fragments [N/16][K/16][lane][8] bf16, the layout of mma_bf16."""
    N, K = w.shape
    tiles = w.reshape(N // 16, 2, 8, K // 16, 2, 4, 2)  # n, row half, g, k, k half, t, pair
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 5, 4, 1, 6)).reshape(N // 16, K // 16, 32, 8)


@pytest.mark.parametrize("T, D, threads", [(3, 576, 256), (1, 8, 32), (5, 123, 64)])
def test_rmsnorm(device, rng, T, D, threads):
    x, w = rng.standard_normal((T, D)).astype(BF16), rng.standard_normal(D).astype(BF16)
    y = np.zeros((T, D), BF16)
    run(device, "rmsnorm.cu", "rmsnorm", T, threads, [x, w, np.float32(1e-6), y, D])
    x, w = x.astype(np.float64), w.astype(np.float64)
    want = w * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    assert np.all(np.abs(y.astype(np.float64) - want) <= np.abs(want) * 2.0**-8 + 1e-30)


@pytest.mark.parametrize("kind, dtype", [("bf16", BF16), ("float", np.float32)])
def test_block_best_takes_the_first_of_equals(device, rng, kind, dtype):
    x = rng.integers(-5, 5, (4, 300)).astype(dtype)
    value, index, largest = np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros(4, np.float32)
    run(
        device, "rmsnorm.cu", "row_best", 4, 96, [x, value, index, largest, 300], defines={"ACTIVATION": kind}
    )
    assert index.tolist() == x.astype(np.float32).argmax(-1).tolist()
    assert value.tolist() == largest.tolist() == [4.0] * 4


@pytest.mark.parametrize("M, N, K", [(8, 32, 64), (1, 16, 16), (5, 48, 160)])
@pytest.mark.parametrize("name", ["gemm_direct", "gemm_cp_async", "gemm_bulk"])
def test_gemm(device, rng, name, M, N, K):
    w, x = rng.standard_normal((N, K)).astype(BF16), rng.standard_normal((M, K)).astype(BF16)
    y = np.zeros((M, N), np.float32)
    shared = 3 * 512 if name == "gemm_bulk" else 0
    run(device, "tiles.cu", name, N // 16, 64 if shared else 32, [pack_a(w), x, y, M, N, K], shared)
    x, w = x.astype(np.float64), w.astype(np.float64)
    assert np.all(np.abs(y - x @ w.T) <= K * 2.0**-24 * (np.abs(x) @ np.abs(w).T))


def test_every_order_gives_the_same_bits(rng):
    w, x = rng.standard_normal((32, 96)).astype(BF16), rng.standard_normal((7, 96)).astype(BF16)
    results = set()
    for seed in (None, 0, 1, 2):
        for name in ("gemm_direct", "gemm_cp_async", "gemm_bulk"):
            y = np.zeros((7, 32), np.float32)
            block, shared = (64, 1536) if name == "gemm_bulk" else (32, 0)
            run(EmulatedDevice(seed), "tiles.cu", name, 2, block, [pack_a(w), x, y, 7, 32, 96], shared)
            results.add(y.tobytes())
    assert len(results) == 1


def test_a_cp_async_group_waited_for_too_late_is_nan(device, rng):
    w, x = rng.standard_normal((16, 64)).astype(BF16), rng.standard_normal((8, 64)).astype(BF16)
    y = np.zeros((8, 16), np.float32)
    run(device, "tiles.cu", "gemm_cp_async", 1, 32, [pack_a(w), x, y, 8, 16, 64], defines={"SKEW": 1})
    assert np.isnan(y).any()


def warpgroup(device, rng, columns, K, mistake=0):
    """(what samples/warpgroup_sm90.cu gives, the truth, sums of |terms|)."""
    w, x = rng.standard_normal((64, K)).astype(BF16), rng.standard_normal((columns, K)).astype(BF16)
    y, defines = np.zeros((64, columns), np.float32), {"COLUMNS": columns, "MISTAKE": mistake}
    run(device, "warpgroup_sm90.cu", "product", 1, 128, [pack_a(w), x, y, K], columns * 128, defines)
    w, x = w.astype(np.float64), x.astype(np.float64)
    return y, w @ x.T, np.abs(w) @ np.abs(x).T


@pytest.mark.parametrize("columns, K", [(64, 64), (128, 192), (256, 128)])
def test_wgmma(device, rng, columns, K):
    y, want, terms = warpgroup(device, rng, columns, K)
    assert np.all(np.abs(y - want) <= K * 2.0**-24 * terms)


@pytest.mark.parametrize("mistake", [2, 3], ids=["columns refilled early", "columns not swizzled"])
def test_a_wgmma_of_wrong_columns_is_wrong(device, rng, mistake):
    y, want, terms = warpgroup(device, rng, 64, 64, mistake)
    assert (np.abs(y - want) > 1e-3 * terms).mean() > 0.05


def test_sums_of_a_wgmma_under_way_are_nan(device, rng):
    assert np.isnan(warpgroup(device, rng, 64, 64, 1)[0][:2]).all()


@pytest.mark.parametrize(
    "mistake, message",
    [
        (4, "without a wgmma_fence"),
        (5, "wgmma of the other warps of its warpgroup"),
        (6, "are not aligned to 1024"),
        (7, "its warps name different matrices"),
        (8, "ends with 4 wgmma under way"),
    ],
)
def test_mistakes_with_wgmma_are_named(device, rng, mistake, message):
    with pytest.raises(EmulationError, match=message):
        warpgroup(device, rng, 64, 128, mistake)


def test_ldmatrix(device):
    data = np.arange(4 * 64, dtype=np.uint16)
    out = np.zeros((12, 32), np.uint32)
    run(device, "tiles.cu", "matrices", 1, 32, [data, out])
    m = data.reshape(4, 8, 8)
    plain, turned = (
        np.ascontiguousarray(a).view(np.uint32).reshape(4, 32) for a in (m, m.transpose(0, 2, 1))
    )
    assert (out == np.concatenate([plain, turned, plain[:2], turned[:2]])).all()


def test_fp4_pairs_become_f16(device):
    # An aligned start, which NumPy does not promise.
    room = np.zeros(256 + 32, np.uint8)
    packed = room[-room.ctypes.data % 32 :][:256]
    packed[:] = np.arange(256)
    halves = np.zeros(256, np.uint32)
    run(device, "wide_sm100.cu", "unpack_fp4", 1, 32, [packed, halves, 256])
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float16)
    want = np.stack([values[packed & 15], values[packed >> 4]], 1)
    assert (halves.view(np.uint16).reshape(256, 2) == want.view(np.uint16)).all()


def test_last_block_merges_in_index_order(rng):
    x = rng.standard_normal(1000).astype(np.float32)
    results = set()
    for seed in (None, 1, 2, 3):
        partial, counter, out = np.zeros(40, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32)
        device = EmulatedDevice(seed, sms=1)  # 32 blocks at once, so some start after others ended
        for _ in range(2):  # the counter is ready again
            run(device, "grid.cu", "sum_last_block", 40, 64, [x, partial, counter, out, 1000])
        assert counter[0] == 0 and abs(out[0] - x.sum(dtype=np.float64)) < 1e-3
        results.add(out.tobytes())
    assert len(results) == 1


def test_blocks_that_wait_for_each_other(device):
    counters, place, out = np.zeros(6, np.uint32), np.zeros(12, np.int32), np.zeros((3, 12), np.int32)
    run(device, "grid.cu", "neighbours", 12, 32, [counters, place, out, 3])
    assert (out == np.arange(3)[:, None] * 100 + (np.arange(12) + 1) % 12).all()


def test_blocks_that_wait_for_each_other_must_be_resident():
    device = EmulatedDevice(sms=1)
    args = [np.zeros(2, np.uint32), np.zeros(40, np.int32), np.zeros((1, 40), np.int32), 1]
    with pytest.raises(EmulationError, match="deadlocked.*have not started.*holds 32 blocks.*load_acquire"):
        run(device, "grid.cu", "neighbours", 40, 32, args)


def test_cluster_adds_through_distributed_shared_memory(device):
    x, out = np.arange(512, dtype=np.float32), np.zeros(8, np.float32)
    run(device, "grid.cu", "cluster_sum", 8, 64, [x[:512], out, 512], cluster=8)
    assert (out == x.sum()).all()
    run(device, "grid.cu", "cluster_sum", 8, 64, [x, out, 512], cluster=4)
    halves = x.reshape(8, 64).sum(1).reshape(2, 4).sum(1)
    assert (out.reshape(2, 4) == halves[:, None]).all()


def test_named_barrier(device):
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    run(device, "grid.cu", "hand_over", 1, 64, [x, y])
    assert (y == x[::-1]).all()


@pytest.mark.parametrize("too_early", [0, 1])
def test_dependent_launch_hides_the_predecessor_until_the_wait(device, too_early):
    x, weight = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
    y, z = np.zeros(100, np.float32), np.zeros(100, np.float32)
    run(device, "grid.cu", "produce", 4, 32, [x, y, 100])
    run(
        device,
        "grid.cu",
        "consume",
        4,
        32,
        [weight, y, z, 100],
        defines={"TOO_EARLY": too_early},
        dependent=True,
    )
    assert (y == 2 * x).all()  # restored either way
    assert np.isnan(z).all() if too_early else (z == 1 + 2 * x).all()


@pytest.mark.parametrize("is_early", [False, True])
def test_of_an_array_read_early_only_what_changed_is_hidden(device, is_early):
    """Attention's keys: most are of earlier rounds. A cp.async begun before the wait reads what was there
    then."""
    x, weight = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    for too_early in (1, 2):  # a load, a cp.async
        y, z = np.full(100, 7, np.float32), np.zeros(100, np.float32)
        run(device, "grid.cu", "produce", 4, 32, [x, y, 52], dependent=True)
        run(device, "grid.cu", "consume", 4, 32, [weight, y, z, 100], defines={"TOO_EARLY": too_early},
            dependent=True, early=(y,) if is_early else ())  # fmt: skip
        assert np.isnan(z[:52]).all() and (y[:52] == 2 * x[:52]).all()
        assert (z[52:] == 7).all() if is_early else np.isnan(z[52:]).all()


def place(text, nth=0):
    """ "mistakes.cu:LINE" of the nth line that holds this text."""
    lines = (SAMPLES / "mistakes.cu").read_text().splitlines()
    return f"mistakes.cu:{[i for i, line in enumerate(lines, 1) if text in line][nth]}"


def test_a_kernel_that_never_waits_does_not_cover_what_came_before():
    device, n = EmulatedDevice(), 32
    x, y, z = np.ones(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    run(device, "grid.cu", "produce", 1, n, [x, y, n])
    run(device, "grid.cu", "hand_over", 1, 64, [x, z], dependent=True)  # no griddep_wait in it
    run(device, "grid.cu", "consume", 1, n, [x, y, z, n], defines={"TOO_EARLY": 1}, dependent=True)
    assert np.isnan(z).all() and (y == 2).all()


def mistake(name, args, block=64, grid=1, device=None):
    with pytest.raises(EmulationError) as caught:
        run(device or EmulatedDevice(), "mistakes.cu", name, grid, block, args)
    return str(caught.value)


def test_deadlock_says_who_waits_where():
    text = mistake("waits_for_nobody", [np.zeros(1, np.uint32), np.zeros(64, np.int32)])
    assert "kernel waits_for_nobody is deadlocked" in text
    assert "63 threads wait in __syncthreads at " + place("__syncthreads();") in text
    assert "1 threads wait in a counter (load_acquire) at " + place("load_acquire(flag)") in text
    assert "block (0, 0, 0) thread (5, 0, 0)" in text


def test_barrier_divergence_names_both_places():
    text = mistake("diverges", [np.zeros(64, np.int32)])
    assert "barrier divergence" in text
    assert place("__syncthreads();", 1) in text and place("__syncthreads();", 2) in text


def test_lanes_in_different_operations():
    text = mistake("half_a_shuffle", [np.zeros(32, np.float32)], block=32)
    assert "a warp shuffle" in text and "__syncwarp" in text


def test_a_bulk_copy_that_nobody_waits_for():
    text = mistake("leaves_a_copy", [np.zeros(4, np.float32)], block=1)
    assert "the block ends with 1 bulk copies under way" in text


def test_wild_pointer_names_the_line():
    text = mistake("reads_nowhere", [np.zeros(32, np.float32), np.zeros(32, np.float32)], block=32)
    assert "thread (0, 0, 0): invalid memory access" in text
    assert not shutil.which("addr2line") or place("1ll << 40") in text


def test_misaligned_vector_load():
    text = mistake("misaligned", [np.zeros(64, np.float32), np.zeros(32, np.float32)], block=32)
    assert "undefined behaviour" in text and "misaligned" in text


def test_stack_overflow():
    assert "stack overflow" in mistake("overflows_stack", [np.zeros(1, np.float32), 0], block=1)


def test_a_thread_that_never_waits_is_ended():
    device = EmulatedDevice()
    device.patience = 0.2
    args = [np.zeros(1, np.int32), np.zeros(1, np.int32)]
    text = mistake("polls_plain_memory", args, block=1, device=device)
    assert "over 0.2 s" in text and "load_acquire" in text


def test_the_device_works_after_a_mistake(rng):
    device = EmulatedDevice()
    mistake("diverges", [np.zeros(64, np.int32)], device=device)
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    run(device, "grid.cu", "hand_over", 1, 64, [x, y])
    assert (y == x[::-1]).all()


def test_shared_memory_starts_as_nan(device):
    y = np.zeros(32, np.float32)
    run(device, "mistakes.cu", "reads_shared_unwritten", 1, 32, [y])
    assert (y[:31] == 1).all() and np.isnan(y[31])


def test_arguments_are_checked():
    device, x = EmulatedDevice(), np.zeros(8, np.float32)
    function = device.function(SAMPLES / "mistakes.cu", "reads_past")
    for args, message in (
        ([x, x], "takes 3 arguments, got 2"),
        ([x, 5, 1], "y must be a contiguous NumPy array"),
        ([x, np.zeros((4, 4), np.float32)[:, 0], 1], "y must be a contiguous"),
        ([x, x, 1.5], "n is a scalar, got float"),
    ):
        with pytest.raises(TypeError, match=message):
            device.launch(function, 1, 8, 0, args)
    with pytest.raises(OverflowError, match="n = 4294967296 does not fit"):
        device.launch(function, 1, 8, 0, [x, x, 1 << 32])
    fixed = x.copy()
    fixed.flags.writeable = False
    with pytest.raises(TypeError, match="y is written, the array is read-only"):
        device.launch(function, 1, 8, 0, [x, fixed, 0])
    with pytest.raises(
        UserError, match=r"asks for 3001\d\d bytes of shared memory a block, the limit here is 232448"
    ):
        device.launch(function, 1, 8, 300000, [x, x, 0])
    with pytest.raises(
        UserError, match="no kernel nothing in this source; it has waits_for_nobody, diverges"
    ):
        device.function(SAMPLES / "mistakes.cu", "nothing")


def test_two_threads_launch_at_once_and_no_cache_is_needed(rng, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIDFLASH_CACHE", str(tmp_path / "file" / "under a file"))
    w, x = rng.standard_normal((32, 96)).astype(BF16), rng.standard_normal((7, 96)).astype(BF16)
    want = x.astype(np.float64) @ w.astype(np.float64).T

    def work(seed):
        device, y = EmulatedDevice(seed), np.zeros((7, 32), np.float32)
        for _ in range(20):
            run(device, "tiles.cu", "gemm_bulk", 2, 64, [pack_a(w), x, y, 7, 32, 96], 1536)
        return np.abs(y - want).max() < 1e-3

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.slow
def test_out_of_bounds_under_asan():
    """In a new process, where ASan can be loaded first; a right kernel passes there too."""
    script = (
        "import sys, numpy as np\n"
        "from minidflash.kernels.emulate import EmulatedDevice\n"
        "device = EmulatedDevice(seed=1)\n"
        "x, y = np.zeros(4000, np.float32), np.zeros(64, np.float32)\n"
        f"name, grid = sys.argv[1], {str(SAMPLES / 'grid.cu')!r}\n"
        "if name == 'reads_past':\n"
        f"    function = device.function({str(SAMPLES / 'mistakes.cu')!r}, name)\n"
        "    device.launch(function, 1, 64, 0, [x, y, 4000 - 63])\n"
        "else:\n"
        "    counter, part = np.zeros(1, np.uint32), np.zeros(8, np.float32)\n"
        "    device.launch(device.function(grid, name), 8, 64, 0, [x, part, counter, y, 4000])\n"
        "    device.launch(device.function(grid, 'cluster_sum'), 8, 64, 0, [x, y, 512], cluster=8)\n"
        "print('finished')\n"
    )
    root = str(Path(__file__).parents[2])
    for name, finishes in (("sum_last_block", True), ("reads_past", False)):
        result = subprocess.run(
            [sys.executable, "-c", script, name],
            check=False,
            env=emulate.sanitizer_environment(),
            cwd=root,
            capture_output=True,
            text=True,
        )
        assert ("finished" in result.stdout) == finishes, result.stderr[-3000:]
        if not finishes:
            assert "heap-buffer-overflow" in result.stderr and place("threadIdx.x + n]") in result.stderr


def test_without_a_compiler_one_line_says_so(monkeypatch):
    emulate.build.compiler.cache_clear()
    monkeypatch.setattr(emulate.build.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="g\\+\\+, which is not installed") as caught:
        emulate.build.compiler()
    assert caught.value.code == 3 and "numba" in caught.value.hint
    emulate.build.compiler.cache_clear()
