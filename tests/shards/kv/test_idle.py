from __future__ import annotations

import struct
from itertools import pairwise

import pytest

from shards.kv.idle import IdleBlocks, recompute_cost
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.options import PoolOptions
from shards.kv.pool import BlockPool, OutOfBlocks
from shards.kv.prefix import CachedBlock
from shards.kv.table import BlockTable


def a_block(token: int) -> bytes:
    return struct.pack("<I", token) * BLOCK_TOKENS


def a_table(pool: BlockPool, *tokens: int, domain: str = "", rank: int = 0) -> BlockTable:
    """A table with blocks of `tokens`, one value a block, shared where they are cached and computed where not."""
    table = BlockTable(pool, domain, rank=rank)
    table.follow(lambda index: a_block(tokens[index]), limit=len(tokens))
    table.grow(len(tokens) * BLOCK_TOKENS)
    table.store(lambda index: a_block(tokens[index]), computed_tokens=len(tokens) * BLOCK_TOKENS)
    return table


def leave(pool: BlockPool, *tokens: int, domain: str = "", rank: int = 0) -> list[CachedBlock]:
    """Cache `tokens` and let go of them."""
    table = a_table(pool, *tokens, domain=domain, rank=rank)
    path = table.path
    table.release()
    return path


def cached(pool: BlockPool) -> set[int]:
    return {block.token_ids[0] for block in pool.prefix if block.block is not None}


def churn(pool: BlockPool, blocks: int) -> None:
    """Take and give back `blocks` blocks, one at a time, which evicts where nothing is free."""
    for _ in range(blocks):
        pool.release(pool.take(1))


def test_the_lowest_rank_goes_first_whenever_it_was_used():
    pool = BlockPool(3, model="m")
    leave(pool, 1, rank=1)
    leave(pool, 2, rank=0)
    leave(pool, 3, rank=2)
    pool.take(1)
    assert cached(pool) == {1, 2}
    pool.take(1)
    assert cached(pool) == {2}


def test_the_best_class_that_used_a_block_counts():
    pool = BlockPool(3, model="m")
    leave(pool, 1, rank=0)
    leave(pool, 2, rank=1)
    leave(pool, 1, rank=2)
    pool.take(2)
    assert cached(pool) == {1}


def test_the_rank_may_change_while_the_table_lives():
    pool = BlockPool(2, model="m")
    table = a_table(pool, 1, rank=0)
    leave(pool, 2, rank=1)
    table.rank = 2
    table.release()
    pool.take(1)
    assert cached(pool) == {2}


def test_a_rank_fades_when_it_is_not_used_for_sixteen_turnovers():
    pool = BlockPool(4, model="m")
    leave(pool, 1, rank=0)
    churn(pool, 15 * 4)
    leave(pool, 2, rank=1)
    pool.take(3)
    assert cached(pool) == {1}
    pool = BlockPool(4, model="m")
    leave(pool, 1, rank=0)
    churn(pool, 17 * 4)
    leave(pool, 2, rank=1)
    pool.take(3)
    assert cached(pool) == {2}


def test_within_a_rank_what_is_dear_to_recompute_stays_longer():
    options = PoolOptions(doubling_tokens=BLOCK_TOKENS)
    pool = BlockPool(8, model="m", options=options)
    leave(pool, 1, 2, 3, 4)
    leave(pool, 5)
    pool.take(4)
    assert cached(pool) == {1, 2, 3, 4}


def test_what_is_dear_goes_too_when_it_is_not_used():
    options = PoolOptions(doubling_tokens=BLOCK_TOKENS)
    pool = BlockPool(4, model="m", options=options)
    leave(pool, 1, 2, 3)
    for token in range(10, 30):
        leave(pool, token)
    assert not cached(pool) & {1, 2, 3}


def test_cost_grows_with_depth_up_to_a_bound():
    costs = [recompute_cost(depth, 640) for depth in (0, 10, 20, 10**6)]
    assert costs == [1.0, 2.0, 3.0, 8.0]


def test_a_shared_beginning_outlives_its_branches():
    pool = BlockPool(6, model="m")
    for end in range(10, 30):
        leave(pool, 1, 2, end)
    assert cached(pool) >= {1, 2}


def test_sequences_that_grow_in_a_full_pool_get_runs_of_consecutive_blocks():
    pool = BlockPool(2048, model="m")
    for start in range(0, 2048, 64):
        leave(pool, *range(start, start + 64))
    tables = [BlockTable(pool, "") for _ in range(8)]
    for blocks in range(1, 17):
        for table in tables:
            table.grow(blocks * BLOCK_TOKENS)
    breaks = sum(right != left + 1 for table in tables for left, right in pairwise(table.ids))
    assert breaks / len(tables) <= 4


def test_stale_entries_do_not_pile_up():
    pool = BlockPool(8, model="m")
    for _ in range(1000):
        leave(pool, 1)
    assert "1 blocks" in repr(pool._idle)
    assert sum(map(len, pool._idle._heaps.values())) < 100


def test_nothing_is_least_where_nothing_is_idle():
    assert IdleBlocks().least() is None


def test_a_domain_keeps_its_floor_against_others_and_not_against_itself():
    pool = BlockPool(6, model="m", options=PoolOptions(floors={"a": 2}))
    leave(pool, 1, 2, 3, domain="a")
    assert pool.available == 4
    assert pool.available_for("a") == 6
    taken = pool.take(4, domain="b")
    assert cached(pool) == {1, 2}
    with pytest.raises(OutOfBlocks, match="1 blocks are wanted and 0 of 6"):
        pool.take(1, domain="b")
    pool.check([taken])
    taken += pool.take(2, domain="a")
    assert not cached(pool)
    pool.check([taken])


def test_floors_are_passed_over_for_what_is_worth_more():
    pool = BlockPool(4, model="m", options=PoolOptions(floors={"a": 2}))
    leave(pool, 1, 2, domain="a", rank=3)
    leave(pool, 3, domain="b", rank=0)
    pool.take(2, domain="b")
    assert cached(pool) == {1, 2}


@pytest.mark.parametrize(
    "options",
    [
        PoolOptions(floors={"a": 3, "b": 3}, pin_share=0.25),
        PoolOptions(pin_share=1.0),
        PoolOptions(floors={"a": -1}),
        PoolOptions(doubling_tokens=0),
    ],
)
def test_options_that_leave_no_room_or_no_meaning_are_refused(options):
    with pytest.raises(ValueError, match=r"pins and floors|must be"):
        BlockPool(8, model="m", options=options)


def test_a_pin_keeps_a_path_until_it_ends():
    pool = BlockPool(8, model="m", options=PoolOptions(pin_share=0.5))
    path = leave(pool, 1, 2)
    leave(pool, 3)
    assert pool.pins.pin("p", [path[-1].key], domain="", until_s=60.0, now_s=0.0) == 1
    taken = pool.take(6)
    assert cached(pool) == {1, 2}
    with pytest.raises(OutOfBlocks):
        pool.take(1)
    pool.pins.expire(59.0)
    assert pool.available == 0
    pool.pins.expire(60.0)
    taken += pool.take(2)
    assert not cached(pool)
    pool.check([taken])


def test_a_pin_on_what_is_held_counts_once_it_is_let_go():
    pool = BlockPool(4, model="m", options=PoolOptions(pin_share=0.5))
    table = a_table(pool, 1)
    assert pool.pins.pin("p", [table.path[0].key], domain="", until_s=60.0, now_s=0.0)
    table.release()
    assert pool.available == 3
    pool.pins.expire(60.0)
    assert pool.available == 4
    pool.check([])


def test_pins_never_take_more_than_their_share():
    pool = BlockPool(8, model="m", options=PoolOptions(pin_share=0.25))
    path = leave(pool, 1, 2, 3)
    keys = [block.key for block in path]
    assert pool.pins.pin("p", keys, domain="", until_s=60.0, now_s=0.0) == 2
    assert pool.guaranteed == 6 == pool.available
    pool.check([])


def test_a_key_of_another_domain_and_a_time_that_is_over_pin_nothing():
    pool = BlockPool(4, model="m", options=PoolOptions(pin_share=0.5))
    keys = [block.key for block in leave(pool, 1, domain="a")]
    assert pool.pins.pin("p", keys, domain="b", until_s=60.0, now_s=0.0) == 0
    assert pool.pins.pin("p", keys, domain="a", until_s=60.0, now_s=60.0) == 0
    assert pool.pins.pin("p", [12345], domain="a", until_s=60.0, now_s=0.0) == 0


def test_nothing_can_be_pinned_unless_the_operator_gave_a_share():
    pool = BlockPool(4, model="m")
    assert pool.pins.pin("p", [block.key for block in leave(pool, 1)], domain="", until_s=60.0, now_s=0.0) == 0


def test_a_second_pin_lengthens_and_never_shortens():
    pool = BlockPool(4, model="m", options=PoolOptions(pin_share=0.5))
    keys = [block.key for block in leave(pool, 1)]
    for until_s in (60.0, 90.0, 30.0):
        pool.pins.pin("p", keys, domain="", until_s=until_s, now_s=0.0)
    pool.pins.expire(60.0)
    pool.check([])
    assert pool.available == 3
    pool.pins.expire(90.0)
    assert pool.available == 4


def test_a_cleared_pool_has_no_pins():
    pool = BlockPool(4, model="m", options=PoolOptions(pin_share=0.5))
    pool.pins.pin("p", [block.key for block in leave(pool, 1)], domain="", until_s=60.0, now_s=0.0)
    pool.clear()
    pool.pins.expire(90.0)
    pool.check([])
    assert pool.available == 4
