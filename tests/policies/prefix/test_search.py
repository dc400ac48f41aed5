import random

import pytest

from policies.prefix.search import Falls, search, walk


def searched(masks: list[int], looks: list[int], blocks: list[int] | None = None, *, wanted: int = -1) -> Falls:
    """`search`, with a set of its own for each different mask, and the number of its blocks, or `blocks`."""
    sets = [0, *sorted(set(masks) - {0})]
    numbers = [sets.index(mask) for mask in masks]

    def set_at(place: int) -> int:
        looks.append(place)
        return numbers[place]

    counts = [numbers.count(number) for number in range(len(sets))]
    return search(set_at, sets, blocks or counts, count=len(masks), wanted=wanted)


def closed(rng: random.Random, count: int, bits: int) -> tuple[list[int], list[int]]:
    """The depth of each bit, and the masks at each place."""
    depths = [rng.randrange(count + 1) for _ in range(bits)]
    return depths, [sum(1 << bit for bit, depth in enumerate(depths) if at < depth) for at in range(count)]


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("are_shared", [False, True])
def test_search_and_walk_find_the_same_depths_in_few_looks(seed: int, are_shared: bool) -> None:
    rng, looks = random.Random(seed), list[int]()
    depths, masks = closed(rng, rng.randrange(1, 4000), rng.randrange(1, 12))
    count = len(masks)
    # sets that many prompts have say nothing of how far they go in this one
    falls = searched(masks, looks, [10**6] * 20 if are_shared else None)
    assert {bit: depth for depth, mask in falls for bit in range(len(depths)) if mask >> bit & 1} == {
        bit: depth for bit, depth in enumerate(depths) if depth
    }
    assert falls == walk(enumerate(masks), masks[0], count)
    different = len(set(depths) - {0})
    assert len(looks) <= (2 + different * 13 if are_shared else 1 + 2 * different)
    assert falls == sorted(falls)


@pytest.mark.parametrize("seed", range(50))
def test_the_given_number_of_a_sets_blocks_changes_looks_but_no_depth(seed: int) -> None:
    rng = random.Random(seed)
    _, masks = closed(rng, rng.randrange(1, 400), rng.randrange(1, 12))
    found = [rng.choice([0, 1, 2, rng.randrange(400), 10**6]) for _ in range(20)]
    assert searched(masks, [], found) == walk(enumerate(masks), masks[0], len(masks))


@pytest.mark.parametrize("seed", range(50))
def test_however_bits_come_and_go_none_is_believed_beyond_a_place_that_has_it(seed: int) -> None:
    rng = random.Random(seed)
    masks = [rng.getrandbits(4) | rng.getrandbits(4) for _ in range(rng.randrange(1, 60))]
    falls = searched(masks, [])
    assert sum(bits for _, bits in falls) == masks[0]
    assert all(masks[depth - 1] & bits == bits for depth, bits in falls)


def test_only_wanted_bits_are_searched() -> None:
    looks: list[int] = []
    assert searched([7, 7, 5, 1], looks, wanted=4) == [(3, 4)]
    assert searched([7, 7, 5, 1], looks, wanted=8) == []


def test_a_search_without_a_hit_at_the_first_place_ends() -> None:
    looks: list[int] = []
    assert searched([0] * 1000, looks) == []
    assert looks == [0]


def test_what_is_found_missing_on_the_way_does_not_come_back() -> None:
    masks = [3, 3, 3, 1, 3, 3, 3, 2]
    assert searched(masks, [], [100] * 4) == [(3, 2), (7, 1)]
