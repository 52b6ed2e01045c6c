"""Caches are only caches: of code that is compiled; what is damaged,
foreign or cannot be written means compile again."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from minidflash.kernels import compiler, diskcache
from minidflash.kernels.cpu import jit
from minidflash.kernels.emulate import build

from minidflash.errors import UserError

DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "without its end": lambda data: data[:-1],
    "one bit": lambda data: data[:-90] + bytes([data[-90] ^ 1]) + data[-89:],
    "foreign": lambda data: b"something else" * 9,
}
damaged = pytest.mark.parametrize("damage", DAMAGE.values(), ids=[name.replace(" ", "-") for name in DAMAGE])
has_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no owners of files")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder; warnings count from here."""
    monkeypatch.setenv("MINIDFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(diskcache, "_said", False)
    return tmp_path / "cache"


def give_away(path, monkeypatch):
    """Make path another user's: really by the superuser, else by becoming another."""
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)


def test_the_cache_folder_is_never_a_shared_one(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "MINIDFLASH_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def no_home(path="~"):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert diskcache.cache_folder() is None and diskcache.folder("cubin") is None


@has_owners
def test_folders_are_the_users_alone(cache):
    before = os.umask(0o002)
    try:
        assert diskcache.folder("numba/key") == cache / "numba/key"
    finally:
        os.umask(before)
    for path in (cache, cache / "numba", cache / "numba/key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@has_owners
@pytest.mark.parametrize("level", [".", "numba", "numba/key"])
@pytest.mark.parametrize("kind", [0o777, 0o770, "another user's"])
def test_a_folder_that_others_can_change_is_not_used(cache, monkeypatch, capfd, level, kind):
    diskcache.folder("numba/key")
    if kind == "another user's":
        give_away(cache / level, monkeypatch)
    else:
        (cache / level).chmod(kind)
    assert diskcache.folder("numba/key") is None and diskcache.folder("numba/key") is None
    (line,) = capfd.readouterr().err.splitlines()  # once, with what to type
    assert str(cache / level) in line or os.geteuid() != 0
    assert "MINIDFLASH_CACHE" in line and ("chmod -R go-w" in line) == (kind != "another user's")


@damaged
def test_a_damaged_file_is_a_miss(cache, damage):
    path = diskcache.folder("x") / "name"
    for data in (b"", b"short", bytes(range(256)) * 9):
        assert diskcache.store(path, data) and diskcache.load(path) == data
    path.write_bytes(damage(path.read_bytes()))
    assert diskcache.load(path) is None
    assert diskcache.store(path, b"anew") and diskcache.load(path) == b"anew"


@has_owners
def test_a_file_of_another_name_or_owner_is_a_miss(cache, monkeypatch):
    path = diskcache.folder("x") / "name"
    diskcache.store(path, b"data")
    shutil.copy(path, path.with_name("other"))
    assert diskcache.load(path.with_name("other")) is None
    assert diskcache.load(path.with_name("absent")) is None
    path.chmod(0o666)
    assert diskcache.load(path) is None
    path.chmod(0o600)
    assert diskcache.load(path) == b"data"
    give_away(path, monkeypatch)
    assert diskcache.load(path) is None


def full_disk(monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(diskcache.os, "replace", refuse)


def test_a_full_disk_is_said_once_and_leaves_nothing(cache, monkeypatch, capfd):
    path = diskcache.folder("x") / "name"
    full_disk(monkeypatch)
    assert not diskcache.store(path, b"data") and not diskcache.store(path, b"data")
    (line,) = capfd.readouterr().err.splitlines()
    assert "No space left" in line and "free some space" in line and str(path.parent) in line
    assert list(path.parent.iterdir()) == []


def test_nobody_to_warn_is_no_error(cache, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    diskcache.say_once("what", "remedy")


# Numba's kernels


@pytest.fixture
def kernel(cache, monkeypatch):
    """A function that makes a kernel with an empty memory and gives (result, was it in the cache)."""
    monkeypatch.setattr(jit, "CACHE_FOLDER", diskcache.folder("numba/key"))

    def twice(x):
        return x * 2

    def call(value=21):
        dispatcher = jit.jit(twice)
        return dispatcher(value), sum(dispatcher.stats.cache_hits.values()) == 1

    return call


def test_a_kernel_is_compiled_once(kernel, cache):
    assert [kernel(), kernel()] == [(42, False), (42, True)]
    assert kernel(1.5) == (3.0, False) and kernel(1.5) == (3.0, True)  # a file a signature
    assert len(list(cache.rglob("*.nbc"))) == 2


@damaged
def test_a_damaged_kernel_is_compiled_again_and_repaired(kernel, cache, damage, capfd):
    kernel()
    (file,) = cache.rglob("*.nbc")
    file.write_bytes(damage(file.read_bytes()))
    assert [kernel(), kernel()] == [(42, False), (42, True)]
    assert capfd.readouterr().err == ""


def test_a_kernel_that_cannot_be_rebuilt_is_compiled_again(kernel, cache):
    """Whole, but of another version of a library."""
    kernel()
    (file,) = cache.rglob("*.nbc")
    for content in (b"no pickle", b"N."):
        diskcache.store(file, content)
        assert [kernel(), kernel()] == [(42, False), (42, True)]


def test_kernels_run_on_a_full_disk(kernel, monkeypatch, capfd):
    full_disk(monkeypatch)
    assert [kernel(), kernel()] == [(42, False), (42, False)]
    assert len(capfd.readouterr().err.splitlines()) == 1


ONE = """
import resource, sys
if len(sys.argv) > 1: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
import numpy as np, minidflash.kernels.cpu.control as c
one = np.zeros(1, np.int32); c._stage_context(one, one, one.copy(), one.copy()); print("ran")
"""


def run_kernel(*args):
    """One kernel of ours in a new process; returns the lines of stderr."""
    command = [sys.executable, "-c", ONE, *args]
    out = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (out.returncode, out.stdout) == (0, "ran\n"), out.stderr
    return out.stderr.splitlines()


def test_real_kernels_live_without_a_disk_and_keep_their_files_private(cache):
    """A quota on the size of files; then files are kept, then the folder is opened to all and nothing in it
    is run."""
    pytest.importorskip("resource")
    (line,) = run_kernel("small files only")
    assert "File too large" in line and not list(cache.rglob("*.nbc"))
    assert run_kernel() == [] and list(cache.rglob("*.nbc"))
    for file in cache.rglob("*.nbc"):
        diskcache.store(file, b"cos\nabort\n(tR.")  # what another user could leave there
    cache.chmod(0o777)
    (line,) = run_kernel()
    assert "can be written by others" in line and "chmod" in line


# The emulator's libraries and cubins


@pytest.fixture
def toy(cache, monkeypatch):
    """A function that builds a small library, or takes it; the list of what g++ was started for."""
    if not shutil.which("g++"):
        pytest.skip("the emulator builds kernels with g++: not installed")
    monkeypatch.setattr(build, "_temporary", None)
    started, run = [], subprocess.run
    build.compiler()

    def count(command, **options):
        started.append(command)
        return run(command, **options)

    monkeypatch.setattr(build.subprocess, "run", count)

    def call():
        source = {"toy.cpp": 'extern "C" int one() { return 1; }'}
        return build._build("toy", ["-fPIC", "toy.cpp"], [], source)

    return call, started


def is_open(library):
    """Whether the library works, seen by a process that may die of it."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).one() != 1)"
    return os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code, str(library)) == 0


@damaged
def test_a_damaged_library_is_built_again(toy, cache, damage):
    call, started = toy
    library = call()
    assert library.parent == cache / "emulate" and is_open(library)
    assert call() == library and len(started) == 1
    library.write_bytes(damage(library.read_bytes()))
    assert call() == library and len(started) == 2 and is_open(library)
    assert call() == library and len(started) == 2


def test_a_library_that_no_disk_takes_lies_in_a_temporary_folder(toy, cache, monkeypatch, capfd):
    call, started = toy
    store = diskcache.store

    def full(path, data):
        return "emulate" not in path.parts and store(path, data)

    monkeypatch.setattr(diskcache, "store", full)
    library = call()
    assert cache not in library.parents and is_open(library) and call() == library and len(started) == 1
    monkeypatch.setattr(diskcache, "store", lambda path, data: False)
    library.unlink()
    with pytest.raises(UserError, match="cannot write") as error:
        call()
    assert error.value.code == 3 and "space" in error.value.hint


@damaged
@pytest.mark.parametrize("kind", ["cubin", "log"])
def test_a_damaged_cubin_is_compiled_again(cache, monkeypatch, tmp_path, damage, kind):
    file, made = tmp_path / "own.cu", []
    file.write_text('extern "C" __global__ void own(float* y) { y[0] = 1; }\n')
    monkeypatch.setattr(compiler, "open_nvrtc", lambda: (None, (13, 0)))
    monkeypatch.setattr(compiler, "_compile", lambda *_: made.append(1) or (b"cubin" * 99, "words\n" * 99))
    for _ in range(2):
        assert compiler.compile_cubin(file, "sm_90a") == (b"cubin" * 99, "words\n" * 99)
    assert len(made) == 1
    (stored,) = cache.rglob(f"*.{kind}")
    stored.write_bytes(damage(stored.read_bytes()))
    for _ in range(2):
        assert compiler.compile_cubin(file, "sm_90a") == (b"cubin" * 99, "words\n" * 99)
    assert len(made) == 2


def test_results_do_not_depend_on_the_cache(kernel):
    values = np.arange(5.0)
    assert (kernel(values)[0] == kernel(values)[0]).all()
