"""open_pair(): the one way to open a target and its drafter, for `load` and `info` alike.
No weight is read."""

from dataclasses import dataclass
from typing import Any

from .config import check_pair, read_drafter, read_target
from .errors import UserError
from .values import is_word, told

WIDENS_BLOCKS = ("numba", "oracle")  # backends whose products take the blocks of GGUF files


@dataclass
class Checked:
    """A checkpoint that is understood. files: weights.Checkpoint. config: its stack.
    bound: our name -> names.Bound."""

    files: Any
    config: Any
    bound: dict


@dataclass
class Pair:
    """A target, its drafter or None, and the target's Tokenizer or None."""

    target: Checked
    drafter: Checked | None
    tokenizer: Any

    @property
    def configs(self):
        """(target's, drafter's or None)."""
        return self.target.config, self.drafter and self.drafter.config

    @property
    def weights(self):
        """Bytes of all weights as they are kept."""
        checked = [self.target, *([self.drafter] if self.drafter else [])]
        return sum(bound.nbytes for one in checked for bound in one.bound.values())

    @property
    def notes(self):
        """Lines about the target and its tokenizer that a user should know."""
        tokenizer, vocab = self.tokenizer, self.target.config.vocab
        if tokenizer is None or tokenizer.vocab_size <= vocab:
            return []
        vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
        beyond = sorted((i, text) for text, i in vocabulary.items() if i >= vocab)
        first, text = beyond[0]
        ids = "an id" if len(beyond) == 1 else f"{len(beyond)} ids"
        which = "" if len(beyond) == 1 else "the first is "
        unknown = f"{ids} that the model has no row for, {which}{first} {told(text)}"
        return [f"the tokenizer knows {unknown}: refused when used"]


def open_pair(
    target="default", drafter=..., revision=None, drafter_revision=None, offline=False, progress=None,
    needs_weights=True, weights=None,
):  # fmt: skip
    """Open, read and check both checkpoints; nothing is left that a later step would find wrong with them.

    target, drafter: folder, Hugging Face id, "default"; drafter None, False or "none": none; left out: the
    embedded one for the embedded target, else none. revision, drafter_revision: of a Hugging Face id.
    weights: of the target, as open_checkpoint. progress: as load's. needs_weights: False: a folder with
    config.json alone will do; what its weights are is then foretold. Returns a Pair.
    Errors: UserError. Source: engine.md 4.
    """
    from minidflash.weights import names, open_checkpoint

    from .tokenizer import open_tokenizer

    files = open_checkpoint(target, "target", revision, offline, progress, needs_weights, weights)
    config = read_target(files.config, files.generation, files.tensors)
    bind = names.bind_target if files.tensors else names.foretell_target
    opened = Checked(files, config, bind(config, files.tensors))
    own = None
    if drafter is ...:
        drafter = "default" if target == "default" else None
    if not (drafter is None or drafter is False or is_word(drafter, "none")):
        found = open_checkpoint(drafter, "drafter", drafter_revision, offline, progress, needs_weights)
        draft_config = read_drafter(found.config, found.tensors)
        bind = names.bind_drafter if found.tensors else names.foretell_drafter
        own = Checked(found, draft_config, bind(draft_config, found.tensors))
        check_pair(config, draft_config)
    return Pair(opened, own, open_tokenizer(files.folder, files.texts))


def weights_for(ops, target, asked=None):
    """How the target's weights are kept: what was asked for, or what suits the backend.

    On the CPU the default target's own bytes are read faster than bf16 (bench/NOTES.md); GPU kernels do not
    widen blocks of GGUF files. Returns "bf16", "file", or None: as they are. Errors: UserError.
    """
    if asked not in (None, "bf16", "file"):
        raise UserError(f"weights {told(asked)} not known", hint="use bf16 or file")
    if asked is None and target == "default":
        return "file" if ops.name in WIDENS_BLOCKS else "bf16"
    return asked


def check_kinds(ops, pair):
    """Refuse blocks of a GGUF file where no kernel widens them. Errors: UserError, code 3."""
    from minidflash.kernels.blocks import KINDS

    if ops.name in WIDENS_BLOCKS:
        return
    for checked in (pair.target, pair.drafter):
        for bound in checked.bound.values() if checked else ():
            if bound.dtype in KINDS:
                found = f"{checked.files.name} holds {bound.dtype.upper()} blocks"
                hint = "--weights bf16 rounds them, or take the bf16 checkpoint, or --backend numba"
                raise UserError(f"{found}, which the {ops.name} backend does not widen", hint, code=3)
