from __future__ import annotations

import pytest

from policies.prefix.rungs import Rungs

RUNGS = Rungs(4, 3)


@pytest.mark.parametrize(
    ("blocks", "recorded"), [(0, []), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (6, [0, 1, 2, 3]), (11, [0, 1, 2, 3, 6, 9])]
)
def test_the_first_blocks_are_recorded_one_by_one_then_the_last_of_every_few(blocks: int, recorded: list[int]) -> None:
    assert list(RUNGS.of(range(blocks))) == recorded


@pytest.mark.parametrize("blocks", range(20))
def test_each_rung_says_how_many_blocks_end_with_it(blocks: int) -> None:
    rungs = RUNGS.of(range(blocks))
    assert RUNGS.within(blocks) == len(rungs)
    assert [RUNGS.blocks(number + 1) - 1 for number in range(len(rungs))] == list(rungs)
    assert RUNGS.blocks(0) == 0
