"""What others wrote under our keys hurts nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from policies.errors import Unavailable
from router.shared.documents.document_set import Note, Uses
from router.shared.documents.redis import RedisSets, notes_in, uses_in
from tests.contracts.test_set_store import a_set, put
from tests.router.shared.store.parts import RedisServer, a_redis

ODD = (b"", b"\xff", b"{", b"\x91" * 10_000, b"\xc0", b"inf", b"nan", b"1e999", b"9" * 100_000)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.mark.parametrize("odd", ODD)
async def test_a_set_that_cannot_be_read_is_said_to_be_so_and_the_others_are_there(
    odd: bytes, server: RedisServer
) -> None:
    server.clean()
    store = RedisSets(server.url)
    try:
        assert await put(store, a_set(), {})
        with server.admin() as admin:
            admin.hset("pointsman:documents:sets", "acme\0odd", odd)
            admin.hset("pointsman:documents:revisions", "acme\0odd", odd or b"x")
        assert await store.all() == [a_set()]
        for call in (store.look(("acme", "odd")), store.revision(("acme", "odd"))):
            with pytest.raises(Unavailable, match="cannot be read"):
                await call
    finally:
        await store.close()


@pytest.mark.parametrize("odd", ODD)
def test_a_note_or_a_number_that_cannot_be_read_is_left_out(odd: bytes) -> None:
    assert notes_in({b"a": odd, b"\xff": b"\x90", b"b": b"\x90"}) == {"b": Note()}
    found = uses_in({b"requests:a": b"3", b"saved_s:a": odd, b"last_at:\xff": b"1"})
    assert found["a"].requests == Uses(3).requests
    assert found.keys() == {"a"}
