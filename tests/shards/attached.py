"""A shard on a real socket, and routers that speak to it by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from shards.scripted import ScriptedEngine
from shards.server import ServedEngine, ServerOptions, ShardServer
from shards.wire import limits
from shards.wire.translate import pack_ids
from shards.wire.v1 import shard_pb2 as wire
from shards.wire.v1 import shard_pb2_grpc


@asynccontextmanager
async def a_shard(engine: ServedEngine | None = None, **options: Any) -> AsyncIterator[ShardServer]:
    server = ShardServer(engine or ScriptedEngine(), "127.0.0.1:0", ServerOptions(**{"load_s": 0.01, **options}))
    await server.start()
    try:
        yield server
        if not server.loop.died.done():
            await server.check()
    finally:
        await server.close()


@asynccontextmanager
async def a_channel(server: ShardServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address, options=limits.CLIENT_OPTIONS) as channel:
        yield channel


class HandRouter:
    """One Attach stream, and every report that came over it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = shard_pb2_grpc.ShardStub(channel).Attach()  # type: ignore[no-untyped-call]
        self.reports: list[wire.StepReport] = []

    async def say(self, **command: Any) -> None:
        await self.call.write(wire.Command(**command))

    async def hello(self) -> wire.Welcome:
        await self.say(hello=wire.Hello(router="hand"))
        return (await self.until(lambda report: report.HasField("welcome"))).welcome

    async def ask(self, request: int, prompt: list[int], max_new_tokens: int = 3, **submit: Any) -> None:
        sizes = {"prompt_tokens": len(prompt), "max_new_tokens": max_new_tokens}
        await self.say(submit=wire.Submit(request=request, **{**sizes, **submit}))
        await self.say(prompt=wire.Prompt(request=request, token_ids=pack_ids(prompt)))

    async def read(self) -> wire.StepReport:
        report: Any = await asyncio.wait_for(self.call.read(), 5)
        assert report is not grpc.aio.EOF, "the stream ended"
        self.reports.append(report)
        return self.reports[-1]

    async def until(self, is_it: Callable[[wire.StepReport], bool]) -> wire.StepReport:
        async with asyncio.timeout(10):
            while not is_it(report := await self.read()):
                pass
            return report

    async def until_finished(self, request: int) -> wire.Finished:
        report = await self.until(lambda report: any(end.request == request for end in report.finished))
        return next(end for end in report.finished if end.request == request)


async def eventually(is_true: Callable[[], bool], *, within_s: float = 5) -> None:
    """Wait for what another thread or process is about to make true."""
    async with asyncio.timeout(within_s):
        while not is_true():  # noqa: ASYNC110 - the other side of a socket announces nothing
            await asyncio.sleep(0.005)
