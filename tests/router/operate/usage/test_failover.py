"""A PostgreSQL that fails over, is restarted or stops in the middle: usage is complete, and no router is restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.nouns import Outcome
from router.operate.usage.database import UsageDatabase
from router.operate.usage.recorder import UsageRecorder
from tests.router.operate.usage.parts import (
    HAS_POSTGRES,
    NOON,
    SPENT,
    PostgresServer,
    a_postgres,
    an_account,
    some_rows,
)
from tests.router.shared.store.parts import a_line
from tests.shards.attached import eventually

pytestmark = pytest.mark.skipif(not HAS_POSTGRES, reason="there is no PostgreSQL")


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    with a_postgres() as old, a_postgres() as new:
        yield old, new


def a_recorder(database: UsageDatabase, folder: Path, events: list[str]) -> UsageRecorder:
    return UsageRecorder(
        database,
        folder,
        kind_of=lambda _: "vllm",
        currency=lambda: "USD",
        clock=lambda: 100.0,
        unix_time=lambda: float(NOON),
        on_event=events.append,
    )


def journal_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def test_what_is_used_while_it_says_nothing_is_in_the_journal_all_the_same(
    both: tuple[PostgresServer, PostgresServer], tmp_path: Path
) -> None:
    server = both[1]
    database = UsageDatabase(server.url)
    recorder = a_recorder(database, tmp_path, [])
    await asyncio.to_thread(recorder.open)
    recorder.ended(an_account(SPENT, started_at=100.0), Outcome.FINISHED, "", 0.0)
    assert await asyncio.to_thread(recorder.sync)
    with server.frozen():
        for _ in range(3):
            before = journal_bytes(tmp_path)
            recorder.ended(an_account(SPENT, started_at=100.0), Outcome.FINISHED, "", 0.0)
            await eventually(lambda before=before: journal_bytes(tmp_path) > before)
            # the call to the database that is under way has no end
            await asyncio.sleep(0.3)
    assert await asyncio.to_thread(recorder.sync)
    assert database.sums(("tenant",))[0]["finished"] == 4
    await asyncio.to_thread(recorder.close)


async def test_a_primary_that_became_a_standby_behind_the_same_address_is_left(
    both: tuple[PostgresServer, PostgresServer],
) -> None:
    old, new = both
    async with a_line(old) as line:  # type: ignore[arg-type]
        port = line.url.rpartition(":")[2]
        database = UsageDatabase(f"postgresql://pointsman@127.0.0.1:{port}/postgres?target_session_attrs=any")
        await asyncio.to_thread(database.migrate)
        await asyncio.to_thread(database.add, "w", 1, some_rows(), now=0.0)
        await asyncio.to_thread(old.demote)
        with pytest.raises(ConnectionError, match="read-only"):
            await asyncio.to_thread(database.add, "w", 2, some_rows(), now=0.0)
        line.server = new  # type: ignore[assignment]
        await asyncio.to_thread(database.migrate)
        await asyncio.to_thread(database.add, "w", 2, some_rows(), now=0.0)
        assert await asyncio.to_thread(database.last, "w") == 2
        await asyncio.to_thread(database.close)


async def test_of_several_hosts_the_one_that_takes_writes_is_found(both: tuple[PostgresServer, PostgresServer]) -> None:
    old, new = both
    await asyncio.to_thread(old.demote)
    async with a_line(old) as first, a_line(new) as second:  # type: ignore[arg-type]
        hosts = ",".join(line.url.removeprefix("redis://") for line in (first, second))
        database = UsageDatabase(f"postgresql://pointsman@{hosts}/postgres")
        await asyncio.to_thread(database.migrate)
        await asyncio.to_thread(database.add, "several", 1, some_rows(), now=0.0)
        second.cut()
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(database.last, "several")
        second.mend()
        assert await asyncio.to_thread(database.last, "several") == 1
        await asyncio.to_thread(database.close)


async def test_a_restart_of_the_server_costs_no_usage(
    both: tuple[PostgresServer, PostgresServer], tmp_path: Path
) -> None:
    server, events = both[1], list[str]()
    server.clean()
    database = UsageDatabase(server.url)
    recorder = a_recorder(database, tmp_path, events)
    await asyncio.to_thread(recorder.open)
    for _ in range(2):
        recorder.ended(an_account(SPENT, started_at=100.0), Outcome.FINISHED, "", 0.0)
        await asyncio.to_thread(server.stop)
        recorder.ended(an_account(SPENT, started_at=100.0), Outcome.FINISHED, "", 0.0)
        await asyncio.to_thread(server.start)
        for _ in range(50):
            if await asyncio.to_thread(recorder.sync):
                break
            await asyncio.sleep(0.1)
    assert database.sums(("tenant",))[0]["finished"] == 4
    await asyncio.to_thread(recorder.close)
