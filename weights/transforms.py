"""How the tensors of a checkpoint make a weight: exact transforms by name, done when a backend reads a part.

A transform takes Tensors and returns parts, which a backend stacks along rows: objects with dtype, shape, nbytes, array
and drop() as a Tensor has them.
"""


def stack(tensors):
    """As they are, one below the other."""
    return tensors


TRANSFORMS = {"stack": stack}
