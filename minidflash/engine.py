"""load(): checkpoints + tokenizer + ops -> Engine, a dataclass without behaviour."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from .drafter import draft
from .fit import make_plan, positions_of
from .pair import check_kinds, open_pair, weights_for
from .rope import rope_tables
from .values import whole


@dataclass
class Model:
    """A stack with its weights on the backend.

    config: a Stack. weights: by our names; layers: one dict a layer. embed, head: the tables it reads ids
    from, times embed_scale, and ranks them with; a drafter's are its target's. tables: (cos, sin) of each
    layer, (P, J) f32. ids: it chooses ids below this: what the target's tokenizer knows, so that no padding
    row of a head is ever drawn. names: i32, the target's ids of a reduced head's rows, of which `ids` counts
    the first ones.
    """

    config: Any
    weights: dict
    layers: list
    tables: list
    embed: Any = None
    embed_scale: float = 1.0
    head: Any = None
    ids: int = 0
    names: Any = None
    nbytes: int = 0


@dataclass
class Engine:
    """A loaded target, perhaps with a drafter. One run at a time (`is_busy`); load two for two threads.

    ctx: positions a run may use; a drafter may be made for fewer, and drafted runs then end there. notes:
    what a user should know about the pair, one line each. state and programs are made by the first run.
    schedule, shared: what rounds cost, of a text alone and side by side. draft: the calls that fill
    state.drafts; a test may put a replay there.
    can_sample: a first draw has compiled what it needs. origins: "target", and "drafter" where there is one
    -> its weights.Checkpoint without tensors. weights: how the target's are kept, as pair.weights_for says.
    is_interrupted: set it while a run goes on, from a signal handler or another thread. The run ends with the
    round that is read next, whose finish_reason says "interrupted"; answers that have not begun are left out.
    Source: engine.md 6.
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
    table_bytes: int = 0
    notes: list = field(default_factory=list)
    jit_s: float = 0.0
    draft: Any = draft
    state: Any = None
    state_shape: Any = None
    programs: dict = field(default_factory=dict)
    schedule: Any = None
    shared: Any = None
    is_busy: bool = False
    is_interrupted: bool = False
    can_sample: bool = False
    origins: dict = field(default_factory=dict)
    weights: str | None = None


def load(
    target="default", drafter=..., backend="auto", activations=None, ctx=None, prefill_chunk=None,
    revision=None, drafter_revision=None, offline=False, device=0, progress=None, warm=True, weights=None,
    **backend_options,
):  # fmt: skip
    """Open a checkpoint pair and put it on a backend.

    target, drafter, revision, drafter_revision: as pair.open_pair. backend: as kernels.ops. ctx: positions a
    run may use, default what the target allows and memory holds. prefill_chunk: prompt tokens in one pass,
    default the backend's. weights: of the default target and of GGUF files, "file": their own bytes, or
    "bf16"; default the former on the CPU, for the default target bf16 on a GPU. progress: None or
    progress(label, done, total). warm: compile the kernels now, timed as jit_s, not in the first run.
    Returns an Engine. Errors: UserError, with .hint. Source: engine.md 4-6.
    """
    from minidflash.kernels import open_ops
    from minidflash.weights.drafter_names import target_ids
    from minidflash.weights.manifest import start_check

    begun = time.perf_counter()
    prefill_chunk = None if prefill_chunk is None else whole("prefill_chunk", prefill_chunk, 1)
    ctx = None if ctx is None else whole("ctx", ctx, 1)
    # First: what cannot run here need not be fetched.
    ops = open_ops(backend, activations, device, **backend_options)
    weights = weights_for(ops, target, weights)
    pair = open_pair(target, drafter, revision, drafter_revision, offline, progress, weights=weights)
    check_kinds(ops, pair)
    files, tokenizer = pair.target.files, pair.tokenizer
    check_contents = start_check(files) if files.name == "default" else None  # while they are read
    plan = make_plan(ops, pair, ctx, prefill_chunk)
    config, draft_config = pair.configs
    tables = {
        rotation: rope_tables(ops, *rotation, count)
        for rotation, count in positions_of(config, draft_config, plan.ctx).items()
    }
    model = build(ops, config, pair.target.bound, tables, progress)
    model.embed = model.weights["embed"]
    model.head = model.weights.get("head", model.embed)
    model.embed_scale = in_type(config.embed_scale, pair.target.bound["embed"].parts[0].dtype)
    model.ids, stop_ids = config.vocab, frozenset(config.stop_ids)
    if tokenizer:
        model.ids = min(model.ids, max(1, tokenizer.vocab_size))
        stop_ids |= {i for i in tokenizer.stop_ids if i < config.vocab}  # no other is ever chosen
    draft_model = None
    if draft_config is not None:
        draft_model = build(ops, draft_config, pair.drafter.bound, tables, progress)
        own = draft_model.weights
        draft_model.embed, draft_model.head = own.get("embed", model.embed), own.get("head", model.head)
        draft_model.embed_scale = model.embed_scale * draft_config.embed_scale
        draft_model.ids = min(draft_config.vocab or model.ids, model.ids)
        if draft_config.draft_vocab:
            names = target_ids(draft_config, pair.drafter.bound, config.vocab)
            draft_model.ids, draft_model.names = int((names < model.ids).sum()), ops.array(names.shape, "i32")
            ops.upload(draft_model.names, names)
    if check_contents:
        check_contents()
    engine = Engine(
        ops=ops, target=model, drafter=draft_model, tokenizer=tokenizer, stop_ids=stop_ids,
        target_name=files.name, drafter_name=pair.drafter and pair.drafter.files.name, ctx=plan.ctx,
        chunk=plan.chunk, table_bytes=plan.memory["rope_tables"], load_s=time.perf_counter() - begun,
        notes=pair.notes, origins=origins_of(pair), weights=weights,
    )  # fmt: skip
    if warm:
        from .warm import warm_up

        warm_up(engine, progress)
    return engine


def origins_of(pair):
    """Where a pair's checkpoints come from, without their tensors."""
    found = {"target": pair.target, "drafter": pair.drafter}
    return {role: replace(one.files, tensors=None) for role, one in found.items() if one}


def build(ops, config, bound, tables, progress=None):
    """Model from bound tensors: matrices become Weights, vectors f32, one by one, pages let go.

    tables: (rope, rotary width) -> (cos, sin). A drafter's layers see their rows of what injection needs of
    all layers.
    """
    from minidflash.kernels.weight import VECTOR
    from minidflash.weights.names import IDS, MARKS

    model = Model(config, {}, [{} for _ in config.layers], [tables[kind] for kind in config.rotations])
    bound = {name: one for name, one in bound.items() if one.role not in (IDS, MARKS)}
    ops.read_ahead([one.parts for one in bound.values() if one.role != VECTOR])
    for done, (name, one) in enumerate(bound.items()):
        where, short = model.weights, name
        if name.startswith("layers."):
            _, i, short = name.split(".", 2)
            where = model.layers[int(i)]
        where[short] = (
            vector(ops, one) if one.role == VECTOR else ops.weight(one.parts, one.role, experts_of(one))
        )
        model.nbytes += where[short].nbytes
        if progress:
            progress("weights", done + 1, len(bound))
    for i, layer in enumerate(model.layers):
        rows = config.layers[i].kv_rows
        if config.layers[i].v_norm:  # a norm without weights
            layer["v_norm"] = ops.array((config.layers[i].head_size,), "f32")
            ops.upload(layer["v_norm"], np.ones(config.layers[i].head_size, np.float32))
        if "k_norm" in model.weights:
            layer["k_norm"] = model.weights["k_norm"][i]
        if "kv_bias" in model.weights:
            layer["kv_bias"] = model.weights["kv_bias"][i * rows : (i + 1) * rows]
        if "kv" not in layer:
            layer["kv"] = model.weights["kv"].slice(i * rows, rows)
    return model


def in_type(number, dtype):
    """A number rounded to a checkpoint's BF16, F16 or F32 (MXFP4: not at all), as a float."""
    kinds = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}
    return float(np.asarray(number, kinds.get(dtype, np.float32)))


def experts_of(bound):
    """How many experts a weight belongs to; 0: it is a matrix."""
    return bound.shape[0] if len(bound.shape) == 3 else 0


def vector(ops, bound):
    """f32 array of a bound weight's tensors laid end to end (exact: bf16 and f16 widen)."""
    from minidflash.kernels.oracle import real

    values = np.concatenate([real(part.array).reshape(-1) for part in bound.parts]).astype(np.float32)
    out = ops.array(bound.shape, "f32")
    ops.upload(out, values.reshape(bound.shape))
    return out
