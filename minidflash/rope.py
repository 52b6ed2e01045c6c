"""Rotary position embedding: which frequencies a config asks for."""

import math
from dataclasses import dataclass

import numpy as np

PIECE = 65536  # positions whose angles are held in float64 at a time
# What each kind needs (None) or may set (its published default; 0: unset). A kind not listed is refused.
ROPE_KEYS = {
    "default": {},
    "llama3": {"factor": None, "low_freq_factor": None, "high_freq_factor": None,
               "original_max_position_embeddings": None},
    "yarn": {"factor": None, "original_max_position_embeddings": None, "beta_fast": 32.0, "beta_slow": 1.0,
             "truncate": True, "attention_factor": 0.0, "mscale": 0.0, "mscale_all_dim": 0.0},
    "proportional": {"partial_rotary_factor": None, "factor": 1.0},
    "divisors": {"divisors": None},
}  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies. theta: base. kind: default, llama3, yarn, proportional, or divisors, one a
    frequency, as GGUF files have them; the fields after it are theirs (0: unset)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    partial_rotary_factor: float = 0.0
    divisors: tuple = ()

    def frequencies(self, size):
        """Frequencies of the pairs (j, j + size/2), and the multiplier on cos and sin.

        size: rotary width, even. Returns (f32 [size/2] in radians a position, float).
        Errors: none; read_target and read_drafter have checked. Source: models.md 0, 1, 4, 5.
        """
        # theta^x is correctly rounded to f32 before the division: bit for bit what the reference has.
        exponent = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        power = np.power(self.theta, exponent.astype(np.float64)).astype(np.float32)
        plain = np.float32(1) / power
        if self.kind == "llama3":
            wave = 1 / plain * np.float32(2 * math.pi)  # this order, and the next line's, are the reference's
            context, low, high = (
                self.original_max_position_embeddings,
                self.low_freq_factor,
                self.high_freq_factor,
            )
            blend = (1 / wave * np.float32(context) - np.float32(low)) / np.float32(high - low)
            slow = plain / np.float32(self.factor)
            mixed = (1 - blend) * plain / np.float32(self.factor) + blend * plain
            return np.where(wave < context / high, plain, np.where(wave > context / low, slow, mixed)), 1.0
        if self.kind == "proportional":  # of all pairs only the first turn: models.md 5
            turning = np.arange(size // 2) < int(self.partial_rotary_factor * size // 2)
            return np.where(turning, plain / np.float32(self.factor), np.float32(0)), 1.0
        if self.kind == "yarn":
            return self._yarn(size, plain), self._yarn_multiplier()
        if self.kind == "divisors":
            return plain / np.float32(self.divisors), 1.0
        return plain, 1.0

    def _yarn(self, size, plain):
        """Blend of plain and slowed frequencies, f32 [size/2]; models.md 4."""

        def dimension(turns):
            turned = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return size * math.log(turned) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        if low == high:
            high += 0.001
        ramp = np.clip(
            (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1
        )
        return plain * (1 - ramp) + plain / np.float32(self.factor) * ramp

    def _yarn_multiplier(self):
        """Multiplier on cos and sin; a ratio of two terms when both mscale keys are given."""

        def term(scale):
            return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.attention_factor:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return term(self.mscale) / term(self.mscale_all_dim)
        return term(1.0)


def rope_tables(ops, rope, size, positions):
    """cos and sin, (positions, J): the angle in f32 as the reference has it, its cosine in float64,
    rounded once."""
    frequencies, multiplier = rope.frequencies(size)
    tables = tuple(ops.array((positions, len(frequencies)), "f32") for _ in range(2))
    for first in range(0, positions, PIECE):
        where = np.arange(first, min(first + PIECE, positions), dtype=np.float32)
        angle = (where[:, None] * frequencies[None, :]).astype(np.float64)
        for function, out in zip((np.cos, np.sin), tables, strict=True):
            ops.upload(out[first : first + len(where)], (function(angle) * multiplier).astype(np.float32))
    return tables


def table_bytes(positions):
    """Bytes of the tables of {(rope, size): positions}."""
    return sum(count * size // 2 * 2 * 4 for (_, size), count in positions.items())
