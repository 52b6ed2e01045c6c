"""load(): checkpoints + tokenizer + ops -> Engine, a dataclass without behaviour."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .config import WIDEST, check_pair, read_drafter, read_target
from .drafter import draft
from .errors import UserError
from .fit import check_fit, fitting_context, weight_bytes
from .values import is_word, told, whole

ROLES = {"gate_up": "pairs", "embed": "table"}
ROPE_ROWS = 65536  # positions whose angles are held in float64 at a time


@dataclass
class Model:
    """A config with its weights on the backend. layers: one dict a layer. tables: cos, sin (P, J) in f32.

    ids: a target chooses ids below this: what its tokenizer knows, so that no padding row of a head is ever drawn.
    """

    config: Any
    weights: dict
    layers: list
    tables: tuple
    nbytes: int
    ids: int


@dataclass
class Engine:
    """A loaded target, perhaps with a drafter. One run at a time (`is_busy`); load two for two threads.

    ctx: positions a run may use; a drafter may be made for fewer, and drafted runs then end there. notes: what a user
    should know about the pair, one line each. state and programs are made by the first run. propose: the calls that fill
    state.drafts; a test may put a replay there. can_sample: a first draw has compiled what it needs.
    is_interrupted: set it while a run goes on, from a signal handler or another thread. The run ends with the round
    that is read next, whose finish_reason says "interrupted"; answers that have not begun are left out. Source:
    engine.md 6.
    """

    ops: Any
    target: Model
    drafter: Model | None
    tokenizer: Any
    stop_ids: frozenset
    target_name: str
    drafter_name: str | None
    ctx: int
    chunk: int
    load_s: float
    notes: list = field(default_factory=list)
    jit_s: float = 0.0
    propose: Any = draft
    state: Any = None
    state_shape: Any = None
    programs: dict = field(default_factory=dict)
    schedule: Any = None
    is_busy: bool = False
    is_interrupted: bool = False
    can_sample: bool = False


def load(
    target="default", drafter=..., backend="auto", activations=None, ctx=None, prefill_chunk=None, revision=None,
    offline=False, device=0, progress=None, warm=True, **backend_options,
):  # fmt: skip
    """Open a checkpoint pair and put it on a backend.

    target, drafter: folder, Hugging Face id, "default"; drafter None, False or "none" decodes plainly; left out it is the
    embedded one for the embedded target, else None. backend: as kernels.ops. ctx: positions a run may use, default what
    the target allows and memory holds. prefill_chunk: prompt tokens in one pass, default the backend's. progress: None or
    progress(label, done, total). warm: compile the kernels now, timed as jit_s, not in the first run. Returns an
    Engine. Errors: UserError, with .hint. Source: engine.md 4-6.
    """
    from minidflash.kernels import open_ops
    from minidflash.weights import names, open_checkpoint
    from minidflash.weights.manifest import start_check

    from .tokenizer import open_tokenizer

    begun = time.perf_counter()
    if drafter is ...:
        drafter = "default" if target == "default" else None
    if drafter is False or is_word(drafter, "none"):
        drafter = None
    prefill_chunk = None if prefill_chunk is None else whole("prefill_chunk", prefill_chunk, 1)
    ctx = None if ctx is None else whole("ctx", ctx, 1)
    # First: what cannot run here need not be fetched.
    ops = open_ops(backend, activations, device, **backend_options)
    files = open_checkpoint(target, "target", revision, offline, progress)
    config = read_target(files.config, files.generation, files.tensors)
    bound = names.bind_target(config, files.tensors)
    check_contents = start_check(files) if files.name == "default" else None  # while they are read
    draft_config = draft_bound = draft_files = None
    if drafter is not None:
        draft_files = open_checkpoint(drafter, "drafter", None, offline, progress)
        draft_config = read_drafter(draft_files.config, draft_files.tensors)
        draft_bound = names.bind_drafter(draft_config, draft_files.tensors)
        check_pair(config, draft_config)
    tokenizer = open_tokenizer(files.folder)
    limit = context_length(config, ctx)
    weights = weight_bytes(bound) + (weight_bytes(draft_bound) if draft_bound else 0)
    prefill_chunk = prefill_chunk or ops.prefill_chunk
    ctx = ctx or fitting_context(ops, config, draft_config, limit, weights, prefill_chunk)
    check_fit(ops, config, draft_config, ctx, weights, prefill_chunk)
    model = build(ops, config, bound, ctx + WIDEST, progress)
    stop_ids = frozenset(config.stop_ids)
    if tokenizer:
        model.ids = min(model.ids, max(1, tokenizer.vocab_size))
        stop_ids |= {i for i in tokenizer.stop_ids if i < config.vocab}  # no other is ever chosen
    if "head" not in model.weights:
        model.weights["head"] = model.weights["embed"]
    draft_model = None
    if draft_config is not None:
        draft_model = build(ops, draft_config, draft_bound, draft_config.context(ctx) + WIDEST, progress)
    if check_contents:
        check_contents()
    engine = Engine(
        ops=ops, target=model, drafter=draft_model, tokenizer=tokenizer, stop_ids=stop_ids,
        target_name=str(target), drafter_name=None if drafter is None else str(drafter), ctx=ctx,
        chunk=min(prefill_chunk, ctx), load_s=time.perf_counter() - begun, notes=notes_on(config, tokenizer),
    )  # fmt: skip
    if warm:
        from .warm import warm_up

        warm_up(engine, progress)
    return engine


def context_length(target, asked):
    """Positions a run may use: what was asked for, else all that the target was made for.

    Errors: UserError when more is asked for.
    """
    if asked is not None and not 1 <= asked <= target.max_positions:
        raise UserError(
            f"context of {told(asked)} positions: the target allows 1 to {target.max_positions}",
            "change --ctx",
        )
    return asked or target.max_positions


def notes_on(target, tokenizer):
    """Lines about a target and its tokenizer (or None) that a user should know."""
    if tokenizer is None or tokenizer.vocab_size <= target.vocab:
        return []
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    beyond = sorted((i, text) for text, i in vocabulary.items() if i >= target.vocab)
    first, text = beyond[0]
    ids = "an id" if len(beyond) == 1 else f"{len(beyond)} ids"
    which = "" if len(beyond) == 1 else "the first is "
    return [
        f"the tokenizer knows {ids} that the model has no row for, {which}{first} {told(text)}: refused when used"
    ]


def build(ops, config, bound, positions, progress=None):
    """Model from bound checkpoint tensors: matrices become Weights, vectors f32, one by one, pages let go.

    The k and v projections of all drafter layers lie stacked in one Weight (one pass injects all), and each layer
    sees its rows of it.
    """
    from minidflash.kernels.weight import TILE

    weights, layers, nbytes = {}, [{} for _ in range(config.layers)], 0
    stacked = [name for name in bound if "fc" in bound and name.endswith((".kv", ".k_norm", ".kv_bias"))]
    if stacked:
        bound = dict(bound)
        for kind in ("kv", "k_norm", "kv_bias"):
            parts = [bound.pop(name) for name in stacked if name.endswith("." + kind)]
            if parts:
                bound[kind] = [tensor for layer in parts for tensor in layer]
                if kind == "kv":
                    own = parts
    ops.read_ahead([parts for parts in bound.values() if len(parts[0].shape) == 2])
    for done, (name, parts) in enumerate(bound.items()):
        value = (
            ops.weight(parts, ROLES.get(name.rpartition(".")[2], "matrix"))
            if len(parts[0].shape) == 2
            else vector(ops, parts)
        )
        nbytes += value.nbytes
        where, short = weights, name
        if name.startswith("layers."):
            _, i, short = name.split(".", 2)
            where = layers[int(i)]
        where[short] = value
        if progress:
            progress("weights", done + 1, len(bound))
    if stacked:
        size, rows = config.head_size, 2 * config.kv_heads * config.head_size
        weights["k_norm"] = weights["k_norm"].reshape(config.layers, size)
        for i, layer in enumerate(layers):
            if rows % TILE == 0:
                layer["kv"] = weights["kv"].slice(i * rows, rows)
            else:  # its share cuts a packed group: a copy, which only odd toy sizes need
                layer["kv"] = ops.weight(own[i], "matrix")
                nbytes += layer["kv"].nbytes
            layer["k_norm"] = weights["k_norm"][i]
            if "kv_bias" in weights:
                layer["kv_bias"] = weights["kv_bias"][i * rows : (i + 1) * rows]
    return Model(config, weights, layers, rope_tables(ops, config, positions), nbytes, config.vocab)


def vector(ops, parts):
    """f32 vector of checkpoint tensors laid end to end (exact: bf16 and f16 widen)."""
    from minidflash.kernels.oracle import real

    values = np.concatenate([real(p.array).reshape(-1) for p in parts]).astype(np.float32)
    out = ops.array(values.shape, "f32")
    ops.upload(out, values)
    return out


def rope_tables(ops, config, positions):
    """cos and sin, (positions, J): the angle in f32 as the reference has it, its cosine in float64, rounded once."""
    frequencies, multiplier = config.rope.frequencies(config.head_size)
    tables = tuple(ops.array((positions, len(frequencies)), "f32") for _ in range(2))
    for first in range(0, positions, ROPE_ROWS):
        where = np.arange(first, min(first + ROPE_ROWS, positions), dtype=np.float32)
        angle = (where[:, None] * frequencies[None, :]).astype(np.float64)
        for function, out in zip((np.cos, np.sin), tables, strict=True):
            ops.upload(out[first : first + len(where)], (function(angle) * multiplier).astype(np.float32))
    return tables
