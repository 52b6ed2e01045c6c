"""experts_up: the Numba kernel is in a later commit."""


def experts_up(backend, u, w, bias, expert, first, order, act, limit, alpha, work, h):
    raise NotImplementedError
