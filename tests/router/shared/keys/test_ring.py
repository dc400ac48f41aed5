"""The issued keys as a router knows them: fresh, by the clock, and still there when their store is not."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from policies.errors import ConfigError, InvalidRequest, Unauthenticated, Unavailable
from policies.keys import KeyBook, hash_of
from policies.nouns import FixedBudget, Limits, Tenant
from router.call.identify import identity_of
from router.shared.keys.base import Edit, KeyStore
from router.shared.keys.file import FileKeys
from router.shared.keys.lines import decode, encode
from router.shared.keys.redis import RedisKeys
from router.shared.keys.ring import KeyRing
from tests.policies.builders import an_issued_key
from tests.router.parts import a_config, a_tenant
from tests.router.shared.store.parts import HandClock, RedisServer, a_redis

DAY_S = 86_400.0


@dataclass
class Ring:
    """A ring over `store`, the events that it reported, and the clock that its keys expire by."""

    store: KeyStore | None
    clock: HandClock = field(default_factory=HandClock)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = KeyRing(self.store, clock=self.clock, on_event=self.events.append)

    def tenant_of(self, key: str) -> Tenant:
        return identity_of(key, a_config(a_tenant(key=None), a_tenant("labs", key=None)), self.keys).tenant

    def refuses(self, key: str, why: str = "is not known") -> bool:
        with pytest.raises(Unauthenticated, match=why):
            self.tenant_of(key)
        return True


@asynccontextmanager
async def a_ring(store: KeyStore | None) -> AsyncIterator[Ring]:
    ring = Ring(store)
    await ring.keys.start()
    yield ring
    await ring.keys.close()


def text_of(path: Path) -> str:
    return path.read_text()


def write(path: Path, text: str) -> None:
    path.write_text(text)


def remove(path: Path) -> None:
    path.unlink()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


async def test_a_new_key_lets_its_tenant_in_and_looks_like_one(path: Path) -> None:
    async with a_ring(FileKeys(str(path))) as ring:
        made = await ring.keys.issue("labs", name="ci")
        assert re.fullmatch(r"pm_[A-Za-z0-9_-]{43}", made.text)
        assert ring.tenant_of(made.text).name == "labs"
        assert made.kept.id == hash_of(made.text)[:12]
        assert (await ring.keys.issue("labs")).text != made.text


async def test_only_the_hash_is_kept(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with a_ring(FileKeys(str(path))) as ring:
            made = await ring.keys.issue("acme", name="ci")
            newer = await ring.keys.rotate("acme", made.kept.id, overlap_s=60)
            ring.tenant_of(newer.text)
            ring.refuses("pm_guess")
            await ring.keys.revoke("acme", made.kept.id)
            texts = f"{made!r} {newer!r} {ring.keys!r} {ring.keys.of('acme')} {caplog.text} {text_of(path)}"
    assert made.kept.id in caplog.text
    assert not [secret for secret in (made.text, newer.text, "pm_") if secret in texts]


async def test_the_error_for_an_expired_key_says_so(path: Path) -> None:
    async with a_ring(FileKeys(str(path))) as ring:
        made = await ring.keys.issue("acme", lives_s=90 * DAY_S)
        ring.clock.pass_s(90 * DAY_S - 1)
        assert ring.tenant_of(made.text)
        ring.clock.pass_s(1)
        assert ring.refuses(made.text, rf"the API key {made.kept.id} expired at 2024-02-13 12:00:00 UTC \(ask")


async def test_while_a_rotation_overlaps_both_keys_are_good(path: Path) -> None:
    async with a_ring(FileKeys(str(path))) as ring:
        old = await ring.keys.issue("acme", name="ci")
        new = await ring.keys.rotate("acme", old.kept.id, overlap_s=DAY_S)
        assert (ring.tenant_of(old.text), new.kept.name) == (ring.tenant_of(new.text), "ci")
        ring.clock.pass_s(DAY_S)
        assert ring.tenant_of(new.text)
        assert ring.refuses(old.text, "expired")


async def test_a_rotated_key_may_live_as_long_as_the_old_one_might(path: Path) -> None:
    async with a_ring(FileKeys(str(path))) as ring:
        old = await ring.keys.issue("acme", lives_s=30 * DAY_S)
        ring.clock.pass_s(20 * DAY_S)
        new = await ring.keys.rotate("acme", old.kept.id, overlap_s=DAY_S)
        assert new.kept.expires == ring.clock() + 30 * DAY_S
        short = await ring.keys.rotate("acme", new.kept.id, overlap_s=DAY_S, lives_s=60)
        assert short.kept.expires == ring.clock() + 60


async def test_a_tenant_that_left_the_file_takes_its_keys_along(path: Path) -> None:
    async with a_ring(FileKeys(str(path))) as ring:
        made = await ring.keys.issue("gone")
        assert ring.refuses(made.text, "tenant of the API key .* is not there any more")


async def test_the_last_use_of_a_key_is_remembered_while_it_lives(path: Path) -> None:
    async with a_ring(FileKeys(str(path))) as ring:
        made = await ring.keys.issue("acme")
        assert ring.keys.used(made.kept.sha256) is None
        ring.clock.pass_s(5)
        ring.tenant_of(made.text)
        assert ring.keys.used(made.kept.sha256) == ring.clock()
        await ring.keys.revoke("acme", made.kept.id)
        assert ring.keys.used(made.kept.sha256) is None


async def test_without_a_store_nothing_can_be_issued_and_the_hint_says_what_is_missing() -> None:
    async with a_ring(None) as ring:
        with pytest.raises(InvalidRequest, match=r"has no store for keys \(set server.state to a folder"):
            await ring.keys.issue("acme")
        with pytest.raises(InvalidRequest, match="has no issued key"):
            await ring.keys.rotate("acme", "x", overlap_s=1)


async def test_a_file_that_is_no_book_is_refused_at_the_start_with_every_line(path: Path) -> None:
    write(path, '{"sha256": "x", "tenant": "acme", "created": 1}\n\nnonsense\n')
    with pytest.raises(ConfigError) as caught:
        await Ring(FileKeys(str(path))).keys.start()
    problems = caught.value.problems
    assert [problem.partition(": ")[0] for problem in problems] == [f"{path}:1", f"{path}:3"]
    assert "$.sha256" in problems[0]
    assert caught.value.hint


async def test_a_file_that_is_spoilt_while_it_runs_leaves_the_old_keys(path: Path) -> None:
    async with a_ring(FileKeys(str(path))) as ring:
        made = await ring.keys.issue("acme")
        whole = text_of(path)
        write(path, whole[:-20])
        for _ in range(3):
            await ring.keys.look()
        assert ring.tenant_of(made.text)
        with pytest.raises(ConfigError, match=f"{path}:1"):
            await ring.keys.issue("acme")
        write(path, whole)
        await ring.keys.look()
        assert ring.events == ["keys_refused", "keys_back"]


async def test_a_file_that_vanishes_takes_no_key_along_and_is_made_again(path: Path) -> None:
    async with a_ring(FileKeys(str(path))) as ring:
        made = await ring.keys.issue("acme")
        remove(path)
        await ring.keys.look()
        assert ring.tenant_of(made.text)
        await ring.keys.issue("acme")
        assert len(text_of(path).splitlines()) == 2
        write(path, "")
        await ring.keys.look()
        assert ring.refuses(made.text)
        assert ring.events == ["keys_away", "keys_back"]


async def test_a_missing_folder_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere for the keys \(make it"):
        await Ring(FileKeys(str(tmp_path / "nowhere" / "keys.jsonl"))).keys.start()


async def test_the_file_is_its_owners_alone(path: Path) -> None:
    write(path, "")
    async with a_ring(FileKeys(str(path))) as ring:
        await ring.keys.issue("acme")
    assert {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {
        "keys.jsonl": 0o600,
        "keys.jsonl.lock": 0o600,
    }


async def test_another_router_hears_of_a_key_at_its_next_look(server: RedisServer) -> None:
    server.clean()
    async with a_ring(RedisKeys(server.url)) as first, a_ring(RedisKeys(server.url)) as second:
        made = await first.keys.issue("acme")
        assert second.refuses(made.text)
        await second.keys.look()
        assert second.tenant_of(made.text)
        await second.keys.revoke("acme", made.kept.id)
        await first.keys.look()
        assert first.refuses(made.text)


async def test_a_router_rotates_what_another_one_just_issued(server: RedisServer) -> None:
    server.clean()
    async with a_ring(RedisKeys(server.url)) as first, a_ring(RedisKeys(server.url)) as second:
        made = await first.keys.issue("acme", name="ci")
        assert (await second.keys.rotate("acme", made.kept.id, overlap_s=1)).kept.name == "ci"


async def test_without_redis_known_keys_are_good_and_an_empty_one_gets_them_back(server: RedisServer) -> None:
    server.clean()
    events: list[str] = []
    async with a_ring(RedisKeys(server.url, on_event=events.append)) as ring, a_ring(RedisKeys(server.url)) as other:
        made = await ring.keys.issue("acme")
        await other.keys.look()
        server.stop()
        await ring.keys.look()
        assert ring.tenant_of(made.text)
        server.start()
        for each in (ring, other):
            await each.keys.look()
            assert each.tenant_of(made.text)
        assert (ring.events, events) == (["keys_away", "keys_back"], ["keys_put_back"])
        async with a_ring(RedisKeys(server.url)) as fresh:
            assert fresh.tenant_of(made.text)


async def test_routers_agree_on_one_book_after_a_failover_that_lost_a_change(server: RedisServer) -> None:
    server.clean()
    async with a_ring(RedisKeys(server.url)) as first, a_ring(RedisKeys(server.url)) as second:
        await first.keys.issue("acme")
        await second.keys.look()
        with server.admin() as admin:
            replica = admin.dump("pointsman:keys")
            await first.keys.issue("acme", name="lost")
            admin.restore("pointsman:keys", 0, replica, replace=True)
        await second.keys.issue("acme", name="kept apart")
        for each in (first, second, first):
            await each.keys.look()
        assert set(first.keys.all()) == set(second.keys.all())


async def test_a_revoked_key_does_not_come_back_with_an_old_copy_of_redis(server: RedisServer) -> None:
    server.clean()
    async with a_ring(RedisKeys(server.url)) as ring:
        made = await ring.keys.issue("acme")
        with server.admin() as admin:
            copy = admin.dump("pointsman:keys")
            await ring.keys.revoke("acme", made.kept.id)
            admin.restore("pointsman:keys", 0, copy, replace=True)
        await ring.keys.look()
        assert ring.refuses(made.text)


@pytest.mark.parametrize("nonsense", [{"revision": "x"}, {"revision": 2**40, "book": "{"}])
async def test_a_redis_that_talks_nonsense_is_as_one_that_is_away(
    server: RedisServer, nonsense: dict[str, str | int]
) -> None:
    server.clean()
    async with a_ring(RedisKeys(server.url)) as ring:
        made = await ring.keys.issue("acme")
        with server.admin() as admin:
            admin.hset("pointsman:keys", mapping=nonsense)
        await ring.keys.look()
        assert ring.tenant_of(made.text)
        assert ring.events == ["keys_away"]


async def test_a_router_that_starts_while_redis_is_away_learns_the_keys_later(server: RedisServer) -> None:
    server.clean()
    async with a_ring(RedisKeys(server.url)) as ring:
        made = await ring.keys.issue("acme")
        server.stop()
        async with a_ring(RedisKeys(server.url)) as late:
            with pytest.raises(Unavailable, match="cannot be looked up now"):
                late.tenant_of(made.text)
            await ring.keys.look()
            server.start()
            await ring.keys.look()
            await late.keys.look()
            assert late.tenant_of(made.text)
        assert late.events == ["keys_away", "keys_back"]


class SlowStore:
    """A store with changes that take until it is released."""

    def __init__(self) -> None:
        self.book: KeyBook = {}
        self.began, self.release = asyncio.Event(), asyncio.Event()

    async def look(self) -> KeyBook | None:
        return self.book

    async def change(self, edit: Edit) -> KeyBook:
        self.began.set()
        await self.release.wait()
        self.book = edit(self.book)
        return self.book

    async def close(self) -> None:
        pass


async def test_a_change_is_known_even_if_its_caller_leaves() -> None:
    store = SlowStore()
    async with a_ring(store) as ring:
        asking = asyncio.create_task(ring.keys.issue("acme"))
        await store.began.wait()
        asking.cancel()
        await asyncio.wait({asking})
        store.release.set()
    assert [key.tenant for key in ring.keys.of("acme")] == ["acme"]


LIMITED = Limits(concurrent=2, cost_per_day=5, fixed=(FixedBudget("launch", 9, 20_000, 20_100), FixedBudget("all", 7)))


def test_a_book_without_limits_reads_as_it_always_did_and_one_with_them_comes_back_whole() -> None:
    plain, limited = an_issued_key("pm_one"), an_issued_key("pm_two", limits=LIMITED)
    book = {key.sha256: key for key in (plain, limited)}
    text = encode(book)
    assert decode(text, "book") == book
    assert b"limits" not in encode({plain.sha256: plain})
    with pytest.raises(ConfigError, match="is not a key"):
        decode(text.replace(b'"concurrent":2', b'"concurrent":0'), "book")
    with pytest.raises(ConfigError, match="is not a key: nested more than 128 levels deep"):
        decode(text.replace(b'"concurrent":2', b'"more":' + b"[" * 128 + b"]" * 128 + b',"concurrent":2'), "book")
