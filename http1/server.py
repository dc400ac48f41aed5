"""The HTTP/1.1 server: where it listens, its connections, and how it ends."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from email.utils import formatdate

from http1.client_connection import ClientConnection, refusal
from http1.errors import HttpError
from http1.limits import ServerLimits
from http1.request import Handler, Response


class HttpServer:
    """Answers requests with `handler`. `limits` may be replaced while it runs, for connections that begin afterwards.
    `refuse` gives the answer to a request that HTTP itself does not allow.

    `clock` is Unix time in seconds, for the date of answers.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits | None = None,
        *,
        refuse: Callable[[HttpError], Response] = refusal,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.handler, self.refuse, self.limits = handler, refuse, limits or ServerLimits()
        self.is_draining = False
        self._clock = clock
        self._dated_at, self._date = -1, b""
        self._connections: set[ClientConnection] = set()
        self._listeners: list[asyncio.Server] = []
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<HttpServer {len(self._connections)} connections{', draining' if self.is_draining else ''}>"

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    async def listen(
        self, host: str, port: int, *, ssl_context: ssl.SSLContext | None = None, shares_port: bool = False
    ) -> int:
        """Listen at `host`; the port that it really has. Raises OSError. Several addresses may be listened at."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: ClientConnection(self, loop),
            host,
            port,
            ssl=ssl_context,
            reuse_address=True,
            reuse_port=shares_port or None,
            backlog=1024,
        )
        self._listeners.append(listener)
        return int(listener.sockets[0].getsockname()[1])

    async def close(self, grace_s: float = 0.0) -> None:
        """Listen no more, close idle connections, and let requests end: those that take longer than `grace_s` are
        cancelled. Returns when no handler runs any more.
        """
        self.is_draining = True
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self._connections):
            connection.retire()
        if not await self._is_emptied(grace_s):
            for connection in tuple(self._connections):
                connection.abort()
            await self._is_emptied(None)

    async def _is_emptied(self, within_s: float | None) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while self._connections:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def add(self, connection: ClientConnection) -> bool:
        """A client has connected; may it stay?"""
        self._connections.add(connection)
        return len(self._connections) <= self.limits.connections and not self.is_draining

    def discard(self, connection: ClientConnection) -> None:
        """A client has gone, and its handler has ended."""
        self._connections.discard(connection)
        self._changed.set()

    def date(self) -> bytes:
        """The header line that dates an answer."""
        if (now := int(self._clock())) != self._dated_at:
            self._dated_at, self._date = now, f"Date: {formatdate(now, usegmt=True)}\r\n".encode()
        return self._date
