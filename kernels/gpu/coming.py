"""Which weights the kernel after attention reads first: attention asks for them in L2 (kernels/cuda/coming.cuh)."""

import os

from ..weight import Weight

BYTES = int(os.environ.get("COMING_MB", 12)) << 20


def args(backend):
    """[pointer, bytes] for a kernel: of backend.coming, a Weight or None."""
    weight = getattr(backend, "coming", None)
    return [None, 0] if weight is None else [weight.data, min(2 * weight.data.size, BYTES)]


def after(calls):
    """For each recorded call (name, function, args) the weight of the next one where it is attention, or None."""
    found = []
    for (name, _, _), (_, _, values) in zip(calls, calls[1:]):
        weights = [v for v in values if isinstance(v, Weight) and v.layout.startswith("packed")]
        found.append(weights[0] if weights and name == "attend" else None)
    return [*found, None][: len(calls)]
