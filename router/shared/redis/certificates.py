"""TLS of connections to Redis, with certificates that are read again when they change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio import SSLConnection
from redis.asyncio.sentinel import SentinelManagedSSLConnection

from tls.certificates import Certificates


class LiveConnection(SSLConnection):
    """A connection with the certificates that are in effect when it is made."""

    def __init__(self, *, certificates: Certificates, **options: Any) -> None:
        super().__init__(**options)
        self._certificates = certificates

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "ssl": self._certificates.live()}


class LiveSentinelConnection(LiveConnection, SentinelManagedSSLConnection):
    """The same, to the primary that Sentinels name."""
