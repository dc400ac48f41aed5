"""Single blocks are looked up in an index and in learned caches alike."""

from __future__ import annotations

from policies.prefix.held_blocks import HeldBlocks
from policies.prefix.index import PrefixIndex
from policies.prefix.residency import Residency, ResidencyRules

KEYS = tuple(range(1, 401))


def test_an_index_and_learned_caches_have_bits_of_their_own() -> None:
    index = PrefixIndex(max_bytes=2**20)
    index.store("b0", KEYS[:2])
    index.store("b1", KEYS[:1])
    held = HeldBlocks(*index.holders(), [lambda key, depth: key == 3, lambda key, depth: depth == 0])
    assert held.all.bit_count() == 4
    assert [held.of(key, 0, held.all).bit_count() for key in (1, 2, 3, 4)] == [3, 2, 2, 1]
    assert held.of(1, 1, held.all).bit_count() == 2
    assert held.of(1, 0, 0) == 0
    assert repr(held) == "<HeldBlocks of 4 caches>"


def test_backends_can_be_left_out_of_an_index() -> None:
    index = PrefixIndex(max_bytes=2**20)
    for name in ("b0", "b1", "b2"):
        index.store(name, KEYS[:1])
    held = HeldBlocks(*index.holders(but={"b1", "b2"}), [lambda key, depth: False])
    # a learned cache may not be taken for a backend that was left out
    assert held.of(KEYS[0], 0, held.all).bit_count() == 1


def test_a_block_counts_once_for_a_backend_with_several_tiers() -> None:
    index = PrefixIndex(max_bytes=2**20)
    index.store("b0", KEYS[:1], "device")
    index.store("b0", KEYS[:2], "disk")
    index.store("b1", KEYS[:1], "host")
    held = HeldBlocks(*index.holders(), ())
    assert held.all.bit_count() == 2
    assert [held.of(key, 0, held.all).bit_count() for key in KEYS[:3]] == [2, 1, 0]


def test_a_removed_backend_holds_nothing() -> None:
    index = PrefixIndex(max_bytes=2**20)
    index.store("b0", KEYS[:1])
    index.store("b1", KEYS[:1])
    index.forget("b0")
    held = HeldBlocks(*index.holders(), ())
    assert held.of(KEYS[0], 0, held.all).bit_count() == 1


def test_learned_blocks_are_held_while_they_are_likelier_there_than_not() -> None:
    residency = Residency(ResidencyRules(first_blocks=100))
    residency.sent("b0", KEYS[:50], 0.0)
    (holds,) = residency.newest(8)
    assert holds(KEYS[49], 49)
    assert not holds(KEYS[50], 50)
    residency.sent("b0", KEYS[100:220], 1.0)
    assert not holds(KEYS[49], 49)
    # the last block of a prompt is the first to go
    assert holds(KEYS[119], 19)


def test_blocks_behind_those_that_are_recorded_one_by_one_do_not_count() -> None:
    residency = Residency()
    residency.sent("b0", KEYS, 0.0)
    (holds,) = residency.newest(8)
    assert holds(KEYS[255], 255)
    assert not holds(KEYS[271], 271)


def test_the_caches_that_were_used_last_are_looked_into() -> None:
    residency = Residency()
    for number in range(5):
        residency.sent(f"b{number}", KEYS[number : number + 1], float(number))
    found = residency.newest(2, but=lambda name: name == "b4")
    assert [[key for key in KEYS[:5] if holds(key, 0)] for holds in found] == [[4], [3]]
