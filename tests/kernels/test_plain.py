"""The plain kernels read a weight in fragment order too: where a fast variant declines, or a row has none."""

import pytest
from minidflash.kernels import compiler
from minidflash.kernels.gpu import fast, plain
from minidflash.kernels.ops import Ops
from minidflash.kernels.table import ROWS

from tests.cases import Make, run
from tests.compare import assert_same_bits
from tests.conftest import parameters
from tests.kernels.test_compile import needs_nvrtc
from tests.kernels.test_rows import make_form


class Forced(Ops):
    """Ops whose weights have a role, so that they are packed, and whose rows are all plain."""

    def __init__(self, ops, role):
        super().__init__(ops.backend)
        self.weight = lambda parts: ops.backend.weight(parts, role)

    def __getattr__(self, name):
        if name not in ROWS:
            return super().__getattr__(name)
        return lambda *args: getattr(plain, name)(self.backend, *args)


@pytest.mark.parametrize("ops", parameters(["emulate", "cuda"], ["bf16"]), indirect=True)
@pytest.mark.parametrize(
    "form, role", [("embed", "table"), ("qkv", "matrix"), ("linear", "matrix"), ("linear_add", "matrix"),
                   ("linear_add normed", "matrix"), ("qkv bare", "matrix"), ("gate_up bare", "pairs"),
                   ("gate_up gelu", "pairs"),
                   ("gate_up", "pairs"), ("head", "matrix"), ("head_logits", "matrix"), ("fuse", "matrix"),
                   ("inject", "matrix")]
)  # fmt: skip
def test_packed_and_plain_weights_give_the_same_bits(ops, rng, form, role):
    name, case, sizes = make_form(form, rng, "bf16", "bf16")
    weight = ops.weight([Make(rng).w(48, 77)], role) if fast.FAST else None
    assert weight is None or weight.layout != "plain", "the role packs"
    plain_bits = run(Forced(ops, ""), name, case, **sizes)
    packed_bits = run(Forced(ops, role), name, case, **sizes)
    for what, value in plain_bits.items():
        assert_same_bits(packed_bits[what], value, f"{name}: {what}")


def test_arguments_are_the_tables():
    import inspect

    for name, row in ROWS.items():
        found = list(inspect.signature(getattr(plain, name)).parameters)
        assert found == ["backend", *(spec.name for spec in row.args)]


KINDS = {
    "ACTIVATION": "float",
    "WEIGHT": "float",
    "FROM": "float",
    "TO": "float",
    "TOKEN": "float",
    "OUT": "bf16",
}
FILES = ["embed", "norm", "linear", "linear_add", "gate_up", "qkv", "inject", "attend"]


@needs_nvrtc
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "defines", [KINDS, {"PACKED": 1}, {"PACKED": 2}, KINDS | {"WEIGHT": "bf16"}], ids=str
)
def test_every_type_compiles_and_stays_in_registers(file, defines):
    compiles(file, defines)


@needs_nvrtc
@pytest.mark.parametrize("file", ["sample", "reject", "head_logits"])
def test_capped_laws_compile_and_stay_in_registers(file):
    compiles(file, {"SOFTCAP": 1})


def compiles(file, defines):
    """Compiles the file; nothing spills."""
    _, log = compiler.compile_cubin(f"{file}.cu", "sm_90a", defines)
    for name, used in compiler.resources(log).items():
        assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), f"{name}: {used}"
