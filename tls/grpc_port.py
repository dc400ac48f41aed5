"""A port of a gRPC server, with TLS or without.

gRPC's own TLS names no peer when it refuses one, has no pins, and no lowest version. So TLS ends in a TlsListener, and
bytes go on through a socket in a folder that only this process's user may enter.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import grpc

from tls.certificates import Certificates
from tls.listener import TlsListener

_BUFFER_BYTES = 256 << 10

_PINGS: tuple[tuple[str, int], ...] = (
    # by default gRPC ends the connection of a client that pings twice in five minutes of silence: a long prefill
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # by default the machine of a client may be gone for two hours before its calls end
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Clients and proxies may ping every five seconds, and one that answers no ping for twenty is gone.

Source: grpc's doc/keepalive.md, and the names in its channel_arg_names.h.
"""


def grpc_server(*options: tuple[str, int]) -> grpc.aio.Server:
    """A server with `options` of gRPC, for a GrpcPort; they stand above those that every port has."""
    return grpc.aio.server(options=tuple((dict(_PINGS) | dict(options)).items()))


class GrpcPort:
    """Where `server` listens: `port` is the real one once it is open. Opened before the server starts, and closed
    after it has stopped.
    """

    def __init__(self, server: grpc.aio.Server, certificates: Certificates | None = None) -> None:
        self._server, self._certificates = server, certificates
        self.port = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._listener: TlsListener | None = None
        self._relays: set[_Outer] = set()

    def __repr__(self) -> str:
        return f"<GrpcPort {self.port}: {len(self._relays)} connections with TLS>"

    async def open(self, address: str, *, shares_port: bool = False) -> int:
        """Listen at `address` (host:port); the port that it really has. Raises OSError or RuntimeError if the address
        cannot be had.
        """
        if self._certificates is None:
            self.port = self._server.add_insecure_port(address)
            return self.port
        self._folder = tempfile.TemporaryDirectory(prefix="pointsman-")
        inner = str(Path(self._folder.name) / "grpc")
        self._server.add_insecure_port(f"unix:{inner}")
        self._listener = TlsListener(lambda: _Outer(inner, self._relays), self._certificates)
        host, _, port = address.rpartition(":")
        self.port = await self._listener.listen(host.strip("[]"), int(port), shares_port=shares_port)
        return self.port

    async def close(self) -> None:
        """Close every connection with TLS, and the port."""
        if self._listener is not None:
            await self._listener.close()
        for relay in tuple(self._relays):
            relay.abort()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _End(asyncio.Protocol):
    """One end of a connection that is passed on to the `other` end."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.other: _End | None = None

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def eof_received(self) -> bool:
        # an HTTP/2 connection has no half that is closed
        return False

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - how it was lost makes no difference
        if self.other is not None:
            self.other.transport.close()


class _Outer(_End):
    """The end of a client. Its data waits until the way inside is open."""

    def __init__(self, inner: str, relays: set[_Outer]) -> None:
        super().__init__()
        self._inner, self._relays = inner, relays
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.pause_reading()
        self.transport.set_write_buffer_limits(_BUFFER_BYTES)
        self._relays.add(self)
        self._task = asyncio.create_task(self._connect())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._relays.discard(self)
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, inner = await loop.create_unix_connection(lambda: _Inner(self), self._inner)
        except OSError:
            self.abort()
            return
        if self.transport.is_closing():
            inner.transport.abort()
            return
        self.other = inner
        self.transport.resume_reading()


class _Inner(_End):
    """The end of our gRPC server."""

    def __init__(self, outer: _Outer) -> None:
        super().__init__()
        self.other = outer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.set_write_buffer_limits(_BUFFER_BYTES)
