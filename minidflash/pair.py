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
    needs_weights=True, weights=None,
):  # fmt: skip
    """Open, read and check both checkpoints; nothing is left that a later step would find wrong with them.

    target, drafter: folder, Hugging Face id, "default"; drafter None, False or "none": none; left out: the
    embedded one for the embedded target, else none. revision, drafter_revision: of a Hugging Face id.
    weights: of the target, as open_checkpoint. progress: as load's. needs_weights: False: none are fetched,
    and a folder with config.json alone will do; what its weights are is then foretold. Returns a Pair.
    Errors: UserError. Source: engine.md 4.
    """
    from minidflash.weights import drafter_names, names, open_checkpoint

    from .tokenizer import open_tokenizer

    def look(spec, role, revision, weights=None):
        """The checkpoint as far as it is here: of one on the hub, that is its small files."""
        return open_checkpoint(spec, role, revision, offline, progress, False, weights)

    def whole(files, role, read):
        """(checkpoint, config), with its weights where they are needed."""
        if needs_weights and files.tensors is None:
            # Of the commit that was looked at, whatever its branch has become meanwhile.
            files = open_checkpoint(files.name, role, files.revision, offline, progress)
        return files, read(files)

    def target_of(files):
        return read_target(files.config, files.generation, files.tensors)

    def drafter_of(files):
        return read_drafter(files.config, files.tensors)

    files, found = look(target, "target", revision, weights), None
    if drafter is ...:
        drafter = "default" if target == "default" else None
    if not (drafter is None or drafter is False or is_word(drafter, "none")):
        found = look(drafter, "drafter", drafter_revision)
    config = target_of(files)
    if found:  # what is no pair is refused before weights are fetched, or read
        check_pair(config, drafter_of(found))
    files, config = whole(files, "target", target_of)
    bind = names.bind_target if files.tensors else names.foretell_target
    opened, own = Checked(files, config, bind(config, files.tensors)), None
    if found:
        found, draft_config = whole(found, "drafter", drafter_of)
        bind = drafter_names.bind_drafter if found.tensors else drafter_names.foretell_drafter
        own = Checked(found, draft_config, bind(draft_config, found.tensors))
        check_tables(config, own)
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
