"""The store of several processes without one in their file: a real Redis that starts, ends and comes back with them."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from policies.errors import ConfigError
from policies.quota.budget import Charge, Refused, Reservation
from router.shared.store.base import StoreFailed
from router.shared.store.levels_file import LevelsFile
from router.shared.store.memory import MemoryStore
from router.shared.store.redis import RedisStore
from router.start.commands.own_store import OwnStore, find_server
from tests.policies.builders import a_descriptor, a_reservation
from tests.router.shared.store.parts import EXECUTABLE, owed
from tests.shards.attached import eventually

SERVER = Path(EXECUTABLE)
BUDGET = a_descriptor(cost_per_month=10)
NAMESPACE = "pointsman"


def a_program(folder: Path, name: str, says: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


async def spend(store: OwnStore, name: str, cost: int) -> bool:
    """Reserve and settle `cost` of the budget; whether that was admitted."""
    redis = RedisStore(store.url, prefix=NAMESPACE)
    try:
        asked = a_reservation(name, BUDGET, requests=1, cost=cost)
        if isinstance(await redis.reserve(asked), Refused):
            return False
        await redis.settle_all([owed(asked, asked.charge)])
        return True
    finally:
        await redis.close()


async def eventually_answers(store: OwnStore) -> None:
    async with asyncio.timeout(20):
        while True:
            with suppress(StoreFailed):
                redis = RedisStore(store.url, prefix=NAMESPACE)
                await redis.renew(())
                await redis.close()
                return
            await asyncio.sleep(0.05)


async def test_it_is_private_and_nothing_of_it_is_left() -> None:
    async with OwnStore(SERVER, NAMESPACE, None) as store:
        socket = Path(store.url.removeprefix("unix://"))
        assert {_mode(socket.parent), _mode(socket)} == {0o700}
        assert await spend(store, "a", 1)
        pid = store.pid
    assert pid is not None
    assert not _lives(pid)
    with pytest.raises(FileNotFoundError):
        _mode(socket.parent)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_a_server_that_is_killed_comes_back_with_every_budget() -> None:
    async with OwnStore(SERVER, NAMESPACE, None) as store:
        assert await spend(store, "a", 6_000)
        first = store.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: store.pid != first)
        await eventually_answers(store)
        assert not await spend(store, "b", 5_000)
        assert await spend(store, "c", 4_000)


async def test_budgets_go_on_in_the_next_run_with_one_process_or_several(tmp_path: Path) -> None:
    path = tmp_path / "budgets"
    async with OwnStore(SERVER, NAMESPACE, path) as store:
        assert await spend(store, "a", 3_000)
        redis = RedisStore(store.url, prefix=NAMESPACE)
        # one that never ends is no use
        assert isinstance(await redis.reserve(a_reservation("open", BUDGET, cost=7_000)), Reservation)
        await redis.close()
    single = MemoryStore(time.time, LevelsFile(path))
    await single.start()
    asked = single.reserve(a_reservation("b", BUDGET, cost=2_000))
    assert isinstance(asked, Reservation)
    single.settle(asked, Charge(cost=2_000))
    await single.close()
    async with OwnStore(SERVER, NAMESPACE, path) as store:
        assert not await spend(store, "c", 5_001)
        assert await spend(store, "d", 5_000)


ORPHAN = """
import asyncio, sys
from pathlib import Path
from router.start.commands.own_store import OwnStore
async def main():
    async with OwnStore(Path(sys.argv[1]), "pointsman", None) as store:
        print(store.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_it_ends_with_its_parent_however_that_ends() -> None:
    command = [sys.executable, "-c", ORPHAN, str(SERVER)]
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await eventually(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    # an orphan that has ended may wait for its new parent to look
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_long_path_for_temporary_files_is_too_long_for_a_socket_and_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with OwnStore(SERVER, NAMESPACE, None) as store:
        assert len(store.url) < 100
        assert await spend(store, "a", 1)
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(ConfigError, match=r"no room for a store .* \(set TMPDIR"):
        async with OwnStore(SERVER, NAMESPACE, None):
            pass


async def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not start: it said nothing"):
        async with OwnStore(a_program(tmp_path, "redis-server", "no"), NAMESPACE, None):
            pass


def test_the_first_server_of_the_path_that_is_new_enough_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    folder = tmp_path / "path"
    folder.mkdir()
    environment = {"PATH": str(folder)}
    with pytest.raises(ConfigError) as missing:
        find_server(environment)
    assert "`apt-get install valkey-server` or `apt-get install redis-server`" in missing.value.hint
    a_program(folder, "redis-server", "Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64")
    with pytest.raises(ConfigError, match=r"redis-server is 6\.0"):
        find_server(environment)
    newer = a_program(folder, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64")
    assert find_server(environment) == newer
    valkey = a_program(folder, "valkey-server", "Valkey server v=8.1.1 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64")
    assert find_server(environment) == valkey
