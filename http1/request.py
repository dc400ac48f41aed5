"""A client's connection: its bytes become requests, which are handled one after the other, and answers go back.

Bytes go into Requests, and a Request comes out; a handler answers it by a Response in one piece, or a Stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from http1.chunks import ChunkedEnd
from http1.errors import BadRequest, BodyTimeout, BodyTooLarge, ClientGone, HeadTooLarge, HttpError
from http1.greeting import Abortable
from http1.host import is_host
from http1.limits import ServerLimits
from http1.message import EMPTY_LINE, Deadline, Headers, Incoming, Lines, appended, header_lines, until_empty_line
from http1.spoken import other_protocol

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Those that handlers see. The parser knows more, of other protocols."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_BODILESS = frozenset({204, 304})
_COPIED_BYTES = 16 << 10
"""Bodies up to this size are joined with their head into one write."""

_FRAMING_EACH = 16
"""Bytes of sizes and extensions that a byte of a body may have, beyond those of a head: chunks of one byte have 5."""

log = logging.getLogger("pointsman.http")


@dataclass(slots=True)
class Response:
    """An answer in one piece. Length, date and connection headers are added by the server."""

    status: int = 200
    body: bytes = b""
    headers: Lines = field(default_factory=dict)


class Stream:
    """An answer that is written piece by piece. Its `head` is sent with the first piece, which may be empty."""

    __slots__ = ("_connection", "_goes_on", "_has_body", "_head", "_is_chunked", "head", "is_ended")

    def __init__(self, connection: ClientConnection, head: bytes, *, is_chunked: bool, has_body: bool) -> None:
        self._connection, self._head, self.head = connection, head, head
        self._is_chunked, self._has_body = is_chunked, has_body
        # is its head sent, and does its body go in chunks?
        self._goes_on = False
        self.is_ended = False

    def __repr__(self) -> str:
        return f"<Stream{', ended' if self.is_ended else ''}>"

    def push(self, data: bytes) -> bool:
        """Send one piece; False: the client reads slowly, so `drained` should be awaited first. Raises ClientGone."""
        if self.is_ended:
            raise RuntimeError("the stream was ended before")
        if not self._goes_on or not data:
            return self._connection.push(self._framed(data))
        connection = self._connection
        if connection.transport.is_closing():
            raise ClientGone("the client has gone")
        connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return connection.writable is None

    def drained(self) -> Coroutine[Any, Any, None]:
        """Return once the client has read enough of what was sent. Raises ClientGone."""
        return self._connection.drained()

    async def write(self, data: bytes) -> None:
        """Send one piece; waits while the client reads slower than this. Raises ClientGone."""
        if not self.push(data):
            await self.drained()

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece. Raises ClientGone."""
        if not self.is_ended:
            self.is_ended = True
            last = b"0\r\n\r\n" if self._is_chunked and self._has_body else b""
            if not self._connection.push(self._framed(data) + last):
                await self._connection.drained()

    def _framed(self, data: bytes) -> bytes:
        """`data` as it is sent, behind the head if that was not sent yet."""
        head, self._head = self._head, b""
        self._goes_on = self._is_chunked and self._has_body
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

    def __init__(
        self, method: str, target: str, headers: Headers, connection: ClientConnection, limits: ServerLimits
    ) -> None:
        self.method, self.target, self.headers = method, target, headers
        self._connection, self._most_bytes, self.unread_bytes = connection, limits.body_bytes, limits.unread_bytes
        raw = target.partition("?")[0]
        if not raw.startswith(("/", "*")):
            # as proxies are asked: http://host/path (RFC 9112, section 3.2.2)
            host, _, raw = raw.partition("://")[2].partition("/")
            if not is_host(host):
                raise BadRequest("a target names one host, and perhaps its port")
            raw = f"/{raw}"
        self.path = unquote(raw) if "%" in raw else raw
        self.address = connection.address
        self.answer_headers: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path[:80]}>"

    @property
    def query(self) -> str:
        """What follows the question mark, as it came."""
        return self.target.partition("?")[2]

    def on_room(self) -> None:
        """Its client may go on to send."""
        self._connection.proceed()

    def on_wait(self) -> None:
        """Its client may wait for that, too."""
        self._connection.await_body()

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
        return self._connection.start(self, status, headers)


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

    def __init__(self, limits: ServerLimits, connection: ClientConnection) -> None:
        self.waiting: deque[Request | HttpError] = deque()
        self.is_in_head = self.is_deaf = False
        self.incoming: Request | None = None
        self._limits = limits
        self._connection: ClientConnection | None = connection
        self._parser: HttpRequestParser | None = None
        # what the parser was given of the present head
        self._given: bytes | bytearray = b""
        self._chunks: _Chunks | None = None
        # empty lines and what came of a head; or the sizes, extensions and trailers of a body in chunks
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
            elif incoming is not None:
                data = self._feed_chunks(incoming, data)
            else:
                if not self.is_in_head:
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
                # a head ends with the first empty line
                end = data.find(EMPTY_LINE)
                # most come whole
                is_cut = self._given or end < 0
                piece = data[: until_empty_line(self._given, data) if is_cut else end + len(EMPTY_LINE)]
                self._given = appended(self._given, piece) if is_cut else piece
                self._framing_bytes += len(piece)
                data = data[len(piece) :]
                assert self._parser is not None
                try:
                    self._parser.feed_data(piece)
                except HttpParserUpgrade:
                    # the parser would have another protocol follow: here, the body of the request does
                    pass
                except HttpParserError as error:
                    self._misunderstood(error)
            if (incoming := self.incoming) is not None and incoming.is_ended:
                # the next request may come, unless this one closes the connection
                self.incoming, self._chunks, self._framing_bytes = None, None, 0
                if not incoming.keeps_alive:
                    self.stop()
        if self.incoming is None and self._framing_bytes > self._limits.head_bytes:
            self.refuse(HeadTooLarge(f"{self._limits.head_bytes} bytes"))

    def _feed_chunks(self, incoming: Request, data: bytes) -> bytes:
        """Take what `data` has of the body of `incoming`; what follows that."""
        chunks, parser = self._chunks, self._parser
        assert chunks is not None
        assert parser is not None
        length = chunks.end.within(data)
        refused: Exception | None = None
        try:
            parser.feed_data(data[:length])
        except HttpParserError as error:
            refused = error
        body = b"".join(chunks.pieces)
        chunks.pieces.clear()
        self._framing_bytes += length - len(body)
        if incoming.received + len(body) > self._limits.body_bytes:
            self.refuse(BodyTooLarge(self._limits.body_bytes))
            return b""
        if body:
            incoming.put(body)
        if refused is not None:
            self._misunderstood(refused)
        elif chunks.end.trailer_bytes > self._limits.head_bytes:
            self.refuse(HeadTooLarge(f"{self._limits.head_bytes} bytes"))
        elif chunks.end.trailers > self._limits.headers + 1:
            self.refuse(HeadTooLarge(f"{self._limits.headers} headers"))
        elif self._framing_bytes > self._limits.head_bytes + _FRAMING_EACH * incoming.received:
            self.refuse(HeadTooLarge(f"{self._limits.head_bytes} bytes beside a body"))
        elif chunks.is_ended is not chunks.end.is_found:
            self.refuse(BadRequest("a body ends before its end"))
        elif chunks.is_ended:
            incoming.end()
        return data[length:]

    def _misunderstood(self, error: Exception) -> None:
        ours = error.__context__
        self.refuse(
            ours if isinstance(ours, HttpError) else BadRequest(other_protocol(bytes(self._given)) or str(error))
        )

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
        self._parser = self._connection = self._chunks = None

    def on_headers_complete(self) -> None:
        """A head is complete: its request waits for its turn. Raises HttpError for one that is not served, or that
        could be read in two ways.
        """
        parser, connection, head, limits = self._parser, self._connection, self._given, self._limits
        assert parser is not None
        assert connection is not None
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
        if host is None:
            if not is_http_10:
                raise BadRequest("a request names its host")
        elif not is_host(host):
            raise BadRequest("a request names one host, and perhaps its port")
        if coding is not None and (is_http_10 or coding.lower() != "chunked"):
            raise BadRequest("a body is sent with its length, or chunked and in no other coding")
        if expected is not None and expected.lower() != "100-continue":
            raise HttpError(417, "nothing but 100-continue can be expected")
        request = Request(method, target, headers, connection, limits)
        request.is_http_10, request.keeps_alive = is_http_10, parser.should_keep_alive()
        request.waits_for_continue = expected is not None and not is_http_10
        if (length := fields.get("content-length")) is not None:
            request.content_length = int(length)
        self.waiting.append(request)
        self.incoming, self.is_in_head, self._given, self._framing_bytes = request, False, b"", 0
        if coding is not None:
            self._chunks = _Chunks()
            self._parser = HttpRequestParser(self._chunks)
            self._parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        elif not request.content_length:
            request.end()
        elif request.content_length > limits.body_bytes:
            raise BodyTooLarge(limits.body_bytes)


class _Chunks:
    """What the parser of a body in chunks tells: its data, in `pieces`. It is not asked for trailers, of which it would
    copy what came before with each piece: they are dropped, and have the limits of a head.
    """

    def __init__(self) -> None:
        self.end, self.is_ended = ChunkedEnd(), False
        self.pieces: list[bytes] = []
        # called for each chunk, of which a client may send 40,000 in a read
        self.on_body = self.pieces.append

    def on_message_begin(self) -> None:
        """A body begins; no other one follows it."""
        if self.is_ended:
            raise BadRequest("a body ends before its end")

    def on_message_complete(self) -> None:
        """All of it came."""
        self.is_ended = True


Reply = Response | Stream
Handler = Callable[[Request], Awaitable[Reply]]
"""Answers a request. It is cancelled when the client has gone. An HttpError becomes an answer of its status."""


class Strangers(Protocol):
    """Connections that have sent no request yet."""

    def discard(self, connection: ClientConnection, /) -> None:
        """The client has begun a request, or has gone."""
        ...


class Owner(Protocol):
    """What a connection needs of its server. `unserved` are connections on which no handler runs."""

    handler: Handler
    limits: ServerLimits
    clock: Callable[[], float]
    refuse: Callable[[HttpError], Response]
    is_draining: bool
    unserved: dict[ClientConnection, None]

    @property
    def strangers(self) -> Strangers:
        """Those of the server."""
        ...

    def add(self, connection: ClientConnection, peer: object) -> bool:
        """A client has connected, from a socket with the name `peer`; may it stay?"""
        ...

    def wait(self, connection: ClientConnection) -> None:
        """No handler runs for this stranger."""
        ...

    def discard(self, connection: ClientConnection) -> None:
        """A client has gone, and its handler has ended."""
        ...


class ClientConnection(Abortable):
    """What a client sends goes through the parser at once; requests wait in order for the one that is handled.

    Where the client cannot be understood any more, it is answered what it had asked before, then refused.
    """

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner, self._loop, self._limits = owner, loop, owner.limits
        self._requests = Requests(self._limits, self)
        self.transport: Any = None
        self._current: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._reading = Deadline(self._late_to_send, loop)
        self._writing = Deadline(self._late_to_read, loop)
        self.writable: asyncio.Future[None] | None = None
        self._unsent_bytes = 0
        self._is_paused = self._is_half_closed = self._is_lost = False
        self._rest: asyncio.TimerHandle | None = None
        self.address, self.is_known = "", False

    def __repr__(self) -> str:
        return f"<ClientConnection of {self._current!r}, {self._requests!r}>"

    @property
    def _is_idle(self) -> bool:
        """Has everything been answered, and nothing more begun?"""
        return self._current is None and not self._requests.waiting and not self._requests.is_in_head

    def retire(self) -> None:
        """Close the connection as soon as nothing is under way on it."""
        if self._is_idle and not self._requests.is_deaf:
            self._close(lingers=False)

    def abort(self) -> None:
        """Close the connection at once, which cancels its handler."""
        if self.transport is not None:
            self.transport.abort()

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self.transport = transport
        if self._owner.add(self, transport.get_extra_info("peername")):
            self._reading.within(self._limits.head_s)
            self._owner.wait(self)
        else:
            self._requests.refuse(HttpError(503, "there are too many connections"))
            self.proceed()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        requests = self._requests
        if requests.is_deaf:
            return
        was_in_head = requests.is_in_head
        requests.feed(data)
        if requests.incoming is not None:
            self._reading.within(self._limits.body_s)
        elif requests.is_in_head and not was_in_head:
            self._reading.within(self._limits.head_s)
        self.proceed()

    def eof_received(self) -> bool:
        """The client sends no more. Its connection stays for a moment if it has asked for something."""
        is_over = self._current is None or self._requests.incoming is not None
        if is_over or self.transport.get_extra_info("ssl_object") is not None:
            return False
        self._is_half_closed, self._requests.is_in_head = True, False
        self._reading.within(self._limits.half_closed_s)
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - how it was lost makes no difference
        """The client has gone; its handler is cancelled."""
        self._is_lost = True
        if self._requests.incoming is not None:
            self._requests.incoming.fail(ClientGone("the client has gone"))
        self._requests.stop()
        self._requests.waiting.clear()
        self._reading.cancel()
        if self._rest is not None:
            self._rest.cancel()
        self.resume_writing()
        self._writing.cancel()
        if self._task is not None:
            self._task.cancel()
        if not self._has_begun:
            # a task that is cancelled before its first step runs nothing of its own
            self._owner.discard(self)

    def pause_writing(self) -> None:
        """The client reads slower than its handler writes."""
        self.writable = self._loop.create_future()
        self._watch_unsent()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writing.clear()
        if self.writable is not None and not self.writable.done():
            self.writable.set_result(None)
        self.writable = None

    # reading

    def _late_to_send(self) -> None:
        """Nothing came for too long."""
        if self._requests.incoming is not None:
            self._requests.refuse(BodyTimeout(self._limits.body_s))
            self.proceed()
        elif self._requests.is_in_head:
            self._requests.refuse(HttpError(408, f"the head was not complete after {self._limits.head_s:g} s"))
            self.proceed()
        elif (self._current is not None or self._requests.waiting) and not self._is_half_closed:
            # a time from before its request, which has no other: a handler may take as long as it needs
            return
        elif self._current is None and self.transport.get_write_buffer_size():
            # the client has not read its answer yet: how long that may take is another question
            self._reading.within(self._limits.linger_s)
        else:
            self.abort()

    def proceed(self) -> None:
        """Begin with what waits, and read on, or not, according to what is unread."""
        if self.transport.is_closing() or self._rest is not None:
            return
        if self._current is None and self._requests.waiting:
            next_one = self._requests.waiting.popleft()
            if isinstance(next_one, HttpError):
                self._write(self._owner.refuse(next_one), None)
                self._close(lingers=True)
                return
            self._current = next_one
            self._owner.unserved.pop(self, None)
            if not self.is_known:
                self._owner.strangers.discard(self)
            self._task = self._loop.create_task(self._serve(next_one))
        requests, incoming = self._requests, self._requests.incoming
        pauses = not requests.is_deaf and (bool(requests.waiting) or (incoming is not None and incoming.is_full))
        if pauses and not self._is_paused:
            self._reading.clear()
            self._pause_reading()
        elif self._is_paused and not pauses:
            self._resume_reading()
            if incoming is not None:
                self._reading.within(self._limits.body_s)

    def _pause_reading(self) -> None:
        if not self._is_paused and not self.transport.is_closing():
            self._is_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def await_body(self) -> None:
        """The handler waits for a body, perhaps for one that its client has not begun to send."""
        request = self._current
        if request is None or not request.waits_for_continue or self.transport.is_closing():
            return
        if request.stream is None and not request.received:
            request.waits_for_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # answering

    async def _serve(self, request: Request) -> None:
        """Answer one request, and then go on with the next one, or close."""
        self._has_begun, is_whole = True, False
        try:
            try:
                reply = await self._owner.handler(request)
            except HttpError as error:
                reply = self._owner.refuse(error)
            except ClientGone:
                raise
            except Exception:
                log.exception("a handler failed")
                reply = self._owner.refuse(HttpError(500, "the server has failed"))
            if request.stream is None and isinstance(reply, Response):
                self._write(reply, request)
                if self.writable is not None:
                    await self.drained()
                is_whole = True
            else:
                is_whole = request.stream is not None and request.stream.is_ended
        except ClientGone:
            pass
        except Exception:
            log.exception("an answer could not be sent")
        finally:
            self._task, self._current, self._has_begun = None, None, False
            self.is_known = self.is_known or request.is_known
            if self._is_lost:
                self._owner.discard(self)
            elif is_whole:
                if self.is_known:
                    self._owner.unserved[self] = None
                else:
                    self._owner.wait(self)
                self._finish(request)
            else:
                # a client must not take what it has for the whole
                self.abort()

    def _finish(self, request: Request) -> None:
        requests = self._requests
        is_idle = not requests.waiting and not requests.is_in_head
        if not request.keeps_alive:
            self._close(lingers=not request.is_ended)
        elif is_idle and (self._is_half_closed or self._owner.is_draining):
            self._close(lingers=False)
        else:
            if is_idle:
                self._reading.within(self._limits.idle_s)
            if request.rest_s:
                self._pause_reading()
                self._rest = self._loop.call_later(request.rest_s, self._wake)
            elif requests.waiting or self._is_paused:
                self.proceed()

    def _wake(self) -> None:
        self._rest = None
        if self._is_idle:
            self._reading.within(self._limits.idle_s)
        self.proceed()

    def start(self, request: Request, status: int, headers: Lines) -> Stream:
        """Begin an answer of many pieces; its head is sent with the first one."""
        if request.stream is not None:
            raise RuntimeError("a request has one answer")
        if request.is_http_10:
            request.keeps_alive = False
        has_body = request.method != "HEAD" and status not in _BODILESS
        head = self._head(request, status, headers, None)
        request.stream = Stream(self, head, is_chunked=not request.is_http_10, has_body=has_body)
        return request.stream

    def _write(self, reply: Response, request: Request | None) -> None:
        """Write a whole answer; to bytes that are no request without one. Raises ClientGone."""
        if self.transport.is_closing():
            raise ClientGone("the client has gone")
        head = self._head(request, reply.status, reply.headers, len(reply.body))
        body = b"" if reply.status in _BODILESS or (request is not None and request.method == "HEAD") else reply.body
        if len(body) <= _COPIED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    def _head(self, request: Request | None, status: int, headers: Lines, length: int | None) -> bytes:
        """The head of an answer: chunked if its `length` is not known. It decides whether the connection stays."""
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, _date_line(int(self._owner.clock()))]
        lines.append(headers if isinstance(headers, bytes) else header_lines(headers.items()))
        stays = False
        if request is not None:
            stays = request.keeps_alive and request.is_ended
            stays = request.keeps_alive = stays and not request.hang_up and not self._owner.is_draining
            if request.answer_headers:
                lines.append(header_lines(request.answer_headers.items()))
        if length is None:
            chunked = request is not None and not request.is_http_10 and status not in _BODILESS
            lines.append(b"Transfer-Encoding: chunked\r\n" if chunked else b"")
        elif status not in _BODILESS:
            lines.append(b"Content-Length: %d\r\n" % length)
        if not stays:
            lines.append(b"Connection: close\r\n")
        elif request is not None and request.is_http_10:
            lines.append(b"Connection: keep-alive\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def push(self, data: bytes) -> bool:
        """Send a part of the answer; False: the client reads slowly, so await `drained`. Raises ClientGone."""
        if self.transport.is_closing():
            raise ClientGone("the client has gone")
        if data:
            self.transport.write(data)
        return self.writable is None

    async def drained(self) -> None:
        """Return once the client has read enough of what was sent. Raises ClientGone."""
        if self.writable is not None:
            await self.writable
        if self.transport.is_closing():
            raise ClientGone("the client has gone")

    def _watch_unsent(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._writing.within(self._limits.write_s)

    def _late_to_read(self) -> None:
        """Nothing was sent for too long, or at least not enough."""
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._watch_unsent()
        else:
            self.abort()

    def _close(self, *, lingers: bool) -> None:
        """Close once all is sent. A client that still sends gets time to stop: data unread at a close would make its
        system throw the answer away.
        """
        self._requests.stop()
        self._requests.waiting.clear()
        self._watch_unsent()
        if not lingers or not self.transport.can_write_eof():
            self.transport.close()
            return
        try:
            self.transport.write_eof()
        except OSError:
            # the client was faster
            self.abort()
            return
        self._resume_reading()
        self._reading.within(self._limits.linger_s)


@lru_cache(maxsize=1)
def _date_line(second: int) -> bytes:
    """The header line that dates an answer."""
    return f"Date: {formatdate(second, usegmt=True)}\r\n".encode()
