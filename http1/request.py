"""What a handler is given and gives back: a Request, a Response in one piece, or a Stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

from http1.errors import BodyTooLarge
from http1.headers import Headers, Lines
from http1.incoming import Incoming


@dataclass(slots=True)
class Response:
    """An answer in one piece. Length, date and connection headers are added by the server."""

    status: int = 200
    body: bytes = b""
    headers: Lines = field(default_factory=dict)


class Wire(Protocol):
    """Where a Stream is written to."""

    def push(self, data: bytes) -> bool:
        """Send `data`; False: the client reads slowly, so `drained` should be awaited. Raises ClientGone."""
        ...

    async def drained(self) -> None:
        """Return once the client has read enough of what was sent. Raises ClientGone."""
        ...


class Stream:
    """An answer that is written piece by piece. Its head is sent with the first piece, which may be empty."""

    __slots__ = ("_has_body", "_head", "_is_chunked", "_wire", "is_ended")

    def __init__(self, wire: Wire, head: bytes, *, is_chunked: bool, has_body: bool) -> None:
        self._wire, self._head = wire, head
        self._is_chunked, self._has_body = is_chunked, has_body
        self.is_ended = False

    def __repr__(self) -> str:
        return f"<Stream{', ended' if self.is_ended else ''}>"

    def push(self, data: bytes) -> bool:
        """Send one piece; False: the client reads slowly, so `drained` should be awaited first. Raises ClientGone."""
        if self.is_ended:
            raise RuntimeError("the stream was ended before")
        is_next = data and self._is_chunked and self._has_body and not self._head
        return self._wire.push(b"%x\r\n%b\r\n" % (len(data), data) if is_next else self._framed(data))

    def drained(self) -> Coroutine[Any, Any, None]:
        """Return once the client has read enough of what was sent. Raises ClientGone."""
        return self._wire.drained()

    async def write(self, data: bytes) -> None:
        """Send one piece; waits while the client reads slower than this. Raises ClientGone."""
        if not self.push(data):
            await self.drained()

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece. Raises ClientGone."""
        if not self.is_ended:
            self.is_ended = True
            last = b"0\r\n\r\n" if self._is_chunked and self._has_body else b""
            if not self._wire.push(self._framed(data) + last):
                await self._wire.drained()

    def _framed(self, data: bytes) -> bytes:
        """`data` as it is sent, behind the head if that was not sent yet."""
        head, self._head = self._head, b""
        if not data or not self._has_body:
            return head
        return b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._is_chunked else head + data


class Request:
    """One request of a client.

    `target` is what its first line names; `path` is that without its query and decoded, "/v1/models/a b" for
    "/v1/models/a%20b?x=1", and `query` is as it came. Headers in `answer_headers` are added to its answer, whichever
    that is; `hang_up` closes the connection after it, or nothing is read from it for `rest_s` seconds. `address` is the
    client's, an IPv6 network of 64 bits being one address; a handler that knows the client sets `is_known`. `noted` is
    what handlers want a record of the request to have.
    """

    __slots__ = (
        "_most_bytes",
        "_start",
        "address",
        "answer_headers",
        "content_length",
        "hang_up",
        "headers",
        "incoming",
        "is_http_10",
        "is_known",
        "keeps_alive",
        "method",
        "noted",
        "path",
        "rest_s",
        "stream",
        "target",
        "waits_for_continue",
    )

    def __init__(
        self,
        method: str,
        target: str,
        headers: Headers,
        incoming: Incoming,
        start: Callable[[Request, int, Lines], Stream],
        most_bytes: int,
    ) -> None:
        self.method, self.target, self.headers, self.incoming = method, target, headers, incoming
        self._start, self._most_bytes = start, most_bytes
        raw = target.partition("?")[0]
        if not raw.startswith(("/", "*")):
            # as proxies are asked: http://host/path (RFC 9112, section 3.2.2)
            raw = "/" + raw.partition("://")[2].partition("/")[2]
        self.path = unquote(raw) if "%" in raw else raw
        self.address = ""
        self.answer_headers: dict[str, str] = {}
        self.content_length: int | None = None
        self.stream: Stream | None = None
        self.hang_up = self.is_http_10 = self.is_known = self.waits_for_continue = False
        self.rest_s = 0.0
        self.noted: dict[str, object] | None = None
        self.keeps_alive = True

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path[:80]}>"

    @property
    def query(self) -> str:
        """What follows the question mark, as it came."""
        return self.target.partition("?")[2]

    def arrived(self, most_bytes: int) -> bytes | None:
        """All of the body, if it came with the head and is at most so long; else it is to be read."""
        return self.incoming.whole(most_bytes)

    async def body(self, most_bytes: int | None = None) -> bytes:
        """All of the body, as it was sent: at most `most_bytes`, or what the server allows.

        Raises BodyTooLarge as soon as that is known, BadRequest, BodyTimeout, ClientGone.
        """
        most_bytes = self._most_bytes if most_bytes is None else most_bytes
        if (self.content_length or 0) > most_bytes:
            raise BodyTooLarge(most_bytes)
        pieces, size = [], 0
        while data := await self.incoming.read():
            pieces.append(data)
            size += len(data)
            if size > most_bytes:
                raise BodyTooLarge(most_bytes)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def content(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises as `body` does, at the server's own limit."""
        return self.incoming.pieces()

    def start(self, status: int, headers: Lines) -> Stream:
        """Begin an answer of many pieces; the handler returns it when it has ended."""
        return self._start(self, status, headers)


Reply = Response | Stream
Handler = Callable[[Request], Awaitable[Reply]]
"""Answers a request. It is cancelled when the client has gone. An HttpError becomes an answer of its status."""
