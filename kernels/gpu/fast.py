"""Fast variants of the rows: bf16 activations, bf16 weights packed in fragment order. The hook of the plain backend.

What a fast file offers is entered here; the backend (kernels/gpu/__init__.py) asks in this order:

* `pack(backend, parts, role)` when a weight is made. `pack` returns
  Weight(layout="packed") or None: then the weight stays plain, (rows, cols). It is only asked when activations are
  bf16 and all parts are BF16. Inside, `backend.raw(parts)` is a device array u16 (rows, cols) with the parts stacked,
  in a temporary that the next `raw` may reuse: the stream's order is enough, nothing waits. The packed array comes
  from `backend.empty(shape, np.uint16)`; its first axis counts groups of 16 rows, so that Weight.slice works.
* `FAST[row](backend, *args)` when a row is called, args in table order. It launches through `backend.launch` and
  returns True, or returns None before any launch to decline; the plain variant then runs. It must decline weights
  whose layout is plain. What it decides may depend on shapes, never on T alone: row r has the same bits for every T.
* `work_size(backend, rows, cols, outputs)`: f32 that fast variants need in `work` behind the counters, for a product
  of `rows` token rows with `cols` inputs and `outputs` outputs.

`work` begins with COUNTERS f32 slots that are u32 counters: zero when allocated, left at zero by every kernel. What
follows holds anything. backend.variants[row] says which variant ran last, "fast" or "plain".

backend.launch(file, kernel, grid, block, shared, args, defines=None, cluster=1, cooperative=False, dependent=False)
takes arrays for pointers (a slice of an array is a shifted pointer) and numbers for scalars. While a graph is being
prepared it only compiles and loads, so a row function must not depend on what kernels computed. backend.sms is the
number of multiprocessors.
"""

FAST = {}  # row of the table -> function(backend, *args) -> True, or None to decline


def run(backend, row, args):
    """True if a fast variant of `row` took the call."""
    function = FAST.get(row)
    return function is not None and bool(function(backend, *args))


def pack(backend, parts, role):
    """`Weight` in fragment order from checkpoint tensors stacked along rows, or None: keep it plain."""
    return None


def work_size(backend, rows, cols, outputs):
    """f32 elements of workspace, counters not counted."""
    return 0
