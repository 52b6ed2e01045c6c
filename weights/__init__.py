"""Checkpoints: a folder, a Hugging Face id, or "default" -> config.json and mapped tensors."""

from dataclasses import dataclass
from pathlib import Path

from minidflash.weights.safetensors_io import Tensors, open_tensors, read_json, weight_names

from minidflash.errors import UserError


@dataclass
class Checkpoint:
    """One opened checkpoint. name: as the user gave it. files: weight files and their bytes.

    tensors: None where there are no weights and none were needed. revision: the hub's commit, or as asked.
    folder: of a GGUF file, the file itself. texts: what a folder has in tokenizer.json and so on, by name,
    where it is in a GGUF file instead.
    """

    name: str
    folder: Path
    config: dict
    generation: dict | None
    tensors: Tensors | None
    files: list[tuple[Path, int]]
    revision: str | None = None
    texts: dict | None = None


def open_checkpoint(
    spec, role, revision=None, offline=False, progress=None, needs_weights=True, weights=None
):
    """The checkpoint that `spec` names, its header read and its weights mapped.

    spec: folder, GGUF file, Hugging Face id, or "default". role: "target" or "drafter",
    for the default pair and messages. weights: of a GGUF target and the default one: "file": as the file has
    them, "bf16": rounded to bf16; None: a file as it is, the default target in bf16.
    progress: None, or called as progress(label, done, total) in bytes. needs_weights: False: those that are
    not here are not fetched, and not missed. Returns a Checkpoint.
    Errors: UserError, code 2 for what is wrong with the files, 3 for a missing network, package or disk.
    Source: engine.md 4.
    """
    from minidflash.weights.hub import commit_of, resolve

    folder = resolve(spec, role, revision, offline, progress, needs_weights)
    if folder.is_file():
        return _open_file(spec, folder, role, weights)
    is_default = str(spec) == "default" and role == "target"
    if weights == "bf16" and not is_default:
        hint = "leave it out: a folder's weights are read in their own type"
        raise UserError(f"{role} {spec} is no GGUF file, so its weights cannot be rounded to bf16", hint)
    if not (folder / "config.json").is_file():
        raise UserError(f"no config.json in {role} folder {folder}", hint=_nearby(folder))
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation = read_json(generation) if generation.is_file() else None
    commit = commit_of(spec, folder)
    found = Checkpoint(str(spec), folder, config, generation, None, [], commit or revision)
    if is_default and weights == "file":
        from minidflash.weights.default import GGUF_FILE
        from minidflash.weights.gguf_model import open_gguf

        path = folder / GGUF_FILE
        found.tensors, found.files = open_gguf(path)[2], [(path, path.stat().st_size)]
        return found
    is_here = [(folder / name).is_file() for name in weight_names(folder)]
    # A snapshot of the hub may hold some weights, of a download that goes on when they are needed.
    if needs_weights or (all(is_here) if commit else any(is_here)):
        found.tensors, found.files = open_tensors(folder)
    return found


def _nearby(folder):
    """Where a checkpoint may be, if not in this folder: a hint."""
    if (folder / "adapter_config.json").is_file():
        return "this is an adapter: merge it into its model, and give that folder"
    below = sorted(
        path.parent for pattern in ("*", "snapshots/*") for path in folder.glob(f"{pattern}/config.json")
    )
    if below:
        return f"give the folder of a checkpoint, such as {below[-1]}"
    return "give the folder of a checkpoint"


def _open_file(spec, path, role, weights):
    """A GGUF file, which holds everything that a folder does; of a drafter, its config is its metadata."""
    from minidflash.weights.gguf_io import read_gguf
    from minidflash.weights.gguf_model import open_gguf, rounded, without_blocks

    files = [(path, path.stat().st_size)]
    if role == "drafter":
        metadata, tensors = read_gguf(path)
        return Checkpoint(str(spec), path, metadata, None, Tensors(without_blocks(tensors)), files)
    config, generation, tensors, texts = open_gguf(path)
    if weights == "bf16":
        tensors = rounded(tensors)
    return Checkpoint(str(spec), path, config, generation, tensors, files, None, texts)
