"""The emulator's check for races in shared memory: it finds planted ones, and none in the kernels.

Kernels are tested in a process with MINIDFLASH_RACES=1, for which they are built anew. What it takes for
order: barriers, __syncwarp, mbarriers, cluster barriers, atomics and counters; not shuffles
(kernels/emulate/races.cpp).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from minidflash.kernels.emulate import EmulatedDevice, EmulationError

from tests.conftest import FULL, open_or_skip

FOLDER = Path(__file__).parent
SAMPLES = FOLDER / "samples"
PLANTED = {
    "neighbour": ((64, 1, [0]), (64, 1, [1])), "lanes": ((32, 1, [0]), (32, 1, [1])),
    "hand_over": ((64, 1, [0, 1]), (64, 1, [1, 1])), "across": ((32, 2, [0]), (32, 2, [1])),
}  # fmt: skip
# Some tests of the files whose kernels meet in shared memory: every kernel, and every way to wait (several
# slices, several who finish, clusters with an early launch) of those that share one frame.
CHECKED = {
    "test_fast_gemm": "37-77 or 17-16-40 or 5-123-77 or layers_end and 33-16-32 or shared_values and True"
    " or join and 3-2816 or inject and True-False or 17-80-509",
    "test_fast_bits": "every_cut and (cut1 or cut5 or cut7)",
    "test_fast_attend": "many_pieces and 2040 or slots or later_row and (136-nan or large)",
    "test_fast_prefill": "70- or row_alone and linear-emulate or qkv_matches and True-True or inject"
    " or layers_end and True-True-264",
    "test_fast_experts": "every_cut and 37- and bf16-emulate-bf16",
    "test_fast_route": "route_matches and (20-300 or 5-7)",
    "test_few_experts": "of_many and 2-4-3 and (up-bf16 or down-mxfp4) or like_many and 10-40",
    "test_sample": "f32 and matches_oracle and 17-40-77 and top_p", "test_plain": "bits",
    "test_head": "matches_oracle", "test_wide": "more_passes and gate_up",
    "test_sinks": "joins_once and 2040 or later_row",
}  # fmt: skip
WHOLE = {"test_fast_gemm": "not 4096", "test_fast_bits": "every_cut", "test_fast_prefill": "not long"}


@pytest.fixture
def racing(monkeypatch):
    """(kernel, threads, cluster, scalars) -> a launch of samples/races.cu under the check."""
    open_or_skip("emulate", "f32")
    monkeypatch.setenv("MINIDFLASH_RACES", "1")
    device = EmulatedDevice()

    def run(name, threads, cluster, scalars):
        function = device.function(SAMPLES / "races.cu", name)
        device.launch(function, cluster, threads, 0, [np.zeros(64, np.int32), *scalars], cluster=cluster)

    return run


@pytest.mark.parametrize("name", PLANTED)
def test_planted_races_are_found(racing, name):
    racy, ordered = PLANTED[name]
    racing(name, *ordered)
    with pytest.raises(EmulationError, match=r"a race in shared memory: .*races\.cu:\d+"):
        racing(name, *racy)


def test_a_write_before_the_reader_is_done_is_found(racing):
    with pytest.raises(EmulationError, match="writes what was read|reads what was written"):
        racing("hand_over", 64, 1, [1, 0])


def test_kernels_have_no_races():
    open_or_skip("emulate", "f32")
    checked = CHECKED | WHOLE if FULL else CHECKED
    chosen = " or ".join(f"{file}.py and ({tests})" for file, tests in checked.items())
    files = [str(FOLDER / f"{file}.py") for file in checked]
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider",
               "-k", f"emulate and ({chosen})", *files]  # fmt: skip
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"MINIDFLASH_RACES": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert set(checked) == set(re.findall(r"(\w+)\.py::.* PASSED", done.stdout)), "a file without a test"
