from __future__ import annotations

import pytest

from shards.kv.options import PoolOptions, usual_pin_share
from shards.kv.pins import MOST_PINS
from shards.kv.pool import BlockPool
from tests.shards.kv.test_idle import a_table, cached, leave


def a_pool(blocks: int = 8, share: float = 0.5) -> BlockPool:
    return BlockPool(blocks, model="m", options=PoolOptions(pin_share=share))


def keys_of(pool: BlockPool, *tokens: int, domain: str = "") -> list[int]:
    return [block.key for block in leave(pool, *tokens, domain=domain)]


def test_what_two_pins_share_stays_until_the_last_of_them_ends():
    pool = a_pool()
    first, second = keys_of(pool, 1, 2), keys_of(pool, 1, 3)
    assert pool.pins.pin("first", first, domain="", until_s=60.0, now_s=0.0) == 2
    assert pool.pins.pin("second", second, domain="", until_s=60.0, now_s=0.0) == 2
    assert len(pool.pins) == 3
    assert pool.pins.unpin("first") == 1
    pool.check([])
    pool.release(pool.take(pool.available))
    assert cached(pool) == {1, 3}
    assert pool.pins.unpin("second") == 2
    pool.check([])
    assert pool.available == 8


def test_a_pin_that_is_not_there_is_ended_without_a_word():
    assert a_pool().pins.unpin("nobody's") == 0


def test_another_pin_of_a_name_adds_to_it():
    pool = a_pool()
    keys = keys_of(pool, 1, 2, 3)
    assert pool.pins.pin("p", keys[:1], domain="", until_s=60.0, now_s=0.0) == 1
    assert pool.pins.pin("p", keys, domain="", until_s=30.0, now_s=0.0) == 3
    pool.pins.expire(59.0)
    assert len(pool.pins) == 3
    pool.pins.expire(60.0)
    assert len(pool.pins) == 0
    pool.check([])


def test_a_pin_that_finds_nothing_leaves_none_behind_and_harms_no_other():
    pool = a_pool()
    keys = keys_of(pool, 1)
    assert pool.pins.pin("p", keys, domain="", until_s=60.0, now_s=0.0) == 1
    assert pool.pins.pin("p", [12345], domain="", until_s=60.0, now_s=0.0) == 0
    assert pool.pins.pin("q", [12345], domain="", until_s=60.0, now_s=0.0) == 0
    assert repr(pool.pins) == "Pins(1 on 1 of 4 blocks)"


@pytest.mark.parametrize("is_ended", [True, False])
def test_pins_that_come_and_go_or_are_prolonged_for_ever_leave_nothing_behind(is_ended: bool):
    pool = a_pool()
    keys = keys_of(pool, 1)
    for time in range(3 * MOST_PINS):
        assert pool.pins.pin("p", keys, domain="", until_s=1e6 + time, now_s=0.0) == 1
        if is_ended:
            pool.pins.unpin("p")
    pool.check([])
    pool.pins.pin("p", keys, domain="", until_s=2e6, now_s=0.0)
    pool.pins.expire(2e6 - 1)
    assert len(pool.pins) == 1
    pool.pins.expire(2e6)
    assert len(pool.pins) == 0


def test_room_is_what_may_still_be_pinned():
    pool = a_pool()
    keys = keys_of(pool, 1, 2)
    assert pool.pins.room == 4
    pool.pins.pin("p", keys, domain="", until_s=60.0, now_s=0.0)
    assert pool.pins.room == 2


def test_there_are_never_more_pins_than_may_be():
    pool = a_pool()
    keys = keys_of(pool, 1)
    held = [pool.pins.pin(str(number), keys, domain="", until_s=60.0, now_s=0.0) for number in range(MOST_PINS + 1)]
    assert held == [1] * MOST_PINS + [0]
    assert pool.pins.pin("1", keys, domain="", until_s=90.0, now_s=0.0) == 1
    pool.check([])


def test_a_cleared_domain_is_gone_and_another_keeps_all_it_has():
    pool = a_pool(12)
    held = a_table(pool, 1, 2, domain="a")
    pinned = keys_of(pool, 3, 4, domain="a")
    others = keys_of(pool, 5, 6, domain="b")
    pool.pins.pin("mine", pinned, domain="a", until_s=60.0, now_s=0.0)
    pool.pins.pin("theirs", others, domain="b", until_s=60.0, now_s=0.0)
    assert pool.clear("a") == 4
    held.unchain()
    pool.check([held.ids])
    assert cached(pool) == {5, 6}
    assert len(pool.pins) == 2
    held.grow(3 * 64)
    held.release()
    pool.check([])
    pool.pins.expire(60.0)
    assert pool.available == 12


@pytest.mark.parametrize(("blocks", "context", "share"), [(1000, 100, 0.25), (100, 90, 0.1), (100, 200, 0.0)])
def test_the_usual_share_takes_no_room_from_the_longest_prompt(blocks: int, context: int, share: float):
    found = usual_pin_share(blocks, context_blocks=context)
    assert found == pytest.approx(share)
    assert PoolOptions(pin_share=found).guaranteed(blocks) >= min(blocks, context)
