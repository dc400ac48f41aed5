"""The book of issued keys: which key makes room, what a rotation leaves, and what is refused."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import keys
from policies.errors import InvalidRequest
from policies.keys import MOST_OF_TENANT, NO_KEYS, KeyBook, find_key, hash_of, keys_of, rotated, with_key, without_key
from tests.policies.builders import an_issued_key

NOW = 1_700_000_000


def a_book(*issued: keys.IssuedKey) -> KeyBook:
    book = NO_KEYS
    for key in issued:
        book = with_key(book, key, now=NOW)
    return book


def test_a_key_is_known_by_its_sha256_and_called_by_its_beginning() -> None:
    key = an_issued_key("pm_secret")
    assert key.sha256 == hashlib.sha256(b"pm_secret").hexdigest()
    assert key.id == key.sha256[:12]
    assert "pm_secret" not in repr(key)


def test_a_key_expires_at_its_second_and_one_without_never() -> None:
    assert not an_issued_key(expires=NOW).has_expired(NOW - 0.001)
    assert an_issued_key(expires=NOW).has_expired(NOW)
    assert not an_issued_key().has_expired(2.0**40)


def test_a_change_leaves_the_old_book_as_it_was() -> None:
    before = a_book(an_issued_key("one"))
    after = with_key(before, an_issued_key("two"), now=NOW)
    assert (len(before), len(after)) == (1, 2)
    assert len(without_key(after, "acme", an_issued_key("one").id)) == 1


def test_a_key_belongs_to_one_tenant_alone() -> None:
    book, mine = a_book(an_issued_key("one", "acme"), an_issued_key("two", "labs")), an_issued_key("one").id
    assert [key.tenant for key in keys_of(book, "labs")] == ["labs"]
    for change in (lambda: find_key(book, "labs", mine), lambda: without_key(book, "labs", mine)):
        with pytest.raises(InvalidRequest, match="'labs' has no issued key"):
            change()


def test_an_id_with_a_slip_is_answered_with_what_was_meant() -> None:
    key = an_issued_key("one")
    with pytest.raises(InvalidRequest, match=f"did you mean '{key.id}'"):
        find_key(a_book(key), "acme", key.id[:-1])


def test_a_full_tenant_gets_no_more_keys_until_one_has_expired() -> None:
    book = a_book(*(an_issued_key(str(number), expires=NOW + 10 + number) for number in range(MOST_OF_TENANT)))
    with pytest.raises(InvalidRequest, match="has 64 keys, the maximum"):
        with_key(book, an_issued_key("more"), now=NOW)
    assert with_key(book, an_issued_key("more", "labs"), now=NOW)
    later = with_key(book, an_issued_key("more"), now=NOW + 12)
    assert len(later) == MOST_OF_TENANT
    assert hash_of("0") not in later
    assert hash_of("1") in later


def test_all_tenants_together_have_a_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MOST", 2)
    book = a_book(an_issued_key("one", "a"), an_issued_key("two", "b"))
    with pytest.raises(InvalidRequest, match="there are 2 keys, the maximum"):
        with_key(book, an_issued_key("three", "c"), now=NOW)


def test_no_two_keys_have_one_id() -> None:
    with pytest.raises(InvalidRequest, match="already"):
        a_book(an_issued_key("one"), an_issued_key("one", "labs"))


def test_a_rotated_key_lives_until_the_overlap_is_over_and_never_longer_than_before() -> None:
    old, new = an_issued_key("old"), an_issued_key("new")
    book = rotated(a_book(old), old.id, new, until=NOW + 60, now=NOW)
    assert (book[old.sha256].expires, book[old.sha256].replaced_by) == (NOW + 60, new.id)
    assert book[new.sha256] == new
    short = an_issued_key("old", expires=NOW + 5)
    assert rotated(a_book(short), short.id, new, until=NOW + 60, now=NOW)[short.sha256].expires == NOW + 5


def test_a_key_is_rotated_once() -> None:
    old, new = an_issued_key("old"), an_issued_key("new")
    book = rotated(a_book(old), old.id, new, until=NOW + 60, now=NOW)
    with pytest.raises(InvalidRequest, match=f"was rotated already \\(rotate {new.id}\\)"):
        rotated(book, old.id, an_issued_key("newer"), until=NOW + 60, now=NOW)


@given(st.lists(st.tuples(st.sampled_from("irdt"), st.integers(0, 9), st.integers(0, 200)), max_size=40))
def test_whatever_is_done_a_book_is_whole(steps: list[tuple[str, int, int]]) -> None:
    book, now = NO_KEYS, float(NOW)
    for made, (what, which, amount) in enumerate(steps):
        mine = keys_of(book, "acme")
        new = an_issued_key(str(made), created=int(now), expires=None if amount % 2 else int(now) + amount)
        try:
            if what == "i":
                book = with_key(book, new, now=now)
            elif what == "t":
                now += amount
            elif mine and what == "r":
                book = rotated(book, mine[which % len(mine)].id, new, until=int(now) + amount, now=now)
            elif mine:
                book = without_key(book, "acme", mine[which % len(mine)].id)
        except InvalidRequest:
            assert what == "r"
        assert all(digest == key.sha256 for digest, key in book.items())
        assert len({key.id for key in book.values()}) == len(book)
        replaced = [key for key in book.values() if key.replaced_by]
        assert all(key.expires is not None for key in replaced), "a replaced key must end"
