"""experts_down: the Numba kernel is in a later commit."""


def experts_down(backend, h, w, bias, expert, share, first, order, tap_row, tap_at, x, taps, work):
    raise NotImplementedError
