"""A shard as a gRPC server: start, drain and stop in one place."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import grpc
from grpc_health.v1 import health_pb2

from shards.announce import Announcer
from shards.kv.keys import BLOCK_TOKENS
from shards.loop import AnyEngine, EngineLoop
from shards.nouns import AdapterUse
from shards.service import ShardService
from shards.wire import limits
from shards.wire.facts import ShardFacts
from shards.wire.v1 import shard_pb2 as wire
from shards.wire.v1 import shard_pb2_grpc
from tls.certificates import Certificates
from tls.grpc_about import add_about
from tls.grpc_port import GrpcPort, grpc_server

if TYPE_CHECKING:
    from shards.tracing import ShardTraces

SERVICE = wire.DESCRIPTOR.services_by_name["Shard"].full_name

_DRAIN_POLL_S = 0.02


class Network(Protocol):
    """The part of a model's shape that routers receive."""

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer, together."""
        ...


class ModelInfo(Protocol):
    """The part of an engine's model that routers receive."""

    @property
    def name(self) -> str:
        """The name that requests use for it."""
        ...

    @property
    def path(self) -> Path | None:
        """The folder with tokenizer.json and related files; None if there is none."""
        ...

    @property
    def dtype(self) -> str:
        """The type of its weights."""
        ...

    @property
    def network(self) -> Network:
        """Its shape."""
        ...

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        ...


class Options(Protocol):
    """The part of an engine's limits that routers receive."""

    @property
    def window_tokens(self) -> int:
        """Prompt tokens that may be sent ahead of the computed ones."""
        ...

    @property
    def max_running(self) -> int:
        """Sequences that run at the same time."""
        ...


class ServedEngine(AnyEngine, Protocol):
    """An engine that describes its model and its abilities."""

    @property
    def shapes_answers(self) -> bool:
        """Whether it can constrain an answer to a grammar."""
        ...

    @property
    def adapter_use(self) -> AdapterUse | None:
        """Its LoRA adapters; None if it serves none. Later reports have its changes."""
        ...

    @property
    def model(self) -> ModelInfo:
        """The model that it runs."""
        ...

    @property
    def options(self) -> Options:
        """Its limits."""
        ...

    @property
    def kv_address(self) -> str | None:
        """Where other shards fetch KV from it; None if they cannot."""
        ...

    @property
    def kv_group(self) -> str | None:
        """What shards that can exchange KV have in common, in hex digits; None if it exchanges none."""
        ...


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a shard's server.

    Without `tls` the port speaks plain text. `load_s` is the largest age of the load that a router has seen,
    `heartbeat_s` the longest time without any report to it.
    `outbox_bytes` may wait for one router before its stream is ended. `device` is shown to routers. `traces` make spans
    of the requests that are traced.
    """

    shard: str = "shard"
    device: str = "cpu"
    tls: Certificates | None = None
    grace_s: float = 10.0
    load_s: float = 0.1
    heartbeat_s: float = limits.HEARTBEAT_S
    outbox_bytes: int = 16 << 20
    traces: ShardTraces | None = None


class ShardServer:
    """One engine behind one port. `address` is the address that it listens on, once started."""

    def __init__(self, engine: ServedEngine, listen: str, options: ServerOptions = ServerOptions()) -> None:
        self.loop = EngineLoop(engine)
        self.address = ""
        self._listen, self._options, self._engine = listen, options, engine

    def __repr__(self) -> str:
        return f"<ShardServer {self._options.shard} on {self.address or self._listen}>"

    async def start(self) -> None:
        """Listen. Raises OSError if the address is not available."""
        engine = self._engine
        self.loop.start()
        self.service = ShardService(
            self.loop,
            facts_of(engine, self._options),
            engine.model.path,
            outbox_bytes=self._options.outbox_bytes,
            traces=self._options.traces,
            adapters=engine.adapter_use,
        )
        self._server = grpc_server(*limits.SERVER_OPTIONS)
        self._port = GrpcPort(self._server, self._options.tls)
        shard_pb2_grpc.add_ShardServicer_to_server(self.service, self._server)  # type: ignore[no-untyped-call]
        self._health = add_about(self._server, SERVICE)
        try:
            self.address = await self._bind()
        except OSError:
            await self.loop.stop()
            raise
        await self._server.start()
        await self._say(health_pb2.HealthCheckResponse.SERVING)
        self._tasks = [asyncio.create_task(self._keep_fresh()), asyncio.create_task(self._mourn())]

    async def drain(self) -> None:
        """Refuse new requests, report that to routers at once, and wait at most `grace_s` until running requests have
        ended and other shards have got the KV of this one.
        """
        self.service.drain(self._options.grace_s)
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.grace_s):
                while not (self._is_done or self.loop.died.done()):  # noqa: ASYNC110 - sockets announce nothing
                    await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        """End every stream and the engine's thread."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.loop.stop)
            stack.push_async_callback(self._end_tasks)
            stack.push_async_callback(self._port.close)
            stack.push_async_callback(self._server.stop, grace=0.5)
            self.service.end_all(grpc.StatusCode.UNAVAILABLE, "this shard has stopped")

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def check(self) -> None:
        """Raise AssertionError if an invariant of the engine or of a stream is broken."""
        self.service.check()
        await self.loop.check()

    @property
    def _is_done(self) -> bool:
        return self.service.is_quiet and self.service.is_handed_over

    async def _bind(self) -> str:
        host, _, _ = self._listen.rpartition(":")
        try:
            port = await self._port.open(self._listen)
        except (OSError, RuntimeError) as error:
            # grpc does not say which of the reasons applies
            because = "it must be host:port of this machine, with a port that no other process has"
            raise OSError(f"cannot listen on {self._listen}: {because}") from error
        return f"{host}:{port}"

    async def _keep_fresh(self) -> None:
        options = self._options
        pause_s = min(options.load_s, options.heartbeat_s / 2 or options.load_s)
        while True:
            await asyncio.sleep(pause_s)
            self.service.refresh(self._options.load_s)

    async def _mourn(self) -> None:
        """Once the engine has failed: report it to load balancers, and to routers by ending their streams."""
        failure = await asyncio.shield(self.loop.died)
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.service.is_draining = True
        self.service.end_all(grpc.StatusCode.UNAVAILABLE, str(failure))

    async def _say(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)


def facts_of(engine: ServedEngine, options: ServerOptions) -> ShardFacts:
    """The description of `engine` that routers receive."""
    try:
        release = version("pointsman")
    except PackageNotFoundError:
        release = "unreleased"
    return ShardFacts(
        shard=options.shard,
        model=engine.model.name,
        block_tokens=BLOCK_TOKENS,
        context_tokens=engine.model.network.context_tokens,
        vocabulary=engine.model.vocabulary,
        window_tokens=engine.options.window_tokens,
        max_requests=engine.options.max_running,
        version=release,
        device=options.device,
        dtype=engine.model.dtype,
        shapes_answers=engine.shapes_answers,
        heartbeat_s=options.heartbeat_s,
        kv_address=engine.kv_address or "",
        kv_group=bytes.fromhex(engine.kv_group or ""),
    )


async def serve(
    engine: ServedEngine,
    listen: str,
    *,
    shard: str = "shard",
    grace_s: float = 10.0,
    on_listening: Callable[[str], None] = lambda _: None,
    tls: Certificates | None = None,
    traces: ShardTraces | None = None,
    announcer: Callable[[str], Announcer] | None = None,
) -> None:
    """Serve `engine` on `listen` (host:port; 0 picks a port; `on_listening` gets the address) until SIGTERM or SIGINT.

    Running requests then have `grace_s` to end. `announcer` makes the object that announces the actual address to
    routers. Raises EngineError if the engine fails, OSError if it cannot listen.
    """
    options = ServerOptions(shard=shard, grace_s=grace_s, tls=tls, traces=traces)
    server = ShardServer(engine, listen, options)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.close)
        on_listening(server.address)
        announcing = announcer(server.address) if announcer else None
        if announcing is not None:
            await announcing.start()
        waiting = asyncio.create_task(stopped.wait())
        await asyncio.wait((waiting, server.loop.died), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        # telling an unreachable router takes seconds, and reachable routers send requests meanwhile
        endings = [server.drain(), *([] if announcing is None else [announcing.stop()])]
        failures = [failure for failure in await asyncio.gather(*endings, return_exceptions=True) if failure]
        if failures:
            raise failures[0]
    if server.loop.died.done():
        raise server.loop.died.result()
