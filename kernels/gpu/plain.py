"""The plain variant of every row: any activation type, weight and layout, any shape.
A function a row, arguments in table order.

A row is one to four launches: a norm into the workspace, the matrix product, what finishes it. Behind the
counters the workspace holds the normed rows, then the products, both f32 and row by row.
"""

from . import COUNTERS

THREADS = 128  # of a block of plain.cuh: 4 warps
CLUSTER_FROM = 16384  # logits of a row that are worth eight blocks
DRAW, DRAFT = 0, 1  # as in law.cuh
C_TYPES = {"f32": "float", "bf16": "bf16", "mxfp4": "u8", "fp8": "u8"}
MOST_USED = 32  # experts of a row, as in choose.cuh
LAYOUTS = {"plain": 0, "packed": 1, "packed pairs": 2}  # PACKED of plain.cuh


def work_size(rows, cols, outputs):
    """f32 behind the counters for `rows` token rows of `cols` inputs and `outputs` outputs."""
    return rows * (cols + outputs)


def _types(backend, weight=None, **others):
    """-D of a file: the activation type, the weight's, and others given as "f32" or "bf16"."""
    kinds = {"ACTIVATION": backend.activations, **others}
    if weight is not None:
        kinds["WEIGHT"] = weight.dtype
    defines = {name: C_TYPES[kind] for name, kind in kinds.items()}
    if weight is None:
        return defines
    of_fp8 = {"FP8": 1} if weight.dtype == "fp8" else {}
    return defines | {"PACKED": LAYOUTS[weight.layout]} | of_fp8


def _blocks(backend, warps):
    """Blocks for this many warps of work, each of which may walk on: enough to fill the device."""
    return max(1, min(-(-warps * 32 // THREADS), 8 * backend.sms))


def _norm(backend, x, pick, norm, eps, out, rows, source, target):
    """out: `rows` normed rows of x (of x[pick]); norm None: as they are. source,
    target: types of x and out."""
    defines = _types(backend, FROM=source, TO=target)
    args = [x, pick, norm, eps, out, out.size // rows]
    backend.launch("norm.cu", "normalise", rows, THREADS, 0, args, defines)


def _linear(backend, w, x, kind, out, stride, bias=None, target="f32"):
    """out[t, :rows] = w x[t] + bias. stride: of out's rows.

    kind, target: types of x, "f32" in the workspace, and of out.
    """
    rows, cols = w.shape
    tokens = x.size // cols
    defines = _types(backend, w, TOKEN=kind, OUT=target)
    args = [w.data, x, bias, out, tokens, rows, cols, stride]
    backend.launch("linear.cu", "linear", _blocks(backend, rows), THREADS, 0, args, defines)


def _laid(backend, x, pick, norm, eps, work):
    """(normed rows in the workspace, what is free behind them)."""
    rows, cols = len(x) if pick is None else len(pick), x.shape[1]
    laid, free = work[COUNTERS : COUNTERS + rows * cols], work[COUNTERS + rows * cols :]
    _norm(backend, x, pick, norm, eps, laid, rows, backend.activations, "f32")
    return laid, free


def embed(backend, ids, table, scale, x):
    rows, width = x.shape
    args = [ids, table.data, scale, x, table.rows, width]
    backend.launch("embed.cu", "embed", rows, THREADS, 0, args, _types(backend, table))


def qkv(backend, x, norm, eps, wq, wkv, q_bias, kv_bias, q_norm, k_norm, v_norm, cos, sin, slot, pos, at,
        cache_k, cache_v, work, q):  # fmt: skip
    (rows, heads, size), (_, groups, room, _), wide = q.shape, cache_k.shape, wq.rows + wkv.rows
    laid, y = _laid(backend, x, None, norm, eps, work)
    _linear(backend, wq, laid, "f32", y, wide)
    _linear(backend, wkv, laid, "f32", y[wq.rows :], wide)
    args = [y, eps, q_bias, kv_bias, q_norm, k_norm, v_norm, cos, sin, slot, pos, at, cache_k, cache_v, q]
    args += [rows, heads, groups, wkv.rows // size - groups, room, size, cos.shape[1]]
    blocks = -(-rows * (heads + 2 * groups) * 32 // THREADS)
    backend.launch("qkv.cu", "qkv", blocks, THREADS, 0, args, _types(backend))


def attend(backend, q, cache_k, cache_v, slot, pos, begin, end, window, causal, scale, sinks, work, o):
    (rows, heads, size), (_, groups, room, _) = q.shape, cache_k.shape
    if size > 512:
        raise NotImplementedError(f"attend: heads of {size}, the kernel holds 512")
    args = [q, cache_k, cache_v, slot, pos, begin, end, window, causal, scale, sinks, o, groups, room, size]
    backend.launch("attend.cu", "attend", (heads, rows), 128, 4 * (size + 128), args, _types(backend))


def linear(backend, a, w, bias, work, y):
    _linear(backend, w, a, backend.activations, y, w.rows, bias, backend.activations)


def linear_add(backend, a, w, bias, norm, eps, scale, tap_row, tap_at, x, taps, work):
    rows, width = x.shape
    columns = 0 if taps is None else taps.shape[1]
    if norm is not None or scale is not None:
        y = work[COUNTERS:]
        _linear(backend, w, a, backend.activations, y, width, bias)
        args = [y, norm, eps, scale, tap_row, tap_at, x, taps, width, columns]
        backend.launch("linear_add.cu", "end_layer", rows, THREADS, 0, args, _types(backend))
        return
    args = [a, w.data, bias, tap_row, tap_at, x, taps, rows, width, a.shape[1], columns]
    blocks = _blocks(backend, width)
    backend.launch("linear_add.cu", "linear_add", blocks, THREADS, 0, args, _types(backend, w))


def gate_up(backend, x, norm, eps, act, w, work, h):
    (rows, width), ffn = x.shape, h.shape[1]
    laid, _ = _laid(backend, x, None, norm, eps, work)
    args = [laid, w.data, h, act, rows, width, ffn]
    blocks = _blocks(backend, ffn)
    backend.launch("gate_up.cu", "gate_up", blocks, THREADS, 0, args, _types(backend, w))


def route(backend, x, norm, u_norm, eps, w, bias, normalise, expert_scale, pos, touched, work, u, expert,
          share, first, order):  # fmt: skip
    (rows, width), (experts, used) = x.shape, (w.rows, expert.shape[1])
    if used > MOST_USED:
        raise NotImplementedError(f"route: {used} experts a row, the kernel holds {MOST_USED}")
    logits = work[COUNTERS:]
    _norm(backend, x, None, norm, eps, u, rows, backend.activations, backend.activations)
    _linear(backend, w, u, backend.activations, logits, experts)
    if u_norm is not None:  # the router has read its own
        _norm(backend, x, None, u_norm, eps, u, rows, backend.activations, backend.activations)
    args = [logits, bias, expert_scale, pos, normalise, u, expert, share, rows, experts, used, width]
    backend.launch("route.cu", "choose_rows", _blocks(backend, rows), THREADS, 0, args, _types(backend))
    group(backend, experts, touched, expert, first, order)


def group(backend, experts, touched, expert, first, order, dependent=False):
    """The pairs of each expert, from the experts of each pair."""
    args = [expert, first, order, touched, expert.size]
    defines = _types(backend)
    backend.launch("route.cu", "group", experts + 1, 256, 0, args, defines, dependent=dependent)


def _expert_types(backend, w):
    return _types(backend, w) | ({"MXFP4": 1} if w.dtype == "mxfp4" else {})


def _scales(w):
    """The second part of an MXFP4 weight, if it is apart."""
    return w.parts[1] if len(w.parts) > 1 else None


def experts_up(backend, u, w, bias, expert, first, order, act, limit, alpha, work, h):
    (rows, used, ffn), (experts, _, width) = h.shape, w.shape
    args = [u, w.data, _scales(w), bias, expert, first, order, act, limit, alpha, h]
    args += [rows * used, used, experts, width, ffn]
    blocks = _blocks(backend, experts * ffn)
    backend.launch("experts_up.cu", "experts_up", blocks, THREADS, 0, args, _expert_types(backend, w))


def experts_down(backend, h, w, bias, expert, share, first, order, adds, tap_row, tap_at, x, taps, work):
    (rows, used, ffn), width = h.shape, x.shape[1]
    columns = 0 if taps is None else taps.shape[1]
    args = [h, w.data, _scales(w), bias, expert, share, adds, tap_row, tap_at, x, taps]
    args += [rows, used, width, ffn, columns]
    blocks = _blocks(backend, rows * width)
    backend.launch("experts_down.cu", "experts_down", blocks, THREADS, 0, args, _expert_types(backend, w))


def join(backend, a, b, a_norm, b_norm, norm, eps, scale, tap_row, tap_at, x, taps):
    rows, width = x.shape
    columns = 0 if taps is None else taps.shape[1]
    args = [a, b, a_norm, b_norm, norm, eps, scale, tap_row, tap_at, x, taps, width, columns]
    backend.launch("join.cu", "join", rows, THREADS, 4 * width, args, _types(backend))


def head(backend, x, pick, norm, eps, w, limit, ids, margin, work):
    if not len(pick):
        return
    laid, y = _laid(backend, x, pick, norm, eps, work)
    _linear(backend, w, laid, "f32", y, w.rows)
    backend.launch("head.cu", "head", len(pick), 256, 0, [y, pick, ids, margin, limit, w.rows])


def _picked_logits(backend, x, pick, norm, eps, w, work):
    """Logits of those rows, in the workspace, w.rows apart."""
    laid, y = _laid(backend, x, pick, norm, eps, work)
    _linear(backend, w, laid, "f32", y, w.rows)
    return y


def sample(backend, x, pick, slot, pos, norm, eps, w, limit, multiplier, cap, key, law, ids, logprob, work):
    if len(pick):
        y = _picked_logits(backend, x, pick, norm, eps, w, work)
        draw(backend, y, w.rows, pick, slot, pos, limit, (multiplier, cap), key, law, ids, logprob)


def propose(backend, x, pick, slot, pos, norm, eps, w, limit, multiplier, cap, key, law, ids, mass, work):
    if len(pick):
        y = _picked_logits(backend, x, pick, norm, eps, w, work)
        draw(backend, y, w.rows, pick, slot, pos, limit, (multiplier, cap), key, law, ids, None, mass, DRAFT)


def reject(backend, x, pos, norm, eps, w, limit, multiplier, cap, key, law, drafts, mass, ids, logprob, work):
    y = _picked_logits(backend, x, None, norm, eps, w, work)
    accept_or_redraw(backend, y, pos, limit, (multiplier, cap), key, law, drafts, mass, ids, logprob)


def draw(backend, logits, stride, pick, slot, pos, limit, curve, key, law, ids, logprob, mass=None,
         purpose=DRAW):  # fmt: skip
    """The end of sample and propose: ids from the picked rows' logits, which lie `stride` f32 apart.

    curve: multiplier and cap.
    """
    args = [logits, pick, slot, pos, key, law, ids, logprob, mass, purpose, limit, stride]
    _launch_law(backend, "sample", len(pick), limit, args, curve)


def accept_or_redraw(backend, logits, pos, limit, curve, key, law, drafts, mass, ids, logprob):
    """The end of reject, from the logits of all rows."""
    slots, block, stride = mass.shape
    args = [logits, pos, key, law, drafts, mass, ids, logprob, len(pos) // slots, block, limit, stride]
    _launch_law(backend, "reject", len(pos), limit, args, curve)


def _launch_law(backend, kernel, rows, limit, args, curve):
    """A kernel of law.cuh. How many blocks and threads share a row does not show in its ids.

    Laws of bare logits have machine code of their own.
    """
    defines, args = {"SOFTCAP": 1} if is_bent(*curve) else None, [*args, *map(float, curve)]
    blocks = 8 if limit >= CLUSTER_FROM else 1
    threads = 512 if limit > 4096 else 128
    backend.launch(
        f"{kernel}.cu", kernel, rows * blocks, threads, 0, args, defines, cluster=blocks,
        dependent=backend.dependent,
    )  # fmt: skip


def is_bent(multiplier, cap):
    """Whether laws see other logits than the head's own."""
    return (multiplier, cap) != (1, 0)


def bend(backend, logits, multiplier, cap):
    """Scales and caps them in place."""
    if is_bent(multiplier, cap):
        args = [logits, float(multiplier), float(cap), logits.size]
        backend.launch("head_logits.cu", "cap_logits", _blocks(backend, logits.size // 32), THREADS, 0, args)


def head_logits(backend, x, norm, eps, w, multiplier, cap, work, logits):
    laid, _ = _laid(backend, x, None, norm, eps, work)
    _linear(backend, w, laid, "f32", logits, w.rows)
    bend(backend, logits, multiplier, cap)


def fuse(backend, taps, w, norm, eps, work, f):
    y = work[COUNTERS:]
    _linear(backend, w, taps, backend.activations, y, w.rows)
    _norm(backend, y, None, norm, eps, f, len(f), "f32", backend.activations)


def inject(backend, f, wkv, kv_bias, k_norm, eps, cos, sin, slot, pos, at, cache_k, cache_v, work):
    rows, (layers, slots, groups, room, size) = len(f), cache_k.shape
    y = work[COUNTERS:]
    _linear(backend, wkv, f, backend.activations, y, wkv.rows)
    args = [y, kv_bias, k_norm, eps, cos, sin, slot, pos, at, cache_k, cache_v]
    args += [rows, layers, slots, groups, room, size, cos.shape[1]]
    blocks = -(-rows * layers * 2 * groups * 32 // THREADS)
    backend.launch("inject.cu", "inject", blocks, THREADS, 0, args, _types(backend))


def stage(backend, anchor, start, fresh, done, fill, ids, slot, pos, at, begin, end, row):
    slots, width = len(anchor), len(ids) // len(anchor)
    args = [anchor, start, fresh, done, fill, ids, slot, pos, at, begin, end, row, width, fill.shape[1]]
    _control(backend, "stage", slots, args)


def stage_context(backend, start, fresh, slot, pos):
    args = [start, fresh, slot, pos, len(slot) // len(start)]
    _control(backend, "stage_context", len(start), args)


def accept(backend, drafts, choice, stop, start, anchor, fresh, left, done, record, kept):
    args = [drafts, choice, stop, start, anchor, fresh, left, done, record, kept]
    args += [len(choice) // len(start), drafts.shape[1], stop.shape[1]]
    _control(backend, "accept", len(start), args)


def _control(backend, kernel, slots, args):
    backend.launch("control.cu", kernel, slots, 32, 0, args, dependent=backend.dependent)


def widen(backend, pick, pos, names, narrow, ids, mass):
    if len(pick):
        args = [pick, pos, names, narrow, ids, mass, len(names), 0 if mass is None else mass.shape[1]]
        threads = 32 if mass is None else 512
        backend.launch("control.cu", "widen", len(pick), threads, 0, args, dependent=backend.dependent)
