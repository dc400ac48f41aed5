from __future__ import annotations

import struct

import pytest

from shards.kv.copier import InlineCopier
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.options import PoolOptions
from shards.kv.pool import BlockPool, OutOfBlocks
from shards.kv.table import BlockTable
from shards.nouns import CacheChange, CacheEvent


def a_block(token: int) -> bytes:
    return struct.pack("<I", token) * BLOCK_TOKENS


class Ledger:
    """Memory with blocks that hold anything."""

    def __init__(self, blocks: int, slots: int) -> None:
        self.device: list[object] = [None] * blocks
        self.host: list[object] = [None] * slots
        self.slots = slots
        self.saves = self.loads = 0

    def save(self, block: int, slot: int) -> None:
        self.host[slot] = self.device[block]
        self.saves += 1

    def load(self, slot: int, block: int) -> None:
        self.device[block] = self.host[slot]
        self.loads += 1


class HeldCopier(InlineCopier):
    """Copies when the test says so."""

    def __init__(self, memory: Ledger) -> None:
        super().__init__(memory)
        self.queue = []
        self.waited = 0

    def start(self, copies):
        self.queue.append(copies)
        return len(self.queue) + self._started

    def wait(self, ticket):
        self.waited += 1
        self.run(ticket - self._started)

    def run(self, batches: int = 99) -> None:
        for copies in self.queue[:batches]:
            super().start(copies)
        del self.queue[:batches]


class House:
    """A pool with a host tier, and tables that write what they stand for."""

    def __init__(self, blocks: int, slots: int, *, is_held: bool = False, **options) -> None:
        self.memory = Ledger(blocks, slots)
        self.copier = HeldCopier(self.memory) if is_held else InlineCopier(self.memory)
        self.pool = BlockPool(blocks, model="m", options=PoolOptions(**options), copier=self.copier)

    def table(self, *tokens: int, rank: int = 0, domain: str = "") -> BlockTable:
        table = BlockTable(self.pool, domain, rank=rank)
        had = table.follow(lambda index: a_block(tokens[index]), limit=len(tokens))
        table.grow(len(tokens) * BLOCK_TOKENS)
        for index in range(had, len(tokens)):
            self.memory.device[table.ids[index]] = tokens[: index + 1]
        table.store(lambda index: a_block(tokens[index]), computed_tokens=len(tokens) * BLOCK_TOKENS)
        return table

    def leave(self, *tokens: int, rank: int = 0, domain: str = "") -> None:
        self.table(*tokens, rank=rank, domain=domain).release()

    def contents(self, table: BlockTable) -> list[object]:
        return [self.memory.device[block] for block in table.ids]

    def where(self) -> dict[tuple[int, ...], str]:
        return {
            self._tokens(block): "".join(sign for sign, at in (("d", block.block), ("h", block.slot)) if at is not None)
            for block in self.pool.prefix
        }

    def _tokens(self, cached) -> tuple[int, ...]:
        return (*(self._tokens(cached.parent) if cached.parent else ()), cached.token_ids[0])


def test_what_is_evicted_waits_in_the_host_tier_and_comes_back():
    house = House(2, 4)
    house.leave(1, 2)
    house.leave(3, 4)
    assert house.where() == {(1,): "h", (1, 2): "h", (3,): "d", (3, 4): "d"}
    table = house.table(1, 2)
    assert house.contents(table) == [(1,), (1, 2)]
    assert table.is_landed
    house.pool.check([table.ids])


def test_what_came_back_is_evicted_again_without_a_copy():
    house = House(2, 4)
    for _ in range(3):
        house.leave(1, 2)
        house.leave(3, 4)
    assert house.memory.saves == 4


def test_events_name_the_tier():
    house = House(1, 1)
    house.leave(1)
    first = next(iter(house.pool.prefix)).key
    house.leave(2)
    events = house.pool.prefix.drain_events()
    second = next(block.key for block in house.pool.prefix if block.block is not None)
    assert [event for event in events if event.tier == "device"] == [
        CacheEvent(CacheChange.STORED, (first,)),
        CacheEvent(CacheChange.EVICTED, (first,)),
        CacheEvent(CacheChange.STORED, (second,)),
    ]
    assert [event for event in events if event.tier == "host"] == [CacheEvent(CacheChange.STORED, (first,), "host")]
    assert house.pool.prefix.snapshot() == (
        CacheEvent(CacheChange.STORED, (second,), "device"),
        CacheEvent(CacheChange.STORED, (first,), "host"),
    )


def test_many_blocks_that_move_are_two_events():
    house = House(40, 40)
    house.leave(*range(40))
    house.pool.prefix.drain_events()
    house.pool.take(40)
    assert len(house.pool.prefix.drain_events()) == 2


def test_a_low_rank_does_not_push_a_better_one_out_of_the_host_tier():
    house = House(1, 1)
    house.leave(1, rank=0)
    house.leave(2, rank=1)
    house.leave(3, rank=0)
    assert house.where() == {(1,): "h", (3,): "d"}
    house.leave(4, rank=0)
    assert house.where() == {(3,): "h", (4,): "d"}


def test_a_parent_follows_its_children_even_where_the_host_tier_is_full_of_better():
    house = House(2, 2)
    house.leave(1, rank=0)
    house.leave(2, 3, rank=1)
    house.pool.take(1)
    assert house.where() == {(1,): "h", (2,): "d", (2, 3): "h"}
    house.pool.take(1)
    assert house.where() == {(1,): "h", (2,): "h"}
    house.pool.check()


def test_a_match_takes_as_much_from_the_host_tier_as_there_is_room():
    house = House(4, 4)
    house.leave(1, 2, 3)
    house.pool.release(blocks := house.pool.take(4))
    assert house.where() == {(1,): "h", (1, 2): "h", (1, 2, 3): "h"}
    blocks = house.pool.take(2)
    table = BlockTable(house.pool, "")
    assert table.follow(lambda index: a_block(index + 1), limit=3) == 2
    assert house.contents(table) == [(1,), (1, 2)]
    house.pool.check([blocks, table.ids])


def test_computing_what_the_host_tier_has_puts_it_on_the_device_again():
    house = House(2, 2)
    house.leave(1)
    house.pool.release(house.pool.take(2))
    table = BlockTable(house.pool, "")
    table.grow(BLOCK_TOKENS)
    table.store(lambda _: a_block(1), computed_tokens=BLOCK_TOKENS)
    assert house.where() == {(1,): "dh"}
    house.pool.check([table.ids])


def test_a_block_is_not_read_before_it_has_landed():
    house = House(2, 2, is_held=True)
    house.leave(1)
    house.pool.release(house.pool.take(2))
    table = house.table(1)
    assert not table.is_landed
    other = house.table(1)
    assert not other.is_landed
    house.copier.run()
    assert table.is_landed
    assert other.is_landed
    assert house.contents(table) == [(1,)]


def test_a_block_is_not_given_away_before_it_was_saved():
    house = House(2, 2, is_held=True)
    house.leave(1)
    house.leave(2)
    house.pool.take(1)
    assert house.copier.waited == 1
    assert house.memory.host.count((1,)) == 1


def test_room_made_a_step_ahead_needs_no_waiting():
    house = House(2, 2, is_held=True)
    house.leave(1)
    house.leave(2)
    house.pool.make_room(1)
    house.copier.run()
    house.pool.take(1)
    assert house.copier.waited == 0


def test_a_block_is_free_only_when_its_copy_has_landed():
    house = House(1, 1, is_held=True)
    house.leave(1)
    house.pool.release(house.pool.take(1))
    table = house.table(1)
    house.pool.clear()
    table.unchain()
    table.release()
    house.pool.check([])
    assert house.pool.available == 1
    house.pool.take(1)
    assert house.copier.waited == 2


def test_a_parked_table_gives_its_blocks_to_others_and_gets_its_kv_back():
    house = House(4, 4)
    table = house.table(1, 2)
    table.grow(2 * BLOCK_TOKENS + 5)
    house.memory.device[table.ids[-1]] = "in part"
    assert table.park()
    assert (len(table), table.is_parked, table.is_landed) == (0, True, False)
    others = house.pool.take(4)
    for block in others:
        house.memory.device[block] = "other"
    table.check()
    with pytest.raises(OutOfBlocks, match="3 blocks are wanted and 0 of 4"):
        table.unpark()
    house.pool.release(others)
    table.unpark()
    assert house.contents(table) == [(1,), (1, 2), "in part"]
    table.check()
    house.pool.check([table.ids])
    assert house.where() == {(1,): "dh", (1, 2): "dh"}


def test_what_is_still_on_the_device_is_shared_and_not_copied_back():
    house = House(4, 4)
    table = house.table(1, 2)
    table.park()
    table.unpark()
    assert house.memory.loads == 0
    assert house.contents(table) == [(1,), (1, 2)]


def test_two_parked_tables_share_the_slots_of_their_common_prefix():
    house = House(8, 4)
    first, second = house.table(1, 2, 3), house.table(1, 2, 4)
    assert first.park()
    assert second.park()
    assert house.pool.host.room == 0
    house.pool.check([])
    first.release()
    assert house.pool.host.room == 1
    second.release()
    assert house.pool.host.room == 4
    house.pool.check([])


def test_a_table_that_finds_no_room_in_the_host_tier_stays_as_it_is():
    house = House(4, 1)
    table = house.table(1, 2)
    blocks = table.ids
    assert not table.park()
    assert table.ids == blocks
    table.check()
    house.pool.check([blocks])


def test_without_a_host_tier_nothing_can_be_parked():
    pool = BlockPool(4, model="m")
    table = BlockTable(pool, "")
    table.grow(BLOCK_TOKENS)
    assert not table.park()
    assert not table.is_parked


def test_parking_may_push_cached_blocks_out():
    house = House(3, 2)
    house.leave(8)
    house.leave(9)
    house.pool.release(house.pool.take(3))
    table = house.table(1, 2)
    assert house.pool.host.room == 2
    assert table.park()
    assert house.where() == {(1,): "dh", (1, 2): "dh"}


def test_a_parked_table_goes_on_uncached_when_the_pool_is_cleared():
    house = House(4, 4)
    table = house.table(1, 2)
    table.park()
    house.pool.clear()
    table.unchain()
    table.check()
    table.unpark()
    assert house.contents(table) == [(1,), (1, 2)]
    house.pool.check([table.ids])
    table.release()
    house.pool.check([])
    assert (house.pool.available, house.pool.host.free) == (4, 4)


def test_a_pinned_block_is_not_pushed_out_of_the_host_tier():
    house = House(4, 2, pin_share=0.5)
    house.leave(1)
    house.pool.release(house.pool.take(4))
    keys = [block.key for block in house.pool.prefix]
    assert house.pool.pins.pin("p", keys, domain="", until_s=60.0, now_s=0.0) == 1
    assert house.pool.host.room == 1
    assert not house.table(2, 3).park()
    house.pool.check()
    house.pool.pins.expire(60.0)
    assert house.pool.host.room == 2


def test_distrust_forgets_both_copies():
    house = House(4, 4)
    table = house.table(1, 2)
    table.park()
    table.unpark()
    table.distrust()
    assert house.where() == {}
    table.release()
    house.pool.check([])


def test_the_representation_has_the_contents():
    house = House(4, 4)
    table = house.table(1, 2)
    table.park()
    assert repr(table) == "BlockTable(0 blocks, 2 cached, 2 parked)"
    assert "2 free, 0 double, 0 idle, 2 held of 4" in repr(house.pool)
