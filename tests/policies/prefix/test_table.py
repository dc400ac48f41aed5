from __future__ import annotations

import random

import numpy as np
import pytest

from policies.prefix.table import MOST_VALUE, ROW_BYTES, VALUE_BITS, KeyTable, as_keys


def some_keys(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) or 1 for _ in range(count)]


def put(table: KeyTable, keys: list[int], value: int, stamp: int) -> None:
    for key in keys:
        table.cells[table.claim(key)] = stamp << VALUE_BITS | value


def value(table: KeyTable, key: int) -> int | None:
    place = table.find(key)
    return None if place is None else table.cells[place] & MOST_VALUE


@pytest.mark.parametrize("seed", range(3))
def test_it_is_a_dict_while_it_has_room(seed: int) -> None:
    rng, table, truth = random.Random(seed), KeyTable(2**21), dict[int, int]()
    pool = some_keys(20_000, seed)
    for step in range(60):
        keys = rng.sample(pool, rng.choice([1, 10, 100, 2000]))
        if rng.random() < 0.5:
            put(table, keys, step + 1, step)
        else:
            # a wrong number of known ones makes it no less correct
            known = rng.choice([None, 0, len(keys) // 2])
            values, stamps = np.full(len(keys), step + 1), np.full(len(keys), step, np.uint64)
            table.put_many(as_keys(keys), values, stamps, known=known)
        truth |= dict.fromkeys(keys, step + 1)
    table.check()
    assert len(table) == len(truth)
    assert {key: value(table, key) for key in pool} == {key: truth.get(key) for key in pool}
    places = table.find_many(as_keys(pool))
    assert [place >= 0 for place in places.tolist()] == [key in truth for key in pool]


def test_it_grows_by_one_segment_at_a_time_and_no_further_than_its_bytes() -> None:
    table, sizes = KeyTable(2**20), []
    for start in range(100):
        put(table, some_keys(1000, start), 1, start)
        sizes.append(table.size_bytes())
    assert sizes == sorted(sizes)
    assert sizes[0] < 2**17
    assert sizes[-1] == 2**20
    table.check()


def test_a_full_table_drops_the_oldest_and_returns_it() -> None:
    dropped: list[int] = []
    table = KeyTable(2**17, dropped=lambda values: dropped.extend(values.tolist()))
    for stamp in range(1, 200):
        put(table, some_keys(100, stamp), stamp, stamp)
    table.check()
    ages = [sum(value(table, key) is not None for key in some_keys(100, stamp)) for stamp in range(1, 200)]
    assert ages[:130] == [0] * 130
    assert ages[-10:] == [100] * 10
    assert len(dropped) + len(table) == 19_900


def test_rows_that_have_become_empty_go_when_their_segment_is_moved() -> None:
    table = KeyTable(2**17, renewed=lambda values: np.where(values == 1, 0, values))
    gone, kept = some_keys(500, 1), some_keys(500, 2)
    put(table, gone, 1, 5)
    put(table, kept, 2, 5)
    for _ in range(2):
        table.refresh()
    assert [value(table, key) for key in gone] == [None] * 500
    assert [value(table, key) for key in kept] == [2] * 500
    table.check()


def test_keys_that_crowd_one_place_are_found_and_cost_only_their_own_segment() -> None:
    table = KeyTable(2**20)
    # the last row of a segment, however many there are
    crowd = [number * 2**20 // ROW_BYTES + table.segment_rows - 1 for number in range(1, 1500)]
    table.put_many(as_keys(crowd[:500]), np.ones(500, np.int64), np.ones(500, np.uint64))
    put(table, crowd[500:], 1, 2)
    table.check()
    assert all(value(table, key) == 1 for key in crowd[-1000:])


def test_the_same_key_twice_in_a_batch_is_one_row() -> None:
    table, keys = KeyTable(2**17), as_keys([5 << 40, 6 << 40] * 40)
    table.put_many(keys, np.ones(80, np.int64), np.ones(80, np.uint64))
    assert len(table) == 2
    table.check()


def test_a_table_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        KeyTable(64)


def test_a_key_of_zero_counts_as_one() -> None:
    assert as_keys([0, 7]).tolist() == [1, 7]
