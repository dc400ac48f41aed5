"""Shard processes are started, kept alive on their port, and ended with the router."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from policies.errors import ConfigError
from router.start.commands.local_shards import LocalShards, ShardCommand, shard_environment
from router.start.commands.up import started_unless

# plays the supervised shard: prints what it loads, listens at the given address, ends with its standard input
STAND_IN = """
import json, os, socket, sys
host, port = sys.argv[1].rsplit(":", 1)
print(json.dumps({"loading": "weights", "share": 0.5}), flush=True)
listener = socket.create_server((host, int(port)))
print(json.dumps({"listening": f"{host}:{listener.getsockname()[1]}"}), flush=True)
while os.read(0, 1):
    pass
"""

LOADS_FOR_EVER = """
import json, os
print(json.dumps({"loading": "weights", "share": 0.5}), flush=True)
while os.read(0, 1):
    pass
"""


@dataclass(frozen=True, slots=True)
class StandIn(ShardCommand):
    """A process without torch in place of a shard; `script` is what it runs."""

    script: str = STAND_IN

    def line(self, listen: str) -> list[str]:
        return [sys.executable, "-c", self.script, listen]


async def until_another_listens(shards: LocalShards, old: int) -> int:
    """The process id of the shard that took the place of `old`."""
    async with asyncio.timeout(20):
        while (new := shards.shards[0].pid) in (None, old) or not await answers(shards):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert new is not None
    return new


async def answers(shards: LocalShards) -> bool:
    host, port = shards.shards[0].address.rsplit(":", 1)
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


async def test_progress_is_heard_and_addresses_are_known_once_all_listen() -> None:
    heard: list[tuple[str, float, str]] = []
    async with LocalShards(
        [StandIn("own-0", "x"), StandIn("own-1", "x")], lambda *event: heard.append(event)
    ) as shards:
        assert set(shards.addresses) == {"own-0", "own-1"}
        assert all(not address.endswith(":0") for address in shards.addresses.values())
        assert await answers(shards)
    assert ("own-1", 0.5, "weights") in heard
    assert ("own-0", 1.0, "ready") in heard
    assert not await answers(shards)


async def test_a_shard_that_dies_comes_back_on_its_port() -> None:
    async with LocalShards([StandIn("own-0", "x")]) as shards:
        address, old = shards.shards[0].address, shards.shards[0].pid
        assert old is not None
        os.kill(old, signal.SIGKILL)
        assert await until_another_listens(shards, old) != old
        assert shards.shards[0].address == address
        assert "1 restarts" in repr(shards.shards[0])


async def test_a_shard_that_cannot_load_ends_the_start_with_a_sentence() -> None:
    broken = StandIn("own-1", "x", script="raise SystemExit(2)")
    with pytest.raises(ConfigError, match="shard own-1 ended with code 2"):
        async with LocalShards([StandIn("own-0", "x"), broken]):
            pass


async def test_a_signal_while_shards_load_ends_them_and_the_start() -> None:
    loading = asyncio.Event()
    shards = LocalShards([StandIn("own-0", "x", script=LOADS_FOR_EVER)], lambda *_: loading.set())
    stopped = asyncio.Event()
    async with AsyncExitStack() as stack, asyncio.timeout(20):
        starting = asyncio.create_task(started_unless(stopped, shards, stack))
        await loading.wait()
        stopped.set()
        assert not await starting
        (shard,) = shards.shards
        assert "stopped" in repr(shard)


async def test_shards_that_load_in_time_end_with_the_stack() -> None:
    shards = LocalShards([StandIn("own-0", "x")])
    async with AsyncExitStack() as stack:
        assert await started_unless(asyncio.Event(), shards, stack)
        assert await answers(shards)
    assert not await answers(shards)


async def test_a_shard_that_ends_while_it_loads_is_an_error_without_a_signal() -> None:
    shards = LocalShards([StandIn("own-0", "x", script="raise SystemExit(2)")])
    with pytest.raises(ConfigError, match="own-0 ended with code 2"):
        async with AsyncExitStack() as stack:
            await started_unless(asyncio.Event(), shards, stack)


async def test_a_failed_restart_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture, tmp_path: object) -> None:
    # the second life finds the mark of the first and refuses
    script = f"import os, sys\nmark = {str(tmp_path)!r} + '/seen'\n"
    script += "first = not os.path.exists(mark)\nopen(mark, 'w').close()\nif not first: sys.exit(3)\n" + STAND_IN
    with caplog.at_level(logging.WARNING):
        async with LocalShards([StandIn("own-0", "x", script=script)]) as shards:
            assert shards.shards[0].pid is not None
            os.kill(shards.shards[0].pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                while "code 3" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
    assert "own-0" in caplog.text


def test_threads_do_not_spin_unless_the_operator_says_so() -> None:
    assert shard_environment({})["OMP_WAIT_POLICY"] == "PASSIVE"
    assert shard_environment({"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"
