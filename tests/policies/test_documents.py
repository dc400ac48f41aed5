"""The order of a prompt's documents is the one of which a backend holds most."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.documents import BLOCK_BYTES, Order, best_order
from policies.prefix.held_blocks import HeldBlocks
from policies.prefix.index import PrefixIndex
from policies.prefix.text_keys import text_keys

ROOT = 7


class Caches(dict[str, set[int]]):
    """The block keys that each backend holds."""

    def sent(self, backend: str, *texts: bytes, root: int = ROOT) -> None:
        self.setdefault(backend, set()).update(text_keys(b"".join(texts), root))

    @property
    def all(self) -> int:
        return (1 << len(self)) - 1

    def of(self, key: int, depth: int, among: int) -> int:
        return sum(1 << bit for bit, held in enumerate(self.values()) if among >> bit & 1 and key in held)


def a_text(seed: int, size: int = 1000) -> bytes:
    return random.Random(seed).randbytes(size)


def held_of(order: Sequence[int], start: bytes, documents: Sequence[bytes], caches: Caches) -> int:
    """The most blocks that one backend holds of the prompt with this order."""
    keys = text_keys(start + b"".join(documents[place] for place in order), ROOT)
    return max((sum(1 for _ in itertools.takewhile(held.__contains__, keys)) for held in caches.values()), default=0)


A, B, C, D = (a_text(seed) for seed in range(4))
START = a_text(9, 300)


def order_of(documents: Sequence[bytes], caches: Caches, **options: int) -> Order:
    return best_order(START, documents, root=ROOT, holders=caches, **options)


def test_the_order_that_is_held_is_found_among_all() -> None:
    caches = Caches()
    caches.sent("b0", START, C, A, D, B)
    for order in itertools.permutations(range(4)):
        found = order_of([(A, B, C, D)[place] for place in order], caches)
        assert [order[place] for place in found.places] == [2, 0, 3, 1]
        assert found.held == 4300 // BLOCK_BYTES


def test_documents_behind_the_held_ones_keep_their_order() -> None:
    caches = Caches()
    caches.sent("b0", START, C, a_text(8))
    assert order_of([A, B, C, D], caches).places == (2, 0, 1, 3)


def test_the_longer_of_two_held_paths_wins_and_the_preferred_one_of_equals() -> None:
    caches = Caches()
    caches.sent("b0", START, A, a_text(8))
    caches.sent("b1", START, B, C, a_text(8))
    assert order_of([A, B, C], caches).places == (1, 2, 0)
    caches.sent("b2", START, A, C, a_text(8))
    assert order_of([A, B, C], caches).places == (0, 2, 1)


def test_a_path_of_two_backends_is_no_path() -> None:
    caches = Caches()
    caches.sent("b0", START, A)
    caches.sent("b1", START, B)
    caches["b1"] |= {*text_keys(START + A + B, ROOT)} - caches["b0"]
    assert order_of([A, B], caches).held == len(text_keys(START + A, ROOT))


def test_a_document_that_is_held_in_part_comes_next() -> None:
    caches = Caches()
    caches.sent("b0", START, B[:700])
    found = order_of([A, B], caches)
    assert found == Order((1, 0), 1000 // BLOCK_BYTES)


def test_without_anything_held_the_preferred_order_stays() -> None:
    caches = Caches()
    assert order_of([A, B, C], caches) == Order((0, 1, 2), 0)
    caches.sent("b0", a_text(8), C)
    assert order_of([A, B, C], caches) == Order((0, 1, 2), 0)
    assert order_of([], caches) == Order((), 0)


def test_documents_in_fixed_places_stay_in_front_and_the_search_goes_on_behind_them() -> None:
    caches = Caches()
    caches.sent("b0", START, D, A, B, C)
    caches.sent("b0", START, A, B, C)
    assert order_of([A, B, C, D], caches).places == (3, 0, 1, 2)
    assert order_of([A, C, B, D], caches, fixed=1) == Order((0, 2, 1, 3), len(text_keys(START + A + B + C, ROOT)))
    assert order_of([B, D, A, C], caches, fixed=1).places == (0, 1, 2, 3)


def test_documents_shorter_than_a_block_are_found_too() -> None:
    short, caches = [a_text(seed, 60) for seed in range(5)], Caches()
    caches.sent("b0", START, *(short[place] for place in (3, 0, 4, 1, 2)))
    found = order_of(short, caches, most_tried=10_000)
    assert found.held == (300 + 5 * 60) // BLOCK_BYTES
    assert found.places == (3, 0, 4, 1, 2)


def test_a_search_ends_after_as_many_tries_as_it_may_make() -> None:
    tries = 0

    class Endless:
        all = 1

        def of(self, key: int, depth: int, among: int) -> int:
            nonlocal tries
            tries += depth == 1
            return among if depth == 0 else 0

    documents = [a_text(seed, 300) for seed in range(50)]
    order = best_order(START, documents, root=ROOT, holders=Endless(), most_tried=20)
    assert sorted(order.places) == list(range(50))
    assert tries == 20


@given(st.data())
def test_the_search_finds_the_best_of_all_orders(data: st.DataObject) -> None:
    documents = [a_text(seed, data.draw(st.integers(40, 900))) for seed in range(data.draw(st.integers(1, 5)))]
    caches = Caches()
    for number in range(data.draw(st.integers(0, 6))):
        sent = data.draw(st.permutations(documents))[: data.draw(st.integers(1, len(documents)))]
        caches.sent(f"b{number % 3}", START, *sent, a_text(100 + number))
    found = order_of(documents, caches, most_tried=100_000)
    orders = [*itertools.permutations(range(len(documents)))]
    best = max(held_of(order, START, documents, caches) for order in orders)
    assert sorted(found.places) == list(range(len(documents)))
    assert found.held == best == held_of(found.places, START, documents, caches)


@pytest.mark.parametrize("seed", range(100))
def test_nearly_the_best_order_is_found_with_the_usual_number_of_tries(seed: int) -> None:
    rng = random.Random(seed)
    index, caches = PrefixIndex(max_bytes=2**20), Caches()
    documents = [a_text(1000 * seed + number, rng.randrange(300, 3000)) for number in range(12)]
    for number in range(40):
        sent = rng.sample(documents, rng.randrange(2, 8))
        caches.sent(f"b{number % 3}", START, *sent)
        index.store(f"b{number % 3}", text_keys(START + b"".join(sent), ROOT))
    asked = rng.sample(documents, rng.randrange(2, 6))
    found = best_order(START, asked, root=ROOT, holders=HeldBlocks(*index.holders(), ()))
    best = max(held_of(order, START, asked, caches) for order in itertools.permutations(range(len(asked))))
    assert held_of(found.places, START, asked, caches) == found.held >= 0.95 * best
