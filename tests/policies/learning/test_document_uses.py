"""Popular documents come first, a session keeps its order, and a domain learns of no other."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from policies.learning.document_uses import HALF_LIFE_S, DocumentUses, Preferred

ROOT, OTHER = 1, 2


def test_unknown_documents_keep_the_clients_order() -> None:
    uses = DocumentUses()
    assert uses.preferred(ROOT, [5, 3, 4], None, 0.0) == Preferred((0, 1, 2), 0)
    uses.used(ROOT, [5, 3, 4], None, 0.0)
    # once is not popular
    assert uses.preferred(ROOT, [4, 3, 5], None, 0.0) == Preferred((0, 1, 2), 0)


def test_popular_documents_come_first_the_most_popular_before_all() -> None:
    uses = DocumentUses()
    for documents in ([1, 2, 3], [2, 3], [3]):
        uses.used(ROOT, documents, None, 0.0)
    assert uses.preferred(ROOT, [9, 1, 2, 3, 8], None, 0.0) == Preferred((3, 2, 0, 1, 4), 0)


def test_uses_of_long_ago_count_less() -> None:
    uses = DocumentUses()
    for _ in range(3):
        uses.used(ROOT, [1], None, 0.0)
    for _ in range(2):
        uses.used(ROOT, [2], None, HALF_LIFE_S)
    assert uses.preferred(ROOT, [1, 2], None, HALF_LIFE_S).places == (1, 0)
    assert uses.preferred(ROOT, [3, 2], None, 10 * HALF_LIFE_S).places == (0, 1)


def test_a_session_keeps_its_order() -> None:
    uses = DocumentUses()
    for _ in range(5):
        uses.used(ROOT, [7], None, 0.0)
    uses.used(ROOT, [1, 2, 3, 4], "s", 0.0)
    assert uses.preferred(ROOT, [4, 7, 2, 1], "s", 0.0) == Preferred((3, 2, 0, 1), 2)
    assert uses.preferred(ROOT, [4, 3, 2], "s", 0.0) == Preferred((2, 1, 0), 0)
    assert uses.preferred(ROOT, [4, 7, 2, 1], "t", 0.0).places == (1, 0, 2, 3)
    uses.used(ROOT, [4], "s", 0.0)
    assert uses.preferred(ROOT, [1, 4], "s", 0.0) == Preferred((1, 0), 1)


def test_a_domain_can_be_forgotten() -> None:
    uses = DocumentUses()
    uses.used(ROOT, [1, 2], "s", 0.0)
    uses.used(OTHER, [1], None, 0.0)
    uses.forget([ROOT, 9])
    assert repr(uses) == "<DocumentUses 1 documents and sessions of 1 domains>"
    assert uses.preferred(ROOT, [2, 1], "s", 0.0) == Preferred((0, 1), 0)
    uses.check()


@given(st.lists(st.tuples(st.permutations(range(6)), st.sampled_from([None, "s"]))), st.permutations(range(6)))
def test_no_domain_learns_of_another(others: list[tuple[list[int], str | None]], asked: list[int]) -> None:
    alone, beside = DocumentUses(), DocumentUses()
    for uses in (alone, beside):
        uses.used(ROOT, [3, 4], "s", 0.0)
    for documents, session in others:
        beside.used(OTHER, documents, session, 1.0)
    for session in (None, "s"):
        assert alone.preferred(ROOT, asked, session, 2.0) == beside.preferred(ROOT, asked, session, 2.0)


def test_documents_and_sessions_are_bounded_in_each_domain_and_together() -> None:
    uses, rng = DocumentUses(), random.Random(3)
    for number in range(6000):
        uses.used(ROOT, [number], f"s{number}", 0.0)
    uses.check()
    assert "8192 documents" in repr(uses)
    for number in range(20_000):
        uses.used(rng.randrange(100, 20_000), [*range(rng.randrange(8))], f"s{number % 3}", 0.0)
    uses.check()
    # the domain that was used longest ago is the first to go
    assert uses.preferred(ROOT, [1, 5999], "s5999", 0.0).places == (0, 1)
