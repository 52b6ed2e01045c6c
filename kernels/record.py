"""The record of a slot: all that the host reads of a round, i32. Fields and offsets are said here alone.

accept writes it: oracle_control.py and cpu/control.py import these numbers, control.cu gets them as macros
(`defines`).
"""

from dataclasses import dataclass

# Tokens committed; drafts kept before the cuts; why the slot ended, 0: it runs.
EMITTED, ACCEPTED, WHY = range(3)
TOKENS = 3  # from here on B tokens, then the B drafts that were looked at, the first -1; -1: there is none
STOPPED, OUT_OF_BUDGET, NOT_FINITE = 1, 2, 3  # why
NAMES = "EMITTED", "ACCEPTED", "WHY", "TOKENS", "STOPPED", "OUT_OF_BUDGET", "NOT_FINITE"


def size(block):
    """Numbers of a record."""
    return TOKENS + 2 * block


def defines():
    """Name -> number, for a .cu file."""
    return {f"RECORD_{name}": globals()[name] for name in NAMES}


@dataclass(frozen=True)
class Record:
    """One slot's record on the host. drafts: of the rows that were verified, without the anchor's."""

    emitted: int
    accepted: int
    why: int
    tokens: list
    drafts: list

    @classmethod
    def of(cls, numbers):
        """From the i32 of one slot."""
        block = (len(numbers) - TOKENS) // 2
        emitted = int(numbers[EMITTED])
        tokens, drafts = numbers[TOKENS : TOKENS + emitted], numbers[TOKENS + block + 1 :]
        return cls(
            emitted,
            int(numbers[ACCEPTED]),
            int(numbers[WHY]),
            tokens.tolist(),
            [i for i in drafts.tolist() if i != -1],
        )
