"""assert_close: kernel results against float64 truth, with a bound that follows from the arithmetic."""

import numpy as np

EPS32 = 2.0**-23


def real(x):
    """float64 of activations: bf16 bits (uint16), f32 or f64."""
    x = np.asarray(x)
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def ulp(values, dtype):
    """Distance of neighbours around |values| in storage `dtype`: float32, or uint16 for bf16."""
    bits, lowest = (23, -126) if dtype == np.float32 else (7, -126)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.abs(values)))
    return 2.0 ** (np.maximum(np.nan_to_num(exponent, neginf=lowest, posinf=127), lowest) - bits)


def ratios(got, want, terms, c):
    """|error| / (c * eps32 * terms + half an output ulp), elementwise;
    infinite where one side alone is finite.

    got: f32 or bf16 bits. want: float64. terms: what the sums add up to in absolute value, broadcast to want.
    """
    value, want = real(got), np.asarray(want, np.float64)
    assert value.shape == want.shape, f"shape {value.shape}, wanted {want.shape}"
    bound = c * EPS32 * np.broadcast_to(terms, want.shape)
    bound = bound + 0.5 * ulp(np.maximum(np.abs(value), np.abs(want)), np.asarray(got).dtype)
    same = (value == want) | (np.isnan(value) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        ratio = np.abs(value - want) / bound
    return np.where(same, 0.0, np.where(np.isfinite(value) & np.isfinite(want), ratio, np.inf))


def worst(got, want, terms, c):
    """The largest ratio of error to tolerance: above 1 is a failure; a wrong kernel must reach 10."""
    found = ratios(got, want, terms, c)
    return float(found.max()) if found.size else 0.0


def assert_close(got, want, terms, c, what=""):
    """Fail with the worst error, the first bad index and how many are bad. Arguments as `ratios`."""
    found = ratios(got, want, terms, c)
    bad = found > 1
    if not bad.any():
        return
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    peak = np.unravel_index(np.argmax(found), found.shape)
    value, want = real(got), np.asarray(want, np.float64)
    raise AssertionError(
        f"{what}: {bad.sum()} of {bad.size} outside the tolerance (c = {c}); "
        f"first at {first}: {value[first]} instead of {want[first]}; "
        f"worst at {tuple(map(int, peak))}: {value[peak]} instead of {want[peak]}, "
        f"{found[peak]:.3g} tolerances off"
    )


def assert_same_bits(got, want, what=""):
    """Fail unless both arrays hold the same bits; says where they first differ."""
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: {got.dtype}{got.shape}, wanted {want.dtype}{want.shape}"
    )
    kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[got.itemsize]
    differs = got.view(kind) != want.view(kind)
    if differs.any():
        first = tuple(int(i) for i in np.argwhere(differs)[0])
        raise AssertionError(
            f"{what}: {differs.sum()} of {differs.size} differ in bits, first at {first}: {got[first]}, "
            f"{want[first]}"
        )
