from __future__ import annotations

import random
import struct
from types import SimpleNamespace

import pytest

from shards.kv.keys import BLOCK_TOKENS
from shards.kv.pool import BlockPool, OutOfBlocks
from shards.kv.prefix import PrefixCache
from shards.kv.table import BlockTable
from shards.nouns import CacheChange


def a_block(token: int) -> bytes:
    return struct.pack("<I", token) * BLOCK_TOKENS


class CollidingCache(PrefixCache):
    """Has two keys in all."""

    def key(self, parent, token_ids, *, domain):
        return token_ids[0] % 2


def a_table(pool: BlockPool, *tokens: int, domain: str = "") -> BlockTable:
    """A table with blocks of `tokens`, one value a block, shared where they are cached and computed where not."""
    table = BlockTable(pool, domain)
    table.follow(lambda index: a_block(tokens[index]), limit=len(tokens))
    table.grow(len(tokens) * BLOCK_TOKENS)
    table.store(lambda index: a_block(tokens[index]), computed_tokens=len(tokens) * BLOCK_TOKENS)
    return table


def test_a_released_prefix_is_shared_by_the_next_table():
    pool = BlockPool(8, model="m")
    first = a_table(pool, 1, 2)
    blocks = first.ids
    first.release()
    assert a_table(pool, 1, 2, 3).ids[:2] == blocks


def test_two_tables_that_computed_the_same_end_up_with_one_block():
    pool = BlockPool(8, model="m")
    first, second = BlockTable(pool, ""), BlockTable(pool, "")
    for table in (first, second):
        table.grow(BLOCK_TOKENS)
    for table in (first, second):
        table.store(lambda _: a_block(1), computed_tokens=BLOCK_TOKENS)
    assert first.ids == second.ids
    assert pool.owned == 1
    pool.check([first.ids, second.ids])


def test_what_was_unused_longest_is_evicted_first_and_children_before_parents():
    pool = BlockPool(4, model="m")
    old, new = a_table(pool, 1, 2), a_table(pool, 3, 4)
    old_keys = [cached.key for cached in old.path]
    old.release()
    new.release()
    pool.prefix.drain_events()
    pool.take(2)
    assert [(event.change, event.keys) for event in pool.prefix.drain_events()] == [
        (CacheChange.EVICTED, tuple(reversed(old_keys)))
    ]


def test_a_held_block_is_never_evicted():
    pool = BlockPool(4, model="m")
    held = a_table(pool, 1, 2)
    a_table(pool, 3, 4).release()
    pool.take(2)
    with pytest.raises(OutOfBlocks, match="1 blocks are wanted and 0 of 4"):
        pool.take(1)
    held.check()


def test_blocks_that_are_not_full_are_free_after_release():
    pool = BlockPool(4, model="m")
    table = BlockTable(pool, "")
    table.grow(BLOCK_TOKENS + 1)
    table.store(lambda _: a_block(1), computed_tokens=BLOCK_TOKENS + 1)
    table.release()
    assert len(pool.prefix) == 1
    assert pool.available == 4


def test_a_cleared_pool_forgets_and_its_holders_go_on_uncached():
    pool = BlockPool(4, model="m")
    held = a_table(pool, 1)
    a_table(pool, 2).release()
    pool.clear()
    held.unchain()
    held.grow(2 * BLOCK_TOKENS)
    held.store(a_block, computed_tokens=2 * BLOCK_TOKENS)
    pool.check([held.ids])
    assert len(pool.prefix) == 0
    held.release()
    assert pool.available == 4


def test_distrust_uncaches_blocks_without_another_holder():
    pool = BlockPool(8, model="m")
    other, broken = a_table(pool, 1), a_table(pool, 1, 2, 3)
    broken.distrust()
    pool.check([other.ids, broken.ids])
    assert [cached.token_ids for cached in pool.prefix] == [a_block(1)]
    broken.release()
    other.release()
    pool.check([])


def test_a_collision_stops_the_chain_for_good():
    pool = BlockPool(8, model="m")
    pool.prefix.__class__ = CollidingCache
    a_table(pool, 1)
    other = a_table(pool, 3, 2)
    assert not other.is_chained
    assert len(pool.prefix) == 1


@pytest.mark.parametrize("busy", [(), ("disk",), ("peers",), ("lending",), ("disk", "peers", "lending")], ids=" ".join)
def test_blocks_move_while_any_of_the_ways_that_they_take_is_busy(busy):
    pool = BlockPool(4, model="m")
    for way in ("disk", "peers", "lending"):
        setattr(pool, way, SimpleNamespace(is_busy=way in busy))
    assert pool.is_moving is bool(busy)


def test_ten_thousand_operations_lose_no_block_and_mix_no_domain():
    rng, pool = random.Random(7), BlockPool(24, model="m")
    tables: list[tuple[BlockTable, list[int]]] = []
    written: dict[int, tuple[str, tuple[int, ...]]] = {}
    for step in range(10_000):
        roll = rng.random()
        if roll < 0.002:
            pool.clear()
            for table, _ in tables:
                table.unchain()
        elif tables and (roll < 0.4 or len(tables) > 6):
            table, _ = tables.pop(rng.randrange(len(tables)))
            if rng.random() < 0.05:
                table.distrust()
            table.release()
        elif tables and roll < 0.7:
            table, tokens = rng.choice(tables)
            if pool.available:
                tokens.append(rng.randint(1, 2))
                grow(table, tokens, written)
        else:
            table = BlockTable(pool, rng.choice("ab"))
            wanted = [rng.randint(1, 2) for _ in range(rng.randint(1, 4))]
            if pool.available >= len(wanted):
                tables.append((table, wanted))
                grow(table, wanted, written)
        if step % 10 == 0:
            pool.check([table.ids for table, _ in tables])
            for table, _ in tables:
                table.check()
    for table, _ in tables:
        table.release()
    pool.check([])


def grow(table: BlockTable, tokens: list[int], written: dict[int, tuple[str, tuple[int, ...]]]) -> None:
    """Bring `table` to hold `tokens`, and see that every block it is given holds what it stands for."""
    table.follow(lambda index: a_block(tokens[index]), limit=len(tokens))
    had = len(table)
    table.grow(len(tokens) * BLOCK_TOKENS)
    for index in range(had, len(tokens)):
        written[table.ids[index]] = (table.domain, tuple(tokens[: index + 1]))
    table.store(lambda index: a_block(tokens[index]), computed_tokens=len(tokens) * BLOCK_TOKENS)
    assert [written[block] for block in table.ids] == [
        (table.domain, tuple(tokens[: index + 1])) for index in range(len(tokens))
    ]
