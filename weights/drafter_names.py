"""Which tensors make a drafter's weights, in the names of its layout; as names.py for targets."""

import re
from dataclasses import replace

import numpy as np
from minidflash.kernels.weight import TABLE, TILE
from minidflash.weights.fp8_names import with_fp8
from minidflash.weights.names import IDS, MARKS, Named, bind, foretell, layers_of, matrix, vector

from minidflash.drafter_layouts import LAYOUTS, SPECULATORS
from minidflash.errors import UserError

# A drafter's own tables, where its files have them; and what is there for training alone.
OWN_EMBED, OWN_HEAD = "embed_tokens.weight", "lm_head.weight"
TRAINING = re.compile(r"verifier_lm_head\.weight|verifier_norm\.weight")
FOREIGN = {"mask_embedding": "a mask embedding of its own"}


def drafter_table(config, tensors=()):
    """Of DFlash v1 (models.md 7.1), in the names of its layout. What injection needs of all layers is one
    weight: one pass injects into all.

    tensors: names that the files hold. Of those that need not be there: the drafter's own tables, d2t, t2d.
    """
    width, table = config.width, layers_of(config, "")
    for kind in ("kv", "k_norm", "kv_bias"):
        every = [name for name in table if name.endswith("." + kind)]
        if every:
            parts = [table[name] for name in every]
            rows = sum(part.shape[0] for part in parts)
            shape = (len(parts), rows // len(parts)) if kind == "k_norm" else (rows, *parts[0].shape[1:])
            table[kind] = Named(parts[0].role, shape, tuple(one for part in parts for one in part.sources))
            if kind != "kv" or is_sliced(config):
                table = {name: named for name, named in table.items() if name not in every}
    table = {
        "fc": matrix("fc.weight", rows=width, cols=len(config.taps) * width),
        "hidden_norm": vector("hidden_norm.weight", size=width),
        "norm": vector("norm.weight", size=width),
        **table,
        **own_tables(config, tensors),
    }
    spell = LAYOUTS[config.layout].tensor
    spelled = {
        ours: replace(named, sources=tuple((spell(name, tensors), shape) for name, shape in named.sources))
        for ours, named in table.items()
    }
    return with_fp8(spelled, config.fp8)


def own_tables(config, tensors):
    """The drafter's own embedding and head where the files have them; a reduced head and its ids where
    config.json says so, which must be there. models.md 7.7."""
    spell, table = LAYOUTS[config.layout].tensor, {}
    rows, reduced = config.vocab, config.draft_vocab
    if spell(OWN_EMBED) in tensors:
        table["embed"] = matrix(OWN_EMBED, rows=rows, cols=config.width, role=TABLE)
    if reduced:
        table["d2t"] = Named(IDS, (reduced,), (("d2t", (reduced,)),))
        if rows and "t2d" in tensors:
            table["t2d"] = Named(MARKS, (rows,), (("t2d", (rows,)),))
    if reduced or spell(OWN_HEAD) in tensors:
        table["head"] = matrix(OWN_HEAD, rows=reduced or rows, cols=config.width)
    return table


def is_sliced(config):
    """Whether a drafter's layer sees its rows of the k and v of all layers;
    odd toy sizes would cut a packed group."""
    return config.layers[0].kv_rows % TILE == 0


def bind_drafter(config, tensors):
    """Our name -> Bound of a drafter; it shares the target's embedding and head where it has none.

    config: DrafterConfig. Errors: UserError naming the tensor. Source: models.md 7.1 and 7.7, dflash.md 1.2,
    2.6.
    """
    spell = LAYOUTS[config.layout].tensor
    own = [name for name in map(spell, (OWN_EMBED, OWN_HEAD)) if name in tensors]
    if own and not config.vocab and not (config.draft_vocab and own == [spell(OWN_HEAD)]):
        raise UserError(f"drafter tensor {own[0]}: a table of its own needs vocab_size in the config")
    for name, what in FOREIGN.items():
        for found in (name, "model." + name):
            if found in tensors:
                raise UserError(f"drafter tensor {found}: a drafter with {what} is not built")
    fc = tensors.get("fc.weight")
    count = len(config.taps)
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != count * config.width:
        source = config.sources.get("taps", "target_layer_ids")
        found = f"drafter tensor fc.weight takes {fc.shape[1]} inputs"
        raise UserError(f"{found}, {source} names {count} taps of width {config.width}")
    is_theirs = config.layout == SPECULATORS
    return bind(drafter_table(config, tensors), tensors, "drafter", TRAINING if is_theirs else None)


def foretell_drafter(config, tensors=None):
    """The same of a drafter."""
    return foretell(drafter_table(config))


def target_ids(config, bound, vocab):
    """i32 ascending: the target's ids of a reduced head's rows.

    vocab: of the target. Errors: UserError where d2t does not rise inside the vocabulary, or t2d says
    otherwise. Source: models.md 7.7.
    """
    (part,) = bound["d2t"].parts
    given = part.array.astype(np.int64)
    names = given + np.arange(len(given)) if LAYOUTS[config.layout].ids == "offset" else given
    if names[0] < 0 or names[-1] >= vocab or (np.diff(names) < 1).any():
        found = f"drafter tensor {part.name} maps to ids {names.min()} to {names.max()}"
        raise UserError(f"{found}, need ascending ids from 0 to {vocab - 1}")
    if "t2d" in bound:
        (part,) = bound["t2d"].parts
        if not np.array_equal(np.flatnonzero(part.array), names):
            raise UserError(f"drafter tensor {part.name} marks other ids than d2t maps to")
    return names.astype(np.int32)
