"""KV goes to shards alone: over TLS with certificates of their authority, or with a secret that no machine tries."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shards.kv.lending import Lent, Loan
from shards.kv.offers import OpenOffer
from shards.kv.peer_identity import PeerIdentity, PeerTls, is_loopback, key_of, require_protected, secret_in
from shards.kv.peer_jobs import connect, introduce
from shards.kv.peer_server import MOST_UNPROVEN, PeerServer
from shards.kv.peer_wire import PeerRefused, ask, take
from shards.kv.raw_block import BlockLabels
from tests.tls.authority import Authority, Issued

FINGERPRINT = bytes(32)
KEY = key_of(b"0123456789abcdef0123456789abcdef")
LABEL = BlockLabels("m", FINGERPRINT).first(bytes(256), domain="acme")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


def tls(authority: Authority, issued: Issued | None = None) -> PeerTls:
    # the name in the certificate is not that of the shard's address
    return PeerTls.of("s", authority.server(issued or authority.issue("shard", names="DNS:shard.pool.svc")))


@pytest.fixture
def serve() -> Iterator[Callable[[PeerIdentity], PeerServer]]:
    servers: list[PeerServer] = []

    def started(identity: PeerIdentity) -> PeerServer:
        def lend(labels: object) -> Loan:
            loan = Loan([LABEL])
            loan.hand_over(Lent(0, (memoryview(b"KV" * 200_000),)))
            return loan

        def consider(offer: object) -> OpenOffer:
            raise AssertionError(f"{offer} came")

        servers.append(PeerServer("127.0.0.1", 0, identity, lend, consider))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


def fetched(server: PeerServer, identity: PeerIdentity) -> bytes:
    """One block of `server`."""
    piece = bytearray(400_000)
    with connect(f"127.0.0.1:{server.port}") as connection:
        connection.within(10)
        introduce(connection, identity)
        ask(connection, [LABEL])
        assert take(connection, [memoryview(piece)])
    return bytes(piece)


@pytest.mark.parametrize("key", [b"", KEY], ids=["certificates", "certificates and a secret"])
def test_blocks_are_fetched_over_tls(
    serve: Callable[[PeerIdentity], PeerServer], authority: Authority, key: bytes
) -> None:
    server = serve(PeerIdentity(FINGERPRINT, key, tls(authority)))
    assert fetched(server, PeerIdentity(FINGERPRINT, key, tls(authority))) == b"KV" * 200_000


def test_nothing_of_a_block_or_a_secret_crosses_the_network_in_plain_text(
    serve: Callable[[PeerIdentity], PeerServer], authority: Authority
) -> None:
    server = serve(PeerIdentity(FINGERPRINT, KEY, tls(authority)))
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def copy(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        def relay() -> None:
            inner = socket.create_connection(("127.0.0.1", server.port))
            with between.accept()[0] as outer, inner:
                back = threading.Thread(target=copy, args=(inner, outer))
                back.start()
                copy(outer, inner)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        piece = bytearray(400_000)
        with connect(f"127.0.0.1:{between.getsockname()[1]}") as connection:
            connection.within(10)
            introduce(connection, PeerIdentity(FINGERPRINT, KEY, tls(authority)))
            ask(connection, [LABEL])
            assert take(connection, [memoryview(piece)])
        thread.join()
    assert len(seen) > 400_000
    assert b"KVKVKVKV" not in seen
    assert b"pointsman-peer" not in seen


def test_a_borrower_without_a_certificate_of_the_authority_gets_nothing(
    serve: Callable[[PeerIdentity], PeerServer], authority: Authority, stranger: Authority
) -> None:
    server = serve(PeerIdentity(FINGERPRINT, KEY, tls(authority)))
    foreign = stranger.issue("shard")
    with pytest.raises(OSError, match=r"(?i)unknown ca|closed|reset|eof"):
        fetched(server, PeerIdentity(FINGERPRINT, KEY, PeerTls.of("s", authority.server(foreign))))
    with pytest.raises((OSError, PeerRefused)):
        fetched(server, PeerIdentity(FINGERPRINT, KEY))
    assert fetched(server, PeerIdentity(FINGERPRINT, KEY, tls(authority)))


def test_a_lender_without_a_certificate_of_the_authority_is_not_asked(
    serve: Callable[[PeerIdentity], PeerServer], authority: Authority, stranger: Authority
) -> None:
    server = serve(PeerIdentity(FINGERPRINT, KEY, tls(stranger)))
    with pytest.raises(ssl.SSLCertVerificationError):
        fetched(server, PeerIdentity(FINGERPRINT, KEY, tls(authority)))
    plain = serve(PeerIdentity(FINGERPRINT, KEY))
    with pytest.raises(OSError, match=r"(?i)wrong version|closed|eof|record layer|reset"):
        fetched(plain, PeerIdentity(FINGERPRINT, KEY, tls(authority)))


def test_an_expired_certificate_is_refused(serve: Callable[[PeerIdentity], PeerServer], authority: Authority) -> None:
    server = serve(PeerIdentity(FINGERPRINT, KEY, tls(authority)))
    with pytest.raises(OSError, match=r"(?i)expired|closed|reset|eof"):
        fetched(server, PeerIdentity(FINGERPRINT, KEY, tls(authority, authority.issue("old", days=-1))))


def test_a_certificate_that_was_replaced_is_used_without_a_restart(
    serve: Callable[[PeerIdentity], PeerServer], authority: Authority
) -> None:
    issued = authority.issue("old", days=-1)
    certificates = tls(authority, issued)
    server = serve(PeerIdentity(FINGERPRINT, KEY, certificates))
    ours = PeerIdentity(FINGERPRINT, KEY, tls(authority))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        fetched(server, ours)
    issued.replace_with(authority.issue("new"))
    certificates.server._looked_at = float("-inf")
    assert fetched(server, ours)


def test_certificates_do_not_replace_the_secret_where_there_is_one(
    serve: Callable[[PeerIdentity], PeerServer], authority: Authority
) -> None:
    server = serve(PeerIdentity(FINGERPRINT, KEY, tls(authority)))
    with pytest.raises(PeerRefused, match="same secret"):
        fetched(server, PeerIdentity(FINGERPRINT, key_of(b"f" * 32), tls(authority)))


@pytest.mark.parametrize("has_tls", [False, True])
def test_half_open_and_silent_connections_keep_no_shard_away(
    serve: Callable[[PeerIdentity], PeerServer], authority: Authority, has_tls: bool
) -> None:
    identity = PeerIdentity(FINGERPRINT, KEY, tls(authority) if has_tls else None)
    server = serve(identity)
    held = [socket.create_connection(("127.0.0.1", server.port), 5, ("127.0.0.9", 0)) for _ in range(2 * MOST_UNPROVEN)]
    for number, each in enumerate(held[:MOST_UNPROVEN]):
        # some say a part of what they would have to, and some nothing
        each.sendall((b"\x16\x03\x01\x02\x00\x01" if has_tls else b"pointsman-peer")[: number % 7])
    for each in held[MOST_UNPROVEN:]:
        each.settimeout(5)
        assert each.recv(1) == b"", "beyond the most of one address it is closed at once"
    # it comes from another address
    assert fetched(server, identity)
    for each in held:
        each.close()


def test_a_connection_that_has_proven_itself_is_no_handshake_any_more(
    serve: Callable[[PeerIdentity], PeerServer],
) -> None:
    identity = PeerIdentity(FINGERPRINT, KEY)
    server = serve(identity)
    held = []
    for _ in range(MOST_UNPROVEN + 5):
        connection = connect(f"127.0.0.1:{server.port}")
        held.append(connection)
        connection.within(10)
        introduce(connection, identity)
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    "secret",
    [
        b"",
        b"short",
        b"a" * 64,
        b"0101010101010101010101010101010101",
        b"correct horse battery staple, correct horse",
        b"0123456789abcdef0123456789abcde",
    ],
)
def test_a_secret_that_may_be_guessed_is_refused(tmp_path: Path, secret: bytes) -> None:
    (tmp_path / "secret").write_bytes(secret)
    with pytest.raises(ValueError, match="openssl rand -hex 32"):
        secret_in(tmp_path / "secret")


@pytest.mark.parametrize(
    "secret",
    [b"d6f1c3a9b27e4058d6f1c3a9b27e4058\n", b"4p+eD2l0cW9zZWQgYnkgb3BlbnNzbCByYW5kb20=", b"x9-_kQ7bTz2mWd" * 3],
)
def test_a_secret_as_programs_make_them_is_taken_without_its_line_break(tmp_path: Path, secret: bytes) -> None:
    (tmp_path / "secret").write_bytes(secret)
    assert secret_in(tmp_path / "secret") == secret.strip()


def test_keys_of_secrets_differ_and_no_secret_is_no_key() -> None:
    assert key_of(b"") == b""
    assert len({key_of(b"a"), key_of(b"b"), KEY}) == 3
    assert len(KEY) == 32


@pytest.mark.parametrize(
    ("host", "is_own"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("::ffff:127.0.0.1", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "shard-0", "::ffff:10.0.0.1")],
)
def test_a_port_of_this_machine_alone_is_known(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own
    assert require_protected(host, is_protected=True) == ""
    if is_own:
        assert "any program on this machine" in require_protected(host, is_protected=False)
    else:
        with pytest.raises(ValueError, match="KV of all tenants"):
            require_protected(host, is_protected=False)
