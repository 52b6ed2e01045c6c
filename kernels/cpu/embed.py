"""embed: x[t] = scale * table[ids[t]], gathered from the packed table. Moves: T * D weights."""

from .jit import jit
from .scalar import F, load, rounded


@jit
def _run(ids, table, scale, x):
    for t in range(x.shape[0]):
        tile, lane = ids[t] // 16, ids[t] % 16
        for d in range(x.shape[1]):
            x[t, d] = rounded(F(scale) * load(table[tile, d, lane]), x)


def embed(backend, ids, table, scale, x):
    _run(ids, table.data, scale, x)
