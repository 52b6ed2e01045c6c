"""Checkpoints: a folder, a Hugging Face id, or "default" -> config.json and mapped tensors."""

from dataclasses import dataclass
from pathlib import Path

from minidflash.weights.safetensors_io import Tensors, has_weights, open_tensors, read_json

from minidflash.errors import UserError


@dataclass
class Checkpoint:
    """One opened checkpoint. name: as the user gave it. files: weight files and their bytes.

    tensors: None where there are no weights and none were needed. folder: of a GGUF file, the file itself.
    texts: what a folder has in tokenizer.json and so on, by name, where it is in a GGUF file instead.
    """

    name: str
    folder: Path
    config: dict
    generation: dict | None
    tensors: Tensors | None
    files: list[tuple[Path, int]]
    texts: dict | None = None


def open_checkpoint(
    spec, role, revision=None, offline=False, progress=None, needs_weights=True, weights=None
):
    """The checkpoint that `spec` names, its header read and its weights mapped.

    spec: folder, GGUF file, Hugging Face id, or "default". role: "target" or "drafter",
    for the default pair and messages. weights: of a GGUF file and the default target: "file": as the file has
    them, "bf16": rounded to bf16; None: a file as it is, the default target in bf16.
    progress: None, or called as progress(label, done, total) in bytes. Returns a Checkpoint.
    Errors: UserError, code 2 for what is wrong with the files, 3 for a missing network, package or disk.
    Source: engine.md 4.
    """
    from minidflash.weights.hub import resolve

    folder = resolve(spec, role, revision, offline, progress)
    if folder.is_file():
        return _open_file(spec, folder, weights)
    is_default = str(spec) == "default" and role == "target"
    if weights == "bf16" and not is_default:
        hint = "leave it out: a folder's weights are read in their own type"
        raise UserError(f"{role} {spec} is no GGUF file, so its weights cannot be rounded to bf16", hint)
    if not (folder / "config.json").is_file():
        raise UserError(f"no config.json in {role} folder {folder}", hint="give the folder of a checkpoint")
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation = read_json(generation) if generation.is_file() else None
    if not needs_weights and not has_weights(folder):
        return Checkpoint(str(spec), folder, config, generation, None, [])
    if is_default and weights == "file":
        from minidflash.weights.default import GGUF_FILE
        from minidflash.weights.gguf_model import open_gguf

        path = folder / GGUF_FILE
        tensors, files = open_gguf(path)[2], [(path, path.stat().st_size)]
    else:
        tensors, files = open_tensors(folder)
    return Checkpoint(str(spec), folder, config, generation, tensors, files)


def _open_file(spec, path, weights):
    """A GGUF file, which holds everything that a folder does."""
    from minidflash.weights.gguf_model import open_gguf, rounded

    config, generation, tensors, texts = open_gguf(path)
    if weights == "bf16":
        tensors = rounded(tensors)
    return Checkpoint(str(spec), path, config, generation, tensors, [(path, path.stat().st_size)], texts)
