"""Checkpoints: a folder, a Hugging Face id, or "default" -> config.json and mapped tensors."""

from dataclasses import dataclass
from pathlib import Path

from minidflash.weights.safetensors_io import Tensors, has_weights, open_tensors, read_json

from minidflash.errors import UserError


@dataclass
class Checkpoint:
    """One opened checkpoint. name: as the user gave it. files: weight files and their bytes.

    tensors: None where there are no weights and none were needed.
    """

    name: str
    folder: Path
    config: dict
    generation: dict | None
    tensors: Tensors | None
    files: list[tuple[Path, int]]


def open_checkpoint(spec, role, revision=None, offline=False, progress=None, needs_weights=True):
    """The checkpoint that `spec` names, its header read and its weights mapped.

    spec: folder, Hugging Face id, or "default". role: "target" or "drafter",
    for the default pair and messages.
    progress: None, or called as progress(label, done, total) in bytes. Returns a Checkpoint.
    Errors: UserError, code 2 for what is wrong with the files, 3 for a missing network, package or disk.
    Source: engine.md 4.
    """
    from minidflash.weights.hub import resolve

    if role == "drafter" and Path(str(spec)).suffix == ".gguf" and Path(spec).is_file():
        return _open_gguf(spec, revision)
    folder = resolve(spec, role, revision, offline, progress)
    if not (folder / "config.json").is_file():
        raise UserError(f"no config.json in {role} folder {folder}", hint="give the folder of a checkpoint")
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation = read_json(generation) if generation.is_file() else None
    if not needs_weights and not has_weights(folder):
        return Checkpoint(str(spec), folder, config, generation, None, [])
    tensors, files = open_tensors(folder)
    return Checkpoint(str(spec), folder, config, generation, tensors, files)


def _open_gguf(spec, revision):
    """A GGUF file as a checkpoint: its config is its metadata."""
    from minidflash.weights.gguf_io import read_gguf

    if revision:
        raise UserError(f"a revision goes with a Hugging Face id, {str(spec)!r} is none", "leave it out")
    path = Path(spec)
    metadata, tensors = read_gguf(path)
    return Checkpoint(str(spec), path.parent, metadata, None, Tensors(tensors), [(path, path.stat().st_size)])
