"""Checkpoints: a folder, a Hugging Face id, or "default" -> config.json and mapped tensors."""

from dataclasses import dataclass
from pathlib import Path

from minidflash.weights.safetensors_io import Tensors, open_tensors, read_json, weight_names

from minidflash.errors import UserError


@dataclass
class Checkpoint:
    """One opened checkpoint. name: as the user gave it. files: weight files and their bytes.

    tensors: None where there are no weights and none were needed. revision: the hub's commit, or as asked.
    """

    name: str
    folder: Path
    config: dict
    generation: dict | None
    tensors: Tensors | None
    files: list[tuple[Path, int]]
    revision: str | None = None


def open_checkpoint(spec, role, revision=None, offline=False, progress=None, needs_weights=True):
    """The checkpoint that `spec` names, its header read and its weights mapped.

    spec: folder, Hugging Face id, or "default". role: "target" or "drafter",
    for the default pair and messages.
    progress: None, or called as progress(label, done, total) in bytes. needs_weights: False: those that are
    not here are not fetched, and not missed. Returns a Checkpoint.
    Errors: UserError, code 2 for what is wrong with the files, 3 for a missing network, package or disk.
    Source: engine.md 4.
    """
    from minidflash.weights.hub import commit_of, resolve

    if role == "drafter" and Path(str(spec)).suffix == ".gguf" and Path(spec).is_file():
        return _open_gguf(spec, revision)
    folder = resolve(spec, role, revision, offline, progress, needs_weights)
    if not (folder / "config.json").is_file():
        raise UserError(f"no config.json in {role} folder {folder}", hint=_nearby(folder))
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation = read_json(generation) if generation.is_file() else None
    commit = commit_of(spec, folder)
    found = Checkpoint(str(spec), folder, config, generation, None, [], commit or revision)
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


def _open_gguf(spec, revision):
    """A GGUF file as a checkpoint: its config is its metadata."""
    from minidflash.weights.gguf_io import read_gguf

    if revision:
        raise UserError(f"a revision goes with a Hugging Face id, {str(spec)!r} is none", "leave it out")
    path = Path(spec)
    metadata, tensors = read_gguf(path)
    return Checkpoint(str(spec), path.parent, metadata, None, Tensors(tensors), [(path, path.stat().st_size)])
