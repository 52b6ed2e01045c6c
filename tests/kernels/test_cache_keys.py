"""What decides about compiled code is in the key of its cache: sources, headers, options, versions."""

import pytest
from minidflash.kernels import compiler, diskcache
from minidflash.kernels.emulate import build

from tests.conftest import open_or_skip


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """(folder of sources, a .cu and its header in it, list of what was compiled)."""
    made, folder = [], tmp_path / "sources"
    folder.mkdir()
    (folder / "row.cu").write_text('#include "part.cuh"\nextern "C" __global__ void row() { part(); }\n')
    (folder / "part.cuh").write_text("__device__ void part() {}\n")
    monkeypatch.setenv("MINIDFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "open_nvrtc", lambda: (None, (13, 0)))
    monkeypatch.setattr(
        compiler, "_compile", lambda nvrtc, path, *_: (made.append(path.name), (b"cubin", "log"))[1]
    )
    return folder, made


def test_a_cubin_is_compiled_again_when_anything_changes(compiled, monkeypatch):
    folder, made = compiled
    source = folder / "row.cu"

    def ask(arch="sm_90a", defines=None):
        before = len(made)
        for _ in range(2):
            assert compiler.compile_cubin(source, arch, defines) == (b"cubin", "log")
        return len(made) - before

    assert [ask(), ask()] == [1, 0]
    (folder / "part.cuh").write_text("__device__ void part() { __syncthreads(); }\n")
    assert [ask(), ask()] == [1, 0]
    source.write_text(source.read_text() + "// more\n")
    assert [ask(), ask("sm_100a"), ask("sm_100a", {"A": 1}), ask("sm_100a", {"A": 2})] == [1, 1, 1, 1]
    monkeypatch.setattr(compiler, "open_nvrtc", lambda: (None, (13, 1)))
    assert [ask(), ask()] == [1, 0]


def test_numbas_folder_is_another_when_any_source_changes(tmp_path, monkeypatch):
    from minidflash.kernels.cpu import jit

    (tmp_path / "one.py").write_text("a = 1\n")
    (tmp_path / "two.py").write_text("b = 1\n")
    monkeypatch.setenv("MINIDFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "HERE", tmp_path)
    first = jit._cache_folder()
    assert jit._cache_folder() == first
    (tmp_path / "two.py").write_text("b = 2\n")
    assert jit._cache_folder() != first


def test_borders_of_what_is_digested_count():
    assert diskcache.digest("ab", "c") != diskcache.digest("a", "bc")
    assert diskcache.digest("ab", b"c") == diskcache.digest(b"ab", "c")


def test_what_builds_share_says_why_it_does_not_build(monkeypatch, tmp_path):
    """Not the linker, of a file that is not there."""
    open_or_skip("emulate", "f32")
    build._parsed.cache_clear()
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    with pytest.raises(
        RuntimeError, match="could not build cuda_language.h for the emulator:\n.*No such file"
    ):
        build._parsed("-std=c++20")
