"""Rows of the table for a prompt: many token rows at once, so tensor cores are the bound and not the weights' bytes.

`Prefill(backend)` is the backend with these variants in front; ops.for_prefill makes an Ops of it, which loop.prefill
uses for every chunk, a chunk of one row included. A row's bits differ from the skinny family's (that cuts K), but not
with the rows beside it, the chunk, or the tile chosen here: every run of a prompt starts from the same caches.
Weights are the skinny family's, packed. A row declines, and the backend's own variant runs, on plain weights and where
K is not a multiple of 8; never because of the number of rows.
"""

from functools import partial

from ..table import ROWS
from ..weight import TILE
from .attend_fast import attend_prompt

COUNTERS = 4096  # as in kernels/gpu/__init__.py
STAGE_K = 64
# (tokens, row tiles of weights, stages) of a block; the bits are the same in all
TILES = (64, 4, 4), (64, 8, 4), (128, 8, 3), (256, 8, 4)


class Prefill:
    """A backend whose rows try the prefill variants first; everything else is the backend's own."""

    def __init__(self, backend):
        self._backend = backend
        for row in ROWS:
            setattr(self, row, partial(self._run, row))

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def _run(self, row, *args):
        function = PREFILL.get(row)
        if function is not None and self._backend.activations == "bf16" and function(self._backend, *args):
            self._backend.variants[row] = "prefill"
        else:
            getattr(self._backend, row)(*args)


def choose(sms, rows, outputs):
    """The entry of TILES: the largest that still gives each multiprocessor work, or the fullest last wave."""

    def waves(tile):
        tokens, tiles, _ = tile
        blocks = -(-rows // tokens) * -(-outputs // (TILE * tiles))
        area = tokens * tiles
        return (
            -(-blocks // sms) * area * (1.0 + 24 / (tokens + TILE * tiles))
        )  # small tiles read more for their sums

    return min(reversed(TILES), key=waves)


def launch(backend, file, kernel, rows, outputs, args, groups=None, tile=None):
    """One product. groups: function of the row tiles a block -> blocks over the outputs; tile: instead of choose's."""
    tokens, tiles, stages = tile or choose(backend.sms, rows, outputs)
    stage = 2 * STAGE_K * (tokens + TILE * tiles)
    finished = 4 * tokens * (TILE * tiles + 4)
    grid = -(-rows // tokens), groups(tiles) if groups else -(-outputs // (TILE * tiles))
    backend.launch(
        file, kernel, grid, tokens * tiles // 8, max(stages * stage, finished), args,
        {"TOKENS": tokens, "WEIGHT_TILES": tiles, "STAGES": stages}, dependent=getattr(backend, "dependent", False),
    )  # fmt: skip


def linear(backend, rows, w, x, scale, y, v=None, tile=None):
    """y (rows, w.rows + v.rows) f32 = scale (x [w; v]^T). x: bf16 rows, or workspace that holds them."""
    second = v.rows if v else 0
    args = [w.data, v.data if v else None, x, scale, y, rows, w.cols, w.rows, second]

    def groups(tiles):
        return sum(-(-count // (TILE * tiles)) for count in (w.rows, second))

    launch(backend, "linear_prefill.cu", "linear_prefill", rows, w.rows + second, args, groups, tile)


def normed(backend, x, norm, eps, work):
    """(bf16 rows of x times norm, their 1 / rms, what is free behind them), all in work."""
    rows, cols = x.shape
    half = rows * cols // 2
    laid, scale, free = work[COUNTERS:][:half], work[COUNTERS + half :][:rows], COUNTERS + half + rows
    args = [x, norm, eps, laid, scale, cols]
    dependent = getattr(backend, "dependent", False)
    backend.launch("linear_prefill.cu", "norm_prefill", rows, 256, 0, args, dependent=dependent)
    return laid, scale, work[-(-free // 4) * 4 :]


def fits(*weights):
    """Whether these kernels read the weights."""
    return all(w.layout == "packed" and w.cols % 8 == 0 for w in weights)


def qkv(backend, x, norm, eps, wq, wkv, q_bias, kv_bias, q_norm, k_norm, cos, sin, slot, pos, cache_k, cache_v, work,
        q):  # fmt: skip
    if not fits(wq, wkv):
        return None
    (rows, heads, size), (_, groups, room, _) = q.shape, cache_k.shape
    laid, scale, y = normed(backend, x, norm, eps, work)
    linear(backend, rows, wq, laid, scale, y, wkv)
    args = [y, eps, q_bias, kv_bias, q_norm, k_norm, cos, sin, slot, pos, cache_k, cache_v, q]
    args += [rows, heads, groups, room, size, cos.shape[1]]
    finish(backend, "qkv", rows * (heads + 2 * groups), args)
    return True


def linear_add(backend, a, w, bias, tap_row, tap_at, x, taps, work, tile=None):
    if not fits(w):
        return None
    columns = 0 if taps is None else taps.shape[1]
    args = [w.data, a, bias, tap_row, x, taps, len(a), w.rows, w.cols, tap_at, columns]
    launch(backend, "linear_add_prefill.cu", "linear_add_prefill", len(a), w.rows, args, tile=tile)
    return True


def gate_up(backend, x, norm, eps, w, work, h, tile=None):
    if w.layout != "packed pairs" or w.cols % 8:
        return None
    laid, scale, _ = normed(backend, x, norm, eps, work)
    args = [w.data, laid, scale, h, len(x), h.shape[1], w.cols]
    outputs = 2 * TILE // 2 * -(-h.shape[1] // (TILE // 2))  # the gate and up rows of whole tiles
    launch(backend, "gate_up_prefill.cu", "gate_up_prefill", len(x), outputs, args, tile=tile)
    return True


def fuse(backend, taps, w, norm, eps, work, f):
    if not fits(w):
        return None
    y = work[COUNTERS:]
    linear(backend, len(f), w, taps, None, y)
    defines = {"FROM": "float", "TO": "bf16"}
    backend.launch("norm.cu", "normalise", len(f), 128, 0, [y, None, norm, eps, f, len(norm)], defines)
    return True


def inject(backend, f, wkv, kv_bias, k_norm, eps, cos, sin, slot, pos, cache_k, cache_v, work):
    if not fits(wkv):
        return None
    rows, (layers, slots, groups, room, size) = len(f), cache_k.shape
    y = work[COUNTERS:]
    linear(backend, rows, wkv, f, None, y)
    args = [y, kv_bias, k_norm, eps, cos, sin, slot, pos, cache_k, cache_v]
    args += [rows, layers, slots, groups, room, size, cos.shape[1]]
    finish(backend, "inject", rows * layers * 2 * groups, args)
    return True


def finish(backend, name, warps, args):
    """The plain kernel of a row, once linear has summed: a warp a head and token."""
    backend.launch(f"{name}.cu", name, -(-warps * 32 // 128), 128, 0, args, {"ACTIVATION": "bf16"})


# row of the table -> function(backend, *args) -> True, or None to decline
PREFILL = {function.__name__: function for function in (qkv, linear_add, gate_up, fuse, inject)}
PREFILL["attend"] = attend_prompt
