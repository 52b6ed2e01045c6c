"""open_pair(): the one way to open a target and its drafter, for `load` and `info` alike.
No weight is read."""

from dataclasses import dataclass
from typing import Any

from .config import check_pair, read_drafter, read_target
from .errors import UserError
from .values import is_word, told


@dataclass
class Checked:
    """A checkpoint that is understood. files: weights.Checkpoint. config: its stack.
    bound: our name -> names.Bound."""

    files: Any
    config: Any
    bound: dict


def check_tables(target, drafter):
    """Refuse tables of a drafter's own that are not of the target's vocabulary. drafter: Checked.

    Errors: UserError.
    """
    for name in ("embed", "head"):
        if name in drafter.bound:
            (tensor,) = drafter.bound[name].parts
            rows, reduced = tensor.shape[0], drafter.config.draft_vocab
            if rows != target.vocab and not (name == "head" and reduced):
                what = f"drafter tensor {tensor.name} has {rows} rows"
                raise UserError(f"{what}, the target's vocabulary has {target.vocab}: not a pair")
            if name == "embed" and target.embed_scale != 1:
                what = f"drafter tensor {tensor.name}: the target's embedding is scaled"
                raise UserError(f"{what} by {target.embed_scale}, and nothing says whether this one is too")
    if drafter.config.draft_vocab > target.vocab:
        found = f"drafter d2t has {drafter.config.draft_vocab} ids"
        raise UserError(f"{found}, the target's vocabulary has {target.vocab}: not a pair")


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
    needs_weights=True,
):  # fmt: skip
    """Open, read and check both checkpoints; nothing is left that a later step would find wrong with them.

    target, drafter: folder, Hugging Face id, "default"; drafter None, False or "none": none; left out: the
    embedded one for the embedded target, else none. revision, drafter_revision: of a Hugging Face id.
    progress: as load's. needs_weights: False: a folder with config.json alone will do; what its weights are
    is then foretold. Returns a Pair. Errors: UserError. Source: engine.md 4.
    """
    from minidflash.weights import drafter_names, names, open_checkpoint

    from .tokenizer import open_tokenizer

    files = open_checkpoint(target, "target", revision, offline, progress, needs_weights)
    config = read_target(files.config, files.generation, files.tensors)
    bind = names.bind_target if files.tensors else names.foretell_target
    opened = Checked(files, config, bind(config, files.tensors))
    own = None
    if drafter is ...:
        drafter = "default" if target == "default" else None
    if not (drafter is None or drafter is False or is_word(drafter, "none")):
        found = open_checkpoint(drafter, "drafter", drafter_revision, offline, progress, needs_weights)
        draft_config = read_drafter(found.config, found.tensors)
        bind = drafter_names.bind_drafter if found.tensors else drafter_names.foretell_drafter
        own = Checked(found, draft_config, bind(draft_config, found.tensors))
        check_pair(config, draft_config)
        check_tables(config, own)
    return Pair(opened, own, open_tokenizer(files.folder))
