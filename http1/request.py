"""Requests: what a client sends on one connection, what a handler is given, and what it gives back.

Bytes go into Requests, and a Request comes out; a handler answers it by a Response in one piece, or a Stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from http1.errors import BadRequest, BodyTooLarge, HeadTooLarge, HttpError
from http1.limits import ServerLimits
from http1.message import EMPTY_LINE, Headers, Incoming, Lines, until_empty_line

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Those that handlers see. The parser knows more, of other protocols."""


@dataclass(slots=True)
class Response:
    """An answer in one piece. Length, date and connection headers are added by the server."""

    status: int = 200
    body: bytes = b""
    headers: Lines = field(default_factory=dict)


class Wire(Protocol):
    """The connection of a client at `address`."""

    address: str

    def proceed(self) -> None:
        """A body that was full has room: its rest may come."""
        ...

    def await_body(self) -> None:
        """A handler waits for the body of its request."""
        ...

    def start(self, request: Request, status: int, headers: Lines) -> Stream:
        """Begin an answer of many pieces."""
        ...

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


class Request(Incoming):
    """One request of a client.

    `target` is what its first line names; `path` is that without its query and decoded, "/v1/models/a b" for
    "/v1/models/a%20b?x=1", and `query` is as it came. Headers in `answer_headers` are added to its answer, whichever
    that is; `hang_up` closes the connection after it, or nothing is read from it for `rest_s` seconds. `address` is the
    client's, an IPv6 network of 64 bits being one address; a handler that knows the client sets `is_known`. `noted` is
    what handlers want a record of the request to have.
    """

    stream: Stream | None = None
    hang_up = is_http_10 = is_known = waits_for_continue = False
    keeps_alive = True
    rest_s = 0.0
    noted: dict[str, object] | None = None

    def __init__(self, method: str, target: str, headers: Headers, wire: Wire, limits: ServerLimits) -> None:
        self.method, self.target, self.headers = method, target, headers
        self._wire, self._most_bytes, self.unread_bytes = wire, limits.body_bytes, limits.unread_bytes
        raw = target.partition("?")[0]
        if not raw.startswith(("/", "*")):
            # as proxies are asked: http://host/path (RFC 9112, section 3.2.2)
            raw = "/" + raw.partition("://")[2].partition("/")[2]
        self.path = unquote(raw) if "%" in raw else raw
        self.address = wire.address
        self.answer_headers: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path[:80]}>"

    @property
    def query(self) -> str:
        """What follows the question mark, as it came."""
        return self.target.partition("?")[2]

    def on_room(self) -> None:
        """Its client may go on to send."""
        self._wire.proceed()

    def on_wait(self) -> None:
        """Its client may wait for that, too."""
        self._wire.await_body()

    async def body(self, most_bytes: int | None = None) -> bytes:
        """All of the body, as it was sent: at most `most_bytes`, or what the server allows.

        Raises BodyTooLarge as soon as that is known, BadRequest, BodyTimeout, ClientGone.
        """
        most_bytes = self._most_bytes if most_bytes is None else most_bytes
        if (self.content_length or 0) > most_bytes:
            raise BodyTooLarge(most_bytes)
        pieces, size = [], 0
        while data := await self.read():
            pieces.append(data)
            size += len(data)
            if size > most_bytes:
                raise BodyTooLarge(most_bytes)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def content(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises as `body` does, at the server's own limit."""
        return self.pieces()

    def start(self, status: int, headers: Lines) -> Stream:
        """Begin an answer of many pieces; the handler returns it when it has ended."""
        return self._wire.start(self, status, headers)


class Requests:
    """What a client asks on one connection, in order; knows neither sockets nor time.

    `waiting` are the requests that have a complete head, and an HttpError where nothing more can be understood.
    `incoming` is the one with an incomplete body. After a request that closes the connection, and after bytes that
    another program could understand differently, it `is_deaf`.

    Each head and each body in chunks has a parser, which judges every byte of it and calls the methods that begin with
    on_. A head that was accepted is read as a whole.
    """

    on_url = on_header = on_message_begin = on_body = on_chunk_header = on_chunk_complete = on_message_complete = None
    """Nothing that a parser of a head could tell: it finds that faster than a name that is missing."""

    def __init__(self, limits: ServerLimits, wire: Wire) -> None:
        self.waiting: deque[Request | HttpError] = deque()
        self.is_in_head = self.is_deaf = False
        self.incoming: Request | None = None
        self._limits = limits
        self._wire: Wire | None = wire
        self._parser: HttpRequestParser | None = None
        # what the parser was given of the present head; or the end of that of a body in chunks
        self._given = b""
        # sizes of chunks, trailers and empty lines since the last byte of a body
        self._framing_bytes = 0

    def __repr__(self) -> str:
        return f"<Requests {len(self.waiting)} waiting{', deaf' if self.is_deaf else ''}>"

    def feed(self, data: bytes) -> None:
        """`data` came."""
        while data and not self.is_deaf:
            incoming = self.incoming
            if incoming is not None and incoming.content_length is not None:
                left = incoming.content_length - incoming.received
                incoming.put(data[:left])
                data = data[left:]
            else:
                if incoming is None and not self.is_in_head:
                    # empty lines may go before a request (RFC 9112, section 2.2)
                    begins = data.lstrip(b"\r\n")
                    self._framing_bytes += len(data) - len(begins)
                    if not begins:
                        break
                    if len(self.waiting) >= self._limits.waiting:
                        self.refuse(BadRequest(f"more than {self._limits.waiting} requests were sent ahead"))
                        break
                    data, self.is_in_head, self._given, self._framing_bytes = begins, True, b"", 0
                    self._parser = HttpRequestParser(self)
                # a head ends with the first empty line, and a body in chunks with one of them
                piece = data[: until_empty_line(self._given, data)]
                self._given = (self._given if incoming is None else self._given[-3:]) + piece
                self._framing_bytes += len(piece)
                data = data[len(piece) :]
                assert self._parser is not None
                try:
                    self._parser.feed_data(piece)
                except HttpParserUpgrade:
                    # the parser would have another protocol follow: here, the body of the request does
                    pass
                except HttpParserError as error:
                    ours = error.__context__
                    self.refuse(ours if isinstance(ours, HttpError) else BadRequest(str(error)))
            if (incoming := self.incoming) is not None and incoming.is_ended:
                # the next request may come, unless this one closes the connection
                self.incoming, self._framing_bytes = None, 0
                if not incoming.keeps_alive:
                    self.stop()
        if self._framing_bytes > self._limits.head_bytes:
            self.refuse(HeadTooLarge(f"{self._limits.head_bytes} bytes"))

    def refuse(self, error: HttpError) -> None:
        """Understand no more, because of `error`."""
        incoming = self.incoming
        self.stop()
        if incoming is None:
            self.waiting.append(error)
            return
        incoming.fail(error)
        if self.waiting and isinstance(error, BadRequest):
            # its handler has not begun, and does not have to
            self.waiting[-1] = error

    def stop(self) -> None:
        """Understand no more."""
        self.is_deaf, self.is_in_head, self.incoming, self._framing_bytes = True, False, None, 0
        # both refer back to this connection: a crowd of closed ones would wait for the garbage collector, which takes
        # more than 100 ms for them
        self._parser = self._wire = None

    def on_headers_complete(self) -> None:
        """A head is complete: its request waits for its turn. Raises HttpError for one that is not served, or that
        could be read in two ways.
        """
        parser, wire, head, limits = self._parser, self._wire, self._given, self._limits
        assert parser is not None
        assert wire is not None
        if not self.is_in_head or head.find(EMPTY_LINE) != len(head) - len(EMPTY_LINE):
            raise BadRequest("a head ends before its end")
        first, _, lines = head.partition(b"\r\n")
        # HTTP/0.9 names no version
        method, target, version = (*first.decode("ascii").split(), "")[:3]
        if len(target) + len(lines) - len(b"\r\n") > limits.head_bytes:
            raise HeadTooLarge(f"{limits.head_bytes} bytes")
        if lines.count(b"\r\n") > limits.headers + 1:
            raise HeadTooLarge(f"{limits.headers} headers")
        if method not in METHODS:
            raise HttpError(501, f"{method} is not served here")
        if version not in ("HTTP/1.0", "HTTP/1.1"):
            raise HttpError(505, "HTTP/1.1 is spoken here")
        headers = Headers(lines)
        fields, is_http_10 = headers.lowered, version == "HTTP/1.0"
        host, coding, expected = fields.get("host"), fields.get("transfer-encoding"), fields.get("expect")
        if "," in host if host is not None else not is_http_10:
            raise BadRequest("a request names one host")
        if coding is not None and (is_http_10 or coding.lower() != "chunked"):
            raise BadRequest("a body is sent with its length, or chunked and in no other coding")
        if expected is not None and expected.lower() != "100-continue":
            raise HttpError(417, "nothing but 100-continue can be expected")
        request = Request(method, target, headers, wire, limits)
        request.is_http_10, request.keeps_alive = is_http_10, parser.should_keep_alive()
        request.waits_for_continue = expected is not None and not is_http_10
        if (length := fields.get("content-length")) is not None:
            request.content_length = int(length)
        self.waiting.append(request)
        self.incoming, self.is_in_head, self._given, self._framing_bytes = request, False, b"", 0
        if coding is not None:
            self._parser = HttpRequestParser(_Chunks(self, request, limits))
            self._parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        elif not request.content_length:
            request.end()
        elif request.content_length > limits.body_bytes:
            raise BodyTooLarge(limits.body_bytes)

    def chunk(self, request: Request, data: bytes) -> None:
        """A part of the body of `request` came in a chunk."""
        self._framing_bytes = 0
        if request.received + len(data) > self._limits.body_bytes:
            raise BodyTooLarge(self._limits.body_bytes)
        request.put(data)


class _Chunks:
    """What the parser of a body in chunks tells. Trailers are dropped, but have the limits of a head."""

    def __init__(self, requests: Requests, request: Request, limits: ServerLimits) -> None:
        self._requests, self._request, self._limits = requests, request, limits
        self._trailers = self._trailer_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """A trailer came; or the header before the body, which the parser was given for it."""
        self._trailers += 1
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailers > self._limits.headers:
            raise HeadTooLarge(f"{self._limits.headers} headers")
        if self._trailer_bytes > self._limits.head_bytes:
            raise HeadTooLarge(f"{self._limits.head_bytes} bytes")

    def on_body(self, data: bytes) -> None:
        """A part of the body came."""
        self._requests.chunk(self._request, data)

    def on_message_complete(self) -> None:
        """All of it came."""
        self._request.end()


Reply = Response | Stream
Handler = Callable[[Request], Awaitable[Reply]]
"""Answers a request. It is cancelled when the client has gone. An HttpError becomes an answer of its status."""
