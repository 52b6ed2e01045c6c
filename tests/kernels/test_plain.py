"""The plain kernels read a weight in fragment order too: where a fast variant declines, or a row has none."""

import re

import pytest
from minidflash.kernels import compiler, source
from minidflash.kernels.gpu import fast, plain
from minidflash.kernels.ops import Ops
from minidflash.kernels.table import ROWS

from tests.cases import Make, run
from tests.compare import assert_same_bits
from tests.conftest import FULL, parameters
from tests.disassembly import SM90, cards
from tests.kernels.test_compile import CAPPED, needs_nvrtc
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
WAYS = [KINDS, {"PACKED": 1}, {"PACKED": 2}, KINDS | {"WEIGHT": "bf16"}]


def builds():
    """(file, defines); of a file that reads no weight, in what way it lies changes nothing."""
    for file in FILES:
        reads = re.search(r"\bWEIGHT\b", source.find(f"{file}.cu").read_text())
        yield from ((file, defines) for defines in (WAYS if reads else WAYS[:1]))


@needs_nvrtc
@pytest.mark.parametrize("file, defines", list(builds()), ids=str)
def test_every_type_compiles_and_stays_in_registers(file, defines):
    compiles(file, defines)


@needs_nvrtc
@pytest.mark.parametrize("file", CAPPED)
def test_capped_laws_compile_and_stay_in_registers(file):
    """On the cards on which test_compile leaves them out; on both kinds with MINIDFLASH_FULL=1."""
    for arch in cards(CAPPED.index(file))[0 if FULL else 1 :]:
        compiles(file, {"SOFTCAP": 1}, arch)


def compiles(file, defines, arch=SM90):
    """Compiles the file; nothing spills."""
    _, log = compiler.compile_cubin(f"{file}.cu", arch, defines)
    for name, used in compiler.resources(log).items():
        assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0), f"{name}: {used}"
