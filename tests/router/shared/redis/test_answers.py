"""Whatever a Redis answers that is not ours any more, the next connection may lead to one that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
import redis

from router.shared.redis.faults import faults
from router.shared.store.base import Fault, StoreFailed
from tests.router.shared.redis.parts import Users, users
from tests.router.shared.store.parts import Line, RedisServer, a_line, a_redis


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[RedisServer, RedisServer]]:
    with a_redis() as old, a_redis() as new:
        yield old, new


@asynccontextmanager
async def behind_a_service(both: tuple[RedisServer, RedisServer]) -> AsyncIterator[tuple[Line, Users]]:
    """All parts at an address that leads to the first server, all of their connections open."""
    for server in both:
        server.clean()
    async with a_line(both[0]) as line, users(line.url) as parts:
        await asyncio.gather(*(parts.asked() for _ in range(4)))
        await parts.work_again()
        yield line, parts


def demoted(admin: redis.Redis) -> None:
    admin.replicaof("127.0.0.1", "1")


def stale(admin: redis.Redis) -> None:
    admin.config_set("replica-serve-stale-data", "no")
    admin.replicaof("127.0.0.1", "1")


def out_of_memory(admin: redis.Redis) -> None:
    admin.config_set("maxmemory", 1)


def without_permission(admin: redis.Redis) -> None:
    admin.execute_command("ACL", "SETUSER", "default", "-@write", "-@scripting")


def without_replicas(admin: redis.Redis) -> None:
    admin.config_set("min-replicas-to-write", 3)


def healed(admin: redis.Redis) -> None:
    admin.replicaof("NO", "ONE")
    admin.config_set("replica-serve-stale-data", "yes")
    admin.config_set("maxmemory", 0)
    admin.config_set("min-replicas-to-write", 0)
    admin.execute_command("ACL", "SETUSER", "default", "+@all")


REAL: dict[str, Callable[[redis.Redis], None]] = {
    "READONLY": demoted,
    "MASTERDOWN": stale,
    "OOM": out_of_memory,
    "NOPERM": without_permission,
    "NOREPLICAS": without_replicas,
}

SPOKEN = [
    *("LOADING Redis is loading the dataset in memory", "BUSY Redis is busy running a script", "NOAUTH Authentication"),
    *("MISCONF Redis is configured to save RDB snapshots", "WRONGPASS invalid username-password pair"),
    *("CLUSTERDOWN The cluster is down", "MOVED 3999 127.0.0.1:1", "ASK 3999 127.0.0.1:1", "TRYAGAIN Multiple keys"),
    *(
        "UNKILLABLE Sorry",
        "ERR max number of clients reached",
        "CROSSSLOT Keys in request",
        "NEWWORD of a later version",
    ),
]
"""Answers that a server on this machine does not give on demand, in the words of Redis' source."""


@pytest.mark.parametrize("answer", REAL)
async def test_a_server_that_answers_so_is_left_once_another_is_behind_the_address(
    both: tuple[RedisServer, RedisServer], answer: str
) -> None:
    async with behind_a_service(both) as (line, parts):
        old, new = both
        with old.admin() as admin:
            REAL[answer](admin)
            try:
                # an idle connection of each part, and those that are in use
                failed = await asyncio.gather(*(parts.asked() for _ in range(3)))
                assert any(each["quotas"] is not None for each in failed)
                line.server = new
                await parts.work_again()
            finally:
                healed(admin)


@pytest.mark.parametrize("answer", SPOKEN, ids=lambda answer: answer.split()[0])
async def test_an_answer_of_any_other_word_is_left_in_the_same_way(
    both: tuple[RedisServer, RedisServer], answer: str
) -> None:
    async with behind_a_service(both) as (line, parts):
        # one for each command that may be in one packet
        line.instead = 6 * f"-{answer}\r\n".encode()
        assert None not in {error for name, error in (await parts.asked()).items() if name != "feeds"}
        line.instead, line.server = None, both[1]
        await parts.work_again()


async def test_a_connection_on_which_nobody_answers_is_left_with_all_its_neighbours(
    both: tuple[RedisServer, RedisServer],
) -> None:
    async with behind_a_service(both) as (line, parts):
        with both[0].frozen():
            line.server = both[1]
            await parts.work_again()


async def test_connections_that_were_cut_without_a_word_are_made_again(both: tuple[RedisServer, RedisServer]) -> None:
    async with behind_a_service(both) as (line, parts):
        line.cut()
        await parts.asked()
        line.mend()
        await parts.work_again()


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("LOADING Redis is loading", Fault.SLOW),
        ("BUSY Redis is busy running a script", Fault.SLOW),
        ("OOM command not allowed", Fault.FULL),
        ("READONLY You can't write", Fault.REFUSING),
        ("NOAUTH Authentication required.", Fault.REFUSING),
        ("WRONGPASS invalid", Fault.REFUSING),
        ("NOPERM this user", Fault.REFUSING),
        ("MISCONF Redis is configured", Fault.REFUSING),
        ("CLUSTERDOWN Hash slot not served", Fault.GONE),
        ("MASTERDOWN Link with MASTER is down", Fault.GONE),
        ("ERR max number of clients reached", Fault.GONE),
        ("ERR Error running script: @user_script: OOM command not allowed", Fault.FULL),
        ("!", Fault.NONSENSE),
    ],
)
async def test_the_metric_names_what_is_wrong(both: tuple[RedisServer, RedisServer], answer: str, fault: Fault) -> None:
    async with a_line(both[0]) as line:
        line.instead = b"!!\r\n" if answer == "!" else f"-{answer}\r\n".encode()
        client = redis.asyncio.Redis.from_url(line.url, retry=None, single_connection_client=False)
        with pytest.raises(StoreFailed) as failed, faults():
            await client.get("x")
        assert failed.value.fault is fault
        with suppress(redis.RedisError):
            await client.aclose()
