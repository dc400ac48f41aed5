"""Both ends of an idle link send heartbeats, so that a link on which nothing arrives any more is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from backends.shard.backend import ShardBackend
from backends.shard.link import LinkOptions
from policies.errors import BackendFailed, Unreached
from shards.nouns import CacheEvent
from shards.scripted import ScriptedEngine
from shards.server import ShardServer
from shards.wire.facts import ShardFacts
from shards.wire.limits import SILENT_BEATS
from shards.wire.v1 import shard_pb2 as wire
from tests.backends.parts import everything
from tests.backends.shard.test_backend import an_engine
from tests.chaos.wire import State, Wire, a_wire
from tests.shards.attached import a_shard, eventually

BEAT_S = 0.05
SILENT_S = SILENT_BEATS * BEAT_S
OPTIONS = LinkOptions(connect_s=0.3, heartbeat_s=BEAT_S, first_backoff_s=0.01, longest_backoff_s=0.02)


@asynccontextmanager
async def a_link(engine: ScriptedEngine, **options: Any) -> AsyncIterator[tuple[ShardServer, Wire, ShardBackend]]:
    """A shard, a line to it that can be spoilt, and a backend at the other end that is attached."""
    async with (
        a_shard(engine, heartbeat_s=BEAT_S, **options) as server,
        a_wire(int(server.address.rpartition(":")[2])) as line,
    ):
        backend = ShardBackend("b", f"127.0.0.1:{line.port}", pool="p", options=OPTIONS)
        await backend.start()
        await backend.probe()
        try:
            yield server, line, backend
            backend.check()
        finally:
            await backend.close()


async def test_an_idle_link_stays_while_heartbeats_come(tmp_path: Path) -> None:
    async with a_link(an_engine(tmp_path)) as (server, line, backend):
        for _ in range(10):
            await asyncio.sleep(SILENT_S / 2)
            await backend.probe()
        assert line.connections == 1, "the first connection is still the only one"
        assert len(server.service._attachments) == 1


async def test_an_idle_link_on_which_nothing_arrives_is_lost_and_made_anew(tmp_path: Path) -> None:
    async with a_link(an_engine(tmp_path)) as (_, line, backend):
        line.spoil(State.MUTE)
        await eventually(lambda: backend._link._session is None, within_s=10 * SILENT_S)
        with pytest.raises(Unreached, match=r"it sent nothing for 0.15 s|no connection in 0.3 s"):
            await everything(backend)
        # several attempts to connect fail in the meantime
        await asyncio.sleep(3 * OPTIONS.connect_s)
        line.mend()
        await eventually(lambda: backend._link._session is not None, within_s=1.0)
        await backend.probe()
        assert await everything(backend)


async def test_a_link_with_a_request_is_kept_as_its_shard_may_be_paused(tmp_path: Path) -> None:
    engine = an_engine(tmp_path)
    async with a_link(engine) as (_, line, backend):
        engine.is_held = True
        asking = asyncio.create_task(everything(backend))
        await eventually(lambda: len(engine.sequences) == 1)
        line.spoil(State.MUTE)
        await asyncio.sleep(3 * SILENT_S)
        assert not asking.done()
        assert backend._link._session is not None
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: backend._link._session is None)


class OlderFacts(ShardFacts):
    """The description of a shard from before heartbeats."""

    def welcome(self, snapshot: tuple[CacheEvent, ...]) -> wire.Welcome:
        welcome = super().welcome(snapshot)
        welcome.ClearField("heartbeat_ms")
        return welcome


async def test_a_shard_that_knows_no_heartbeats_gets_none_and_need_not_send_any(tmp_path: Path) -> None:
    async with a_shard(an_engine(tmp_path), load_s=30.0) as server:
        server.service.facts = OlderFacts(**{**asdict(server.service.facts), "heartbeat_s": 0.0})
        commands: list[str | None] = []
        obey = server.service._obey

        async def noted(attachment: Any, command: wire.Command) -> None:
            commands.append(command.WhichOneof("command"))
            # nor does it know the router's promise of heartbeats: it would end the stream of one that sends none
            command.hello.ClearField("heartbeat_ms")
            await obey(attachment, command)

        server.service._obey = noted  # type: ignore[method-assign]
        backend = ShardBackend("b", server.address, pool="p", options=OPTIONS)
        await backend.start()
        try:
            await backend.probe()
            session = backend._link._session
            await asyncio.sleep(3 * SILENT_S)
            assert backend._link._session is session
            assert commands == ["hello"]
        finally:
            await backend.close()


async def test_a_router_that_cannot_connect_says_so() -> None:
    async with a_wire(9) as line:
        line.spoil(State.MUTE)
        backend = ShardBackend("b", f"127.0.0.1:{line.port}", pool="p", options=OPTIONS)
        await backend.start()
        try:
            with pytest.raises(BackendFailed, match="cannot be reached"):
                await backend.probe()
        finally:
            await backend.close()
