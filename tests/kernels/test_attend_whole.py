"""Blocks of attention that have several units of keys: all of their rows, or what follows of a set."""

import pytest
from minidflash.kernels.gpu import attend_fast

from tests.compare import assert_same_bits
from tests.kernels.test_fast_attend import FAST, call, make, some


@pytest.mark.parametrize("ops", FAST, indirect=True)
def test_few_blocks_are_alone_on_their_multiprocessors(ops, rng, monkeypatch):
    """They ask for more shared memory than two have room for; more blocks than multiprocessors do not."""
    room, launch, asked = 228 << 10, ops.backend.launch, []
    monkeypatch.setattr(
        ops.backend, "launch", lambda file, kernel, grid, block, shared, *rest, **how:
        (asked.append(shared), launch(file, kernel, grid, block, shared, *rest, **how)),
    )  # fmt: skip
    monkeypatch.setattr(ops.backend, "sms", 2)
    for rows in (1, 40):  # of a group as many as fit: one block, then three
        call(ops, make(rng, range(300, 300 + rows), (4, 1, 64)), splits=5, whole=True)
    few, many = asked
    assert 2 * (few + 1024) > room >= 2 * (many + 1024)


@pytest.mark.parametrize("ops", FAST, indirect=True)
def test_a_block_asks_for_its_next_unit_only_where_no_other_set_comes_first(ops, rng):
    """The second row's keys begin with the leaf that the block of the first unit has next of the first row;
    of that leaf the first row does not see all."""
    case = make(rng, [1100, 2249], (2, 1, 128), window=1200)
    both = call(ops, case, splits=12, whole=False)
    for row in (0, 1):
        assert_same_bits(call(ops, some(case, [row]), splits=12, whole=False)[0], both[row], f"row {row}")


def test_rows_of_a_prompt_fill_tiles_whatever_the_slots():
    """They are a few slots' of many; those of a round are as many of each."""
    of_prompt, of_round = (attend_fast.Shape(512, 32, 8, 128, 64, 132, splits=splits) for splits in (0, None))
    assert (of_prompt.group, of_round.group) == (16, 8)
