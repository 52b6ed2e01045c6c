"""The launcher on a real GPU: the emulator's samples, launch attributes, shared memory, graph capture."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from minidflash.kernels.launch import CudaDevice

from minidflash.errors import UserError
from tests.kernels.test_emulate import pack_a

SAMPLES = Path(__file__).parent / "samples"
BF16 = ml_dtypes.bfloat16
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    try:
        import cupy  # noqa: F401

        return CudaDevice()
    except ImportError:
        pytest.skip("CuPy is not installed (extra `cuda`)")
    except UserError as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")


@pytest.fixture
def stream(device):
    """CuPy's copies go to the device's own stream, which does not wait for the default one."""
    import cupy

    with cupy.cuda.ExternalStream(device.stream) as stream:
        yield stream


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def upload(array):
    import cupy

    return cupy.asarray(array.view(np.uint16) if array.dtype == BF16 else array)


def run(device, file, name, grid, block, args, shared=0, defines=None, **how):
    device.launch(device.function(SAMPLES / file, name, defines), grid, block, shared, args, **how)


def test_rmsnorm(device, stream, rng):
    x, w = rng.standard_normal((16, 576)).astype(BF16), rng.standard_normal(576).astype(BF16)
    y = upload(np.zeros((16, 576), BF16))
    run(device, "rmsnorm.cu", "rmsnorm", 16, 256, [upload(x), upload(w), 1e-6, y, 576])
    x, w = x.astype(np.float64), w.astype(np.float64)
    want = w * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    assert np.all(np.abs(y.get().view(BF16).astype(np.float64) - want) <= np.abs(want) * 2.0**-8 + 1e-30)


def test_three_gemms_agree(device, stream, rng):
    N, K, M = 256, 576, 7
    w, x = rng.standard_normal((N, K)).astype(BF16), rng.standard_normal((M, K)).astype(BF16)
    results = []
    for name, block, shared in (("gemm_direct", 32, 0), ("gemm_cp_async", 32, 0), ("gemm_bulk", 64, 3 * 512)):
        y = upload(np.zeros((M, N), np.float32))
        run(device, "tiles.cu", name, N // 16, block, [upload(pack_a(w)), upload(x), y, M, N, K], shared)
        results.append(y.get())
    x, w = x.astype(np.float64), w.astype(np.float64)
    assert np.all(np.abs(results[0] - x @ w.T) <= K * 2.0**-23 * (np.abs(x) @ np.abs(w).T))
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


def test_ldmatrix(device, stream):
    data = np.arange(4 * 64, dtype=np.uint16)
    out = upload(np.zeros((12, 32), np.uint32))
    run(device, "tiles.cu", "matrices", 1, 32, [upload(data), out])
    m = data.reshape(4, 8, 8)
    plain, turned = (
        np.ascontiguousarray(a).view(np.uint32).reshape(4, 32) for a in (m, m.transpose(0, 2, 1))
    )
    assert (out.get() == np.concatenate([plain, turned, plain[:2], turned[:2]])).all()


def test_last_block_merges_and_leaves_its_counter_ready(device, stream, rng):
    x = rng.standard_normal(100_000).astype(np.float32)
    partial, counter, out = (upload(np.zeros(n, t)) for n, t in ((300, "f4"), (1, "u4"), (1, "f4")))
    results = set()
    for _ in range(20):
        run(device, "grid.cu", "sum_last_block", 300, 128, [upload(x), partial, counter, out, x.size])
        results.add(out.get().tobytes())
    assert len(results) == 1 and counter.get()[0] == 0
    assert abs(out.get()[0] - x.sum(dtype=np.float64)) < 0.05


def test_blocks_that_wait_for_each_other(device, stream):
    blocks = device.sms
    counters, place, out = (
        upload(np.zeros(s, t)) for s, t in ((6, "u4"), (blocks, "i4"), ((3, blocks), "i4"))
    )
    run(device, "grid.cu", "neighbours", blocks, 32, [counters, place, out, 3])
    want = np.arange(3)[:, None] * 100 + (np.arange(blocks) + 1) % blocks
    assert (out.get() == want).all()


@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_cluster(device, stream, cluster):
    x, out = np.arange(512, dtype=np.float32), upload(np.zeros(8, np.float32))
    run(device, "grid.cu", "cluster_sum", 8, 64, [upload(x), out, 512], cluster=cluster)
    want = x.reshape(8, 64).sum(1).reshape(-1, cluster).sum(1).repeat(cluster)
    assert (out.get() == want).all()


def test_named_barrier(device, stream):
    x, y = np.arange(32, dtype=np.float32), upload(np.zeros(32, np.float32))
    run(device, "grid.cu", "hand_over", 1, 64, [upload(x), y])
    assert (y.get() == x[::-1]).all()


def test_dependent_launches_and_graph_replay(device, stream):
    """A captured chain of dependent launches, replayed with changed inputs, is right each time."""
    import cupy

    n = 1 << 16
    weight, x, y, z = (cupy.zeros(n, cupy.float32) for _ in range(4))
    produce = device.function(SAMPLES / "grid.cu", "produce")
    consume = device.function(SAMPLES / "grid.cu", "consume")

    def chain():
        device.launch(produce, n // 256, 256, 0, [x, y, n])
        device.launch(consume, n // 256, 256, 0, [weight, y, z, n], dependent=True)
        device.launch(produce, n // 256, 256, 0, [z, x, n], dependent=True)

    def check(start, act):
        x.fill(start)
        weight.fill(1)
        act()
        assert (z.get() == 1 + 2 * start).all() and (x.get() == 2 * (1 + 2 * start)).all()

    for start in (1, 2):
        check(start, chain)
    stream.begin_capture()
    chain()
    graph = stream.end_capture()
    for start in (3, 4, 5):
        check(start, lambda: graph.launch(stream))


@pytest.mark.parametrize("kilobytes", [0, 47, 48, 49, 100, 226])
def test_dynamic_shared_memory_is_opted_in(device, stream, rng, kilobytes):
    w, x = rng.standard_normal((16, 64)).astype(BF16), rng.standard_normal((8, 64)).astype(BF16)
    y = upload(np.zeros((8, 16), np.float32))
    args = [upload(pack_a(w)), upload(x), y, 8, 16, 64]
    run(device, "tiles.cu", "gemm_bulk", 1, 64, args, max(kilobytes << 10, 1536))
    assert np.allclose(y.get(), x.astype(np.float32) @ w.astype(np.float32).T, atol=1e-3)


def test_more_shared_memory_than_the_card_has(device):
    function = device.function(SAMPLES / "tiles.cu", "gemm_bulk")
    with pytest.raises(UserError, match=f"the limit here is {device.shared_limit}"):
        device.launch(function, 1, 64, device.shared_limit, [0, 0, 0, 8, 16, 64])


def test_functions_say_what_they_use(device):
    function = device.function(SAMPLES / "tiles.cu", "gemm_direct")
    assert function.local_bytes == 0 and function.shared == 0


def test_wrong_arguments(device):
    function = device.function(SAMPLES / "rmsnorm.cu", "rmsnorm")
    with pytest.raises(TypeError, match="takes 5 arguments, got 1"):
        device.launch(function, 1, 32, 0, [0])
    with pytest.raises(TypeError, match="x: a pointer wants a CuPy array or an address, got ndarray"):
        device.launch(function, 1, 32, 0, [np.zeros(1), 0, 1e-6, 0, 1])


def test_a_graph_needs_its_functions_beforehand(device):
    """Loading is cached: the same function object comes back, whatever the order of defines."""
    first = device.function(SAMPLES / "tiles.cu", "gemm_cp_async", {"SKEW": 0})
    assert device.function(SAMPLES / "tiles.cu", "gemm_cp_async", {"SKEW": "0"}) is first
