"""Checked values of keywords: what is meant is taken as plain Python,
the rest is a UserError naming the keyword."""

import math
import operator
from numbers import Real

import numpy as np

from .errors import UserError


def told(value):
    """A value in a message: its repr on one line, cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    # Python refuses to print a number of more than 4,300 digits, an object may refuse too.
    except Exception:  # noqa: BLE001
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) < 100 else text[:96] + " ..."


def is_flag(value):
    """Whether a value is true or false, NumPy's included."""
    return isinstance(value, (bool, np.bool_))


def is_word(value, word):
    """Whether a value is this text; an array compares with a text item by item."""
    return isinstance(value, str) and value == word


def whole_number(value):
    """A value as an int where it is a whole number of Python or NumPy, else None."""
    try:
        return None if is_flag(value) else operator.index(value)
    except TypeError:
        return None


def whole(name, value, low, high=None):
    """A whole number within bounds."""
    found = whole_number(value)
    if found is None or found < low or (high is not None and found > high):
        bounds = f"from {low} up" if high is None else f"from {low} to {high}"
        raise _refusal(name, value, f"need a whole number {bounds}")
    return found


def real(name, value, is_good, needed):
    """A finite number for which is_good holds. needed: the bounds in words."""
    try:
        found = float(value) if isinstance(value, Real) and not is_flag(value) else math.nan
    except OverflowError:
        found = math.nan
    if not math.isfinite(found) or not is_good(found):
        raise _refusal(name, value, f"need {needed}")
    return found


def flag(name, value):
    """True or false."""
    if not is_flag(value):
        raise _refusal(name, value, "need True or False")
    return bool(value)


def one_of(name, value, choices):
    """One of some words."""
    if not any(is_word(value, choice) for choice in choices):
        raise _refusal(name, value, f"need {' or '.join(choices)}")
    return value


def instance(name, value, kind, needed):
    """A value of a type or of one of several. needed: the type in words."""
    if not isinstance(value, kind):
        raise _refusal(name, value, f"need {needed}")
    return value


def _refusal(name, value, needed):
    return UserError(f"{name.replace('_', '-')} is {told(value)}, {needed}")
