from __future__ import annotations

import random

from shards.kv.disk_index import DiskEntry, DiskIndex
from tests.shards.kv.blocks_on_disk import a_label


def put(index: DiskIndex, *tokens: int, worth: float = 0.0, size: int = 10) -> DiskEntry:
    entry = index.add(a_label(*tokens), size=size, worth=worth)
    entry.is_written = True
    index.rest(entry, worth)
    return entry


def test_the_least_worth_goes_first_and_children_before_their_parents() -> None:
    index = DiskIndex()
    entries = [put(index, 1, worth=1), put(index, 1, 2, worth=5), put(index, 3, worth=3)]
    order = []
    while (victim := index.victim()) is not None:
        order.append(victim)
        index.remove(victim)
        index.check()
    assert order == [entries[2], entries[1], entries[0]]
    assert (len(index), index.used) == (0, 0)


def test_a_child_that_came_first_keeps_its_parent_too() -> None:
    index = DiskIndex()
    child = put(index, 1, 2, worth=5)
    put(index, 1, worth=1)
    assert index.victim() is child


def test_an_entry_in_use_is_passed_over() -> None:
    index = DiskIndex()
    entry = put(index, 1)
    index.use(entry)
    assert index.victim() is None
    index.rest(entry, 7.0)
    assert index.victim() is entry
    assert entry.worth == 7.0
    index.check()


def test_an_unwritten_entry_and_one_of_another_prefix_are_not_found() -> None:
    index = DiskIndex()
    entry = index.add(a_label(1), size=10, worth=0.0)
    assert index.find(a_label(1)) is None
    entry.is_written = True
    assert index.find(a_label(1)) is entry
    entry.chain = bytes(32)
    assert index.find(a_label(1)) is None
    assert index.get(entry.key) is entry


def test_removing_twice_counts_once() -> None:
    index = DiskIndex()
    entry = put(index, 1)
    index.resize(entry, 30)
    assert index.used == 30
    index.remove(entry)
    index.remove(entry)
    index.rest(entry, 1.0)
    assert entry not in index
    assert repr(index) == "DiskIndex(0 blocks, 0 bytes)"


def test_ten_thousand_uses_keep_the_heap_small_and_in_order() -> None:
    rng, index = random.Random(0), DiskIndex()
    entries = [put(index, token, worth=rng.random()) for token in range(20)]
    for _ in range(10_000):
        index.rest(rng.choice(entries), rng.random() * 10)
    assert len(index._heap) <= 2 * 20 + 65
    index.check()
    assert index.victim() is min(entries, key=lambda entry: entry.worth)
