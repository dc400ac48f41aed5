"""The HTTP/1.1 client of one server: its connections, and requests over them."""

from __future__ import annotations

import asyncio
import re
import ssl
from functools import lru_cache
from urllib.parse import urlsplit

from http1.errors import BadAnswer, Disconnected, Unconnected
from http1.limits import ClientLimits
from http1.message import Lines, header_lines
from http1.server_connection import Answer, Body, ServerConnection

_TARGET = re.compile(r"/[!-~]*")
_HOST = re.compile(r"[0-9A-Za-z.:_~%\[\]-]+")
_METHOD = re.compile(r"[A-Z]+")


class HttpClient:
    """Requests to the server at `url`: http:// or https://, a host, perhaps a port, perhaps a path before all others.

    A connection carries one request at a time and serves the next when the answer has ended. No redirect is followed,
    and no cookie is kept.
    """

    def __init__(
        self, url: str, limits: ClientLimits | None = None, *, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        is_secure, path = parts.scheme == "https", parts.path.rstrip("/")
        is_sound = parts.scheme in ("http", "https") and _HOST.fullmatch(parts.netloc)
        if not is_sound or not parts.hostname or parts.query or not _TARGET.fullmatch(path or "/"):
            raise ValueError(f"'{url}' is not http://host:port")
        self._host, self._port = parts.hostname, parts.port or (443 if is_secure else 80)
        self._ssl = (ssl_context or ssl.create_default_context()) if is_secure else None
        self._path, self._fixed = path, f"Host: {parts.netloc}\r\n".encode("ascii")
        self.limits = limits or ClientLimits()
        if self.limits.decoded_bytes is not None:
            self._fixed += b"Accept-Encoding: gzip, deflate\r\n"
        self._idle: list[ServerConnection] = []
        self._open: set[ServerConnection] = set()
        self._connecting = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<HttpClient of {self._host}:{self._port}: {len(self._open)} connections, {len(self._idle)} idle>"

    async def request(
        self,
        method: str,
        target: str,
        headers: Lines = b"",
        body: Body = None,
        *,
        connect_s: float | None = None,
        silence_s: float | None = None,
    ) -> Answer:
        """The answer to one request, as soon as its head came. The caller reads its body to the end, or closes it.

        A connection that lay idle may be one that the server was just closing: then the request is sent once more, over
        a new one, unless something of an answer came or `body` comes in pieces. Times are those of the limits unless
        given. Raises ValueError for a request that cannot be sent, and AnswerError: Unconnected, Disconnected,
        AnswerTimeout, BadAnswer.
        """
        if body is None:
            framing = b"" if method in ("GET", "HEAD") else b"Content-Length: 0\r\n"
        elif isinstance(body, bytes):
            framing = b"Content-Length: %d\r\n" % len(body)
        else:
            framing = b"Transfer-Encoding: chunked\r\n"
        lines = headers if isinstance(headers, bytes) else header_lines(headers.items())
        head = b"".join((_first_line(method, self._path + target), self._fixed, lines, framing, b"\r\n"))
        silence_s = self.limits.silence_s if silence_s is None else silence_s
        connection = self._idle.pop() if self._idle else await self._connect(connect_s)
        try:
            answer = await connection.ask(method, head, body, silence_s)
        except Disconnected:
            is_replayable = body is None or isinstance(body, bytes)
            if not (connection.was_used and connection.is_unanswered and is_replayable):
                raise
            connection = await self._connect(connect_s)
            answer = await connection.ask(method, head, body, silence_s)
        if self.limits.decoded_bytes is not None:
            try:
                answer.decode(self.limits.decoded_bytes)
            except BadAnswer:
                answer.close()
                raise
        return answer

    async def close(self) -> None:
        """Close every connection; requests that are under way fail with Disconnected."""
        self._is_closed = True
        for connection in tuple(self._open):
            connection.abort()
        while self._open:
            self._changed.clear()
            await self._changed.wait()

    async def _connect(self, connect_s: float | None) -> ServerConnection:
        if self._is_closed:
            raise Unconnected("the client was closed")
        if len(self._open) + self._connecting >= self.limits.connections:
            raise Unconnected(f"{self.limits.connections} connections are open")
        loop = asyncio.get_running_loop()
        self._connecting += 1
        try:
            async with asyncio.timeout(self.limits.connect_s if connect_s is None else connect_s):
                _, connection = await loop.create_connection(
                    lambda: ServerConnection(self, loop), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError as error:
            raise Unconnected("no connection in time") from error
        except OSError as error:
            raise Unconnected(str(error) or type(error).__name__) from error
        finally:
            self._connecting -= 1
        if self._is_closed:
            connection.abort()
            raise Unconnected("the client was closed")
        return connection

    def add(self, connection: ServerConnection) -> None:
        """A connection was made."""
        self._open.add(connection)

    def take_back(self, connection: ServerConnection) -> bool:
        """A connection is free; is it kept?"""
        if self._is_closed or len(self._idle) >= self.limits.most_idle:
            return False
        self._idle.append(connection)
        return True

    def discard(self, connection: ServerConnection) -> None:
        """A connection was lost."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._changed.set()


@lru_cache(maxsize=256)
def _first_line(method: str, target: str) -> bytes:
    """The first line of a request. Raises ValueError for one that could be read in another way."""
    if not _METHOD.fullmatch(method) or not _TARGET.fullmatch(target):
        raise ValueError("a request has a method in capitals, and a path of printable ASCII")
    return f"{method} {target} HTTP/1.1\r\n".encode("ascii")
