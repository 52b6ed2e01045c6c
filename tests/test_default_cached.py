"""The cached default target: what is damaged, half made or in other hands is never used."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading

import pytest
from minidflash.weights import default, manifest, open_checkpoint
from minidflash.weights.safetensors_io import SINGLE

from minidflash.errors import UserError
from tests.small_target import COPY, contents, refused, stand_in
from tests.test_caches import give_away, has_owners


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The stand-in's cache folder."""
    return stand_in(tmp_path, monkeypatch)


def rewrite(name, change):
    def damage(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(change(data))

    return damage


def keep_time(damage):
    """The same damage with the file's time as it was: a disk that lies."""

    def unseen(folder):
        before = {path: path.stat() for path in folder.iterdir()}
        damage(folder)
        for path, was in before.items():
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))

    return unseen


def flip(data):
    return data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]


DAMAGE = {
    f"no {name}": lambda folder, name=name: (folder / name).unlink()
    for name in (SINGLE, "config.json", "tokenizer_config.json", "generation_config.json", manifest.MANIFEST)
} | {
    "a cut weight file": rewrite(SINGLE, lambda data: data[:-100]),
    "an empty tokenizer": rewrite("tokenizer.json", lambda data: b""),
    "a foreign template": lambda folder: (folder / "chat_template.jinja").write_text("planted"),
    "a foreign folder": lambda folder: (folder / "more").mkdir(),
    "a changed config": keep_time(rewrite("config.json", lambda data: data.replace(b"64", b"65"))),
    "changed weights": rewrite(SINGLE, flip),
    "an empty manifest": rewrite(manifest.MANIFEST, lambda data: b""),
    "a manifest of something else": rewrite(manifest.MANIFEST, lambda data: b'{"files": [1]}'),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "no folder": lambda folder: shutil.rmtree(folder) or folder.write_text("a file"),
}  # fmt: skip
damaged = pytest.mark.parametrize("damage", DAMAGE.values(), ids=[name.replace(" ", "-") for name in DAMAGE])


@damaged
def test_a_damaged_folder_is_made_anew(small, damage):
    folder = default.default_target()
    whole = contents(folder)
    damage(folder)
    refused(str(folder), "is damaged", "offline", offline=True)  # and is not used where it cannot be
    assert default.default_target() == folder and contents(folder) == whole
    assert os.listdir(small) == [default.FOLDER] and default.default_target(offline=True) == folder


def test_two_at_once_mend_it_once_or_twice(small):
    folder = default.default_target()
    whole = contents(folder)
    (folder / "config.json").unlink()
    found = []

    def work():
        with contextlib.suppress(UserError):
            found.append(default.default_target())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [folder] * 4 and contents(folder) == whole and os.listdir(small) == [default.FOLDER]


def test_a_copy_is_hashed_once(small, monkeypatch):
    folder = default.default_target()
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    hashed = []
    monkeypatch.setattr(manifest, "SMALL", 0)  # then only other times are a reason
    monkeypatch.setattr(
        manifest, "sha256", lambda path, of=manifest.sha256: hashed.append(path.name) or of(path)
    )
    assert default.default_target(offline=True) == folder and SINGLE in hashed
    hashed.clear()
    assert default.default_target(offline=True) == folder and not hashed
    assert os.listdir(small) == [default.FOLDER]


def test_a_read_only_copy_is_hashed_each_time(small, monkeypatch):
    folder = default.default_target()
    os.utime(folder / SINGLE, (1, 1))

    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(manifest, "_write", read_only)
    assert default.default_target(offline=True) == default.default_target(offline=True) == folder


@has_owners
@pytest.mark.parametrize("name", [".", SINGLE, "tokenizer.json", manifest.MANIFEST])
@pytest.mark.parametrize("kind", ["writable", "another user's"])
def test_what_others_can_change_is_refused_and_left_alone(small, monkeypatch, name, kind):
    path = default.default_target() / name
    if kind == "writable":
        path.chmod(path.stat().st_mode | 0o020)
    else:
        give_away(path, monkeypatch)
    before = contents(small / default.FOLDER)
    for offline in (False, True):
        remedy = (
            f"chmod -R go-w '{small / default.FOLDER}'" if kind == "writable" else "belongs to another user"
        )
        refused(str(small), "MINIDFLASH_CACHE", remedy, offline=offline)
    assert contents(small / default.FOLDER) == before


@has_owners
def test_what_it_makes_is_for_others_to_read_only(small):
    before = os.umask(0)
    try:
        folder = default.default_target()
    finally:
        os.umask(before)
    assert small.stat().st_mode & 0o777 == 0o700
    assert not any(path.stat().st_mode & 0o022 for path in (folder, *folder.iterdir()))


def check_contents():
    manifest.start_check(open_checkpoint("default", "target"))()


@pytest.mark.parametrize("where", [-3, -5000, -50_000])
def test_contents_are_summed_while_they_are_read(small, where, monkeypatch):
    """The same size and time: nothing but the sum sees it in a file that is not small."""
    monkeypatch.setattr(manifest, "SMALL", 1 << 16)
    folder = default.default_target()
    check_contents()
    keep_time(rewrite(SINGLE, lambda data: data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :]))(
        folder
    )
    with pytest.raises(UserError, match=r"damaged.*contents") as error:
        check_contents()
    assert error.value.code == 2 and f"delete {folder}" in error.value.hint


@pytest.mark.parametrize("weights, name", [("bf16", SINGLE), ("file", default.GGUF_FILE)])
def test_load_refuses_damaged_contents(small, monkeypatch, weights, name):
    """Through the library's door, on a backend that reads every tensor."""
    import minidflash as md

    monkeypatch.setattr(manifest, "SMALL", 1 << 16)
    folder = default.default_target()
    engine = md.load(drafter=None, backend="oracle", warm=False, weights=weights)
    assert engine.target.config.width == 64
    keep_time(rewrite(name, flip))(folder)
    with pytest.raises(UserError, match="damaged"):
        md.load(drafter=None, backend="oracle", warm=False, weights=weights)


def test_the_sum_sees_every_piece():
    piece = 8 * manifest.PIECE
    data = bytearray(os.urandom(2 * piece + 8 * 5 + 3))
    whole = manifest.content_sum(bytes(data))
    for at in (0, piece - 1, piece, 2 * piece, len(data) - 4, len(data) - 1):
        data[at] ^= 128
        assert manifest.content_sum(bytes(data)) != whole
        data[at] ^= 128
    moved = data[piece : 2 * piece] + data[:piece] + data[2 * piece :]
    assert manifest.content_sum(bytes(moved)) != whole == manifest.content_sum(bytes(data))
    assert manifest.content_sum(b"abc") != manifest.content_sum(b"abd")


KILLED = """
import os, signal, sys
from pathlib import Path
from minidflash.weights import default
default.WHEEL_SHA256, default.GGUF_SHA256, default.MODULE = sys.argv[2:5]
default._client = lambda got: [sys.executable, "-c", sys.argv[5], sys.argv[6], str(got)]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
when = sys.argv[1]
if when == "described": default.describe = die
if when == "aside" or when == "placed":
    rename, count = Path.rename, []
    def counted(path, to):
        done = rename(path, to)
        if len(count) == (when == "placed"): die()
        count.append(1); return done
    Path.rename = counted
default.default_target(progress=lambda label, done, total: label.startswith(when) and die())
"""


@pytest.mark.parametrize("when", ["fetching", "converting", "described", "aside", "placed"])
def test_killed_at_any_moment_nothing_half_is_trusted(small, tmp_path, when):
    """With a damaged folder in place, so that both renames happen."""
    folder = default.default_target()
    whole = contents(folder)
    (folder / "config.json").unlink()
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    argv = [when, default.WHEEL_SHA256, default.GGUF_SHA256, default.MODULE, COPY, str(wheel)]
    assert subprocess.run([sys.executable, "-c", KILLED, *argv], check=False).returncode == -9
    assert folder.exists() == (when != "aside")
    assert default.default_target() == folder and contents(folder) == whole
