from __future__ import annotations

import random

import pytest

from shards.kv.keys import BLOCK_TOKENS
from shards.kv.options import PoolOptions
from shards.kv.pool import BlockPool, OutOfBlocks
from shards.kv.table import BlockTable
from shards.kv.window_layout import KvLayout, KvWindow
from shards.kv.window_pages import WindowPages


def pages_of(pages: int, *, blocks: int = 40, window: int = 2 * BLOCK_TOKENS) -> WindowPages:
    return WindowPages(KvLayout(blocks, KvWindow(window, 1), pages, BLOCK_TOKENS), lambda _: False)


def a_pool(pages: int = 8, *, blocks: int = 40, window: int = 2 * BLOCK_TOKENS, pin_share: float = 0.0) -> BlockPool:
    layout = KvLayout(blocks, KvWindow(window, 1), pages, BLOCK_TOKENS)
    return BlockPool(blocks, model="m", layout=layout, options=PoolOptions(pin_share=pin_share))


def tokens_of(*heads: int):  # type: ignore[no-untyped-def]
    """Block `i` has the tokens of heads[i], 64 times."""
    return lambda index: heads[index].to_bytes(4, "little") * BLOCK_TOKENS


def compute(table: BlockTable, *heads: int) -> None:
    """Compute all of `heads` block by block, as an engine does."""
    for end in range(len(table) + 1, len(heads) + 1):
        table.slide((end - 1) * BLOCK_TOKENS)
        table.grow(end * BLOCK_TOKENS)
        table.store(tokens_of(*heads), computed_tokens=end * BLOCK_TOKENS)
    table.slide(len(heads) * BLOCK_TOKENS)
    table.check()


def follow(pool: BlockPool, *heads: int) -> BlockTable:
    table = BlockTable(pool, "d")
    table.follow(tokens_of(*heads), limit=len(heads))
    table.check()
    pool.check()
    return table


def hit(pool: BlockPool, *heads: int) -> int:
    """The number of blocks of a hit, which ends at once."""
    table = follow(pool, *heads)
    found = len(table)
    table.release()
    return found


def windows_of(pool: BlockPool) -> WindowPages:
    assert pool.windows is not None
    return pool.windows


def test_a_sequence_of_any_length_holds_one_window() -> None:
    pool = a_pool(4)
    table = BlockTable(pool, "d")
    compute(table, *range(30))
    assert len(table) == 30
    assert len(table.paged) == 2
    assert windows_of(pool).available == 2
    pool.check([table.ids])
    windows_of(pool).check([table.paged])
    table.release()
    assert windows_of(pool).available == 4


def test_more_pages_than_can_be_given_are_refused_and_nothing_changes() -> None:
    pool = a_pool(4)
    table = BlockTable(pool, "d")
    with pytest.raises(OutOfBlocks, match="5 pages are wanted"):
        table.grow(5 * BLOCK_TOKENS)
    assert (pool.available, pool.free, windows_of(pool).available) == (40, 40, 4)
    table.grow(3 * BLOCK_TOKENS)
    # three of four pages are as much as 30 of 40 blocks
    assert (pool.available, pool.free) == (37, 10)


def test_a_hit_goes_to_the_end_of_a_conversation() -> None:
    pool = a_pool(8)
    first = BlockTable(pool, "d")
    compute(first, *range(10))
    first.release()
    again = follow(pool, *range(10), 99)
    assert len(again) == 10
    assert again.paged == list(again.ids[8:])
    windows_of(pool).check([again.paged])


def test_a_hit_ends_where_all_pages_of_its_window_are() -> None:
    pool, other = a_pool(8), list(range(100, 106))
    first = BlockTable(pool, "d")
    compute(first, *range(10))
    first.release()
    second = BlockTable(pool, "d")
    compute(second, *other)
    # the first three blocks and the last ones have pages, and nothing between them
    assert [hit(pool, *range(count)) for count in range(11)] == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 10]


def test_what_a_hit_lacks_is_computed_again_and_found_from_then_on() -> None:
    pool = a_pool(5)
    first = BlockTable(pool, "d")
    compute(first, *range(6))
    ids = first.ids
    # only the first two blocks have kept their pages
    second = follow(pool, 0, 1, 2, 77)
    assert len(second) == 2
    compute(second, 0, 1, 2, 77)
    # its blocks are those that were cached already
    assert second.ids[:3] == ids[:3]
    pool.check([first.ids, second.ids])
    windows_of(pool).check([first.paged, second.paged])
    second.release()
    first.release()
    assert hit(pool, 0, 1, 2, 77) == 4


def test_a_long_prompt_does_not_push_out_the_ends_of_others() -> None:
    pool = a_pool(10, blocks=100)
    for conversation in range(3):
        table = BlockTable(pool, "d")
        compute(table, *(1000 * conversation + block for block in range(4)))
        table.release()
    long = BlockTable(pool, "d")
    compute(long, *range(5000, 5060))
    found = [hit(pool, *(1000 * conversation + block for block in range(4))) for conversation in range(3)]
    assert found == [4, 4, 4]


def test_what_was_found_once_outlasts_what_was_only_passed() -> None:
    pool = a_pool(8, blocks=100)
    first = BlockTable(pool, "d")
    compute(first, 0, 1, 2, 3, 10)
    second = follow(pool, 0, 1, 2, 3, 20)
    assert len(second) == 4
    compute(second, 0, 1, 2, 3, *range(20, 50))
    assert hit(pool, 0, 1, 2, 3, 30) == 4


def test_pages_of_pinned_blocks_are_evicted_last() -> None:
    pool = a_pool(5, blocks=100, pin_share=0.2)
    table = BlockTable(pool, "d")
    compute(table, 0, 1)
    pool.pins.pin("it", [cached.key for cached in table.path], domain="d", until_s=1.0, now_s=0.0)
    table.release()
    for conversation in range(1, 5):
        other = BlockTable(pool, "d")
        compute(other, *(1000 * conversation + block for block in range(3)))
        other.release()
    assert hit(pool, 0, 1) == 2
    more = BlockTable(pool, "d")
    more.grow(5 * BLOCK_TOKENS)
    assert hit(pool, 0, 1) == 0


def test_a_cleared_cache_keeps_no_page() -> None:
    pool = a_pool(8)
    table = BlockTable(pool, "d")
    compute(table, *range(10))
    pool.clear()
    table.unchain()
    pool.check([table.ids])
    table.release()
    pool.check([])
    assert windows_of(pool).available == len(windows_of(pool)._free) == 8


def test_pages_are_consecutive_while_there_is_room() -> None:
    windows = pages_of(8)
    windows.give([5, 9])
    windows.give([2], after=9)
    assert windows.of_blocks[[9, 2]].tolist() == [windows.of_blocks[5] + 1, windows.of_blocks[5] + 2]


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_lose_no_page_and_use_none_twice(seed: int) -> None:
    rng = random.Random(seed)
    window = rng.choice([1, 40, 64, 65, 130, 200])
    most = KvWindow(window, 1).pages(BLOCK_TOKENS)
    pool = a_pool(most * rng.randint(2, 4), blocks=rng.choice([60, 200]), window=window, pin_share=0.1)
    tables: list[tuple[BlockTable, list[int]]] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.3 and len(tables) * most + most <= windows_of(pool).size and pool.available > 20:
            heads = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            tables.append((follow(pool, *heads), heads))
        elif action < 0.75 and tables:
            table, heads = rng.choice(tables)
            heads.append(rng.randrange(2))
            if pool.available:
                table.slide(len(table) * BLOCK_TOKENS)
                table.grow((len(table) + 1) * BLOCK_TOKENS)
                table.store(tokens_of(*heads), computed_tokens=len(table) * BLOCK_TOKENS)
                if len(table) < len(heads):
                    table.follow(tokens_of(*heads), limit=len(heads))
        elif action < 0.95 and tables:
            tables.pop(rng.randrange(len(tables)))[0].release()
        elif action < 0.97:
            pool.clear()
            for table, _ in tables:
                table.unchain()
        elif tables and tables[0][0].path:
            keys = [cached.key for cached in tables[0][0].path]
            pool.pins.pin("it", keys, domain="d", until_s=1.0, now_s=0.0)
        for table, _ in tables:
            table.check()
        pool.check([table.ids for table, _ in tables])
        windows_of(pool).check([table.paged for table, _ in tables])
    for table, _ in tables:
        table.release()
    assert windows_of(pool).available == windows_of(pool).size
