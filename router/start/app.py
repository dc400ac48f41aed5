"""A running router: starts and stops what `build` returns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Unpack

from http1.errors import HttpError
from http1.limits import ServerLimits
from http1.request import Handler, Response
from http1.server import HttpServer, refusal
from policies.sla.config import Config
from policies.sla.server import OPEN
from router.batches.api.all import add_batches
from router.operate.admin.server import AdminEndpoints, MetricsEndpoint
from router.protocols.grpc.server import GrpcServer
from router.protocols.http.access_log import AccessLog
from router.protocols.http.endpoints import HttpEndpoints
from router.protocols.picker.server import PickerServer
from router.protocols.registration.announcements import add_announcements
from router.protocols.registration.fastchat_controller import FastChatController, FastChatPools
from router.protocols.registration.fastchat_workers import Workers
from router.protocols.strangers import Strangers, is_in
from router.start.address import Address, cannot_listen
from router.start.build import Parts, build
from router.start.config_file import ConfigFile
from router.start.drafts import Drafts
from router.start.preflight import require_guarded
from router.start.reload import Reloader, as_shadow
from router.start.tls import port_certificates
from router.supervise import supervise
from tls.listener import TlsListener

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
        self._tls = port_certificates(config, self.telemetry.event)
        self.metrics = None if config.server.metrics in (None, OPEN) else Address.parse(config.server.metrics)
        self._servers: list[GrpcServer | PickerServer] = []
        self._http_servers: list[HttpServer] = []
        self._strangers = Strangers(self.gateway.clock, self.telemetry.limited)
        self._shares_ports = parts.get("shares_ports", False)
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<Router http {self.http} grpc {self.grpc} {self.gateway!r}>"

    @property
    def http_url(self) -> str:
        """Base URL for HTTP clients."""
        return f"{self.scheme('http')}://{self.http}"

    def scheme(self, port: str) -> str:
        """`https` if the port of this name has TLS, else `http`."""
        return "https" if port in self._tls else "http"

    @property
    def metrics_url(self) -> str | None:
        """The URL of the metrics; None if only an operator's key opens them at the HTTP address."""
        is_open = self.gateway.config.server.metrics == OPEN
        port, where = ("http", self.http) if is_open else ("admin", self.admin)
        if self.metrics is not None:
            port, where = "metrics", self.metrics
        return None if where is None else f"{self.scheme(port)}://{where}/metrics"

    @property
    def grpc_address(self) -> str | None:
        """Address for gRPC clients."""
        return None if self.grpc is None else str(self.grpc)

    def models(self) -> tuple[str, ...]:
        """The names of the models that are served now."""
        return tuple(self.gateway.cluster.models())

    async def wait_until_reached(self, timeout_s: float | None) -> bool:
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
            if (audit := self.operations.audit) is not None:
                await asyncio.to_thread(audit.open)
                stack.push_async_callback(asyncio.to_thread, audit.close)
            if (log := self.telemetry.decisions) is not None:
                log.open()
                stack.push_async_callback(asyncio.to_thread, log.close)
            if (usage := self.operations.usage) is not None:
                await asyncio.to_thread(usage.open)
                stack.push_async_callback(asyncio.to_thread, usage.close)
            stack.callback(self.gateway.later.flush)
            stack.push_async_callback(self.gateway.tokenizers.close)
            stack.callback(self.gateway.bodies.close)
            stack.push_async_callback(self.gateway.sources.close)
            stack.push_async_callback(self.gateway.admission.store.close)
            await self.gateway.admission.store.start()
            stack.push_async_callback(self.gateway.admission.end)
            stack.push_async_callback(self.gateway.keys.close)
            await self.gateway.keys.start()
            self._own(stack, "API keys", self.gateway.keys.watch)
            self._own(stack, "issuers", self._fetch_signing_keys)
            stack.push_async_callback(self.operations.alerts.close)
            self._own(stack, "alerts", self.operations.alerts.run)
            # backends join the feeds as soon as the cluster reaches them
            await stack.enter_async_context(self.gateway.feeds)
            await stack.enter_async_context(self.gateway.cluster)
            stack.push_async_callback(self.gateway.mirrors.close)
            stack.push_async_callback(self.gateway.waking.close)
            await stack.enter_async_context(self.gateway.prefixes)
            await stack.enter_async_context(self.gateway.document_sets)
            if self.gateway.replicas is not None:
                stack.push_async_callback(self.gateway.replicas.close)
                await self.gateway.replicas.start()
            self._own(stack, "health of feeds", lambda: _every(1.0, self._weigh_feeds))
            await stack.enter_async_context(self.gateway.fleet.discovery)
            self._own(stack, "event loop lag", partial(self.telemetry.measure_lag, tell=self.gateway.shedding.looked))
            self._own(stack, "tokenizers", self._look_after_tokenizers)
            if self.reloader is not None:
                self._own(stack, "SLA file", self.reloader.watch)
            if self._shadow is not None:
                self._own(stack, "shadow file", self._shadow.watch)
            self.http = await self._listen_http(stack, self.http)
            self._own(stack, "connections", lambda: _every(1.0, self._look_at_connections))
            if self.metrics is not None:
                self.metrics = await self._serve_http(
                    stack, "metrics", self.metrics, MetricsEndpoint(self.telemetry).answer
                )
            if self.admin is not None:
                self.admin = await self._listen_admin(stack, self.admin)
            if self.grpc is not None:
                server = partial(GrpcServer, strangers=self._strangers)
                self.grpc = await self._listen_grpc(stack, self.grpc, server, "grpc")
            if self.picker is not None:
                self.picker = await self._listen_grpc(stack, self.picker, PickerServer, "picker")
            # the stack leaves this before all else: requests end before anything that they need is closed
            stack.push_async_callback(self._drain)
            if self.operations.batches is not None:
                # lines are stopped at once, and sent again by the next router
                await stack.enter_async_context(self.operations.batches)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _look_after_tokenizers(self) -> None:
        cluster = self.gateway.cluster
        await self.gateway.sources.look_after(lambda: cluster.models().values(), cluster.health_changed)

    async def _fetch_signing_keys(self) -> None:
        """Have the keys of the issuers that the file trusts."""
        # a changed file may trust the first one
        while self.gateway.identities.tokens is None:  # noqa: ASYNC110 - once a second costs less than an event in three files
            await asyncio.sleep(1.0)
        await self.gateway.identities.tokens.issuers.run()

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
        try:
            for server in self._servers:
                await server.report_health()
        finally:
            if not await doors.emptied(self.gateway.config.server.drain_s):
                doors.turn_out()
                await doors.emptied(_LEFTOVERS_S)

    async def _listen_http(self, stack: AsyncExitStack, address: Address) -> Address:
        """Serve clients at `address` until the stack is left; returns the address with its real port."""
        endpoints = HttpEndpoints(self.gateway, self.telemetry.exposition, self._strangers)
        add_batches(endpoints.routes, self.gateway.identities, self.gateway.in_force, self.operations.batches)
        answer = AccessLog(endpoints.answer).answer if AccessLog.is_wanted() else endpoints.answer
        return await self._serve_http(stack, "http", address, answer, endpoints.refuse, shares_port=self._shares_ports)

    async def _serve_http(
        self,
        stack: AsyncExitStack,
        port: str,
        address: Address,
        handler: Handler,
        refuse: Callable[[HttpError], Response] = refusal,
        *,
        shares_port: bool = False,
    ) -> Address:
        """Serve `handler` at `address` until the stack is left, with the certificates of `port` if any; returns the
        address with its real port."""
        server = HttpServer(handler, self._limits(), refuse=refuse, on_limit=self.telemetry.limited)
        self._http_servers.append(server)
        stack.push_async_callback(server.close, _LEFTOVERS_S)
        return await self._open(stack, server, port, address, shares_port=shares_port)

    def _limits(self) -> ServerLimits:
        settings = self.gateway.config.server
        proxies = settings.trusted_proxies
        return replace(_LIMITS, strangers=settings.strangers, is_exempt=lambda address: is_in(address, proxies))

    async def _look_at_connections(self) -> None:
        """Report the connections to telemetry, and give new ones the limits of the file in effect."""
        for server in self._http_servers:
            server.limits = self._limits()
        waiting = sum(server.waiting for server in self._http_servers)
        self.telemetry.connected(
            waiting=waiting, served=sum(server.connections for server in self._http_servers) - waiting
        )

    async def _listen_admin(self, stack: AsyncExitStack, address: Address) -> Address:
        """Serve operators at `address` until the stack is left; returns the address with its real port."""
        require_guarded(address, self.gateway.config)
        reload = None if self.reloader is None else self.reloader.reload
        endpoints = AdminEndpoints(self.operations, reload, self._drafts())
        add_announcements(endpoints.routes, self.gateway.fleet)
        workers = Workers(FastChatPools(self.gateway.fleet), self.gateway.clock)
        controller = await stack.enter_async_context(FastChatController(workers))
        controller.add_to(endpoints.routes)
        return await self._serve_http(stack, "admin", address, endpoints.answer, endpoints.refuse)

    def _drafts(self) -> Drafts | None:
        """Drafts of the file, if the router runs with one on disk."""
        if self.reloader is None or not isinstance(file := self.reloader.contents.source, ConfigFile):
            return None
        return Drafts(self.operations, self.reloader, file)

    async def _open(
        self, stack: AsyncExitStack, server: HttpServer, port: str, address: Address, *, shares_port: bool = False
    ) -> Address:
        """Let `server` listen at `address`, with the certificates of `port` if any; returns the real address."""
        certificates = self._tls.get(port)
        with _naming(address):
            if certificates is None:
                number = await server.listen(address.host, address.port, shares_port=shares_port)
            else:
                listener = TlsListener(server.connection, certificates)
                stack.push_async_callback(listener.close)
                number = await listener.listen(address.host, address.port, shares_port=shares_port)
        return Address(address.host, number)

    async def _listen_grpc(
        self, stack: AsyncExitStack, address: Address, kind: Callable[..., GrpcServer | PickerServer], port: str
    ) -> Address:
        """Serve gRPC at `address` until the stack is left; returns the address with its real port."""
        server = kind(self.gateway, str(address), shared=self._shares_ports, certificates=self._tls.get(port))
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
