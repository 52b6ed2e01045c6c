"""`minidflash verify --kernel`: one row of the table at given shapes, beside the oracle."""

import json

import pytest
from minidflash.kernels import open_ops


@pytest.mark.parametrize(
    "flags, says",
    [
        (["nothing"], "no kernel 'nothing' in the table"),
        (["qkv", "--shape", "T=0"], "'T=0' is no size"),
        (["qkv", "--shape", "Q=3"], "'Q=3' is no size"),
        (["qkv", "--reference", "x"], "--reference has no effect without --layers"),
    ],
)
def test_what_cannot_be_is_refused(mdf, flags, says):
    code, out, err = mdf("verify", "--kernel", *flags)
    assert code == 2 and not out and says in err.splitlines()[0] and "hint: " in err


@pytest.mark.parametrize(
    "name, shape",
    [("qkv", "T=3,D=32,H=6,G=3,K=16"), ("linear_add", "toy,T=2"), ("experts_up", "T=7,E=4,D=64"),
     ("attend", "T=30"), ("accept", "T=4,B=4")],
)  # fmt: skip
def test_one_kernel_at_given_shapes(mdf, tmp_path, name, shape):
    flags = "--kernel", name, "--shape", shape, "--backend", "numba"
    code, out, _ = mdf("verify", *flags, "--json", tmp_path / "found.json")
    assert code == 0 and out.splitlines()[-1] == "it agrees with the oracle"
    found = json.loads((tmp_path / "found.json").read_text())
    asked = dict(word.split("=") for word in shape.split(",") if "=" in word)
    assert {letter: found["shape"][letter] for letter in asked if letter in found["shape"]} == {
        letter: int(size) for letter, size in asked.items()
    }


def test_a_wrong_kernel_names_array_and_element(mdf, monkeypatch):
    from minidflash import kernels

    def spoiled(name, *args):
        ops = open_ops(name, *args)
        if name == "numba":
            right = ops.backend.gate_up

            def wrong(*given):
                right(*given)
                given[-1][2, 7] += 1

            ops.backend.gate_up = wrong
        return ops

    monkeypatch.setattr(kernels, "open_ops", spoiled)
    code, out, _ = mdf("verify", "--kernel", "gate_up", "--shape", "T=3", "--backend", "numba", "-q")
    assert code == 1 and out.startswith("FAILED  kernel: gate_up, prompt, h element 2, element 7 is ")
