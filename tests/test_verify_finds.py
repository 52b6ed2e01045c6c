"""`minidflash verify` finds faults of fast and prefill kernels, and names the rows: faults/verify.toml."""

from pathlib import Path

import pytest
from minidflash.kernels import source, table
from minidflash.kernels.gpu import EmulateBackend
from minidflash.kernels.ops import Ops

from minidflash.cli import verify as check
from tests.conftest import open_or_skip
from tests.faults import plant

FAULTS = [fault for fault in plant.read() if fault.topic == "verify"]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Of a fault: its .cu is built with it from now on, all others as they are."""
    open_or_skip("emulate", "bf16")
    find = source.find

    def plant_it(fault):
        place = tmp_path / Path(fault.file).name
        text = find(place.name).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1
        place.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        monkeypatch.setattr(source, "find", lambda file: place if file == place.name else find(file))

    return plant_it


def test_there_are_faults_in_enough_kernels():
    files = {fault.file for fault in FAULTS}
    assert len([file for file in files if file.endswith("_fast.cu")]) >= 6
    assert len([file for file in files if file.endswith("_prefill.cu")]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_row_of_a_faulty_kernel_is_named(planted, capsys, monkeypatch, fault):
    """Of some rows: those that a fault does not touch are right."""
    planted(fault)
    rows = {fault.breaks.split()[1], "linear", "accept", "embed"}
    monkeypatch.setattr(table, "ROWS", {name: row for name, row in table.ROWS.items() if name in rows})
    ops = Ops(EmulateBackend("bf16"))  # one that has no kernel yet
    failed = check.tell(check.kernel_checks(ops, check.SIZES | {"J": 32}), is_quiet=True)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert failed == len(lines) >= 1
    assert any(line.startswith(fault.says) for line in lines), lines
    row = fault.breaks.split()[1]
    assert any(line.startswith(f"FAILED {row} ") for line in lines), lines
