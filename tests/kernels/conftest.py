"""`opened`: the cuda backend on a GPU that is none (tests/fake_card.py). Kernels run on all threads."""

import pytest
from minidflash.kernels import launch
from minidflash.kernels.gpu import cuda
from minidflash.kernels.ops import Ops

from tests.fake_card import Driver, fake_cupy


@pytest.fixture(autouse=True)
def one_thread():
    """Takes the place of the rule for models: who shares out a kernel's work is tested here."""


@pytest.fixture
def opened(monkeypatch):
    """(activations, options) -> (Ops, Driver) of a cuda backend on nothing."""

    def open_it(activations="f32", **options):
        driver = Driver()
        monkeypatch.setattr(launch, "_driver", lambda: driver)
        monkeypatch.setattr(launch, "compile_cubin", lambda *_: (b"cubin", ""))
        monkeypatch.setattr(cuda, "_cupy", fake_cupy)
        return Ops(cuda.CudaBackend(activations, **options)), driver

    return open_it
