import random

import pytest

from policies.prefix.search import search, walk


@pytest.mark.parametrize("seed", range(50))
def test_search_and_walk_find_the_same_depths_in_few_looks(seed: int) -> None:
    rng = random.Random(seed)
    count, bits = rng.randrange(1, 4000), rng.randrange(1, 12)
    depths = [rng.randrange(count + 1) for _ in range(bits)]
    masks = [sum(1 << bit for bit, depth in enumerate(depths) if at < depth) for at in range(count)]
    looks: list[int] = []

    def mask_at(place: int) -> int:
        looks.append(place)
        return masks[place]

    falls = search(mask_at, count)
    assert {bit: depth for depth, mask in falls for bit in range(bits) if mask >> bit & 1} == {
        bit: depth for bit, depth in enumerate(depths) if depth
    }
    assert falls == walk(enumerate(masks), masks[0], count)
    assert len(looks) <= 2 + len(set(depths)) * 13
    assert falls == sorted(falls)


def test_who_is_not_at_the_first_place_is_nowhere() -> None:
    looks = []
    assert search(lambda place: looks.append(place) or 0, 1000) == []
    assert looks == [0]


def test_what_is_found_missing_on_the_way_does_not_come_back() -> None:
    masks = [3, 3, 3, 1, 3, 3, 3, 2]
    assert search(masks.__getitem__, 8) == [(3, 2), (7, 1)]
