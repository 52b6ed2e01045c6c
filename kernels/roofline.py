"""What a row of the table must move and compute at least, and what cards could do:
the yardstick of `kernels --bench`.

Bytes are counted once each: weights as stored, arrays that are read or written for the rows of the call, of a
cache only the rows that the call reads or writes, of experts those with a pair. Peaks are the makers'
datasheet numbers; what is reported as a fraction is always taken of the copy bandwidth measured in the same
run.
"""

from .table import ROWS
from .weight import Weight

PEAKS = {
    "H100": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
    "B200": (8.0e12, 2250e12),
}  # bytes/s, bf16 FLOP/s dense
# What a CUDA backend fuses into the row's product, in the order of the data.
FUSED = {
    "embed": "gather, scale",
    "qkv": "norm -> Q, K, V -> bias, q/k norm, rotation -> append to the caches",
    "attend": "q k^T -> softmax, a sink in it -> p v, keys cut at absolute multiples of 144, merged in order",
    "linear": "product -> bias",
    "linear_add": "product -> bias, residual -> tap",
    "gate_up": "norm -> gate, up -> activation",
    "route": "norm -> router -> likeliest experts, shares -> groups",
    "experts_up": "gather by expert -> gate, up -> bias, activation",
    "experts_down": "product -> bias, share, sum over experts, residual -> tap",
    "join": "two norms -> sum -> norm, residual, scale -> tap",
    "head": "final norm -> head -> argmax, logits never stored",
    "sample": "final norm -> head | filters -> draw, logits in the workspace",
    "propose": "final norm -> head | filters -> draw, masses",
    "reject": "final norm -> head | filters -> accept the draft, or draw from what is left",
    "head_logits": "final norm -> head",
    "widen": "ids, masses of a reduced head -> the target's",
    "fuse": "fc -> hidden norm",
    "inject": "K, V of all drafter layers -> k norm, rotation -> append to the caches",
    "stage": "ids and addresses of a pass's rows",
    "stage_context": "addresses of the context features that wait",
    "accept": "longest prefix -> budget, stop ids -> next anchor, lengths, record",
}
CACHES = ("cache_k", "cache_v")


def traffic(name, args, context=0):
    """(bytes, flops) of a call at least. args: in table order. context: keys that a row of attend sees."""
    row, given = ROWS[name], dict(zip((a.name for a in ROWS[name].args), args, strict=True))
    moved, flops, experts = 0, 0, touched(name, args)
    for arg in row.args:
        value = given[arg.name]
        if experts and arg.dims and arg.dims[0] == "E" and value is not None:
            moved += value.nbytes * experts // value.shape[0]
            if isinstance(value, Weight):
                flops += 2 * int(given["first"][-1]) * value.rows * value.cols
        elif isinstance(value, Weight):
            rows = len(given["pick"]) if "pick" in given else _rows(given)
            is_gather = name == "embed"
            moved += rows * value.nbytes // value.rows if is_gather else value.nbytes
            flops += 0 if is_gather else 2 * rows * value.rows * value.cols
        elif hasattr(value, "nbytes") and arg.name not in (*CACHES, "work", "cos", "sin", "taps"):
            moved += value.nbytes * (2 if arg.inplace else 1)
    if name == "attend":
        q, cache = given["q"], given["cache_k"]
        moved += 2 * context * cache.shape[1] * cache.shape[3] * cache.itemsize
        flops += 4 * q.shape[0] * q.shape[1] * q.shape[2] * context
    elif name in ("qkv", "inject"):
        cache = given["cache_k"]
        layers = cache.shape[0] if name == "inject" else 1
        moved += 2 * _rows(given) * layers * cache.shape[-3] * cache.shape[-1] * cache.itemsize
    elif name == "fuse":
        moved += given["taps"].nbytes
    return moved, flops


def touched(name, args):
    """How many experts a call of experts_up or experts_down has pairs of; 0 for other rows."""
    groups = [v for arg, v in zip(ROWS[name].inputs, args, strict=False) if arg.name == "first"]
    return int((groups[0][1:] > groups[0][:-1]).sum()) if groups else 0


def _rows(given):
    first = next(v for v in given.values() if hasattr(v, "shape") and not isinstance(v, Weight))
    return first.shape[0]


def bound(name, args, card, context=0):
    """(seconds, what bounds it) of a call on a card of PEAKS at least: "memory" or "arithmetic"."""
    bytes_per_s, flops_per_s = PEAKS[card]
    moved, flops = traffic(name, args, context)
    times = {"memory": moved / bytes_per_s, "arithmetic": flops / flops_per_s}
    what = max(times, key=times.get)
    return times[what], what
