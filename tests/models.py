"""Whole models for tests: golden pairs loaded once, a prompt's pass laid bare,
the reference's rounds clipped."""

import json
from functools import lru_cache

import ml_dtypes  # noqa: F401 with it NumPy knows bfloat16
import numpy as np
from safetensors.numpy import load_file

import minidflash as md
from minidflash import target as target_pass
from minidflash.state import make_state
from tests.compare import real
from tests.golden_files import golden

ROUNDS_TOKENS = 48  # every golden trace has this many new tokens


@lru_cache
def numbers(name):
    """golden.safetensors of a case, by tensor name."""
    return load_file(golden(name) / "golden.safetensors")


def target_of(pair):
    """Name of a pair's target case."""
    return json.loads((golden(pair) / "pair.json").read_text())["target"].removeprefix("../")


@lru_cache(maxsize=16)
def engine_of(target, drafter, backend, activations, **options):
    """An engine on golden cases by name; drafter None decodes plainly.
    Kept, since runs leave engines as new."""
    return md.load(
        str(golden(target)), drafter=None if drafter is None else str(golden(drafter)), backend=backend,
        activations=activations, warm=False, **options,
    )  # fmt: skip


def state_of(engine, count, slots=1):
    """A State for passes of up to `count` target rows whose taps are all layers, side by side."""
    config, ops = engine.target.config, engine.ops
    s = make_state(ops, config, None, 0, slots, min(engine.ctx, 512), 1, count)
    s.taps = ops.array((count, len(config.layers) * config.width), "A")
    return s


def last_keys(ops, array, total):
    """(first, A[G,n,K]): the keys first .. total - 1 of slot 0, as many as a cache of S rows still holds."""
    room = array.shape[2]
    first = max(0, total - room)
    return first, ops.download(array)[0][:, np.arange(first, total) % room]


def place(ops, rows, ids, first, slot=0):
    """Address consecutive target rows: token ids at positions first, first + 1, ..."""
    pos = np.arange(first, first + len(ids), dtype=np.int32)
    columns = {"ids": ids, "slot": np.full(len(ids), slot), "pos": pos, "at": pos, "begin": pos,
               "end": pos + 1,
               "tap_row": np.arange(len(ids))}  # fmt: skip
    for name, values in columns.items():
        ops.upload(getattr(rows, name), np.asarray(values, np.int32))


def forward(engine, s, ids, first=0):
    """One pass over ids; returns (hidden, rows): float64 (T, layers, D), the stream after each layer."""
    config, ops = engine.target.config, engine.ops
    rows = s.rows.first(len(ids))
    place(ops, rows, ids, first)
    target_pass.forward(ops, engine.target, s, rows, tuple(range(len(config.layers))))
    return real(ops.download(s.taps)[: len(ids)]).reshape(len(ids), len(config.layers), config.width), rows


def logits_of(engine, rows):
    """The head's logits of rows whose stream is final: f32 (T, V)."""
    ops, config, model = engine.ops, engine.target.config, engine.target
    count = len(rows.ids)
    out = ops.array((count, config.vocab), "f32")
    work = ops.array((ops.backend.work_size(count, config.width, config.vocab),), "f32")
    ops.head_logits(rows.x, model.weights["norm"], config.eps, model.head, *config.curve, work, out)
    return ops.download(out)


def clipped(lengths, total):
    """The reference's rounds as we count them: cut where the budget ends (golden README,
    "Comparing rounds")."""
    rounds, left = [], total - 1
    for gained in lengths:
        if left <= 0:
            break
        rounds.append(min(int(gained), left))
        left -= rounds[-1]
    return rounds


def relative(got, want):
    """Largest |error| over the RMS of its row."""
    rms = np.sqrt((np.asarray(want, np.float64) ** 2).mean(-1, keepdims=True))
    return float((np.abs(real(got) - want) / rms).max())
