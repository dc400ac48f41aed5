"""One suite for every relay. Redis is a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from router.fleet.feeds.relay import MemoryRelay, Relay, Relayed, RelayForgot
from router.shared.replicas.feed_relay import RedisRelay
from tests.router.shared.store.parts import RedisServer, a_redis


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with a_redis() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def relay(request: pytest.FixtureRequest) -> AsyncIterator[Relay]:
    if request.param == "memory":
        yield MemoryRelay(asyncio.get_running_loop().time)
        return
    server: RedisServer = request.getfixturevalue("server")
    server.clean()
    relay = RedisRelay(server.url)
    yield relay
    await relay.close()


async def heard(relay: Relay, count: int, *, after: str | None = None) -> list[Relayed]:
    found = []
    async with asyncio.timeout(5):
        hearing = relay.hear("trt-0", after=after)
        async for relayed in hearing:
            found.append(relayed)
            if len(found) == count:
                break
        await hearing.aclose()  # type: ignore[attr-defined]
    return found


async def test_one_at_a_time_has_the_lease_and_may_keep_it(relay: Relay) -> None:
    token = await relay.claim("trt-0", "a", 60)
    assert token is not None
    assert await relay.claim("trt-0", "b", 60) is None
    assert await relay.claim("trt-0", "a", 60) == token
    assert await relay.claim("trt-1", "b", 60) is not None


async def test_a_lease_that_is_given_up_goes_to_the_next_with_a_higher_token(relay: Relay) -> None:
    first = await relay.claim("trt-0", "a", 60)
    await relay.release("trt-0", "b")
    assert await relay.claim("trt-0", "b", 60) is None
    await relay.release("trt-0", "a")
    second = await relay.claim("trt-0", "b", 60)
    assert first is not None
    assert second is not None
    assert second > first


async def test_a_holder_that_is_gone_loses_the_lease(relay: Relay) -> None:
    assert await relay.claim("trt-0", "a", 0.02) is not None
    async with asyncio.timeout(5):
        while await relay.claim("trt-0", "b", 60) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_all_hear_what_was_and_what_comes_in_order(relay: Relay) -> None:
    await relay.publish("trt-0", 1, b"[1]")
    hearing = [asyncio.create_task(heard(relay, 2)) for _ in range(2)]
    await asyncio.sleep(0)
    await relay.publish("trt-1", 9, b"another's")
    await relay.publish("trt-0", 2, b"")
    for found in await asyncio.gather(*hearing):
        assert [(relayed.token, relayed.payload) for relayed in found] == [(1, b"[1]"), (2, b"")]


async def test_a_reader_that_was_cut_off_continues_at_its_last_event(relay: Relay) -> None:
    for number in range(3):
        await relay.publish("trt-0", 1, b"%d" % number)
    (first,) = await heard(relay, 1)
    later = await heard(relay, 2, after=first.position)
    assert [relayed.payload for relayed in later] == [b"1", b"2"]


async def test_what_is_kept_for_late_comers_has_a_bound_in_bytes(relay: Relay) -> None:
    megabyte = b"x" * 2**20
    for number in range(40):
        await relay.publish("trt-0", 1, b"%02d" % number + megabyte)
    (first,) = await heard(relay, 1)
    kept = 40 - int(first.payload[:2])
    assert 8 <= kept <= 24
    await relay.publish("trt-0", 1, b"[]")
    assert (await heard(relay, kept + 1))[-1].payload == b"[]"


async def test_tokens_grow_though_the_clock_of_redis_goes_back(server: RedisServer) -> None:
    server.clean()
    relay = RedisRelay(server.url)
    ahead = 2_000_000_000_000_000
    await relay.publish("trt-0", ahead, b"[]")
    token = await relay.claim("trt-0", "a", 60)
    assert token is not None
    assert token > ahead
    await relay.close()


async def test_readers_learn_when_redis_has_lost_its_entries(server: RedisServer) -> None:
    server.clean()
    relay = RedisRelay(server.url)
    with server.admin() as admin:
        admin.xadd("pointsman:feeds:{trt-0}:events", {"token": 5, "payload": b"[]"}, id="9999999999999-0")
        (before,) = await heard(relay, 1)
        admin.flushall()
    await relay.publish("trt-0", 1, b"[]")
    with pytest.raises(RelayForgot):
        await heard(relay, 1, after=before.position)
    assert len(await heard(relay, 1)) == 1
    await relay.close()


async def test_what_others_write_into_the_channel_is_passed_over(server: RedisServer) -> None:
    server.clean()
    relay = RedisRelay(server.url)
    with server.admin() as admin:
        for entry in ({"payload": "x"}, {"token": "many", "payload": "x"}, {"token": "5"}):
            admin.xadd("pointsman:feeds:{trt-0}:events", entry)  # type: ignore[arg-type]
    await relay.publish("trt-0", 1, b"[]")
    assert [relayed.payload for relayed in await heard(relay, 1)] == [b"[]"]
    assert await relay.claim("trt-0", "a", 60) is not None
    with server.admin() as admin:
        assert 0 < admin.ttl("pointsman:feeds:{trt-0}:events") <= 86400
    await relay.close()


async def test_a_redis_that_is_away_is_an_os_error(tmp_path: Path) -> None:
    away = RedisRelay(f"unix://{tmp_path}/nobody")
    with pytest.raises(OSError, match="nobody"):
        await away.claim("trt-0", "a", 1)
    with pytest.raises(OSError, match="nobody"):
        await away.publish("trt-0", 1, b"[]")
    with pytest.raises(OSError, match="nobody"):
        await heard(away, 1)
    await away.close()
