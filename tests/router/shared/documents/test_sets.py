"""Document sets over fake backends: who computes which document where, for how long, and what others learn of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import NoBackend, QuotaExceeded, Unavailable, UnknownDocument
from policies.nouns import Tenant
from router.ask import Ask, AskDocument, Documents
from router.shared.documents.base import SetStore
from router.shared.documents.document_set import DocumentSet, Note, Uses
from router.shared.documents.memory import MemorySets
from router.shared.documents.redis import RedisSets
from router.shared.documents.sets import DocumentSets, SetWish
from tests.router.shared.prefixes.parts import ACME, LABS, Bench, a_bench
from tests.router.shared.store.parts import RedisServer, a_redis
from tests.shards.attached import eventually

DOCUMENTS = [AskDocument(name, f"text of {name}", name.title()) for name in ("fox", "dog", "owl")]
WISH = SetWish(600.0, model="fake", shards=1)


@dataclass
class Library:
    """One router's document sets, and the prefixes that they make."""

    bench: Bench
    sets: DocumentSets

    async def states(self, name: str = "animals", tenant: Tenant = ACME) -> dict[str, str]:
        return dict((await self.sets.shown(name, tenant.name)).states)

    async def are_all(self, state: str, name: str = "animals", tenant: Tenant = ACME) -> None:
        """Wait until every document of the set is in this state."""
        async with asyncio.timeout(5):
            while {*(await self.states(name, tenant)).values()} != {state}:  # noqa: ASYNC110
                # the other side of a socket announces nothing
                await asyncio.sleep(0.005)

    def shards(self) -> dict[str, int]:
        """Id of a prefix -> the backends that it is for."""
        return {prefix.id: prefix.shards for prefix in self.bench.prefixes.of("acme")}


@asynccontextmanager
async def a_library(store: SetStore | None = None, *, by: str = "r1") -> AsyncIterator[Library]:
    async with a_bench(by=by) as bench:
        # Redis has a clock of its own, and forgets what has expired
        bench.clock[0] = 4e9

        def ask_of(kept: DocumentSet, document: AskDocument) -> Ask:
            text = f"{kept.model} {document.id} {document.title} {document.text}"
            first = 1000 * (crc32(text.encode()) % 10_000)
            bench.warmer.prompts[text] = (first, first + 1)
            return Ask("fake", (text,), ({},), "/v1/completions")

        sets = DocumentSets(
            store or MemorySets(),
            bench.prefixes,
            ask_of=ask_of,
            tenant_of={"acme": ACME, "labs": LABS}.get,
            backends_of=lambda _: 3,
            now=lambda: bench.now,
            by=by,
        )
        async with sets:
            yield Library(bench, sets)
        sets.check()


@pytest.fixture(scope="module")
def running_server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture
def server(running_server: RedisServer) -> RedisServer:
    with running_server.admin() as admin:
        admin.flushall()
    return running_server


async def test_documents_are_computed_and_pinned_one_by_one() -> None:
    async with a_library() as library:
        await library.sets.put("animals", ACME, DOCUMENTS, WISH)
        await library.are_all("ready")
        assert len(library.bench.warmer.warmed) == 3
        assert [*library.shards().values()] == [1, 1, 1]


async def test_what_did_not_change_is_not_computed_again() -> None:
    async with a_library() as library:
        await library.sets.put("animals", ACME, DOCUMENTS, WISH)
        await library.are_all("ready")
        changed = [*DOCUMENTS[:2], AskDocument("owl", "another text")]
        await library.sets.put("animals", ACME, changed, WISH)
        await eventually(lambda: len(library.bench.warmer.warmed) == 4)
        await library.are_all("ready")
        await library.sets.turn()
        await eventually(lambda: len(library.shards()) == 3)


async def test_a_refresh_prolongs_the_pins_and_an_expired_set_loses_them() -> None:
    async with a_library() as library:
        await library.sets.put("animals", ACME, DOCUMENTS, WISH)
        await library.are_all("ready")
        library.bench.pass_s(300)
        await library.sets.refresh("animals", ACME, 900.0)
        until = library.bench.now + 900
        await eventually(lambda: {prefix.expires_at for prefix in library.bench.prefixes.of()} == {until})
        assert len(library.bench.warmer.warmed) == 3
        library.bench.pass_s(901)
        await library.sets.turn()
        assert library.bench.prefixes.of() == []
        with pytest.raises(UnknownDocument, match="expired"):
            await library.sets.shown("animals", "acme")
        assert await library.sets.of("acme") == []


async def test_documents_that_are_lost_are_computed_again() -> None:
    async with a_library() as library:
        await library.sets.put("animals", ACME, DOCUMENTS, WISH)
        await library.are_all("ready")
        for prefix in library.bench.prefixes.of("acme"):
            await library.bench.prefixes.drop("acme", prefix.id)
        assert {*(await library.states()).values()} == {"waiting"}
        await library.sets.turn()
        await library.are_all("ready")


async def test_a_document_that_failed_is_tried_again_later() -> None:
    async with a_library() as library:
        library.bench.warmer.failure = NoBackend("none is left")
        await library.sets.put("animals", ACME, DOCUMENTS[:1], WISH)
        await library.are_all("failed")
        assert (await library.sets.shown("animals", "acme")).notes["fox"].trouble == "none is left"
        library.bench.warmer.failure = None
        await library.sets.turn()
        await library.are_all("failed")
        library.bench.pass_s(61)
        await library.sets.turn()
        await library.are_all("ready")


async def test_a_document_is_on_as_many_backends_as_its_share_of_the_requests() -> None:
    async with a_library() as library:
        await library.sets.put("animals", ACME, DOCUMENTS, SetWish(600.0, model="fake"))
        await library.are_all("ready")
        for number in range(10):
            library.sets.used("acme", "animals", {"fox": Uses(1)} | ({"dog": Uses(1)} if number < 5 else {}))
        await library.sets.turn()
        # all requests of three backends, half of them, none
        await eventually(lambda: sorted(library.shards().values()) == [1, 2, 3])
        await library.are_all("ready")


async def test_uses_add_up_and_unused_documents_show() -> None:
    async with a_library() as library:
        await library.sets.put("animals", ACME, DOCUMENTS, WISH)
        library.sets.used("acme", "animals", {"fox": Uses(1, 100, 0.5, 7, 10.0)})
        library.sets.used("acme", "animals", {"fox": Uses(1, 50, 0.25, 3, 11.0)})
        assert (await library.sets.shown("animals", "acme")).uses == {"fox": Uses(2, 150, 0.75, 10, 11.0)}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["acme", "labs"]), st.booleans()), max_size=8))
async def test_no_tenant_gets_the_text_of_another_one(calls: list[tuple[str, str, bool]]) -> None:
    tenants, stored = {"acme": ACME, "labs": LABS}, dict[tuple[str, str], str]()
    async with a_library() as library:
        for number, (name, tenant, is_put) in enumerate(calls):
            if is_put:
                text = stored[name, tenant] = f"{tenant} {number}"
                await library.sets.put(name, tenants[tenant], [AskDocument("d", text)], SetWish(60.0))
            elif (name, tenant) in stored:
                await library.sets.drop(name, tenants[tenant])
                del stored[name, tenant]
            for other in tenants:
                try:
                    found = await library.sets.resolved(Documents((AskDocument("d", ""),), of_set=name), other)
                except UnknownDocument:
                    assert (name, other) not in stored
                else:
                    assert found.each == (AskDocument("d", stored[name, other]),)


async def test_a_router_that_starts_later_takes_the_sets_over_from_redis(server: RedisServer) -> None:
    async with a_library(RedisSets(server.url)) as library:
        await library.sets.put("animals", ACME, DOCUMENTS, WISH)
        await library.are_all("ready")
        documents = Documents((AskDocument("fox", ""),), of_set="animals")
    with server.admin() as admin:
        # its lease has ended
        admin.delete("pointsman:documents:leader")
    async with a_library(RedisSets(server.url), by="r2") as restarted:
        await restarted.are_all("ready")
        assert len(restarted.bench.warmer.warmed) == 3
        assert (await restarted.sets.resolved(documents, "acme")).each == (AskDocument("fox", "text of fox", "Fox"),)


async def test_of_two_routers_one_computes_and_both_name_the_documents(server: RedisServer) -> None:
    async with a_library(RedisSets(server.url)) as first, a_library(RedisSets(server.url), by="r2") as second:
        await second.sets.put("animals", ACME, DOCUMENTS, WISH)
        await first.sets.turn()
        await second.sets.turn()
        await eventually(lambda: len(first.bench.warmer.warmed) + len(second.bench.warmer.warmed) == 3)
        assert not (first.bench.warmer.warmed and second.bench.warmer.warmed)
        named = Documents((), of_set="animals")
        assert [each.id for each in (await first.sets.resolved(named, "acme")).each] == ["fox", "dog", "owl"]
        await second.sets.put("animals", ACME, DOCUMENTS[:1], WISH)
        assert [each.id for each in (await first.sets.resolved(named, "acme")).each] == ["fox"]


async def test_while_redis_is_away_what_was_read_before_is_known() -> None:
    with a_redis() as server:
        async with a_library(RedisSets(server.url)) as library:
            await library.sets.put("animals", ACME, DOCUMENTS, WISH)
            named = Documents((AskDocument("fox", ""),), of_set="animals")
            before = await library.sets.resolved(named, "acme")
            server.stop()
            assert await library.sets.resolved(named, "acme") == before
            with pytest.raises(Unavailable):
                await library.sets.resolved(Documents((AskDocument("dog", ""),), of_set="animals"), "acme")
            with pytest.raises(Unavailable):
                await library.sets.put("animals", ACME, DOCUMENTS, WISH)


STORED = SetWish(600.0)


@asynccontextmanager
async def some_routers(count: int, server: RedisServer) -> AsyncIterator[list[DocumentSets]]:
    """Routers that share what they store, or one with a memory of its own."""
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            store = RedisSets(server.url) if count > 1 else MemorySets()
            found.append((await stack.enter_async_context(a_library(store, by=f"r{number}"))).sets)
        yield found


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_documents_that_are_added_at_once_are_all_kept(count: int, server: RedisServer) -> None:
    async with some_routers(count, server) as routers:
        adding = (
            routers[number % count].put("s", ACME, [AskDocument(f"d{number}", f"text {number}")], STORED, adds=True)
            for number in range(10)
        )
        await asyncio.gather(*adding)
        for sets in routers:
            asked = await sets.resolved(Documents((), of_set="s"), "acme")
            assert {each.id: each.text for each in asked.each} == {f"d{each}": f"text {each}" for each in range(10)}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_done_at_once_has_the_effect_of_one_after_the_other(
    seed: int, count: int, server: RedisServer
) -> None:
    rng, added, removed = random.Random(seed), set[str](), set[str]()
    async with some_routers(count, server) as routers:
        await routers[0].put("s", ACME, [AskDocument("first", "text")], STORED)

        async def add(name: str) -> None:
            await rng.choice(routers).put("s", ACME, [AskDocument(name, name)], STORED, adds=True)
            added.add(name)

        async def remove(name: str) -> None:
            with suppress(UnknownDocument):
                await rng.choice(routers).remove("s", ACME, name)
                removed.add(name)

        names = [f"d{number}" for number in range(8)]
        changes = [add(name) for name in names] + [remove(name) for name in names]

        async def refresh() -> None:
            await rng.choice(routers).refresh("s", ACME, 900.0)

        changes += [refresh() for _ in range(3)]
        rng.shuffle(changes)
        tasks = [asyncio.create_task(change) for change in changes]
        for task in rng.sample(tasks, 3):
            # a client that leaves has done its part or nothing
            asyncio.get_running_loop().call_later(rng.random() * 0.02, task.cancel)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = [error for error in ended if isinstance(error, asyncio.CancelledError)]
        assert not [error for error in ended if isinstance(error, Exception)]
        asked = await routers[-1].resolved(Documents((), of_set="s"), "acme")
        unsure = set(names) if cancelled else set[str]()
        assert {each.id for each in asked.each} - unsure == {"first"} | (added - removed - unsure)
        assert all(each.text for each in asked.each)
        # the next change has its turn
        await routers[0].put("s", ACME, [AskDocument("last", "text")], STORED, adds=True)


@pytest.mark.parametrize("count", [1, 3])
async def test_sets_that_are_made_at_once_never_exceed_what_their_tenant_may_store(
    count: int, server: RedisServer
) -> None:
    small = replace(ACME, stored_documents=4)
    async with some_routers(count, server) as routers:
        making = (
            routers[number % count].put(f"s{number}", small, [AskDocument("d", "text")], STORED) for number in range(9)
        )
        ended = await asyncio.gather(*making, return_exceptions=True)
        assert sum(isinstance(error, QuotaExceeded) for error in ended) == 5
        assert len(await routers[0].of("acme")) == 4


async def test_a_set_that_changes_while_it_is_dropped_is_dropped_all_the_same(server: RedisServer) -> None:
    async with some_routers(2, server) as (first, second):
        await first.put("s", ACME, DOCUMENTS, STORED)
        before = await first._fresh(("acme", "s"))
        await second.put("s", ACME, [AskDocument("new", "text")], STORED, adds=True)
        assert before is not None
        assert not await first._store.drop(before)
        await first.drop("s", ACME)
        assert await second.of("acme") == []


async def test_a_document_that_was_computed_for_a_set_that_is_gone_leaves_nothing(server: RedisServer) -> None:
    store = RedisSets(server.url)
    await store.note(("acme", "gone"), {"owl": Note("p")})
    with server.admin() as admin:
        assert not admin.keys("*notes*")
    await store.close()


async def test_a_change_that_a_failover_lost_is_not_taken_for_another_one(server: RedisServer) -> None:
    async with some_routers(2, server) as (first, second):
        await first.put("s", ACME, [AskDocument("a", "text")], STORED)
        with server.admin() as admin:
            saved = admin.dump("pointsman:documents:changes")
            await first.put("s", ACME, [AskDocument("b", "text")], STORED, adds=True)
            seen = await first._store.changes("acme")
            admin.restore("pointsman:documents:changes", 0, saved, replace=True)
        await second.put("s", ACME, [AskDocument("c", "text")], STORED, adds=True)
        assert await first._store.changes("acme") != seen
