from __future__ import annotations

import random

import pytest

from policies.prefix.holders import NO_HOLDERS, HolderSets


def a_set(sets: HolderSets, mask: int, blocks: int = 1) -> int:
    number = sets.number(mask)
    assert number is not None
    sets.move(NO_HOLDERS, number, blocks)
    return number


def test_equal_sets_have_one_number_and_live_as_long_as_a_block_has_them() -> None:
    sets = HolderSets(10_000, 100)
    first = a_set(sets, 0b11)
    assert a_set(sets, 0b11) == first
    assert len(sets) == 2
    sets.release([first, first])
    assert len(sets) == 1
    assert sets.size_bytes() == 0
    sets.check()


def test_without_room_only_sets_of_one_holder_are_new() -> None:
    sets = HolderSets(300, 100)
    numbers = [a_set(sets, 0b11), a_set(sets, 0b110)]
    assert sets.number(0b111) is None
    numbers.append(a_set(sets, 0b1000))
    sets.check()
    sets.release(numbers)
    assert sets.number(0b111) is not None


def test_a_number_too_many_is_refused() -> None:
    sets = HolderSets(10_000, 2)
    a_set(sets, 0b11)
    assert sets.number(0b101) is None


def test_retired_bits_go_in_time_and_are_clean_when_they_are_in_no_set() -> None:
    sets = HolderSets(10**6, 10**6)
    numbers = {mask: a_set(sets, mask) for mask in range(1, 2000)}
    sets.retire(0b1)
    sweeps = [sets.sweep() for _ in range(9)]
    assert sweeps == [0] * 7 + [0b1, 0]
    assert all(sets.masks[number] == mask & ~0b1 for mask, number in numbers.items())
    assert {sets.renewed(number) for mask, number in numbers.items() if mask in (6, 7)} == {numbers[6]}
    assert sets.renewed(numbers[1]) == NO_HOLDERS
    assert sets.stale_blocks == 1000
    sets.check()


@pytest.mark.parametrize("seed", range(5))
def test_counts_hold_after_any_history(seed: int) -> None:
    rng, sets, blocks = random.Random(seed), HolderSets(10**5, 1000), list[int]()
    live = 0xFF
    for _ in range(2000):
        event = rng.random()
        if event < 0.5:
            mask = rng.getrandbits(8) & live
            if mask:
                blocks.append(a_set(sets, mask))
        elif event < 0.8 and blocks:
            sets.release([blocks.pop(rng.randrange(len(blocks)))])
        elif event < 0.9 and blocks:
            at = rng.randrange(len(blocks))
            new = sets.renewed(blocks[at])
            sets.move(blocks[at], new)
            blocks[at] = new
        elif event < 0.92:
            retired = 1 << rng.randrange(8)
            live &= ~retired
            sets.retire(retired)
        else:
            live |= sets.sweep()
        blocks = [number for number in blocks if number]
        assert sets.blocks_of(0xFF) >= sum(bool(sets.masks[number]) for number in blocks)
    sets.check()
