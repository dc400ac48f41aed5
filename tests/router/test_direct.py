"""No variable of the environment diverts a request: each client asks its own address, and never a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest

from backends.openai.compatible import OpenAICompatible
from backends.shard.backend import ShardBackend
from backends.triton.backend import TritonOptions
from backends.triton.grpc import TritonStreams
from policies.errors import BackendFailed
from policies.identity import Issuer
from policies.sla.batches import S3Settings
from policies.sla.sources import KubernetesService
from router.batches.store.s3_bucket import open_bucket
from router.client.batches import BatchClient
from router.client.chats import ChatClient
from router.fleet.discovery.kubernetes import KubernetesAccess, KubernetesSource
from router.identity.key_source import KeySource
from router.operate.admin_port import AdminPort
from router.start.commands.engines import find_engine
from shards.announce import Announcement, Announcer
from shards.wire.otel import Signal, exporter_of

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")

Ask = Callable[[int], Awaitable[object]]


class Listener:
    """An address that counts its connections, and has nothing for those who ask."""

    def __init__(self, answer: bytes) -> None:
        self.port = self.connections = 0
        self._answer = answer
        self.heard = b""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError):
            self.heard += await reader.read(1 << 16)
            writer.write(self._answer)
            await writer.drain()
        writer.close()


NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


@asynccontextmanager
async def listening(answer: bytes = NOT_FOUND) -> AsyncIterator[Listener]:
    listener = Listener(answer)
    server = await asyncio.start_server(listener.take, "127.0.0.1", 0)
    listener.port = server.sockets[0].getsockname()[1]
    async with server:
        yield listener


async def call_operators(port: int) -> None:
    await asyncio.to_thread(AdminPort(f"http://127.0.0.1:{port}", "secret").call, "/admin/snapshot")


async def call_operators_with_tls(port: int) -> None:
    await asyncio.to_thread(AdminPort(f"https://127.0.0.1:{port}", "secret").call, "/admin/snapshot")


async def look_for_an_engine(port: int) -> None:
    await asyncio.to_thread(find_engine, f"http://127.0.0.1:{port}", "secret")


async def probe_a_shard(port: int) -> None:
    shard = ShardBackend("own-0", f"127.0.0.1:{port}", pool="own")
    try:
        await shard.start()
        await shard.probe()
    finally:
        await shard.close()


async def open_a_triton(port: int, *, is_secure: bool) -> None:
    streams = TritonStreams("t-0", f"127.0.0.1:{port}", TritonOptions(), is_secure=is_secure)
    channel = await streams._connected()
    try:
        await channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=2)
    finally:
        await streams.close()


async def probe_an_engine(port: int) -> None:
    backend = OpenAICompatible("e-0", f"http://127.0.0.1:{port}", pool="own")
    try:
        await backend.start()
        await backend.probe()
    finally:
        await backend.close()


async def read_a_bucket(port: int, host: str) -> None:
    settings = S3Settings(endpoint=f"http://{host}:{port}", region="r", access_key="a", secret_key="s")
    await open_bucket("s3://b/p", settings, retries=0).head_async("x")


async def fetch_keys(port: int) -> None:
    issuer = Issuer("corp", "https://login.example.com", frozenset({"a"}), jwks=f"http://127.0.0.1:{port}/keys")
    await KeySource(issuer).fetch()


async def ask_a_router(port: int) -> None:
    async with ChatClient(f"http://127.0.0.1:{port}", "secret") as client:
        await client.models()


async def ask_for_a_batch(port: int) -> None:
    async with BatchClient(f"http://127.0.0.1:{port}", "secret") as client:
        await client.show("batch_1")


async def ask_kubernetes(port: int) -> None:
    source = KubernetesSource(KubernetesService("n", "s", "http"), KubernetesAccess(f"http://127.0.0.1:{port}"))
    async for _ in source.addresses():
        return


async def announce_a_shard(port: int) -> None:
    announcer = Announcer(Announcement([f"http://127.0.0.1:{port}"], "own", "127.0.0.1:1", "secret"))
    await announcer.start()
    # withdrawing asks as well
    await announcer.stop()


async def export(port: int, signal: Signal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    exporter = exporter_of(signal)
    await asyncio.to_thread(exporter._client.export, b"")
    await asyncio.to_thread(exporter.shutdown)


CLIENTS: dict[str, Ask] = {
    "a command at the operators' port": call_operators,
    "a command at the operators' port with TLS": call_operators_with_tls,
    "a command that looks for an engine": look_for_an_engine,
    "a shard's link": probe_a_shard,
    "Triton over gRPC": partial(open_a_triton, is_secure=False),
    "Triton over gRPC with TLS": partial(open_a_triton, is_secure=True),
    "an engine over HTTP": probe_an_engine,
    "a bucket of batches": partial(read_a_bucket, host="127.0.0.1"),
    "a bucket of batches by name": partial(read_a_bucket, host="localhost"),
    "the keys of an issuer": fetch_keys,
    "pointsman chat and bench": ask_a_router,
    "pointsman batch": ask_for_a_batch,
    "Kubernetes": ask_kubernetes,
    "a shard that announces itself": announce_a_shard,
}


@pytest.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    """A proxy that every variable names, in both cases."""
    async with listening(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n") as proxy:
        for name in VARIABLES:
            for written in (name, name.upper()):
                monkeypatch.setenv(written, f"http://127.0.0.1:{proxy.port}")
                monkeypatch.delenv("no_proxy" if written == name else "NO_PROXY", raising=False)
        yield proxy


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_asks_its_own_address_whatever_proxy_the_environment_names(client: str, proxy: Listener) -> None:
    async with listening() as there:
        with suppress(Exception):
            async with asyncio.timeout(5):
                await CLIENTS[client](there.port)
        assert there.connections > 0
    assert proxy.connections == 0, proxy.heard


@pytest.mark.parametrize("signal", ["traces", "metrics"])
async def test_telemetry_goes_to_its_collector_whatever_proxy_the_environment_names(
    signal: Signal, proxy: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening() as there:
        with suppress(Exception):
            await export(there.port, signal, monkeypatch)
        assert there.connections > 0
    assert proxy.connections == 0, proxy.heard


@pytest.mark.parametrize("client", [call_operators, look_for_an_engine])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_command_does_not_follow_a_redirect_with_its_key(client: Ask, status: int) -> None:
    async with listening() as other:
        where = b"HTTP/1.1 %d X\r\nLocation: http://127.0.0.1:%d/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        async with listening(where % (status, other.port)) as there:
            with suppress(Exception):
                await client(there.port)
            assert there.connections > 0
        assert other.connections == 0, other.heard


async def test_a_redirected_operators_port_is_an_error_with_its_address() -> None:
    answer = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with listening(answer) as there:
        with pytest.raises(BackendFailed, match=rf"http://127\.0\.0\.1:{there.port} is not an admin port"):
            await call_operators(there.port)
