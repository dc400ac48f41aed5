"""The contract of every store of document sets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from policies.errors import Unavailable
from router.shared.documents.base import SetStore
from router.shared.documents.document_set import DocumentEntry, DocumentSet, Note, Texts, Uses
from router.shared.documents.memory import MemorySets
from router.shared.documents.redis import RedisSets
from tests.router.shared.store.parts import RedisServer, a_line, a_redis

UNTIL_S = 4_000_000_000.0

ENTRIES = (DocumentEntry("fox", "Foxes", 5, 1), DocumentEntry("dög: a\x01", "", 4, 2))
TEXTS = {"fox": "quick", "dög: a\x01": "lazy"}

Opens = Callable[[], SetStore]


def a_set(name: str = "animals", tenant: str = "acme", **fields: Any) -> DocumentSet:
    usual = {"version": 7, "revision": 7, "created_at": 1.0, "expires_at": UNTIL_S, "entries": ENTRIES}
    return DocumentSet(tenant, name, **{**usual, **fields})


async def put(store: SetStore, kept: DocumentSet, texts: Texts | None) -> bool:
    """Store `kept` after all changes of its tenant."""
    return await store.put(kept, texts, after=await store.changes(kept.tenant))


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def another(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Opens]:
    server.clean()
    memory, opened = MemorySets(), list[SetStore]()

    def one_more() -> SetStore:
        opened.append(memory if request.param == "memory" else RedisSets(server.url))
        return opened[-1]

    yield one_more
    for store in opened:
        await store.close()


async def test_what_one_stores_another_one_finds(another: Opens) -> None:
    store, other = another(), another()
    assert (await other.revision(a_set().key), await other.look(a_set().key), await other.all()) == (0, None, [])
    assert await put(store, a_set(), TEXTS)
    assert await other.revision(a_set().key) == 7
    assert await other.look(a_set().key) == a_set()
    assert await other.all() == [a_set()]
    assert await other.texts(a_set(), ["dög: a\x01", "none", "fox"]) == TEXTS
    assert await other.texts(a_set(), []) == {}


async def test_sets_of_other_tenants_and_names_are_apart(another: Opens) -> None:
    store = another()
    await put(store, a_set(), TEXTS)
    await put(store, a_set(tenant="labs"), dict.fromkeys(TEXTS, "other"))
    await put(store, a_set("plants", expires_at=5.0), {})
    assert await store.texts(a_set(), ["fox"]) == {"fox": "quick"}
    assert len(await store.all()) == 3
    await store.drop(a_set())
    assert await store.look(a_set().key) is None
    assert await store.texts(a_set(tenant="labs"), ["fox"]) == {"fox": "other"}


async def test_a_set_is_stored_only_if_no_set_of_its_tenant_has_changed_since(another: Opens) -> None:
    store, other = another(), another()
    before = await store.changes("acme")
    assert await put(store, a_set(version=8, revision=8), TEXTS)
    assert not await other.put(a_set(version=9, revision=9), {"fox": "late"}, after=before)
    assert not await other.put(a_set("plants"), {"fox": "late"}, after=before)
    assert await other.put(a_set(tenant="labs"), TEXTS, after=await other.changes("labs"))
    assert await store.texts(a_set(version=8, revision=8), ["fox"]) == {"fox": "quick"}
    assert await store.texts(a_set(version=9, revision=9), ["fox"]) == {}
    assert await store.look(a_set("plants").key) is None
    seen = await store.changes("acme")
    assert not await store.drop(a_set(version=7, revision=7))
    assert not await store.drop(a_set(version=9, revision=9))
    assert await store.changes("acme") == seen, "nothing was changed"
    assert await store.drop(a_set(version=8, revision=8))
    assert await store.revision(a_set().key) == 0
    assert not await store.drop(a_set(version=8, revision=8))
    assert not await store.put(a_set(), TEXTS, after=seen), "a set that was dropped is a change"


async def test_two_that_store_the_same_version_at_once_never_mix_their_texts(another: Opens) -> None:
    store, other = another(), another()
    before = await store.changes("acme")
    ended = await asyncio.gather(
        store.put(a_set(), TEXTS, after=before), other.put(a_set(), {"fox": "slow", "owl": "wise"}, after=before)
    )
    assert sorted(ended) == [False, True]
    kept = TEXTS if ended[0] else {"fox": "slow", "owl": "wise"}
    assert await store.texts(a_set(), ["fox", "owl", "dög: a\x01"]) == kept


async def test_a_refresh_keeps_the_texts_and_a_new_version_replaces_them(another: Opens) -> None:
    store = another()
    await put(store, a_set(), TEXTS)
    longer = replace(a_set(), revision=8, expires_at=UNTIL_S + 60)
    assert await put(store, longer, None)
    assert await store.texts(longer, ["fox"]) == {"fox": "quick"}
    new = replace(longer, version=9, revision=9)
    assert await put(store, new, {"fox": "slow"})
    assert await store.texts(new, ["fox", "dög: a\x01"]) == {"fox": "slow"}


async def test_notes_and_uses_are_kept_by_document_and_uses_add_up(another: Opens) -> None:
    store, other, key = another(), another(), a_set().key
    await put(store, a_set(), TEXTS)
    await store.note(key, {"fox": Note("prefix-1"), "dög: a\x01": Note(trouble="no room")})
    await store.note(key, {})
    await other.note(key, {"fox": Note("prefix-2")})
    assert await store.notes(key) == {"fox": Note("prefix-2"), "dög: a\x01": Note(trouble="no room")}
    await store.count(key, {"fox": Uses(1, 100, 0.5, 7, 10.0)})
    await other.count(key, {"fox": Uses(2, 50, 0.25, 3, 11.0), "dög: a\x01": Uses(1)})
    assert await store.uses(key) == {"fox": Uses(3, 150, 0.75, 10, 11.0), "dög: a\x01": Uses(1)}
    await store.drop(a_set())
    assert (await store.notes(key), await store.uses(key)) == ({}, {})


async def test_one_leads(another: Opens) -> None:
    store = another()
    assert await store.leads("one", 60.0)
    assert await store.leads("one", 60.0)


async def test_of_several_routers_one_leads(server: RedisServer) -> None:
    server.clean()
    one, other = RedisSets(server.url), RedisSets(server.url)
    assert await one.leads("one", 60.0)
    assert not await other.leads("other", 60.0)
    assert await one.leads("one", 0.001)
    while not await other.leads("other", 60.0):
        pass
    assert not await one.leads("one", 60.0)
    await one.close()
    await other.close()


async def test_a_store_that_is_away_is_unavailable() -> None:
    store = RedisSets("unix:///nowhere.sock")
    calls = (store.revision(a_set().key), store.all(), store.put(a_set(), TEXTS, after=0), store.leads("one", 1.0))
    for call in calls:
        with pytest.raises(Unavailable, match="the store of documents is away"):
            await call
    await store.close()


async def test_a_call_that_is_cancelled_leaves_its_answer_to_no_other(server: RedisServer) -> None:
    server.clean()
    rng = random.Random(1)
    async with a_line(server) as line:
        store = RedisSets(line.url)
        sets = [a_set(f"s{number}", revision=number + 1) for number in range(8)]
        for kept in sets:
            assert await put(store, kept, {"fox": kept.name})
        line.delay_s = 0.005
        for _ in range(60):
            kept = rng.choice(sets)
            asking = asyncio.create_task(store.texts(kept, ["fox"]))
            asyncio.get_running_loop().call_later(rng.random() * 0.01, asking.cancel)
            with suppress(asyncio.CancelledError):
                assert await asking == {"fox": kept.name}
        assert [await store.revision(kept.key) for kept in sets] == [kept.revision for kept in sets]
        await store.close()
