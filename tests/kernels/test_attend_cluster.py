"""Attention whose pieces meet in a cluster's shared memory: the bits of those that meet in the workspace."""

import numpy as np
import pytest
from minidflash.kernels import compiler, source
from minidflash.kernels.gpu import attend_fast

from tests.cases import stored
from tests.compare import assert_same_bits, real
from tests.disassembly import SM90
from tests.kernels.test_compile import disassemble, needs_nvrtc
from tests.kernels.test_fast_attend import FAST, call, check, make, some

SMS = 16  # that the emulator is given: room for a few clusters of 16, two blocks each
on_gpu_backends = pytest.mark.parametrize("ops", FAST, indirect=True)


@pytest.fixture
def clusters(ops, monkeypatch):
    """Clusters of all launches from now on."""
    launch, found = ops.backend.launch, []
    if ops.name == "emulate":
        monkeypatch.setattr(ops.backend, "sms", SMS)
        monkeypatch.setattr(ops.backend.device, "sms", SMS)
    monkeypatch.setattr(
        ops.backend, "launch", lambda *args, cluster=1, **how:
        (found.append(cluster), launch(*args, cluster=cluster, **how)),
    )  # fmt: skip
    return found


@on_gpu_backends
@pytest.mark.parametrize("heads, pos, window, has_sinks, blocks", [
    ((4, 1, 64), [1500], 0, False, 16), ((8, 1, 64), [1400, 1401, 1402], 0, True, 16),
    ((8, 1, 128), [1099], 0, False, 8), ((4, 1, 128), [1438, 1439, 1440, 1441], 400, False, 8),
    ((16, 2, 64), [2201], 128, True, 4), ((4, 1, 128), [2299], 0, False, 16),
    ((4, 1, 64), [5, 1500, 1501], 0, False, 16), ((4, 2, 128), [287, 288], 0, False, 4),
], ids=str)  # fmt: skip
def test_pieces_meet_in_a_cluster_with_the_same_bits(
    ops, rng, clusters, heads, pos, window, has_sinks, blocks
):
    case = make(rng, pos, heads, window=window)
    if has_sinks:
        case["sinks"] = rng.standard_normal(heads[0]).astype(np.float32)
    together = call(ops, case)
    check(case, together)
    assert_same_bits(call(ops, case, meets=False), together, "in the workspace")
    for row in range(len(pos)):
        assert_same_bits(call(ops, some(case, [row]))[0], together[row], f"row {row}")
    assert clusters[:2] == [blocks, 1], clusters


@on_gpu_backends
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_piece_that_is_made_again_is_sent_once(ops, rng, clusters):
    """What a later row holds to itself is no number: the leaf is worked on row by row."""
    case = make(rng, [1400, 1401, 1402, 1403], (4, 1, 64))
    clean, bad = call(ops, case), case | {"cache_v": case["cache_v"].copy()}
    bad["cache_v"][0, :, 1402] = stored(np.inf, "bf16")
    got = call(ops, bad)
    assert_same_bits(got[:2], clean[:2])
    assert not np.isfinite(real(got[2:])).all()
    assert clusters == [16, 16], clusters


@on_gpu_backends
@pytest.mark.parametrize("causal", [0, 1])
def test_a_window_of_a_block_has_all_its_units(ops, rng, clusters, causal):
    """Rows see the block and a window before it: parts of three leaves."""
    case = make(rng, range(1127, 1143), (4, 1, 64), window=128, causal=causal, block=(1127, 1191))
    check(case, call(ops, case))
    assert clusters == [4], clusters


@needs_nvrtc
@pytest.mark.parametrize("arch, size, rows, window, has_sinks", [
    (SM90, 128, 1, 128, True), (SM90, 64, 8, 0, False),
    ("sm_100a", 128, 8, 128, False), ("sm_103a", 64, 1, 0, True),
])  # fmt: skip
def test_compiles_without_spills_or_fences(arch, size, rows, window, has_sinks, tmp_path):
    """A fence of the card, or a counter, would cost what the cluster is there to save."""
    wgmma = arch in attend_fast.HAS_WGMMA
    shape = attend_fast.Shape(rows, 64, 8, size, 1, 132, window, has_sinks, keys=2304, wgmma=wgmma)
    defines = shape.own_defines | {"CLUSTER": shape.cluster}
    assert ("SIDES" in defines, shape.cluster) == (rows == 1, 4 if window else 16)
    cubin, log = compiler.compile_cubin(source.find("attend_fast.cu"), arch, defines)
    used = compiler.resources(log)["attend_fast"]
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), used
    found = " ".join(map(str, disassemble(cubin, tmp_path)["attend_fast"]))
    assert "STAS" in found
    for costly in ("MEMBAR.ALL.GPU", "MEMBAR.SC.GPU", "ATOMG", "RED.E"):
        assert costly not in found, costly
