"""Fast variants of the rows: bf16 activations, bf16 weights packed in fragment order.
The hook of the plain backend.

What a fast file offers is entered here; the backend (kernels/gpu/__init__.py) asks in this order:

* `pack(backend, parts, role, experts)` when a weight is made. `pack` returns Weight(layout="packed") or
  None: then the weight stays plain, (rows, cols). It is only asked when all parts are FP8, or when
  activations are bf16 and all parts are BF16 or all MXFP4. Inside, `backend.raw(parts)` is a device array
  u16 (rows, cols) with the parts stacked, in a temporary that the next `raw` may reuse: the stream's order
  is enough, nothing waits. The packed array comes from `backend.empty(shape, np.uint16)`; its first axis
  counts groups of 16 rows, so that Weight.slice works.
* `FAST[row](backend, *args)` when a row is called, args in table order. It launches through
  `backend.launch` and returns True, or returns None before any launch to decline; the plain variant then
  runs. It must decline weights whose layout is plain. What it decides may depend on shapes, never on T
  alone: row r has the same bits for every T.
* `work_size(backend, rows, cols, outputs)`: f32 that fast variants need in `work` behind the counters,
  for a product of `rows` token rows with `cols` inputs and `outputs` outputs.

`work` begins with COUNTERS f32 slots that are u32 counters: zero when allocated, left at zero by every
kernel. What follows holds anything. backend.variants[row] says which variant ran last, "fast" or "plain".

backend.launch(file, kernel, grid, block, shared, args, defines=None, cluster=1, dependent=False)
takes arrays for pointers (a slice of an array is a shifted pointer) and numbers for scalars. While a graph is
being prepared it only compiles and loads, so a row function must not depend on what kernels computed.
backend.sms is the number of multiprocessors.
"""

from dataclasses import replace

import numpy as np

from ..weight import MATRIX, PAIRS, TABLE, TILE, Weight
from . import COUNTERS, attend_fast, experts, experts_few, fp8, plain, split, wide
from .packed import PAIRED, are_packed, fits_a_block, has_room, head_size_define, rows_of, tiles_of


def take(backend, row, args):
    """True if a fast variant of `row` took the call."""
    function = FAST.get(row) if backend.activations == "bf16" else None
    return function is not None and bool(function(backend, *args))


def pack(backend, parts, role, count=0):
    """`Weight` in fragment order from checkpoint tensors stacked along rows, of `count` experts, or None: it
    stays plain."""
    if all(part.dtype == "FP8" for part in parts):
        return fp8.pack(backend, parts, role, count)
    if count:
        return experts.pack(backend, parts, role, count)
    if role not in (MATRIX, PAIRS, TABLE) or any(part.dtype != "BF16" for part in parts):
        return None
    raw = backend.raw(parts)
    rows, cols = raw.shape
    tiles, half, stride, sizes = split.tiling(rows, role == PAIRS)
    chunks = -(-cols // split.CHUNK)
    data = backend.empty((tiles, chunks, 2, 32, 8), np.uint16)
    args = [raw, raw[half:], data, *sizes, stride, tiles, cols, 0]
    backend.launch("pack.cu", "pack", -(-tiles * chunks * 32 // 256), 256, 0, args)
    return Weight((rows, cols), "bf16", PAIRED if role == PAIRS else "packed", (data,))


def work_size(backend, rows, cols, outputs):
    """f32 elements of workspace, counters not counted. outputs 0: no product, attention alone."""
    pieces = max(attend_fast.work_size(backend), experts.work_size(rows, outputs))
    if not outputs:
        return pieces
    cuts = fp8.every_cut(outputs, cols, backend.sms)
    tiles = -(-outputs // TILE) + 2  # two matrices round up twice
    # Rows that are normed as wholes, and their squares a tile; bests of head and their margins.
    finished = split.ROWS * max(outputs + tiles, 3 * 16 * backend.sms)
    return max(pieces, *(cut.work(tiles) + finished for cut in cuts))


def defines_of(cut, token_tiles, w=None):
    """-D of a kernel of the skinny family. How many chunks are on their way does not show in the bits.

    w: the weight, where it may be FP8; without one, nothing is known of K.
    """
    # The sums of 32 rows take the registers of weights under way.
    is_most = token_tiles == split.TOKEN_TILES[-1]
    chunks, ahead = (3, 1) if is_most and cut.chunks * cut.ahead > 3 else (cut.chunks, cut.ahead)
    found = {
        "TOKEN_TILES": token_tiles, "STREAM_WARPS": cut.warps, "STEP_CHUNKS": chunks, "STEPS_AHEAD": ahead,
        "BLOCKS_PER_SM": cut.resident, "FINISH_WARPS": cut.finishers, "CLUSTER_MERGE": int(cut.cluster),
        "EARLY_LAUNCH": int(cut.early), "ASKED_CHUNKS": cut.asked,
    }  # fmt: skip
    if w is not None and w.dtype == "fp8":
        found |= fp8.defines(cut, chunks, ahead, w.cols)
    if w is not None and not is_most:  # of 32 rows, chunks side by side take more registers than there are
        steps, rest = divmod(-(-w.cols // split.CHUNK), cut.slices * cut.warps * found["STEP_CHUNKS"])
        found["EVEN_STEPS"] = 0 if rest else steps
    return found


def launch(backend, file, kernel, tiles, cut, w, rows, args, is_normed=False, together=False, defines=None):
    """One launch for each pass of rows. args: function of (slice of the rows, their number) -> the kernel's.

    w: the weight, or one of two alike.
    is_normed: the kernel norms its token rows. together: blocks wait for each other,
    so the card must hold all of them.
    defines: of the kernel's own, besides its cut's.
    """
    cols = w.cols
    for here, count in cut.passes(cols, rows, is_normed):
        token_tiles = cut.token_tiles(count)
        grid, shared = cut.grid(tiles, backend.sms), cut.shared(cols, token_tiles, is_normed)
        every_define = defines_of(cut, token_tiles, w) | (defines or {})
        if together:  # fewer blocks have the same bits
            function = backend.device.function(file, kernel, every_define)
            most = backend.device.holds(function, cut.threads, shared, cut.cluster_blocks)
            grid = min(grid, most // cut.slices * cut.slices)
            if not grid:
                raise RuntimeError(
                    f"{kernel}: the card holds {most} blocks, {cut.slices} wait for each other"
                )
        backend.launch(
            file, kernel, grid, cut.threads, shared, args(here, count), every_define,
            cluster=cut.cluster_blocks, dependent=backend.dependent,
        )  # fmt: skip
    return True


def embed(backend, ids, table, scale, x):
    if table.layout != "packed":
        return None
    args = [ids, table.data, x, scale, x.shape[1]]
    backend.launch("embed_fast.cu", "embed_fast", len(ids), 128, 0, args, dependent=backend.dependent)
    return True


def qkv(backend, x, norm, eps, wq, wkv, q_bias, kv_bias, q_norm, k_norm, v_norm, cos, sin, slot, pos, at,
        cache_k, cache_v, work, q):  # fmt: skip
    cols, (_, heads, size), (_, groups, cached, _) = wq.cols, q.shape, cache_k.shape
    if not are_packed(wq, wkv) or not has_room(heads + 2 * groups, size):
        return None
    shares = wkv.rows == groups * size
    # Its successor may start once all blocks of this kernel have seen their predecessor end: attend asks for
    # older keys before its own wait, and those must be whole.
    cut = replace(fp8.cut_of(backend, wq, wkv), early=False)

    def args(here, count):
        return [
            wq.data, wkv.data, x[here], norm, q_bias, kv_bias, q_norm, k_norm, v_norm, cos, sin,
            slot[here], pos[here], at[here], cache_k, cache_v, q[here], work, work[COUNTERS:], eps, count,
            cols, cut.slices, heads, groups, size, cos.shape[1], cached,
        ]  # fmt: skip

    tiles = tiles_of(wq.rows) + tiles_of(wkv.rows)
    is_normed = norm is not None
    return launch(
        backend, "qkv_fast.cu", "qkv_fast", tiles, cut, wq, len(x), args, is_normed, together=True,
        defines={"NORMED": int(is_normed)} | ({"SHARED_KV": 1} if shares else {}) | head_size_define(size),
    )  # fmt: skip


def linear(backend, a, w, bias, work, y):
    if w.layout != "packed":
        return None
    cut, tiles = fp8.cut_of(backend, w), tiles_of(w.rows)

    def args(here, count):
        return [w.data, a[here], bias, y[here], work, work[COUNTERS:], count, w.rows, w.cols, cut.slices]

    return launch(backend, "linear_fast.cu", "linear_fast", tiles, cut, w, len(a), args)


def linear_add(backend, a, w, bias, norm, eps, scale, tap_row, tap_at, x, taps, work):
    if w.layout != "packed":
        return None
    cut, tiles = fp8.cut_of(backend, w), tiles_of(w.rows)
    tap_cols = 0 if taps is None else taps.shape[1]
    tap_row = None if taps is None else tap_row
    if norm is not None or scale is not None:

        def normed_args(here, count):
            return [
                w.data, a[here], bias, norm, scale, rows_of(tap_row, here), x[here], taps, work,
                work[COUNTERS:], eps, count, w.rows, w.cols, cut.slices, tap_at, tap_cols,
            ]  # fmt: skip

        return launch(
            backend, "linear_add_normed_fast.cu", "linear_add_normed_fast", tiles, cut, w, len(a),
            normed_args, together=True,
        )  # fmt: skip

    def args(here, count):
        return [
            w.data, a[here], bias, rows_of(tap_row, here), x[here], taps, work, work[COUNTERS:], count,
            w.rows, w.cols, cut.slices, tap_at, tap_cols,
        ]  # fmt: skip

    return launch(backend, "linear_add_fast.cu", "linear_add_fast", tiles, cut, w, len(a), args)


def join(backend, a, b, a_norm, b_norm, norm, eps, scale, tap_row, tap_at, x, taps):
    rows, width = x.shape
    if not fits_a_block(width):
        return None
    tap_cols, tap_row = (0, None) if taps is None else (taps.shape[1], tap_row)
    args = [a, b, a_norm, b_norm, norm, eps, scale, tap_row, x, taps, width, tap_at, tap_cols]
    backend.launch("join_fast.cu", "join_fast", rows, 256, 0, args, dependent=backend.dependent)
    return True


def gate_up(backend, x, norm, eps, act, w, work, h):
    if w.layout != PAIRED:
        return None
    cut, tiles, ffn = fp8.cut_of(backend, w), tiles_of(w.rows, True), h.shape[1]

    def args(here, count):
        return [w.data, x[here], norm, h[here], work, work[COUNTERS:], eps, count, ffn, w.cols, cut.slices]

    is_normed = norm is not None
    return launch(
        backend, "gate_up_fast.cu", "gate_up_fast", tiles, cut, w, len(x), args, is_normed,
        defines={"NORMED": int(is_normed), "ACT": act},
    )  # fmt: skip


def head(backend, x, pick, norm, eps, w, limit, ids, margin, work):
    if w.layout != "packed":
        return None
    cut, tiles = fp8.cut_of(backend, w, whole=True), tiles_of(w.rows)

    def args(here, count):
        out = [ids] if margin is None else [ids, margin]
        sizes = [count, w.rows, w.cols, limit]
        return [w.data, x, pick[here], norm, *out, work, work[COUNTERS:], eps, *sizes]

    if margin is None:
        return launch(backend, "head_fast.cu", "head_fast", tiles, cut, w, len(pick), args, is_normed=True)
    return launch(
        backend, "head_margin_fast.cu", "head_margin_fast", tiles, cut, w, len(pick), args, is_normed=True
    )


def _room(w, work, rows):
    """Where the workspace holds the logits of so many rows."""
    at = COUNTERS + split.SQUARES
    return work[at : at + rows * w.rows].reshape(rows, w.rows)


def sample(backend, x, pick, slot, pos, norm, eps, w, limit, multiplier, cap, key, law, ids, logprob, work):
    if w.layout != "packed":
        return None
    logits = _room(w, work, len(pick))
    if len(pick) and _logits(backend, x, pick, norm, eps, w, work, logits):
        plain.draw(backend, logits, w.rows, pick, slot, pos, limit, (multiplier, cap), key, law, ids, logprob)
    return True


def propose(backend, x, pick, slot, pos, norm, eps, w, limit, multiplier, cap, key, law, ids, mass, work):
    if w.layout != "packed":
        return None
    logits = _room(w, work, len(pick))
    if len(pick) and _logits(backend, x, pick, norm, eps, w, work, logits):
        curve = multiplier, cap
        plain.draw(
            backend, logits, w.rows, pick, slot, pos, limit, curve, key, law, ids, None, mass, plain.DRAFT
        )
    return True


def reject(backend, x, pos, norm, eps, w, limit, multiplier, cap, key, law, drafts, mass, ids, logprob, work):
    if w.layout != "packed":
        return None
    logits = _room(w, work, len(x))
    _logits(backend, x, None, norm, eps, w, work, logits)
    plain.accept_or_redraw(
        backend, logits, pos, limit, (multiplier, cap), key, law, drafts, mass, ids, logprob
    )
    return True


def head_logits(backend, x, norm, eps, w, multiplier, cap, work, logits):
    if w.layout != "packed":
        return None
    done = _logits(backend, x, None, norm, eps, w, work, logits)
    plain.bend(backend, logits, multiplier, cap)
    return done


def _logits(backend, x, pick, norm, eps, w, work, logits):
    """logits[i] = head of row i of x, of row pick[i] when given."""
    if wide.logits(backend, x, pick, norm, eps, w, work, logits):
        return True
    cut, tiles = fp8.cut_of(backend, w, whole=True), tiles_of(w.rows)

    def args(here, count):
        rows = (x[here], None) if pick is None else (x, pick[here])
        return [w.data, *rows, norm, logits[here], work[COUNTERS:], eps, count, w.rows, w.cols]

    return launch(
        backend, "head_fast.cu", "head_logits_fast", tiles, cut, w, len(logits), args, is_normed=True
    )


def fuse(backend, taps, w, norm, eps, work, f):
    if w.layout != "packed":
        return None
    cut, tiles = fp8.cut_of(backend, w), tiles_of(w.rows)

    def args(here, count):
        return [
            w.data,
            taps[here],
            norm,
            f[here],
            work,
            work[COUNTERS:],
            eps,
            count,
            w.rows,
            w.cols,
            cut.slices,
        ]

    return launch(backend, "fuse_fast.cu", "fuse_fast", tiles, cut, w, len(taps), args, together=True)


def inject(backend, f, wkv, kv_bias, k_norm, eps, cos, sin, slot, pos, at, cache_k, cache_v, work):
    layers, slots, groups, cached, size = cache_k.shape
    if wkv.layout != "packed" or not has_room(layers * 2 * groups, size):
        return None
    cut, tiles = fp8.cut_of(backend, wkv), tiles_of(wkv.rows)

    def args(here, count):
        return [
            wkv.data, f[here], kv_bias, k_norm, cos, sin, slot[here], pos[here], at[here], cache_k, cache_v,
            work, work[COUNTERS:], eps, count, wkv.cols, cut.slices, layers, slots, groups, size,
            cos.shape[1], cached,
        ]  # fmt: skip

    return launch(
        backend, "inject_fast.cu", "inject_fast", tiles, cut, wkv, len(f), args, together=True,
        defines=head_size_define(size),
    )  # fmt: skip


# row of the table -> function(backend, *args) -> True, or None to decline
FAST = {
    function.__name__: function
    for function in (
        embed,
        qkv,
        attend_fast.attend,
        linear,
        linear_add,
        join,
        gate_up,
        head,
        sample,
        propose,
        reject,
        head_logits,
        fuse,
        inject,
        experts_few.route,
        experts_few.experts_up,
        experts_few.experts_down,
    )
}
