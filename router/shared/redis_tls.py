"""TLS of connections to Redis, with certificates that are read again when they change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio import ConnectionPool, SSLConnection

from tls.certificates import Certificates


class _Connection(SSLConnection):
    """A connection with the certificates that are in effect when it is made."""

    def __init__(self, *, certificates: Certificates, **options: Any) -> None:
        super().__init__(**options)
        self._certificates = certificates

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "ssl": self._certificates.live()}


def use_certificates(pool: ConnectionPool, certificates: Certificates | None) -> None:
    """Let the connections of `pool`, which has a rediss:// address, use `certificates`, if there are any."""
    if certificates is not None:
        pool.connection_class = _Connection
        pool.connection_kwargs["certificates"] = certificates
