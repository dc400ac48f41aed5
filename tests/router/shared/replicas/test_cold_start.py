"""Routers that come late, over a real Redis: with a snapshot they place like those that heard everything."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from backends.fake import FakeBackend
from router.fleet.prompt_keys import PromptKeys
from router.shared.replicas.shelf import RedisShelf, Shelf, Superseded
from router.shared.replicas.snapshot import VERSION, Header, decode_header, encode
from tests.router.shared.replicas.parts import KEY, KEYS, QUICK, TOKENS, Site, a_site, some_keys
from tests.router.shared.store.parts import RedisServer, a_line, a_redis
from tests.shards.attached import eventually

SNAPSHOT = f"{KEY}:snapshot"
MOST = 20
# nothing here is slow but the machine
WRITING = replace(QUICK, snapshot_every_s=0.02, every_s=0.002, deadline_s=2.0, patience_s=1.0)
QUIET = replace(WRITING, snapshot_every_s=1e9)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(autouse=True)
def _clean(server: RedisServer) -> None:
    server.clean()


def prompts(count: int, *, seed: int) -> list[tuple[int, ...]]:
    """Of a few documents some beginning, and an end of their own."""
    rng = random.Random(seed)
    documents = [some_keys(40, seed=1000 + number) for number in range(5)]
    return [(*rng.choice(documents)[: rng.randint(1, 40)], *some_keys(3, seed=number)) for number in range(count)]


async def all_sent(site: Site) -> None:
    await eventually(lambda: " 0 news to send" in repr(site.replicas))


async def taught(server: RedisServer, site: Site, asked: Sequence[tuple[int, ...]]) -> None:
    """`site` has learnt from answers to all that was `asked`, and the stream has forgotten most of it."""
    rng = random.Random(1)
    for number, keys in enumerate(asked):
        site.answer(keys, at=rng.choice(site.backends), cached=TOKENS)
        if number % 5 == 0:
            await all_sent(site)
    await all_sent(site)
    with server.admin() as admin:
        assert admin.xlen(KEY) >= MOST
        # Redis cuts whole nodes of a hundred entries; a stream of this length has been cut
        admin.xtrim(KEY, maxlen=MOST, approximate=False)


async def written(site: Site) -> None:
    """All that `site` knows now is in a snapshot."""
    count = site.events.count("replicas_snapshot_written")
    # the next one may have been begun already
    await eventually(lambda: site.events.count("replicas_snapshot_written") >= count + 2)


def believed(site: Site, asked: Sequence[tuple[int, ...]]) -> list[dict[str, float]]:
    found = [site.beliefs.longest(PromptKeys(keys)) for keys in asked]
    return [{name: match.expected_blocks for name, match in matches.items()} for matches in found]


@pytest.mark.parametrize("seed", range(3))
async def test_a_router_that_starts_after_the_stream_was_cut_believes_what_the_others_do(
    server: RedisServer, seed: int
) -> None:
    asked = prompts(400, seed=seed)
    async with (
        a_site(server.url, "x", WRITING, most=MOST) as x,
        a_site(server.url, "z", QUIET, most=MOST) as z,
    ):
        await taught(server, x, asked)
        await written(x)
        await eventually(lambda: z.expected(asked[-1]) == x.expected(asked[-1]))
        async with a_site(server.url, "y", QUIET, most=MOST) as y:
            await eventually(lambda: y.replicas.state == "exact")
            assert "replicas_snapshot_read" in y.events
            for site in (x, y, z):
                site.ahead_s += 60  # beyond speculation
            for mine, others, first in zip(believed(y, asked), believed(z, asked), believed(x, asked), strict=True):
                assert mine == pytest.approx(others, rel=0.02)
                assert mine == pytest.approx(first, rel=0.02)
            # and goes on with them
            x.answer((7, 8, 9))
            await eventually(lambda: y.expected((7, 8, 9)) > 2)


async def test_without_a_snapshot_a_late_router_is_approximate_until_it_has_read_for_long(
    server: RedisServer,
) -> None:
    asked = prompts(200, seed=1)
    async with a_site(server.url, "x", QUIET, most=MOST) as x:
        await taught(server, x, asked)
        async with a_site(server.url, "y", QUIET, most=MOST) as y:
            assert y.replicas.state == "approximate"
            assert "replicas_back" in y.events, "it hears the others all the same"
            await eventually(lambda: y.expected(asked[-1]) > 0)
            assert not any(event.startswith("replicas_snapshot") for event in y.events)
            y.ahead_s += QUICK.settled_s
            await eventually(lambda: y.replicas.is_exact)


def flipped(admin: Any, name: str) -> None:
    piece = bytearray(admin.lindex(f"{SNAPSHOT}:{name}", -1))
    piece[len(piece) // 2] ^= 1
    admin.lset(f"{SNAPSHOT}:{name}", -1, bytes(piece))


def reheaded(admin: Any, **fields: Any) -> None:
    admin.set(SNAPSHOT, encode(msgspec.structs.replace(decode_header(admin.get(SNAPSHOT)), **fields)))


SPOILT: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "cut short": ("broken", lambda admin, name: admin.ltrim(f"{SNAPSHOT}:{name}", 0, -2)),
    "without pieces": ("broken", lambda admin, name: admin.delete(f"{SNAPSHOT}:{name}")),
    "with a flipped bit": ("broken", flipped),
    "with a foreign piece": ("broken", lambda admin, name: admin.lset(f"{SNAPSHOT}:{name}", 0, b"mine")),
    "headed by nonsense": ("broken", lambda admin, _: admin.set(SNAPSHOT, b"hello")),
    "headed by nothing": ("broken", lambda admin, _: admin.set(SNAPSHOT, b"")),
    "of another version": ("foreign", lambda admin, _: reheaded(admin, version=VERSION + 1)),
    "of a time that the stream forgot": ("old", lambda admin, _: reheaded(admin, position="5-0")),
    "of a time that never came": ("old", lambda admin, _: reheaded(admin, position="99999999999999-0")),
}


@pytest.mark.parametrize("how", SPOILT)
async def test_a_snapshot_of_no_use_is_counted_and_the_stream_is_heard_as_without_one(
    server: RedisServer, how: str
) -> None:
    why, spoil = SPOILT[how]
    asked = prompts(200, seed=1)
    async with a_site(server.url, "x", WRITING, most=MOST) as x:
        await taught(server, x, asked)
        await written(x)
    with server.admin() as admin:
        admin.xtrim(KEY, maxlen=MOST, approximate=False)
        spoil(admin, decode_header(admin.get(SNAPSHOT)).name)
    async with a_site(server.url, "w", QUIET, most=MOST) as w:
        w.answer((1, 2, 3))
        await w.replicas.turn()
        async with a_site(server.url, "y", QUIET, most=MOST) as y:
            assert f"replicas_snapshot_{why}" in y.events
            assert y.replicas.state == "approximate"
            assert y.expected((1, 2, 3)) > 2
            y.answer((4, 5, 6))
            assert y.expected((4, 5, 6)) > 2
            y.beliefs.check()


@dataclass
class Troubled:
    """A shelf that `strike`s before the call number `at` of any of `methods`."""

    shelf: Shelf
    strike: Callable[[], Any]
    methods: tuple[str, ...]
    at: int = 1
    calls: int = 0

    @property
    def has_struck(self) -> bool:
        return self.calls >= self.at

    def __getattr__(self, name: str) -> Any:
        if name in self.methods:
            self.calls += 1
            if self.calls == self.at:
                self.strike()
        return getattr(self.shelf, name)


@pytest.mark.parametrize("method", ["claim", "append", "publish", "outdate"])
async def test_a_redis_that_dies_while_a_snapshot_is_written_costs_that_snapshot(
    server: RedisServer, method: str
) -> None:
    asked = prompts(200, seed=2)
    shelf = Troubled(RedisShelf(server.url), server.stop, (method,), at=2)
    async with a_site(server.url, "x", WRITING, shelf=shelf) as x:
        for keys in asked:
            x.answer(keys)
        await eventually(lambda: shelf.has_struck)
        x.answer((1, 2, 3))
        assert x.expected((1, 2, 3)) > 2
        server.start()
        await eventually(lambda: x.replicas.is_exact)
        await written(x)
        async with a_site(server.url, "y", QUIET) as y:
            await eventually(lambda: y.replicas.is_exact)
            y.ahead_s += 60
            assert all(y.expected(keys) > 0 for keys in (*asked, (1, 2, 3)))


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_redis_out_of_reach_while_a_snapshot_is_read_is_asked_again(server: RedisServer, at: int) -> None:
    asked = prompts(600, seed=3)
    async with a_site(server.url, "x", WRITING) as x, a_line(server) as line:
        for keys in asked:
            x.answer(keys, at=x.backends[len(keys) % 2])
        await written(x)
        shelf = Troubled(RedisShelf(line.url), line.cut, ("header", "pieces"), at=at)
        async with a_site(line.url, "y", QUIET, shelf=shelf) as y:
            if at <= 2:
                assert y.replicas.state == "approximate"
            y.answer((1, 2, 3))
            assert y.expected((1, 2, 3)) > 2
            line.mend()
            await eventually(lambda: y.replicas.is_exact)
            y.ahead_s += 60
            assert all(y.expected(keys) > 0 for keys in asked)


async def test_a_full_redis_gets_no_snapshot_and_gets_the_rest_when_there_is_room(server: RedisServer) -> None:
    async with a_site(server.url, "x", WRITING) as x:
        x.answer()
        await written(x)
        with server.admin() as admin:
            admin.config_set("maxmemory", 1)
            await eventually(lambda: "replicas_full" in x.events or "replicas_snapshot_unwritten" in x.events)
            admin.config_set("maxmemory", 0)
        await eventually(lambda: x.replicas.is_exact)
        await written(x)


async def test_a_router_that_missed_too_much_takes_over_the_snapshot_and_keeps_its_own(server: RedisServer) -> None:
    asked = prompts(300, seed=4)
    async with (
        a_line(server) as line,
        a_site(server.url, "x", WRITING, most=MOST) as x,
        a_site(line.url, "y", QUIET, most=MOST, shelf=RedisShelf(server.url)) as y,
    ):
        x.answer((8, 9))
        await eventually(lambda: y.expected((8, 9)) > 1)
        line.cut()
        await eventually(lambda: not y.replicas.is_exact)
        y.answer((1, 2, 3))
        await taught(server, x, asked)
        await written(x)
        line.mend()
        await eventually(lambda: y.replicas.is_exact)
        assert "replicas_missed" in y.events
        await eventually(lambda: x.expected((1, 2, 3)) > 2)
        x.ahead_s += 60
        y.ahead_s += 60
        assert believed(y, asked) == [pytest.approx(share, rel=0.05) for share in believed(x, asked)]
        assert y.expected((1, 2, 3)) > 2


async def test_backends_that_are_found_later_are_known_and_those_that_are_not_are_forgotten(
    server: RedisServer,
) -> None:
    async with a_site(server.url, "x", WRITING) as x:
        x.answer(KEYS, at="a")
        x.answer(KEYS, at="b")
        await written(x)
        async with a_site(server.url, "y", QUIET, backends=()) as y:
            x.answer((1, 2, 3))
            await eventually(lambda: y.expected((1, 2, 3)) > 2)
            async with y.cluster:
                await y.cluster.add(FakeBackend("b"))
                y.ahead_s += QUICK.settled_s
                await eventually(lambda: "a" not in y.beliefs.longest(PromptKeys(KEYS)))
                assert y.beliefs.longest(PromptKeys(KEYS))["b"].expected_blocks > 8


async def test_one_router_at_a_time_writes_and_what_is_outdated_goes(server: RedisServer) -> None:
    first, second = RedisShelf(server.url), RedisShelf(server.url)
    assert await first.claim("x", 60)
    assert not await second.claim("y", 60)
    await first.append("one", [b"a", b"b"])
    await first.append("one", [b"c"])
    assert await second.header() is None, "an unfinished snapshot is not visible"
    assert await first.publish("one", b"head", "x") is None
    assert await second.header() == b"head"
    assert await second.pieces("one", 1, 5) == [b"b", b"c"]
    assert await second.pieces("gone", 0, 5) == []
    await first.append("two", [b"a"])
    assert await first.publish("two", b"next", "x") == b"head"
    await first.outdate("one")
    with server.admin() as admin:
        keys = {key.decode(): admin.ttl(key) for key in admin.scan_iter()}
    assert 0 < keys[f"{SNAPSHOT}:one"] <= 30 < 60 < keys[f"{SNAPSHOT}:two"] <= 3600
    assert 0 < keys[SNAPSHOT] <= 3600
    await first.close()
    await second.close()


async def test_a_router_that_stood_still_publishes_nothing_over_the_snapshot_of_another(server: RedisServer) -> None:
    first, second = RedisShelf(server.url), RedisShelf(server.url)
    assert await first.claim("x", 0.001)
    await first.append("old", [b"a"])
    async with asyncio.timeout(5):
        while not await second.claim("y", 0.001):
            pass
    await second.append("new", [b"b"])
    assert await second.publish("new", b"newer", "y") is None
    with pytest.raises(Superseded):
        await first.publish("old", b"older", "x")
    assert await first.header() == b"newer"
    await first.close()
    await second.close()


async def test_of_more_than_fits_the_newest_of_each_backend_is_kept(server: RedisServer) -> None:
    async with a_site(server.url, "x", WRITING) as x:
        x.replicas._scribe.most_bytes = 12 * 100
        for number in range(100):
            x.answer(some_keys(10, seed=number), at="a")
        x.answer(KEYS, at="b")
        await written(x)
    with server.admin() as admin:
        admin.delete(KEY)
        reheaded(admin, position="0-0")
        header: Header = decode_header(admin.get(SNAPSHOT))
        assert sum(map(len, admin.lrange(f"{SNAPSHOT}:{header.name}", 0, -1))) < 12 * 100 + 300
    async with a_site(server.url, "y", QUIET) as y:
        y.ahead_s += 60
        assert y.expected(some_keys(10, seed=99)) > 8
        assert y.expected(some_keys(10, seed=5)) == 0
        assert y.beliefs.longest(PromptKeys(KEYS))["b"].expected_blocks > 8
