from __future__ import annotations

import random

from shards.exec.batch import Row
from shards.network.sharing import FEWEST_BLOCKS, shared_prefixes


def a_row(start: int, *blocks: int, tokens: int = 1) -> Row:
    return Row(start, tokens, len(blocks) * 64 - 5, blocks)


def test_rows_share_what_they_begin_with_and_no_more() -> None:
    shorter, longer = a_row(0, 1, 2, 3, 4, 5, 9), a_row(1, 1, 2, 3, 4, 5, 6, 7)
    [shared] = shared_prefixes([shorter, a_row(2, 8, 2, 3, 4, 5), longer])
    assert shared == ((shorter, longer), 5)


def test_a_short_prefix_common_to_all_does_not_hide_a_document_common_to_some() -> None:
    rows = [a_row(row, 1, 2, *(10 * (row % 2) + at for at in range(20, 26)), 90 + row) for row in range(4)]
    assert [(len(shared.rows), shared.blocks) for shared in shared_prefixes(rows)] == [(2, 8), (2, 8)]


def test_a_block_that_is_being_written_is_not_shared() -> None:
    same = [a_row(0, 1, 2, 3, 4, 5), a_row(1, 1, 2, 3, 4, 5)]
    assert shared_prefixes(same)[0].blocks == 4


def test_prompts_and_what_is_alone_or_short_are_left_out() -> None:
    prompt = a_row(0, 1, 2, 3, 4, 5, 6, tokens=7)
    assert not shared_prefixes([prompt, a_row(7, 1, 2, 3, 4, 5, 8), a_row(8, 1, 2, 3, 9), a_row(9, 1, 2, 3, 8)])


def test_any_batch_is_grouped_by_what_is_really_common() -> None:
    rng = random.Random(0)
    for _ in range(300):
        trunk = rng.sample(range(1000), 12)
        cuts = [rng.randint(0, 12) for _ in range(rng.randint(1, 8))]
        rows = [a_row(at, *trunk[:cut], *range(2000 + 20 * at, 2000 + 20 * at + 2)) for at, cut in enumerate(cuts)]
        deep = [cut for cut in cuts if cut >= FEWEST_BLOCKS]
        found = [(len(shared.rows), shared.blocks) for shared in shared_prefixes(rows)]
        assert found == ([(len(deep), min(deep))] if len(deep) > 1 else [])
