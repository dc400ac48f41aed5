"""What shards that exchange KV must have in common, and what a shard may do without it. Torch-free."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
import ssl
from pathlib import Path
from typing import NamedTuple

from tls.certificates import Certificates
from tls.settings import TlsSettings

LEAST_CHARACTERS, LEAST_DISTINCT = 32, 10
"""Of a secret: 32 hexadecimal digits are 128 random bits, which no machine tries."""

_RANDOM = re.compile(rb"[0-9A-Za-z+/_=-]+")

_SALT = b"pointsman: KV between shards"
_SCRYPT = {"n": 2**14, "r": 8, "p": 1}
"""50 ms and 16 MiB for each guess, RFC 7914."""


class PeerTls(NamedTuple):
    """The certificates of a shard in both roles: it shows the same one, and trusts the same authority.

    The other end is any shard with a certificate of that authority. Names are not compared, as routers give addresses.
    """

    server: Certificates
    client: Certificates

    @classmethod
    def of(cls, shard: str, settings: TlsSettings) -> PeerTls:
        """Raises TlsError for files that cannot be used."""
        what = f"KV of shard {shard}"
        return cls(
            Certificates(settings, is_server=True, what=what), Certificates(settings, is_server=False, what=what)
        )

    def accept(self, plain: socket.socket) -> ssl.SSLSocket:
        """`plain` as a server, before its handshake."""
        return self.server.context().wrap_socket(plain, server_side=True, do_handshake_on_connect=False)

    def connect(self, plain: socket.socket) -> ssl.SSLSocket:
        """`plain` as a client, before its handshake."""
        context = self.client.context()
        context.check_hostname = False
        return context.wrap_socket(plain, do_handshake_on_connect=False)


class PeerIdentity(NamedTuple):
    """What both ends must have in common: the `fingerprint` of their KV, and the `key` that `key_of` makes of their
    secret; with `tls` they show certificates too.
    """

    fingerprint: bytes
    key: bytes
    tls: PeerTls | None = None


def key_of(secret: bytes) -> bytes:
    """The key of `secret`: 32 bytes, each guess at which takes time; empty without a secret."""
    return hashlib.scrypt(secret, salt=_SALT, dklen=32, maxmem=2**26, **_SCRYPT) if secret else b""


def secret_in(path: Path) -> bytes:
    """The secret in the file at `path`, without space around it. Raises OSError, ValueError if it may be guessed."""
    secret = path.read_bytes().strip()
    if len(secret) < LEAST_CHARACTERS or len(set(secret)) < LEAST_DISTINCT or not _RANDOM.fullmatch(secret):
        raise ValueError(
            f"{path} holds a secret that may be guessed: it must be {LEAST_CHARACTERS} or more random characters, "
            "hexadecimal digits or base64; `openssl rand -hex 32` writes one"
        )
    return secret


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a port at `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def require_protected(host: str, *, is_protected: bool) -> str:
    """What is worth a warning about a port for KV at `host`; empty if nothing is.

    `is_protected`: there is a secret, or TLS. Raises ValueError for a port that others reach without it.
    """
    if is_protected:
        return ""
    if not is_loopback(host):
        raise ValueError(
            f"--kv-listen {host} would give the KV of all tenants to any program that reaches the port: "
            "add --kv-secret-file, or --kv-ca with --tls-cert and --tls-key"
        )
    return "--kv-listen has no --kv-secret-file: any program on this machine can ask for KV, and offer it"
