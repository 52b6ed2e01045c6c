"""Rows of the table for a prompt: many token rows at once, so tensor cores are the bound and not the weights'
bytes.

`Prefill(backend)` is the backend with these variants in front; ops.for_prefill makes an Ops of it, which
loop.prefill uses for every chunk, a chunk of one row included. A row's bits differ from the skinny family's
(that cuts K), but not with the rows beside it, the chunk, or the tile chosen here: every run of a prompt
starts from the same caches. Weights are the skinny family's, packed. A row declines, and the backend's own
variant runs, on plain weights and where K is not a multiple of 8; never because of the number of rows.
"""

from functools import partial

from ..table import ROWS
from ..weight import TILE
from . import COUNTERS, HAS_WGMMA
from .attend_fast import attend_prompt
from .packed import are_packed, fits_a_block

STAGE_K = 64
HEADS = {64: 8, 128: 8, 256: 4, 512: 2}  # head size -> heads of a row by one warp of qkv_prefill.cu
# (tokens, row tiles of weights, stages) of a block; the bits are the same in all of a frame
TILES = {
    "mma": ((64, 4, 4), (64, 8, 4), (128, 8, 3), (256, 8, 4)),
    "wgmma": ((64, 4, 4), (64, 8, 4), (128, 8, 6), (256, 8, 4)),
}
# Blocks of a tile that a multiprocessor holds, and what they take at K = 4096:
# us on an H100, of 16 to 2,048 rows.
WAVES = {(64, 4, 4): (3, 36), (64, 8, 4): (2, 38), (128, 8, 6): (1, 37), (256, 8, 4): (1, 47)}
FRAME = "wgmma"  # where a card has both


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


def frame_of(backend):
    """Which of prefill.cuh's frames: wgmma is sm_90a's alone. A backend's own `prefill_frame` goes first."""
    return backend.prefill_frame or (FRAME if backend.device.arch in HAS_WGMMA else "mma")


def choose(sms, rows, outputs, frame=FRAME, kind="bf16"):
    """The entry of TILES that ends first: waves of its blocks times what one takes."""

    def cost(tile):
        tokens, tiles, _ = tile
        blocks = -(-rows // tokens) * -(-outputs // (TILE * tiles))
        if frame == "wgmma":
            resident, wave = WAVES[tile]
            return -(-blocks // (resident * sms)) * wave
        # small tiles read more for their sums
        return -(-blocks // sms) * tokens * tiles * (1.0 + 24 / (tokens + TILE * tiles))

    return min(reversed(tiles_for(frame, kind)), key=cost)


def tiles_for(frame, kind):
    """Those of TILES whose sums registers hold: with FP8, wgmma's of 128 k are apart from all before."""
    most = 128 if (frame, kind) == ("wgmma", "fp8") else 256
    return [tile for tile in TILES[frame] if tile[0] <= most]


def launch(backend, file, kernel, rows, outputs, args, w, groups=None, tile=None, defines=None):
    """One product with w. groups: function of the row tiles a block -> blocks over the outputs;
    tile: instead of choose's.

    defines: of the kernel's own, besides the frame's.
    """
    frame = frame_of(backend)
    tokens, tiles, stages = tile = tile or choose(backend.sms, rows, outputs, frame, w.dtype)
    stage = STAGE_K * (2 * tokens + (1 if w.dtype == "fp8" else 2) * TILE * tiles)
    shared = max(stages * stage, 4 * tokens * (TILE * tiles + 4))
    count = groups(tiles) if groups else -(-outputs // (TILE * tiles))
    threads = tokens * tiles // 8
    if frame == "wgmma":
        threads, shared = 32 * tiles + 128, shared + 16 * stages
    backend.launch(
        file, kernel, (-(-rows // tokens), count), threads, shared, args,
        defines_of(frame, tile, w.dtype) | (defines or {}), dependent=backend.dependent,
    )  # fmt: skip


def defines_of(frame, tile, kind="bf16"):
    """-D of a kernel."""
    names = dict(zip(("TOKENS", "WEIGHT_TILES", "STAGES"), tile, strict=True))
    return names | ({"WGMMA": 1} if frame == "wgmma" else {}) | ({"FP8": 1} if kind == "fp8" else {})


def product(backend, rows, w, x, scale, y, v=None, tile=None, bias=None, target="float"):
    """y (rows, w.rows + v.rows) = scale (x [w; v]^T). x: bf16 rows as `tokens` gives them.

    target: type of y; rounded to bf16, y gets the bias too.
    """
    second = v.rows if v else 0
    args = [w.data, v.data if v else None, x, scale, y, rows, w.cols, w.rows, second, bias]

    def groups(tiles):
        return sum(-(-count // (TILE * tiles)) for count in (w.rows, second))

    outputs, defines = w.rows + second, {"OUT": target}
    launch(backend, "linear_prefill.cu", "linear_prefill", rows, outputs, args, w, groups, tile, defines)


def laid_size(rows, cols):
    """f32 that hold rows as lay_prefill.cu lays them, and their scale."""
    return -(-rows // 8) * 8 * -(-cols // STAGE_K) * STAGE_K // 2 + -(-rows // 4) * 4


def work_size(rows, cols, outputs):
    """f32 behind the counters for a product."""
    return laid_size(rows, cols) + rows * outputs


def tokens(backend, x, norm, eps, work):
    """(x as the frame reads it, 1 / rms of its rows, what is free behind them), in work as far as need be.

    norm: None for x as it is, without a scale.
    """
    (rows, cols), is_laid = x.shape, frame_of(backend) == "wgmma"
    if norm is None and not is_laid:
        return x, None, work[COUNTERS:]
    size = laid_size(rows, cols)
    place = COUNTERS + size - -(-rows // 4) * 4
    laid, scale = work[COUNTERS:place], None if norm is None else work[place : place + rows]
    if is_laid:
        args = [x, norm, eps, laid, scale, rows, cols]
        backend.launch("lay_prefill.cu", "lay_prefill", rows, 128, 0, args, dependent=backend.dependent)
    else:
        args = [x, norm, eps, laid, scale, cols]
        backend.launch("linear_prefill.cu", "norm_prefill", rows, 256, 0, args, dependent=backend.dependent)
    return laid, scale, work[COUNTERS + size :]


def fits(*weights):
    """Whether these kernels read the weights."""
    return are_packed(*weights) and weights[0].cols % 8 == 0


def qkv(backend, x, norm, eps, wq, wkv, q_bias, kv_bias, q_norm, k_norm, v_norm, cos, sin, slot, pos, at,
        cache_k, cache_v, work, q):  # fmt: skip
    if not fits(wq, wkv):
        return None
    (rows, heads, size), (_, groups, room, _) = q.shape, cache_k.shape
    laid, scale, y = tokens(backend, x, norm, eps, work)
    product(backend, rows, wq, laid, scale, y, wkv)
    args = [y, eps, q_bias, kv_bias, q_norm, k_norm, v_norm, cos, sin, slot, pos, at, cache_k, cache_v, q]
    args += [rows, heads, groups, wkv.rows // size - groups, room, size, cos.shape[1]]
    if size in HEADS and cos.shape[1] == size // 2:
        warps = rows * -(-(heads + 2 * groups) // HEADS[size])
        backend.launch(
            "qkv_prefill.cu", "qkv_prefill", -(-warps // 4), 128, 0, args[:-2],
            {"HEAD": size, "HEADS": HEADS[size]},
            dependent=backend.dependent
        )  # fmt: skip
    else:
        finish(backend, "qkv", rows * (heads + 2 * groups), args)
    return True


def linear(backend, a, w, bias, work, y):
    if not fits(w):
        return None
    laid, _, _ = tokens(backend, a, None, 0.0, work)
    product(backend, len(a), w, laid, None, y, bias=bias, target="bf16")
    return True


def linear_add(backend, a, w, bias, norm, eps, scale, tap_row, tap_at, x, taps, work, tile=None):
    is_ended = norm is not None or scale is not None
    if not fits(w) or (is_ended and not fits_a_block(w.rows)):
        return None
    columns = 0 if taps is None else taps.shape[1]
    laid, _, y = tokens(backend, a, None, 0.0, work)
    if is_ended:
        product(backend, len(a), w, laid, None, y, tile=tile)
        tap_row = None if taps is None else tap_row
        args = [y, bias, norm, eps, scale, tap_row, x, taps, w.rows, tap_at, columns]
        backend.launch("end_rows.cu", "end_rows", len(a), 256, 0, args, dependent=backend.dependent)
        return True
    args = [w.data, laid, bias, tap_row, x, taps, len(a), w.rows, w.cols, tap_at, columns]
    launch(backend, "linear_add_prefill.cu", "linear_add_prefill", len(a), w.rows, args, w, tile=tile)
    return True


def gate_up(backend, x, norm, eps, act, w, work, h, tile=None):
    if w.layout != "packed pairs" or w.cols % 8:
        return None
    laid, scale, _ = tokens(backend, x, norm, eps, work)
    args = [w.data, laid, scale, h, len(x), h.shape[1], w.cols]
    outputs = 2 * TILE // 2 * -(-h.shape[1] // (TILE // 2))  # the gate and up rows of whole tiles
    defines = {"NORMED": int(norm is not None), "ACT": act}
    launch(
        backend, "gate_up_prefill.cu", "gate_up_prefill", len(x), outputs, args, w, tile=tile, defines=defines
    )
    return True


def fuse(backend, taps, w, norm, eps, work, f):
    if not fits(w):
        return None
    laid, _, y = tokens(backend, taps, None, 0.0, work)
    product(backend, len(f), w, laid, None, y)
    defines = {"FROM": "float", "TO": "bf16"}
    backend.launch("norm.cu", "normalise", len(f), 128, 0, [y, None, norm, eps, f, len(norm)], defines)
    return True


def inject(backend, f, wkv, kv_bias, k_norm, eps, cos, sin, slot, pos, at, cache_k, cache_v, work):
    if not fits(wkv):
        return None
    rows, (layers, slots, groups, room, size) = len(f), cache_k.shape
    laid, _, y = tokens(backend, f, None, 0.0, work)
    product(backend, rows, wkv, laid, None, y)
    args = [y, kv_bias, k_norm, eps, cos, sin, slot, pos, at, cache_k, cache_v]
    args += [rows, layers, slots, groups, room, size, cos.shape[1]]
    finish(backend, "inject", rows * layers * 2 * groups, args)
    return True


def finish(backend, name, warps, args):
    """The plain kernel of a row, once linear has summed: a warp a head and token."""
    backend.launch(f"{name}.cu", name, -(-warps * 32 // 128), 128, 0, args, {"ACTIVATION": "bf16"})


# row of the table -> function(backend, *args) -> True, or None to decline
PREFILL = {function.__name__: function for function in (qkv, linear, linear_add, gate_up, fuse, inject)}
PREFILL["attend"] = attend_prompt
