"""A whole Pointsman with mutual TLS everywhere: clients, operators, router, shard and Redis."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from http1.client import HttpClient
from http1.errors import AnswerError
from policies.errors import ConfigError
from policies.sla.parse import parse
from router.operate.admin_port import KEY_VARIABLE
from router.protocols.grpc.v1 import inference_pb2 as pb
from router.protocols.grpc.v1 import inference_pb2_grpc as services
from router.protocols.strangers import BURST_S
from router.start.app import Router
from router.start.cli import app
from shards.announce import Announcement, Announcer
from shards.engine import Engine, EngineOptions
from shards.server import ServerOptions, ShardServer
from tests.e2e.cluster import KEYS, MODEL, bundled_model
from tests.router.shared.store.parts import a_line, a_redis
from tests.tls.authority import Authority, Issued
from tls.certificates import Certificates
from tls.grpc_client import open_channel
from tls.settings import GRPC_ALPN, HTTP_ALPN, TlsSettings

BODY = b'{"model": "MODEL", "prompt": "The first", "max_tokens": 24, "temperature": 0, "stream": true}'
HASHES = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
PORTS = ("http", "grpc", "admin", "picker")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


def side(settings: TlsSettings, *, is_server: bool = False, alpn: tuple[str, ...] = GRPC_ALPN) -> Certificates:
    return Certificates(settings, is_server=is_server, what="shard own-0" if is_server else "client", alpn=alpn)


def sla(authority: Authority, router: Issued, shard: str, redis: str, *, pool: str = "") -> str:
    """All ports with mutual TLS; the pool and the store with the router's certificate."""
    ours = f"ca: '{authority.cert}', cert: '{router.cert}', key: '{router.key}'"
    listens = ", ".join(f"{port}: '127.0.0.1:0'" for port in PORTS)
    port_tls = f"{{cert: '{router.cert}', key: '{router.key}', client_ca: '{authority.cert}'}}"
    return (
        f"pools: {{own: {{kind: shard, at: ['{shard}'], register: true, tls: {{{ours}{pool}}}}}}}\n"
        f"store: {{redis: '{redis}', tls: {{{ours}}}}}\n"
        f"tenants: {{acme: {{keys: ['sha256:{HASHES['acme']}'], limits: {{requests_per_minute: 1000}}}}}}\n"
        f"server: {{{listens}, admin_keys: ['sha256:{HASHES['labs']}'], tls: {port_tls}}}\n"
    )


@dataclass
class Secured:
    router: Router
    shard: ShardServer
    client: TlsSettings
    issued: Issued

    def http(self, settings: TlsSettings | None = None, port: str = "http") -> HttpClient:
        address = getattr(self.router, port)
        certificates = side(settings or self.client, alpn=HTTP_ALPN)
        return HttpClient(f"https://localhost:{address.port}", ssl_context=certificates.live())


async def answer(http: HttpClient) -> bytes:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEYS['acme']}"}
    body = BODY.replace(b"MODEL", MODEL.encode())
    async with await http.request("POST", "/v1/completions", headers, body) as reply:
        assert reply.status == 200
        return await reply.body(1 << 20)


@asynccontextmanager
async def a_shard(authority: Authority, issued: Issued) -> AsyncIterator[ShardServer]:
    options = ServerOptions(shard="own-0", tls=side(authority.server(issued), is_server=True))
    server = ShardServer(Engine(bundled_model(), EngineOptions(kv_blocks=256)), "127.0.0.1:0", options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def a_secured(authority: Authority, folder: Path) -> AsyncIterator[Secured]:
    router, shard = Issued(folder / "tls.crt", folder / "tls.key"), authority.issue("shard")
    router.replace_with(authority.issue("router"))
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(a_redis())
        context = side(authority.server(authority.issue("redis")), is_server=True, alpn=()).context()
        line = await stack.enter_async_context(a_line(redis, context))
        server = await stack.enter_async_context(a_shard(authority, shard))
        at = server.address.replace("127.0.0.1", "localhost")
        pins = f", pins: ['sha256:{shard.pin}']"
        running = await stack.enter_async_context(Router(parse(sla(authority, router, at, line.url, pool=pins))))
        assert await running.wait_until_reached(timeout_s=20)
        yield Secured(running, server, authority.client(authority.issue("client")), router)
        assert line.accepted, "the store was spoken to over TLS"


async def test_all_ports_serve_clients_with_a_certificate_and_refuse_all_others(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    async with a_secured(authority, tmp_path) as secured:
        router = secured.router
        assert router.http_url.startswith("https://")
        http = secured.http()
        assert b"[DONE]" in await answer(http)
        await http.close()
        client = side(secured.client)
        assert router.grpc is not None
        async with await open_channel(f"localhost:{router.grpc.port}", client, ()) as channel:
            stub = services.InferenceStub(channel)  # type: ignore[no-untyped-call]
            key = (("authorization", f"Bearer {KEYS['acme']}"),)
            listed = await stub.ListModels(pb.ListModelsRequest(), metadata=key)
            assert [model.id for model in listed.models] == [MODEL]
        assert router.picker is not None
        async with await open_channel(f"localhost:{router.picker.port}", client, ()) as channel:
            await asyncio.wait_for(channel.channel_ready(), 5)
        for port in PORTS:
            assert await refusals(getattr(router, port).port, authority, stranger) == [], port
        router.check()


async def refusals(port: int, authority: Authority, stranger: Authority) -> list[str]:
    """The certificates with which a connection to `port` was accepted although it should not be."""
    accepted = []
    for name, settings in {
        "none": authority.client(),
        "of another CA": authority.client(stranger.issue("client")),
        "expired": authority.client(authority.issue("client", days=-1)),
    }.items():
        reader, writer = await asyncio.open_connection("localhost", port, ssl=side(settings).context())
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            if await reader.read(1):
                accepted.append(name)
        except OSError:
            pass
        writer.transport.abort()
    return accepted


async def test_limits_of_an_address_hold_behind_tls(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = authority.issue("router")
    port_tls = f"{{cert: '{ours.cert}', key: '{ours.key}'}}"
    limits = "strangers: {connections: 8, requests_per_second: 1}"
    listens = "http: '127.0.0.1:0', grpc: '127.0.0.1:0'"
    keys = f"tenants: {{acme: {{keys: ['sha256:{HASHES['acme']}']}}}}"
    pool = "pools: {own: {kind: fake, at: 'a:1', model: m}}"
    text = f"{keys}\n{pool}\nserver: {{{listens}, {limits}, tls: {port_tls}}}\n"
    client = side(TlsSettings(ca=str(authority.cert)), alpn=HTTP_ALPN).context()
    async with Router(parse(text)) as router, AsyncExitStack() as stack:
        ends = []
        for _ in range(20):
            port = router.http.port
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="localhost")
            stack.callback(writer.transport.abort)
            ends.append((reader, writer))
        closed = [asyncio.create_task(reader.read()) for reader, _ in ends]
        await asyncio.wait_for(asyncio.wait(closed[:12]), 10)
        # those that came last wait on
        assert [task.done() for task in closed] == [True] * 12 + [False] * 8
        assert "without a known key, the last of 127.0.0.1: its address has too many" in caplog.text
        for task in closed:
            task.cancel()
        await asyncio.gather(*closed, return_exceptions=True)
        assert router.grpc is not None
        grpc_client = side(TlsSettings(ca=str(authority.cert)))
        async with await open_channel(f"localhost:{router.grpc.port}", grpc_client, ()) as channel:
            stub = services.InferenceStub(channel)  # type: ignore[no-untyped-call]
            codes = []
            for _ in range(BURST_S + 1):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.ListModels(pb.ListModelsRequest())
                codes.append(failed.value.code())
            assert codes == [*[grpc.StatusCode.UNAUTHENTICATED] * BURST_S, grpc.StatusCode.RESOURCE_EXHAUSTED]
            key = (("authorization", f"Bearer {KEYS['acme']}"),)
            assert (await stub.ListModels(pb.ListModelsRequest(), metadata=key)).models


async def test_operators_and_shards_use_the_admin_port_over_tls(authority: Authority, tmp_path: Path) -> None:
    async with a_secured(authority, tmp_path) as secured, a_shard(authority, authority.issue("another")) as another:
        admin = secured.router.admin
        assert admin is not None
        url = f"https://localhost:{admin.port}"
        issued = authority.issue("operator")
        files = ["--ca", str(authority.cert), "--cert", str(issued.cert), "--key", str(issued.key)]
        command = ["top", "--once", "--admin", url, *files]
        environment = {KEY_VARIABLE: KEYS["labs"], "COLUMNS": "200"}
        done = await asyncio.to_thread(CliRunner().invoke, app, command, env=environment)
        assert done.exit_code == 0, done
        assert "own-0" in done.output
        bare = await asyncio.to_thread(CliRunner().invoke, app, command[:4], env=environment)
        assert "is signed by a CA that is not trusted" in str(bare.exception)
        tls = side(authority.client(issued), alpn=HTTP_ALPN)
        announcer = Announcer(Announcement([url], "own", another.address, KEYS["labs"], tls))
        await announcer.start()
        cluster = secured.router.gateway.cluster
        async with asyncio.timeout(10):
            while len(cluster.names()) < 2:  # noqa: ASYNC110 - sockets announce nothing
                await asyncio.sleep(0.01)
        await announcer.stop()


async def test_certificates_change_under_load_and_no_request_fails(authority: Authority, tmp_path: Path) -> None:
    async with a_secured(authority, tmp_path) as secured:
        statuses: list[bool] = []
        seen: set[bytes] = set()
        is_over = False

        async def client() -> None:
            while not is_over:
                http = secured.http()
                statuses.append(b"[DONE]" in await answer(http))
                await http.close()

        async def look() -> bytes:
            port = secured.router.http.port
            _, writer = await asyncio.open_connection("localhost", port, ssl=side(secured.client).context())
            der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.transport.abort()
            assert isinstance(der, bytes)
            return der

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(client())
            for name in ("second", "third"):
                secured.issued.replace_with(renewed := authority.issue(name))
                der = ssl.PEM_cert_to_DER_cert(renewed.cert.read_text())
                async with asyncio.timeout(20):
                    while await look() != der:  # noqa: ASYNC110 - files announce nothing
                        await asyncio.sleep(0.05)
                seen.add(der)
            is_over = True
        assert len(seen) == 2
        assert statuses
        assert all(statuses)
        secured.router.check()


async def test_a_shard_and_a_router_that_do_not_know_each_other_never_attach(
    authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    issued = authority.issue("router")
    async with a_shard(authority, authority.issue("shard")) as server:
        at = server.address.replace("127.0.0.1", "localhost")
        for settings, reason in {
            stranger.client(issued): "its certificate is signed by a CA that is not trusted",
            authority.client(stranger.issue("router")): "the other side does not trust our certificate",
            authority.client(authority.issue("old", days=-1)): "the other side finds our certificate expired",
            authority.client(issued, pins=frozenset({"0" * 64})): "is not pinned",
        }.items():
            config = parse(f"pools: {{own: {{at: ['{at}']}}}}\nserver: {{http: '127.0.0.1:0', grpc: off}}")
            pool = replace(config.pools["own"], tls=settings)
            async with Router(replace(config, pools={"own": pool})) as router:
                assert not await router.wait_until_reached(timeout_s=0.3)
            assert reason in caplog.text
        with pytest.raises(grpc.aio.AioRpcError):
            async with grpc.aio.insecure_channel(at) as channel:
                await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=2)


@pytest.mark.parametrize("where", ["port", "pool", "store"])
def test_a_missing_file_is_an_error_at_the_start_that_names_it(
    authority: Authority, tmp_path: Path, where: str
) -> None:
    missing = f"{{cert: '{tmp_path}/no.crt', key: '{tmp_path}/no.key'}}"
    text = {
        "port": f"server: {{http: '127.0.0.1:0', tls: {missing}}}",
        "pool": f"pools: {{own: {{at: ['127.0.0.1:1'], tls: {missing}}}}}",
        "store": f"store: {{redis: 'rediss://127.0.0.1:1', tls: {missing}}}",
    }[where]
    with pytest.raises(ConfigError, match=r"TLS of \S+( own)?: cannot read \S+/no.crt: No such file"):
        Router(parse(text))


async def test_a_plain_client_gets_no_answer(authority: Authority, tmp_path: Path) -> None:
    async with a_secured(authority, tmp_path) as secured:
        plain = HttpClient(f"http://localhost:{secured.router.http.port}")
        with pytest.raises(AnswerError):
            await plain.request("GET", "/healthz")
        await plain.close()
