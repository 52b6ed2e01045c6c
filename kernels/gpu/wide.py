"""Rows of the table for many token rows at once with the skinny family's bits: passes of many sequences.

A pass of the skinny family (fast.py) holds 8 to 32 token rows; more rows read the weights again. Here one
pass of up to ROWS does: wide.cuh has the skinny family's tree of sums (tree.cuh), so that a row has the same
bits in either. lay_wide lays tokens, the product leaves each slice's sums in the workspace, a kernel of its
own ends the rows; where there is one slice, gate_up and head end in the product. In a program, what ends the
rows of linear_add and gate_up lays them for the product behind it too (laid.py). A function declines, and
fast.py's runs, where its own pass holds all rows, and where K is no multiple of 8.
"""

from . import COUNTERS, fp8, split
from .laid import STAGE_K, Wanted, address_of, is_written_again, next_wanted, place, sizes, steps, up
from .packed import PAIRED, are_packed, has_room, head_size_define, rows_of, tiles_of
from .prefill import frame_of

ROWS = 1024  # of one pass
MOST_OUTPUTS = 8192  # of rows that are normed as wholes
# (tokens, row tiles of weights, stages) of a block and blocks that share weights -> us of a step of 64 inputs
# and of a unit's end, on an H200 (bench/results/wide-h200.json); the bits are the same in all, and in both
# frames of prefill.py.
TILES = {
    "wgmma": {
        (64, 4, 12, 1): (0.29, 0.3), (64, 8, 8, 1): (0.355, 1.7), (64, 8, 8, 2): (0.3, 3.2),
        (64, 12, 6, 1): (0.42, 6), (64, 12, 6, 2): (0.39, 2.1),
        (128, 8, 6, 1): (0.485, 1.9), (128, 8, 6, 2): (0.43, 3.35), (128, 12, 5, 1): (0.665, 0.8),
        (128, 12, 5, 2): (0.57, 3.4),
    },
    "mma": {(64, 4, 12, 1): (0.33, 3), (64, 8, 8, 1): (0.42, 4), (128, 4, 8, 1): (0.44, 4)},
}  # fmt: skip
MOST_WARPS = 16  # of a cut
LAY_CHUNKS = 32  # of a block of lay_wide
MOST_LAID = 16384  # inputs of a row that is laid with its norm, from shared memory


def take(backend, row, args):
    """True if a wide variant of `row` took the call."""
    function = WIDE.get(row) if is_allowed(backend) else None
    return function is not None and bool(function(backend, *args))


def is_allowed(backend):
    """Whether there are such kernels and nobody has switched them off."""
    return backend.wide and backend.activations == "bf16"


def is_wide(cut, rows, is_normed, *weights):
    """Whether the skinny family would read these weights more than once, and this one can."""
    (dtype, *others), cols = {w.dtype for w in weights}, weights[0].cols
    is_read = dtype in ("bf16", "fp8") and not others and cols % 8 == 0
    return is_read and rows > cut.most_rows(cols, is_normed)


def passes(rows):
    """(slice, count) of each pass."""
    return [(slice(at, min(at + ROWS, rows)), min(ROWS, rows - at)) for at in range(0, rows, ROWS)]


def tiles_for(kind, dtype, rows=ROWS):
    """Those of a frame's TILES that have tokens for all blocks of a cluster, and whose sums registers hold:
    with FP8 a chunk's are apart from all before."""
    most = 12 if kind == "wgmma" else 4  # row tiles: wgmma's warpgroups take registers of those that copy
    held = [tile for tile in TILES[kind] if dtype == "bf16" or (tile[0] == 64 and tile[1] <= most)]
    return [tile for tile in held if rows > (tile[3] - 1) * tile[0]]


def choose(sms, rows, outputs, cut, cols, kind="wgmma", dtype="bf16"):
    """The entry of a frame's TILES whose blocks end first."""

    def cost(tile):
        (tokens, tiles, _, cluster), (step, end) = tile, TILES[kind][tile]
        units = cluster * -(-rows // (cluster * tokens)) * -(-outputs // (split.TILE * tiles)) * cut.slices
        return max(1, units / sms) * (steps(cols, cut) / cut.slices * step + end)

    return min(tiles_for(kind, dtype, rows), key=cost)


def work_size(rows, cols, outputs, sms):
    """f32 behind the counters: of a product, and of logits of all rows with a pass behind them."""
    if not outputs:
        return 0
    most = min(rows, ROWS)

    def of(cut):
        bound = -(-cols // (2 * split.CHUNK)) + cut.slices * MOST_WARPS // 2  # steps: half a one a warp more
        room = max(cut.slices * most * outputs, split.SQUARES + up(rows * outputs))
        return sum(sizes(most, cut, sms, bound)) + room

    return max(map(of, fp8.every_cut(outputs, cols, sms)))


def tree_of(cut):
    """Its defines."""
    return {"TREE_SLICES": cut.slices, "TREE_WARPS": cut.warps, "TREE_SPAN": cut.span}


def run(backend, cut, file, kernel, grid, block, args, defines=None, shared=0, cluster=1, early=()):
    """A launch with the cut's tree. early: what it reads before the launch ahead has ended."""
    backend.launch(
        file, kernel, grid, block, shared, args, tree_of(cut) | (defines or {}), cluster=cluster,
        dependent=backend.dependent, early=early,
    )  # fmt: skip


def lay(backend, want, pick=None, at=COUNTERS):
    """The Laid of the rows that are wanted, of x[pick] where there is a pick, from `at` of the workspace on;
    the call before may have laid them."""
    (_, cols), rows = want.x.shape, len(want.x if pick is None else pick)
    if backend.ready is not None and backend.ready.of.is_like(want):
        laid, backend.ready = backend.ready, None
        return laid
    laid = place(backend, want, rows, at)
    if want.norm is None:
        grid = rows, -(-cols // (split.CHUNK * LAY_CHUNKS))
        args = [want.x, pick, laid.tokens, rows, cols]
        run(backend, want.cut, "lay_wide.cu", "lay_wide", grid, 128, args)
    else:  # the squares of a row are one block's
        args = [want.x, pick, want.norm, want.eps, laid.tokens, laid.squares, laid.scale, rows, cols]
        run(backend, want.cut, "lay_wide.cu", "lay_wide_normed", rows, 256, args, shared=2 * cols)
    return laid


def tile_of(backend, laid, outputs, w):
    """The entry of TILES for so many outputs, of all matrices, which are like w."""
    return choose(backend.sms, laid.rows, outputs, laid.cut, laid.cols, frame_of(backend), w.dtype)


def groups_of(tile, *outputs):
    """Groups of output rows, of each matrix in turn."""
    return sum(-(-count // (split.TILE * tile[1])) for count in outputs)


def frame(backend, laid, tile, file, kernel, args, outputs, w, defines=None):
    """The frame of wide.cuh. tile: tile_of. outputs: of each matrix, which are like w."""
    tokens, tiles, stages, cluster = tile
    units = -(-laid.rows // (cluster * tokens)) * groups_of(tile, *outputs) * laid.cut.slices
    is_fp8 = w.dtype == "fp8"
    shared = stages * (STAGE_K * (2 * tokens + (1 if is_fp8 else 2) * split.TILE * tiles) + 16)
    names = dict(zip(("TOKENS", "WEIGHT_TILES", "STAGES", "CLUSTER"), tile, strict=True)) | (defines or {})
    names |= ({"WGMMA": 1} if frame_of(backend) == "wgmma" else {}) | ({"FP8": 1} if is_fp8 else {})
    threads, held = 32 * tiles + 128, backend.sms  # they wait for each other: the card holds one each
    if cluster > 1:  # where there is room for both
        function = backend.device.function(file, kernel, tree_of(laid.cut) | names)
        held = min(held, backend.device.holds(function, threads, shared, cluster))
    blocks = min(units, held // cluster) * cluster
    run(backend, laid.cut, file, kernel, blocks, threads, args, names, shared, cluster)


def product(backend, laid, w, v=None, y=None, scale=None, outputs=None):
    """Sums (slices, rows, outputs) in f32, behind the tokens or in y, of one matrix or two.

    scale: of each row, or None. outputs: of w, where its tiles have more than its rows.
    """
    y, own = laid.rest if y is None else y, (outputs or w.rows, v.rows if v else 0)
    tile = tile_of(backend, laid, sum(own), w)
    args = [
        w.data, v.data if v else None, laid.tokens, scale, y, laid.counters, laid.handed, laid.rows,
        laid.cols, *own, groups_of(tile, *own),
    ]  # fmt: skip
    frame(backend, laid, tile, "wide_sums.cu", "wide_sums", args, own, w)
    return y


def end(backend, laid, kernel, args, outputs, defines=None, early=()):
    """The end of rows by blocks of 1,024 outputs."""
    grid = -(-outputs // 1024), laid.rows
    run(backend, laid.cut, "wide_rows.cu", kernel, grid, 256, args, defines, early=early)


def end_whole(backend, laid, kernel, args):
    """The end of rows that are normed as wholes, a block a row."""
    run(backend, laid.cut, "wide_whole.cu", kernel, laid.rows, 256, args)


def end_heads(backend, laid, kernel, heads, size, cos, args, defines):
    """The end of heads of so many components, a warp a head of a token."""
    defines = defines | head_size_define(size) | {"HEAD": size, "HEAD_PAIRS": cos.shape[1]}
    run(backend, laid.cut, "wide_heads.cu", kernel, (heads, -(-laid.rows // 4)), 128, args, defines)


def wants_qkv(backend, x, norm, eps, wq, wkv, q_bias, kv_bias, q_norm, k_norm, v_norm, cos, sin, slot, pos,
              at, cache_k, cache_v, work, q):  # fmt: skip
    (_, heads, size), groups, cut = q.shape, cache_k.shape[1], fp8.cut_of(backend, wq, wkv)
    if not are_packed(wq, wkv) or not is_wide(cut, len(x), norm is not None, wq, wkv):
        return None
    return Wanted(x, norm, eps, cut, work, wq.rows + wkv.rows) if has_room(heads + 2 * groups, size) else None


def qkv(backend, *args):
    want = wants_qkv(backend, *args)
    if want is None:
        return None
    x, _, eps, wq, wkv, *biases_and_norms, cos, sin, slot, pos, at, cache_k, cache_v, _, q = args
    (_, heads, size), (_, groups, cached, _) = q.shape, cache_k.shape
    shares = {"SHARED_KV": 1} if wkv.rows == groups * size else {}
    for here, count in passes(len(x)):
        laid = lay(backend, want.rows(x[here]))
        y = product(backend, laid, wq, wkv)
        args = [
            y, laid.squares, *biases_and_norms, cos, sin, slot[here], pos[here],
            at[here], cache_k, cache_v, q[here], eps, count, wq.cols, heads, groups, cached,
        ]  # fmt: skip
        end_heads(backend, laid, "end_qkv", heads + 2 * groups, size, cos, args, shares)
    return True


def linear(backend, a, w, bias, work, y):
    cut = fp8.cut_of(backend, w)
    if w.layout != "packed" or not is_wide(cut, len(a), False, w):
        return None
    for here, _ in passes(len(a)):
        laid = lay(backend, Wanted(a[here], None, 0.0, cut, work, w.rows))
        end(backend, laid, "end_linear", [product(backend, laid, w), bias, y[here], w.rows], w.rows)
    return True


def wants_linear_add(backend, a, w, bias, norm, eps, scale, tap_row, tap_at, x, taps, work):
    cut, is_normed = fp8.cut_of(backend, w), norm is not None or scale is not None
    if w.layout != "packed" or not is_wide(cut, len(a), False, w) or (is_normed and w.rows > MOST_OUTPUTS):
        return None
    return Wanted(a, None, 0.0, cut, work, w.rows)


def linear_add(backend, *args):
    want = wants_linear_add(backend, *args)
    if want is None:
        return None
    a, w, bias, norm, eps, scale, tap_row, tap_at, x, taps, work = args
    columns, tap_row = (0, None) if taps is None else (taps.shape[1], tap_row)
    for here, count in passes(len(a)):
        laid = lay(backend, want.rows(a[here]))
        y, own = product(backend, laid, w), rows_of(tap_row, here)
        args = [y, bias, own, x[here], taps, w.rows, tap_at, columns]
        if norm is not None or scale is not None:
            args = [y, bias, norm, eps, scale, own, x[here], taps, w.rows, tap_at, columns]
            end_whole(backend, laid, "end_linear_add_normed", args)
        elif count == len(a) and (following := next_normed(backend, x, work, y)) is not None:
            of, to = following.of, (following.tokens, following.squares, following.scale)
            defines = {"SUMMED_SLICES": laid.cut.slices}
            run(backend, of.cut, "wide_rows.cu", "end_and_lay", count, 256, [*args, of.norm, of.eps, *to],
                defines, 2 * w.rows, early=(x,))  # fmt: skip
            backend.laid = following
        else:
            end(backend, laid, "end_linear_add", args, w.rows, early=(x[here],))
    return True


def next_normed(backend, x, work, y):
    """The Laid that the next call wants of x with its norm, where it ends before the sums y; else None."""
    want = next_wanted(backend, WANTS, x, work)
    if want is None or want.norm is None or x.shape[1] > MOST_LAID:
        return None
    laid = place(backend, want, len(x))
    fits = address_of(laid.handed) <= address_of(y)
    return laid if fits else None


def wants_gate_up(backend, x, norm, eps, act, w, work, h):
    cut = fp8.cut_of(backend, w)
    if w.layout != PAIRED or not is_wide(cut, len(x), norm is not None, w):
        return None
    return Wanted(x, norm, eps, cut, work, split.TILE * tiles_of(w.rows, True))


def gate_up(backend, *args):
    want = wants_gate_up(backend, *args)
    if want is None:
        return None
    x, _, _, act, w, work, h = args
    outputs, ffn, names = want.outputs, h.shape[1], {"ACT": act}
    for here, count in passes(len(x)):
        laid = lay(backend, want.rows(x[here]))
        if want.cut.slices == 1:
            tile, to = tile_of(backend, laid, outputs, w), h[here]
            if count == len(x) and (following := next_of_h(backend, h, laid)) is not None:
                to, backend.laid = following.tokens, following
                tree = following.cut
                names |= {"LAID_SLICES": tree.slices, "LAID_WARPS": tree.warps, "LAID_SPAN": tree.span}
            args = [w.data, laid.tokens, laid.scale, to, work, laid.handed, count, w.cols, ffn]
            frame(backend, laid, tile, "wide_gate_up.cu", "wide_gate_up", args, [outputs], w, names)
        else:
            y = product(backend, laid, w, outputs=outputs)
            end(backend, laid, "end_gate_up", [y, laid.scale, h[here], ffn], ffn, names)
    return True


def next_of_h(backend, h, laid):
    """The Laid of h that the next call wants, behind all of this one's, where h itself is nobody's; else
    None."""
    work = laid.of.work
    want = next_wanted(backend, WANTS, h, work)
    if want is None or want.norm is not None or h.shape[1] % split.CHUNK or not is_written_again(backend, h):
        return None
    following = place(backend, want, len(h), work.size - laid.rest.size, laid.handed)
    fits = following.rest.size >= want.cut.slices * len(h) * want.outputs
    return following if fits else None


# row -> function of its arguments that gives the Wanted, or None where the row declines
WANTS = {"qkv": wants_qkv, "gate_up": wants_gate_up, "linear_add": wants_linear_add}


def head(backend, x, pick, norm, eps, w, limit, ids, margin, work):
    cut = fp8.cut_of(backend, w, whole=True)
    if w.layout != "packed" or not is_wide(cut, len(pick), True, w):
        return None
    margins = {"WITH_MARGIN": int(margin is not None)}
    for here, count in passes(len(pick)):
        laid = lay(backend, Wanted(x, norm, eps, cut, work, w.rows), pick[here])
        tile = tile_of(backend, laid, w.rows, w)
        groups = groups_of(tile, w.rows)
        bests, seconds, sizes = laid.rest, laid.rest[2 * count * groups :], [count, w.cols, w.rows, limit]
        args = [w.data, laid.tokens, laid.scale, bests, seconds, work, laid.handed, *sizes]
        frame(backend, laid, tile, "wide_head.cu", "wide_head", args, [w.rows], w, margins)
        args = [bests, seconds, pick[here], ids, margin, count, groups]
        run(backend, cut, "wide_head.cu", "head_ends", -(-count // 4), 128, args, margins)
    return True


def logits(backend, x, pick, norm, eps, w, work, out):
    """out[i] = head of row i of x, of row pick[i] when given; out may lie in work. None: declined."""
    cut = fp8.cut_of(backend, w, whole=True)
    if not is_allowed(backend) or not is_wide(cut, len(out), True, w):
        return None
    behind = COUNTERS + split.SQUARES + up(out.size)
    for here, _ in passes(len(out)):
        rows, own = (x[here], None) if pick is None else (x, pick[here])
        laid = lay(backend, Wanted(rows, norm, eps, cut, work, w.rows), own, behind)
        product(backend, laid, w, y=out[here], scale=laid.scale)
    return True


def fuse(backend, taps, w, norm, eps, work, f):
    cut = fp8.cut_of(backend, w)
    if w.layout != "packed" or not is_wide(cut, len(taps), False, w) or w.rows > MOST_OUTPUTS:
        return None
    for here, _ in passes(len(taps)):
        laid = lay(backend, Wanted(taps[here], None, 0.0, cut, work, w.rows))
        args = [product(backend, laid, w), norm, eps, f[here], w.rows]
        end_whole(backend, laid, "end_fuse", args)
    return True


def inject(backend, f, wkv, kv_bias, k_norm, eps, cos, sin, slot, pos, at, cache_k, cache_v, work):
    layers, slots, groups, cached, size = cache_k.shape
    cut = fp8.cut_of(backend, wkv)
    if wkv.layout != "packed" or not is_wide(cut, len(f), False, wkv):
        return None
    if not has_room(layers * 2 * groups, size):
        return None
    for here, count in passes(len(f)):
        laid = lay(backend, Wanted(f[here], None, 0.0, cut, work, wkv.rows))
        args = [
            product(backend, laid, wkv), kv_bias, k_norm, cos, sin, slot[here], pos[here], at[here], cache_k,
            cache_v, eps, count, wkv.cols, layers, slots, groups, cached,
        ]  # fmt: skip
        end_heads(backend, laid, "end_inject", layers * 2 * groups, size, cos, args, {})
    return True


# row of the table -> function(backend, *args) -> True, or None to decline
WIDE = {function.__name__: function for function in (qkv, linear, linear_add, gate_up, head, fuse, inject)}
