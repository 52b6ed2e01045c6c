"""From what the user typed to a local folder: a path, "default", or a Hugging Face id."""

import re
from pathlib import Path

from minidflash.weights.safetensors_io import INDEX, weight_names

from minidflash.errors import UserError

# What is read beside weights, all at the root: some repositories hold copies of everything in folders.
FILES = [
    "config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja",
]  # fmt: skip
# owner/name, or the bare name of an old repository; never something that reads as a path
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
EMBEDDED = Path(__file__).parent / "default"


COMMIT = re.compile(r"[0-9a-f]{40}")


def commit_of(spec, folder):
    """The commit whose snapshot on the hub a resolved folder is; None: it is no such snapshot."""
    is_snapshot = folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name)
    return folder.name if is_snapshot and Path(str(spec)).expanduser() != folder else None


def resolve(spec, role, revision=None, offline=False, progress=None, needs_weights=True):
    """The local folder of a checkpoint, fetched if need be, its weights only if they are needed; or a
    GGUF file.

    Errors: UserError; code 3 when the network, a package or the disk is what is missing. Source: engine.md 4.
    """
    text = str(spec)
    if revision and (text == "default" or Path(text).exists()):
        raise UserError(
            f"a revision goes with a Hugging Face id, {text!r} is none", hint="leave out --revision"
        )
    if text == "default" and role == "drafter":
        return EMBEDDED
    if text == "default":
        from minidflash.weights.default import default_target

        return default_target(offline, progress)
    path = Path(text).expanduser()
    if text and (path.is_dir() or (path.suffix == ".gguf" and path.is_file())):
        return path
    if path.suffix == ".gguf" or path.is_file():
        what = "no such GGUF file" if path.suffix == ".gguf" else "this is a file"
        raise UserError(f"{role} {text}: {what}, need a folder, a Hugging Face id or default")
    if isinstance(spec, Path) or not HUB_ID.fullmatch(text):
        raise UserError(f"no {role} folder {text}", hint="give a folder, a Hugging Face id or default")
    return _fetch(text, role, revision, offline, progress, needs_weights)


def _fetch(repo, role, revision, offline, progress, needs_weights):
    """Snapshot folder of a hub repository: what is read at its root, then just the weight files it names."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        hint = "pip install huggingface_hub, or give a folder"
        raise UserError(
            f"{role} {repo} is no folder, and huggingface_hub is not installed", hint, code=3
        ) from None
    where = f"{role} {repo}" + (f" at revision {revision}" if revision else "")

    def snapshot(patterns):
        bars = {} if progress else {"tqdm_class": _quiet()}
        found = hub.snapshot_download(
            repo, revision=revision, local_files_only=offline, allow_patterns=patterns,
            ignore_patterns=["*/*"], **bars,
        )  # fmt: skip
        return Path(found)

    try:
        folder = snapshot(FILES)
        wanted = weight_names(folder) if needs_weights else []
        if not all((folder / name).is_file() for name in wanted):
            folder = snapshot([*FILES, *wanted])
    except UserError:
        raise
    except errors.GatedRepoError:
        raise UserError(
            f"{where} is gated", hint="accept its terms on its page, then: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{where}: no such revision") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{where}: no such folder, and no such repository",
            hint="check the spelling; if it is private: hf auth login, or set HF_TOKEN",
        ) from None
    except errors.HFValidationError:
        raise UserError(f"{where}: no such folder, and not a Hugging Face id") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        is_offline = offline or hub.constants.HF_HUB_OFFLINE
        hint = (
            "run once without --offline and HF_HUB_OFFLINE"
            if is_offline
            else "check the network, or give a folder"
        )
        what = "is neither a folder nor in the local cache"
        if isinstance(error, errors.IncompleteSnapshotError):
            what = "is only partly in the local cache"
        raise UserError(f"{where} {what}", hint, code=3) from None
    except Exception as error:  # the client's own network errors come from more than one library
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(
            f"{where} could not be fetched: {reason}", "check network and disk", code=3
        ) from error
    return folder


def _quiet():
    """A progress bar class that shows nothing, for library use."""
    from huggingface_hub.utils import tqdm

    class Quiet(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "disable": True})

    return Quiet
