"""Laws for sampling tests: a reference of the filters, and whether counts can come from a law."""

import numpy as np

LAWS = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 40, "min_p": 0.02},
]


def filtered(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after temperature, top_k, top_p, min_p, in float64 by sorting,
    as transformers' warpers do."""
    z = np.asarray(logits, np.float64) / temperature
    z = z - z.max()
    order = np.lexsort((np.arange(len(z)), -z))
    order = order[:top_k] if top_k else order
    p = np.exp(z[order]) / np.exp(z[order]).sum()
    kept = np.cumsum(p) - p < top_p
    order, p = order[kept], p[kept]
    kept = p >= min_p * p.max()
    order, p = order[kept], p[kept]
    law = np.zeros(len(z))
    law[order] = p / p.sum()
    return law


def surprise(counts, law):
    """How far counts are from a law, in standard deviations of a normal variable:
    chi-square, Wilson and Hilferty 1931.

    counts, law: arrays of one shape. Outcomes expected fewer than 5 times are one.
    Infinite for an impossible outcome.
    """
    counts, expected = np.ravel(counts).astype(float), np.ravel(law) * np.sum(counts)
    if counts[expected == 0].any():
        return np.inf
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1:  # too few to say more than that there are not many
        assert counts[-1] <= 8, f"{counts[-1]} rare outcomes, {expected[-1]:.2g} expected"
        counts, expected = counts[:-1], expected[:-1]
    freedom = len(counts) - 1
    if not freedom:
        return 0.0
    square = ((counts - expected) ** 2 / expected).sum()
    part = 2 / (9 * freedom)
    return float(((square / freedom) ** (1 / 3) - (1 - part)) / np.sqrt(part))
