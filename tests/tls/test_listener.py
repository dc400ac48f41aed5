"""A port with TLS: versions, ciphers, peers that are refused, and certificates that change under load."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tls.authority import Authority, Issued
from tls import listener
from tls.certificates import Certificates
from tls.listener import MOST_OF_ONE_PEER, TlsListener
from tls.settings import HTTP_ALPN, TlsSettings


class Echo(asyncio.Protocol):
    """Sends back what it gets."""

    transport: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@dataclass
class Port:
    number: int
    listener: TlsListener
    refused: list[str]


@asynccontextmanager
async def a_port(settings: TlsSettings, *, handshake_s: float = 5.0) -> AsyncIterator[Port]:
    refused: list[str] = []
    certificates = Certificates(
        settings,
        is_server=True,
        what="server.http",
        alpn=HTTP_ALPN,
        on_refused=refused.append,
        # each look is due
        clock=iter(range(10**6)).__next__,
    )
    listener = TlsListener(Echo, certificates, handshake_s=handshake_s)
    try:
        yield Port(await listener.listen("127.0.0.1", 0), listener, refused)
    finally:
        await listener.close()


def a_client(settings: TlsSettings) -> ssl.SSLContext:
    return Certificates(settings, is_server=False, what="client", alpn=HTTP_ALPN).context()


async def echoed(port: Port, context: ssl.SSLContext) -> bytes:
    """The answer to four bytes. Raises OSError where the connection fails, or is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number, ssl=context, server_hostname="localhost")
    try:
        writer.write(b"ping")
        if answer := await reader.read(4):
            return answer
        raise ConnectionResetError
    finally:
        writer.transport.abort()


async def refusal(port: Port, context: ssl.SSLContext) -> str:
    """The reason in the log for a connection that fails."""
    with pytest.raises(OSError):  # noqa: PT011 - how it fails for the client differs between versions
        await echoed(port, context)
    async with asyncio.timeout(5):
        while not port.refused:  # noqa: ASYNC110 - the other side of a socket announces nothing
            await asyncio.sleep(0.001)
    return port.refused[-1]


def of_version(version: ssl.TLSVersion) -> ssl.SSLContext:
    """A client that speaks this version alone, with any cipher, and trusts all."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    return context


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1], ids=["1.0", "1.1"])
async def test_tls_1_0_and_1_1_are_refused(authority: Authority, version: ssl.TLSVersion) -> None:
    async with a_port(authority.server(authority.issue("port"), mutual=False)) as port:
        assert await refusal(port, of_version(version)) == "it speaks no version of TLS that is allowed here"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_tls_1_2_and_1_3_are_accepted(authority: Authority, version: ssl.TLSVersion) -> None:
    async with a_port(authority.server(authority.issue("port"), mutual=False)) as port:
        assert await echoed(port, of_version(version)) == b"ping"


async def test_1_2_is_refused_where_1_3_is_the_lowest(authority: Authority) -> None:
    settings = authority.server(authority.issue("port"), mutual=False, min_version="1.3")
    async with a_port(settings) as port:
        assert await echoed(port, of_version(ssl.TLSVersion.TLSv1_3)) == b"ping"
        assert "no version of TLS" in await refusal(port, of_version(ssl.TLSVersion.TLSv1_2))


@pytest.mark.parametrize("cipher", ["AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-SHA", "ECDHE-ECDSA-AES128-SHA256"])
async def test_ciphers_without_forward_secrecy_or_with_cbc_are_refused(authority: Authority, cipher: str) -> None:
    old = of_version(ssl.TLSVersion.TLSv1_2)
    old.set_ciphers(f"{cipher}:@SECLEVEL=0")
    async with a_port(authority.server(authority.issue("port"), mutual=False)) as port:
        assert await refusal(port, old) == "it offers no cipher that is allowed here"


async def test_http_1_1_is_agreed_on(authority: Authority) -> None:
    async with a_port(authority.server(authority.issue("port"), mutual=False)) as port:
        context = a_client(authority.client())
        _, writer = await asyncio.open_connection("localhost", port.number, ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        writer.transport.abort()


async def test_a_client_with_a_certificate_of_the_ca_is_accepted(authority: Authority) -> None:
    async with a_port(authority.server(authority.issue("port"))) as port:
        assert await echoed(port, a_client(authority.client(authority.issue("client")))) == b"ping"


async def test_wrong_expired_and_missing_certificates_are_refused_with_the_reason(
    authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    foreign, old = stranger.issue("foreign"), authority.issue("old", days=-1)
    async with a_port(authority.server(authority.issue("port"))) as port:
        for settings, reason in [
            (authority.client(foreign), "its certificate is signed by a CA that is not trusted"),
            (authority.client(old), "its certificate has expired"),
            (authority.client(), "it showed no certificate"),
        ]:
            assert await refusal(port, a_client(settings)) == reason
            port.refused.clear()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert all(line.startswith("server.http: no TLS with 127.0.0.1: ") and line.endswith(")") for line in lines), lines


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_a_refused_client_gets_the_alert_that_says_why(authority: Authority, version: ssl.TLSVersion) -> None:
    old = authority.issue("old", days=-1)
    context = of_version(version)
    context.load_cert_chain(old.cert, old.key)
    async with a_port(authority.server(authority.issue("port"))) as port:
        with pytest.raises(ssl.SSLError, match=r"(?i)certificate.expired"):
            await echoed(port, context)


async def test_of_valid_clients_only_those_with_a_pinned_key_are_accepted(authority: Authority) -> None:
    known, other = authority.issue("known"), authority.issue("other")
    async with a_port(authority.server(authority.issue("port"), pins=frozenset({known.pin}))) as port:
        assert await echoed(port, a_client(authority.client(known))) == b"ping"
        assert await refusal(port, a_client(authority.client(other))) == f"its key sha256:{other.pin} is not pinned"


async def test_a_client_refuses_a_server_that_is_wrong_expired_or_unpinned(
    authority: Authority, stranger: Authority
) -> None:
    for issued, settings, reason in [
        (stranger.issue("port"), authority.client(), "unable to get local issuer"),
        (authority.issue("old", days=-1), authority.client(), "expired"),
        (authority.issue("port", names="DNS:elsewhere"), authority.client(), "Hostname mismatch"),
        (authority.issue("port"), authority.client(pins=frozenset({"0" * 64})), "is not pinned"),
    ]:
        async with a_port(TlsSettings(str(issued.cert), str(issued.key))) as port:
            with pytest.raises(ssl.SSLCertVerificationError, match=reason):
                await echoed(port, a_client(settings))


async def test_plain_http_is_told_apart(authority: Authority) -> None:
    async with a_port(authority.server(authority.issue("port"))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
        assert port.refused == ["it speaks plain HTTP"]


async def test_an_unfinished_handshake_ends_in_time(authority: Authority) -> None:
    async with a_port(authority.server(authority.issue("port")), handshake_s=0.05) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert port.refused == ["it did not finish the handshake in time"]


async def test_one_address_may_not_have_all_handshakes(authority: Authority) -> None:
    async with a_port(authority.server(authority.issue("port")), handshake_s=30) as port:
        idle = [socket.create_connection(("127.0.0.1", port.number)) for _ in range(MOST_OF_ONE_PEER + 1)]
        async with asyncio.timeout(10):
            while not port.refused:  # noqa: ASYNC110 - sockets announce nothing
                await asyncio.sleep(0.001)
        assert port.refused == [f"it has {MOST_OF_ONE_PEER} unfinished handshakes"]
        for each in idle:
            each.close()
        async with asyncio.timeout(10):
            while "0 handshakes" not in repr(port.listener):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert await echoed(port, a_client(authority.client(authority.issue("client")))) == b"ping"


async def test_a_few_addresses_that_never_finish_keep_no_other_one_out(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MOST_HANDSHAKES", 8)
    async with a_port(authority.server(authority.issue("port")), handshake_s=30) as port:
        idle = [
            socket.create_connection(("127.0.0.1", port.number), source_address=(f"127.0.0.{host}", 0))
            for host in (2, 2, 3, 2, 2, 3, 2, 4, 2, 3)
        ]
        async with asyncio.timeout(10):
            while len(port.refused) < 2:  # noqa: ASYNC110 - sockets announce nothing
                await asyncio.sleep(0.001)
            assert await echoed(port, a_client(authority.client(authority.issue("client")))) == b"ping"
        assert set(port.refused) == {"its unfinished handshakes made room for others"}
        loop = asyncio.get_running_loop()
        for each in idle:
            each.setblocking(False)
        # the oldest of the address with most of them
        async with asyncio.timeout(10):
            assert [await loop.sock_recv(each, 1) for each in idle[:2]] == [b"", b""]
        assert "8 handshakes" in repr(port.listener) or "7 handshakes" in repr(port.listener)
        for each in idle:
            each.close()


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_all_addresses_of_a_network_count_as_one(host: str, peer: str) -> None:
    assert listener._peer_of(host) == peer


async def test_a_certificate_changes_under_load_without_a_failed_connection(
    authority: Authority, tmp_path: Path
) -> None:
    pair, versions = Issued(tmp_path / "tls.crt", tmp_path / "tls.key"), [authority.issue(f"v{n}") for n in range(2)]
    ders = [ssl.PEM_cert_to_DER_cert(issued.cert.read_text()) for issued in versions]
    pair.replace_with(versions[0])
    context, seen, is_over = a_client(authority.client()), [], False

    async def clients(port: Port) -> None:
        while not is_over:
            reader, writer = await asyncio.open_connection("localhost", port.number, ssl=context)
            seen.append(ders.index(writer.get_extra_info("ssl_object").getpeercert(binary_form=True)))
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
            writer.transport.abort()

    async with a_port(authority.server(pair, mutual=False)) as port, asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(clients(port))
        for version in (1, 0, 1):
            pair.replace_with(versions[version])
            async with asyncio.timeout(10):
                while not seen or seen[-1] != version:  # noqa: ASYNC110 - sockets announce nothing
                    await asyncio.sleep(0.001)
        is_over = True
    assert {0, 1} == set(seen)
    assert not [reason for reason in port.refused if "hung up" not in reason]


async def test_a_connection_outlives_the_certificate_that_it_began_with(authority: Authority, tmp_path: Path) -> None:
    pair = Issued(tmp_path / "tls.crt", tmp_path / "tls.key")
    pair.replace_with(authority.issue("old"))
    async with a_port(authority.server(pair, mutual=False)) as port:
        reader, writer = await asyncio.open_connection("localhost", port.number, ssl=a_client(authority.client()))
        pair.replace_with(authority.issue("new"))
        assert await echoed(port, a_client(authority.client())) == b"ping"
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        writer.transport.abort()


async def test_a_taken_address_is_an_error_and_leaves_no_socket(authority: Authority) -> None:
    settings = authority.server(authority.issue("port"))
    async with a_port(settings) as port:
        other = TlsListener(Echo, Certificates(settings, is_server=True, what="another"))
        with pytest.raises(OSError, match=r"(?i)in use"):
            await other.listen("127.0.0.1", port.number)
        await other.close()


async def test_processes_may_share_a_port(authority: Authority) -> None:
    settings = authority.server(authority.issue("port"), mutual=False)
    certificates = Certificates(settings, is_server=True, what="shared")
    one, two = TlsListener(Echo, certificates), TlsListener(Echo, certificates)
    port = await one.listen("127.0.0.1", 0, shares_port=True)
    assert await two.listen("127.0.0.1", port, shares_port=True) == port
    await one.close()
    await two.close()


async def test_without_descriptors_it_says_so_and_accepts_again_later(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([OSError(errno.EMFILE, "Too many open files")])

    async def accept(loop: asyncio.AbstractEventLoop, listening: socket.socket) -> tuple[socket.socket, Any]:
        for failure in failures:
            raise failure
        return await loop.sock_accept(listening)

    monkeypatch.setattr("tls.listener.accepted", accept)
    async with a_port(authority.server(authority.issue("port"), mutual=False)) as port:
        assert await echoed(port, a_client(authority.client())) == b"ping"
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert logged == ["server.http cannot accept connections: Too many open files"]
