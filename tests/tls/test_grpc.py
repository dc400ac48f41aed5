"""gRPC over TLS: a server's port, and a client's channel."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.tls.authority import Authority, Issued
from tls.certificates import Certificates
from tls.errors import TlsError
from tls.grpc_client import open_channel
from tls.grpc_port import GrpcPort
from tls.settings import GRPC_ALPN, TlsSettings


async def echo(message: bytes, _: object) -> bytes:
    return message


async def echo_all(messages: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


def a_side(settings: TlsSettings, *, is_server: bool) -> Certificates:
    clock = iter(range(10**6)).__next__
    what = "server.grpc" if is_server else "pool own"
    return Certificates(settings, is_server=is_server, what=what, alpn=GRPC_ALPN, clock=clock)


@asynccontextmanager
async def a_server(settings: TlsSettings | None) -> AsyncIterator[str]:
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 64 << 20),))
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),  # type: ignore[arg-type]
        "EchoAll": grpc.stream_stream_rpc_method_handler(echo_all),  # type: ignore[arg-type]
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", methods),))
    port = GrpcPort(server, None if settings is None else a_side(settings, is_server=True))
    number = await port.open("127.0.0.1:0")
    await server.start()
    try:
        yield f"localhost:{number}"
    finally:
        await server.stop(0)
        await port.close()


async def echoed(address: str, settings: TlsSettings | None, message: bytes = b"ping") -> bytes:
    certificates = None if settings is None else a_side(settings, is_server=False)
    async with await open_channel(address, certificates, (("grpc.max_receive_message_length", 64 << 20),)) as channel:
        answer: bytes = await channel.unary_unary("/a.Service/Echo")(message, timeout=10)
        return answer


async def test_without_certificates_it_is_plain() -> None:
    async with a_server(None) as address:
        assert await echoed(address, None) == b"ping"


async def test_both_sides_show_a_certificate_and_large_messages_pass(authority: Authority) -> None:
    client = authority.client(authority.issue("router"))
    async with a_server(authority.server(authority.issue("shard"))) as address:
        message = bytes(range(256)) * (20 << 12)
        assert await echoed(address, client, message) == message


async def test_a_stream_keeps_its_order_and_its_pace(authority: Authority) -> None:
    certificates = a_side(authority.client(authority.issue("router")), is_server=False)
    async with (
        a_server(authority.server(authority.issue("shard"))) as address,
        await open_channel(address, certificates, ()) as channel,
    ):
        call = channel.stream_stream("/a.Service/EchoAll")()

        async def write() -> None:
            for number in range(300):
                await call.write(number.to_bytes(2) * 20_000)
            await call.done_writing()

        writing = asyncio.create_task(write())
        heard = [int.from_bytes(message[:2]) async for message in call]
        await writing
        assert heard == list(range(300))


async def test_with_pins_only_those_keys_are_spoken_to(authority: Authority) -> None:
    shard, router = authority.issue("shard"), authority.issue("router")
    async with a_server(authority.server(shard, pins=frozenset({router.pin}))) as address:
        good = authority.client(router, pins=frozenset({shard.pin}))
        assert await echoed(address, good) == b"ping"
        with pytest.raises(TlsError, match=f"its key sha256:{shard.pin} is not pinned"):
            await echoed(address, authority.client(router, pins=frozenset({"0" * 64})))
        with pytest.raises(TlsError, match="hung up"):
            await echoed(address, authority.client(authority.issue("another"), pins=frozenset({shard.pin})))


async def test_a_name_can_be_expected_in_place_of_the_host(authority: Authority) -> None:
    shard = authority.issue("shard", names="DNS:shards.internal")
    async with a_server(authority.server(shard, mutual=False)) as address:
        assert await echoed(address, authority.client(name="shards.internal")) == b"ping"
        with pytest.raises(TlsError, match="is not for this name"):
            await echoed(address, authority.client())


async def test_a_channel_says_why_it_cannot_be_opened(
    authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    shard, router = authority.issue("shard"), authority.issue("router")
    async with a_server(authority.server(shard)) as address:
        for settings, reason in [
            (authority.client(), "the other side wants a certificate"),
            (authority.client(stranger.issue("router")), "the other side does not trust our certificate"),
            (authority.client(authority.issue("old", days=-1)), "the other side finds our certificate expired"),
            (stranger.client(router), "its certificate is signed by a CA that is not trusted"),
        ]:
            with pytest.raises(TlsError, match=reason):
                await echoed(address, settings)
            assert f"pool own: no TLS with {address}: {reason}" in caplog.text
    async with a_server(authority.server(authority.issue("old", days=-1))) as address:
        with pytest.raises(TlsError, match="its certificate has expired"):
            await echoed(address, authority.client(router))
    with pytest.raises(TlsError, match=r"(?i)refused"):
        await echoed(address, authority.client(router))


@pytest.mark.parametrize(
    ("version", "is_allowed"),
    [
        (ssl.TLSVersion.TLSv1, False),
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_versions_of_tls(authority: Authority, version: ssl.TLSVersion, is_allowed: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    async with a_server(authority.server(authority.issue("shard"), mutual=False)) as address:
        opening = asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]), ssl=context)
        if not is_allowed:
            with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
                await opening
            return
        reader, writer = await opening
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        assert await reader.read(1), "the server begins with its settings"
        writer.transport.abort()


async def test_a_certificate_changes_under_load_without_a_failed_call(authority: Authority, tmp_path: Path) -> None:
    pair = Issued(tmp_path / "tls.crt", tmp_path / "tls.key")
    pair.replace_with(authority.issue("first"))
    client, calls = authority.client(authority.issue("router")), 0
    async with a_server(authority.server(pair)) as address, asyncio.TaskGroup() as group:
        stays = await open_channel(address, a_side(client, is_server=False), ())
        is_over = False

        async def new_channels() -> None:
            nonlocal calls
            while not is_over:
                assert await echoed(address, client) == b"ping"
                calls += 1

        for _ in range(3):
            group.create_task(new_channels())
        for version in range(3):
            seen = calls
            pair.replace_with(authority.issue(f"version-{version}"))
            async with asyncio.timeout(20):
                while calls < seen + 6:  # noqa: ASYNC110 - sockets announce nothing
                    await asyncio.sleep(0.001)
            assert await stays.unary_unary("/a.Service/Echo")(b"old", timeout=10) == b"old"
        is_over = True
        await stays.close()


async def test_a_closed_port_leaves_no_connection_and_no_file(authority: Authority) -> None:
    server = grpc.aio.server()
    port = GrpcPort(server, a_side(authority.server(authority.issue("shard"), mutual=False), is_server=True))
    number = await port.open("127.0.0.1:0")
    assert port._folder is not None
    folder = Path(port._folder.name)
    mode = (await asyncio.to_thread(folder.stat)).st_mode
    assert mode & 0o077 == 0, "only this user may connect without TLS"
    await server.start()
    context = a_side(authority.client(), is_server=False).context()
    reader, writer = await asyncio.open_connection("localhost", number, ssl=context)
    await reader.read(1)
    await server.stop(0)
    await port.close()
    while await reader.read(1000):
        pass
    writer.close()
    assert not await asyncio.to_thread(folder.exists)
    with pytest.raises(OSError, match=r"(?i)refused|connect"):
        await asyncio.open_connection("127.0.0.1", number)
