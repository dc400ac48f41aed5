"""A running router: starts and stops what `build` returns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Unpack

from aiohttp import web

from http1.limits import ServerLimits
from http1.server import HttpServer
from policies.sla.config import Config
from router.operate.admin.server import admin_app
from router.operate.telemetry.logs import HttpServerLog
from router.protocols.grpc.server import GrpcServer
from router.protocols.http.endpoints import HttpEndpoints
from router.protocols.picker.server import PickerServer
from router.protocols.registration.announcements import announcements
from router.protocols.registration.fastchat_controller import FastChatController, FastChatPools
from router.protocols.registration.fastchat_workers import Workers
from router.start.address import Address, cannot_listen
from router.start.build import Parts, build
from router.start.preflight import require_guarded
from router.start.reload import Reloader, as_shadow
from router.supervise import supervise
from router.text.sources import LOOK_EVERY_S

_LIMITS = ServerLimits(body_bytes=2**62)
"""The endpoints limit bodies themselves, by the SLA file in effect when they arrive."""

_LEFTOVERS_S = 2.0
"""How long requests may take, after the drain, to free what they hold and to send their clients an error."""


class Router:
    """A running router, as an async context manager: entered it listens, left it has drained and closed everything.

    Takes the arguments of `build`. `http`, `grpc`, `admin` and `picker` are the addresses in use (with the real port);
    None for a port that the config turns off.
    """

    def __init__(self, config: Config, **parts: Unpack[Parts]) -> None:
        self.operations = build(config, **parts)
        self.gateway, self.telemetry = self.operations.gateway, self.operations.telemetry
        self.reloader = Reloader(self.operations, parts["file"]) if "file" in parts else None
        self._shadow = Reloader(self.operations, parts["shadow"], take=as_shadow) if "shadow" in parts else None
        self.http = Address.parse(config.server.http)
        self.grpc = None if config.server.grpc is None else Address.parse(config.server.grpc)
        self.admin = None if config.server.admin is None else Address.parse(config.server.admin)
        self.picker = None if config.server.picker is None else Address.parse(config.server.picker)
        self._servers: list[GrpcServer | PickerServer] = []
        self._shares_ports = parts.get("shares_ports", False)
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<Router http {self.http} grpc {self.grpc} {self.gateway!r}>"

    @property
    def http_url(self) -> str:
        """Base URL for HTTP clients."""
        return f"http://{self.http}"

    @property
    def grpc_address(self) -> str | None:
        """Address for gRPC clients."""
        return None if self.grpc is None else str(self.grpc)

    def models(self) -> tuple[str, ...]:
        """The names of the models that are served now."""
        return tuple(self.gateway.cluster.models())

    async def wait_until_reached(self, timeout_s: float) -> bool:
        """Wait until every pool has a healthy backend, at most `timeout_s`; returns whether that is so."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.gateway.is_ready():
                    await self.gateway.cluster.health_changed()
        except TimeoutError:
            return False
        return True

    def reload_soon(self) -> None:
        """Read the files at once, changed or not."""
        for reloader in (self.reloader, self._shadow):
            if reloader is not None:
                reloader.ask()

    def check(self) -> None:
        """Assert that an idle router has nothing left of any request: no call, permit, or request at a backend."""
        self.gateway.check()

    async def __aenter__(self) -> Router:
        async with AsyncExitStack() as stack:
            if (log := self.telemetry.decisions) is not None:
                log.open()
                stack.push_async_callback(asyncio.to_thread, log.close)
            stack.push_async_callback(self.gateway.tokenizers.close)
            stack.push_async_callback(self.gateway.sources.close)
            stack.push_async_callback(self.gateway.admission.store.close)
            await self.gateway.admission.store.start()
            stack.push_async_callback(self.gateway.keys.close)
            await self.gateway.keys.start()
            self._own(stack, "API keys", self.gateway.keys.watch)
            # backends join the feeds as soon as the cluster reaches them
            await stack.enter_async_context(self.gateway.feeds)
            await stack.enter_async_context(self.gateway.cluster)
            await stack.enter_async_context(self.gateway.prefixes)
            if self.gateway.replicas is not None:
                stack.push_async_callback(self.gateway.replicas.close)
                await self.gateway.replicas.start()
            self._own(stack, "health of feeds", lambda: _every(1.0, self._weigh_feeds))
            await stack.enter_async_context(self.gateway.finding.discovery)
            self._own(stack, "event loop lag", self.telemetry.measure_lag)
            self._own(stack, "tokenizers", self._load_tokenizers)
            if self.reloader is not None:
                self._own(stack, "SLA file", self.reloader.watch)
            if self._shadow is not None:
                self._own(stack, "shadow file", self._shadow.watch)
            self.http = await self._listen_http(stack, self.http)
            if self.admin is not None:
                self.admin = await self._listen_admin(stack, self.admin)
            if self.grpc is not None:
                self.grpc = await self._listen_grpc(stack, self.grpc, GrpcServer)
            if self.picker is not None:
                self.picker = await self._listen_grpc(stack, self.picker, PickerServer)
            # the stack leaves this first: requests end before anything that they need is closed
            stack.push_async_callback(self._drain)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _load_tokenizers(self) -> None:
        """Load each model's tokenizer as soon as the model is served, so that no request waits for it, and reload it
        when its files change.
        """
        gateway = self.gateway
        while True:
            for model in gateway.cluster.models().values():
                await gateway.sources.text_of(model)
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await gateway.cluster.health_changed()
            except TimeoutError:
                await gateway.sources.refresh()

    async def _weigh_feeds(self) -> None:
        """Pass each feed's confidence on to the index and to telemetry."""
        for health in self.gateway.feeds.health():
            source = health.source
            self.gateway.beliefs.trust(source.backend, source.rank, health.confidence, is_whole=health.is_whole)
            self.telemetry.backends.feed(health)
        self.gateway.beliefs.parity.tick()

    async def _drain(self) -> None:
        doors = self.gateway.doors
        doors.close()
        for server in self._servers:
            await server.report_health()
        if not await doors.emptied(self.gateway.config.server.drain_s):
            doors.turn_out()
            await doors.emptied(_LEFTOVERS_S)

    async def _listen_http(self, stack: AsyncExitStack, address: Address) -> Address:
        """Serve clients at `address` until the stack is left; returns the address with its real port."""
        endpoints = HttpEndpoints(self.gateway, self.telemetry.exposition)
        server = HttpServer(endpoints.answer, _LIMITS, refuse=endpoints.refuse)
        stack.push_async_callback(server.close, _LEFTOVERS_S)
        with _naming(address):
            port = await server.listen(address.host, address.port, shares_port=self._shares_ports)
        return Address(address.host, port)

    async def _listen_admin(self, stack: AsyncExitStack, address: Address) -> Address:
        """Serve operators at `address` until the stack is left; returns the address with its real port."""
        runner = web.AppRunner(
            self._admin_app(address),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_LEFTOVERS_S,
            logger=HttpServerLog(),
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        with _naming(address):
            await web.TCPSite(runner, address.host, address.port, reuse_address=True).start()
        return Address(address.host, runner.addresses[0][1])

    def _admin_app(self, address: Address) -> web.Application:
        require_guarded(address, self.gateway.config)
        app = admin_app(self.operations, None if self.reloader is None else self.reloader.reload)
        app.add_routes(announcements(self.gateway))
        FastChatController(Workers(FastChatPools(self.gateway), self.gateway.clock)).add_to(app)
        return app

    async def _listen_grpc(
        self, stack: AsyncExitStack, address: Address, kind: type[GrpcServer | PickerServer]
    ) -> Address:
        """Serve gRPC at `address` until the stack is left; returns the address with its real port."""
        server = kind(self.gateway, str(address), shared=self._shares_ports)
        self._servers.append(server)
        stack.push_async_callback(server.stop, _LEFTOVERS_S)
        with _naming(address):
            await server.start()
        self._own(stack, f"gRPC health at {address}", lambda: _every(1.0, server.report_health))
        return Address(address.host, server.port)

    def _own(self, stack: AsyncExitStack, name: str, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(supervise(name, work, on_failure=lambda _: self.telemetry.event("task_failed")))
        stack.push_async_callback(_end, task)


@contextmanager
def _naming(address: Address) -> Iterator[None]:
    """Turn a failure to listen into a ConfigError that names the address."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # grpc raises RuntimeError
        raise cannot_listen(address, error) from error


async def _every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await work()
        await asyncio.sleep(seconds)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
