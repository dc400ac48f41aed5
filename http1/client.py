"""The HTTP/1.1 client of one server: its connections, and requests over them."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from functools import lru_cache
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from http1.coding import CODINGS, BadCoding, Decoder
from http1.errors import (
    AnswerError,
    AnswerTimeout,
    BadAnswer,
    BodyTooLarge,
    Disconnected,
    IdleDisconnected,
    Unconnected,
)
from http1.limits import ClientLimits
from http1.message import EMPTY_LINE, Deadline, Headers, Incoming, Lines, appended, header_lines, until_empty_line

_TARGET = re.compile(r"/[!-~]*")
_HOST = re.compile(r"[0-9A-Za-z.:_~%\[\]-]+")
_METHOD = re.compile(r"[A-Z]+")
RACE_S = 0.1
"""A server that closed a connection before it had the request is known to have done so after this, as round trips take:
one that closes it later had the request."""

_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})


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
        self.idle: list[ServerConnection] = []
        """Those without a request, the newest last."""
        self._open: set[ServerConnection] = set()
        self._connecting = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<HttpClient of {self._host}:{self._port}: {len(self._open)} connections, {len(self.idle)} idle>"

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

        A connection that lay idle may be one that the server was just closing. A request that may be repeated (RFC
        9110, 9.2.2) is then sent once more, over a new one, unless something of an answer came. A post is not: its
        server may have done what it asks for. So its caller decides, and then gets a new connection. Times are those of
        the limits unless given. Raises ValueError for a request that cannot be sent, and AnswerError: Unconnected,
        Disconnected, of that IdleDisconnected for such a post, AnswerTimeout, BadAnswer.
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
        connection = self.idle.pop() if self.idle else await self._connect(connect_s)
        while True:
            asked = connection.ask(method, head, body, silence_s)
            try:
                if body is not None and not isinstance(body, bytes):
                    await connection.send_pieces(body, asked)
                answer = await asked
                break
            except BaseException as error:
                connection.leave(asked)
                is_stale = isinstance(error, Disconnected) and connection.was_used and connection.is_unanswered
                if not is_stale:
                    raise
                self._close_idle()
                if method not in _IDEMPOTENT:
                    if connection.lost_after_s > RACE_S:
                        raise
                    raise IdleDisconnected(str(error)) from error
            connection = await self._connect(connect_s)
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

    def _close_idle(self) -> None:
        """The server closed a connection that lay idle: those that lie longer may be closed as well by now."""
        for connection in tuple(self.idle):
            connection.abort()
        self.idle.clear()

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

    def discard(self, connection: ServerConnection) -> None:
        """A connection was lost."""
        self._open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        self._changed.set()


@lru_cache(maxsize=256)
def _first_line(method: str, target: str) -> bytes:
    """The first line of a request. Raises ValueError for one that could be read in another way."""
    if not _METHOD.fullmatch(method) or not _TARGET.fullmatch(target):
        raise ValueError("a request has a method in capitals, and a path of printable ASCII")
    return f"{method} {target} HTTP/1.1\r\n".encode("ascii")


_BODILESS = frozenset({204, 304})
_COPIED_BYTES = 16 << 10
"""Bodies up to this size are joined with their head into one write."""

Body = bytes | AsyncIterable[bytes] | None
"""Of a request: whole, in pieces, or none."""


class Answer(Incoming):
    """The answer of a server, at its body. A context manager: left before its end, it closes the connection.

    The body comes as it was sent unless `decode` was called.
    """

    status = 0
    headers = Headers(b"")
    _decoder: Decoder | None = None
    _decoded: Iterator[bytes] = iter(())

    def __init__(self, connection: ServerConnection) -> None:
        self._connection, self.unread_bytes = connection, connection.limits.unread_bytes

    def __repr__(self) -> str:
        return f"<Answer {self.status}, {self.received} bytes{', ended' if self.is_ended else ''}>"

    def on_room(self) -> None:
        """Its server may go on to send."""
        self._connection.resume_reading()

    def on_wait(self) -> None:
        """From now on its server may be late."""
        self._connection.await_answer()

    def decode(self, most_bytes: int) -> None:
        """Have the body read as its Content-Encoding says, to at most `most_bytes`. Raises BadAnswer where that is
        neither gzip nor deflate.
        """
        coding = self.headers.lowered.get("content-encoding", "identity").lower()
        if coding not in CODINGS:
            raise BadAnswer(f"the answer is encoded as '{coding[:40]}'")
        self._decoder = None if coding == "identity" else Decoder(coding, most_bytes)

    async def read(self) -> bytes:
        """What came since the last time; nothing at the end. Raises AnswerError."""
        decoder = self._decoder
        if decoder is None:
            return await super().read()
        try:
            while True:
                for decoded in self._decoded:
                    return decoded
                if not (data := await super().read()):
                    break
                self._decoded = decoder.pieces(data)
            decoder.end()
        except (BadCoding, BodyTooLarge) as error:
            raise BadAnswer(str(error)) from error
        return b""

    def content(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises AnswerError."""
        return self.pieces()

    async def pour_decoded(self, into: Callable[[bytes], bool]) -> bool:
        """The same as `pour` for a body that may have to be decoded, which is not given in the moment that it comes."""
        while data := await self.read():
            if not into(data):
                return False
            # few bytes may stand for very many
            await asyncio.sleep(0)
        return True

    async def body(self, most_bytes: int) -> bytes:
        """All of the body. Raises AnswerError; BadAnswer for more than `most_bytes`."""
        pieces, size = [], 0
        while data := await self.read():
            pieces.append(data)
            size += len(data)
            if size > most_bytes:
                raise BadAnswer(f"the answer is larger than {most_bytes} bytes")
            if self._decoder is not None:
                # few bytes may stand for very many
                await asyncio.sleep(0)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def stop(self, error: Exception) -> None:
        """Have readers of the body get `error` after what came before, and close the connection."""
        if not self.is_ended:
            self.fail(error)
            self._connection.abort()

    def close(self) -> None:
        """Close the connection unless all of the answer came, in which case it serves other requests already."""
        if not self.is_ended:
            self._connection.abort()

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class ServerConnection(asyncio.Protocol):
    """Each answer has a parser, which judges its head and its chunks, and calls the methods that begin with on_. A head
    that was accepted is read as a whole, and a body of known length is counted.

    `was_used` says that it had an answer before; `is_unanswered`, that nothing came for the present request, before
    it was lost `lost_after_s` seconds behind that.
    """

    on_header = on_chunk_header = on_chunk_complete = on_status = None
    """Nothing that the parser could tell: it finds that faster than a name that is missing."""
    on_body: Callable[[bytes], None] | None = None
    """Takes each part of a body in chunks: the present answer itself."""

    def __init__(self, pool: HttpClient, loop: asyncio.AbstractEventLoop) -> None:
        self.limits, self._pool, self._loop = pool.limits, pool, loop
        self._parser: HttpResponseParser | None = None
        self._transport: Any = None
        self._deadline = Deadline(self._late, loop)
        self._silence_s = 0.0
        self._writable: asyncio.Future[None] | None = None
        self._is_lost = self._is_paused = self._is_eof = False
        self.was_used, self.is_unanswered, self.lost_after_s = False, True, 0.0
        # of the present request; without `_answer` there is none
        self._answer: Answer | None = None
        self._asked: asyncio.Future[Answer] | None = None
        self._is_all_sent = self._keeps_alive = True
        self._wants_head_only = self._ends_with_connection = False
        # what the parser was given of the present head, and the bytes of those before it
        self._is_in_head = False
        self._head: bytes | bytearray = b""
        self._head_bytes = self._unseen_bytes = 0

    def __repr__(self) -> str:
        return f"<ServerConnection {'lost' if self._is_lost else 'idle' if self._answer is None else 'in use'}>"

    def ask(self, method: str, head: bytes, body: Body, silence_s: float) -> asyncio.Future[Answer]:
        """Send a request; its answer, once the head came, or an AnswerError. A body in pieces is to be sent next.

        A caller that waits no more has to `leave`.
        """
        self.is_unanswered = True
        asked: asyncio.Future[Answer] = self._loop.create_future()
        if self._is_lost or self._transport.is_closing():
            asked.set_exception(Disconnected("the server closed the connection"))
            return asked
        self._asked, self._answer = asked, Answer(self)
        self._silence_s, self._wants_head_only = silence_s, method == "HEAD"
        self._is_in_head, self._head, self._head_bytes, self._unseen_bytes = True, b"", 0, 0
        self.on_body = self._answer.put
        self._parser = HttpResponseParser(self)
        self._deadline.within(silence_s)
        if isinstance(body, bytes) and len(body) <= _COPIED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            if isinstance(body, bytes):
                self._transport.write(body)
        return asked

    def leave(self, asked: asyncio.Future[Answer]) -> None:
        """The caller that `asked` waits no more: the connection is closed, unless all of the answer has come."""
        if asked.done() and not asked.cancelled():
            # it may have come, or failed, in the moment of a cancellation
            asked.exception()
        if self._asked is asked:
            self._asked = None
            self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server was reached."""
        self._transport = transport
        self._pool.add(self)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        answer, parser = self._answer, self._parser
        if answer is None or parser is None:
            # an answer to no request would be taken for that of the next
            self.abort()
            return
        self.is_unanswered = False
        received = answer.received
        try:
            while data and self._is_in_head:
                # empty lines may go before an answer
                begin = 0 if self._head else len(data) - len(data.lstrip(b"\r\n"))
                end = data.find(EMPTY_LINE, begin)
                # most come whole
                is_cut = self._head or end < 0
                length = begin + until_empty_line(self._head, data[begin:]) if is_cut else end + len(EMPTY_LINE)
                piece = data[:length]
                self._head = appended(self._head, piece)
                self._unseen_bytes += len(piece)
                data = data[len(piece) :]
                parser.feed_data(piece)
            if data:
                if answer.is_ended:
                    raise BadAnswer("more than one answer")
                if answer.content_length is None:
                    parser.feed_data(data)
                else:
                    left = answer.content_length - received
                    answer.put(data[:left])
                    if len(data) > left:
                        raise BadAnswer("more than one answer")
        except HttpParserUpgrade:
            self._fail(BadAnswer("the server changes to another protocol"))
        except HttpParserError as error:
            ours = error.__context__
            self._fail(ours if isinstance(ours, AnswerError) else BadAnswer(f"no HTTP: {error}"))
        except BadAnswer as error:
            self._fail(error)
        if answer.is_ended:
            self._release()
        elif answer.received == received:
            # a head, sizes of chunks, or trailers
            self._unseen_bytes += len(data)
            if self._unseen_bytes > self.limits.head_bytes:
                self._fail(BadAnswer(f"a head of more than {self.limits.head_bytes} bytes"))
        else:
            self._unseen_bytes = 0
            if answer.deliver():
                # its reader waits, so that the deadline is set already
                self._deadline.at = self._loop.time() + self._silence_s
            elif answer.is_full and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The server sends no more."""
        self._is_eof = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has gone, or the connection was closed here."""
        self._is_lost = True
        if self.is_unanswered and self._answer is not None:
            self.lost_after_s = self._loop.time() - (self._deadline.at - self._silence_s)
        self._deadline.cancel()
        self.resume_writing()
        self._pool.discard(self)
        if self._answer is not None and self._ends_with_connection and self._is_eof:
            self._answer.end()
        failure = Disconnected(f"the connection ended too early{f': {exc}' if exc else ''}")
        failure.__cause__ = exc
        self._fail(failure)
        # they refer back to this connection, which would wait for the garbage collector
        self._parser = self._answer = self._asked = self.on_body = None

    def pause_writing(self) -> None:
        """The server reads slower than the request is sent."""
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """The server has caught up, or has answered."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # what the parser calls

    def on_message_begin(self) -> None:
        """An answer begins."""
        if not self._is_in_head:
            raise BadAnswer("more than one answer")

    def on_headers_complete(self) -> None:
        """A head is complete; perhaps of one that goes before the answer to the request (RFC 9110, section 15.2)."""
        parser, answer, head, limits = self._parser, self._answer, self._head.lstrip(b"\r\n"), self.limits
        assert parser is not None
        assert answer is not None
        self._head_bytes += len(head)
        if self._head_bytes > limits.head_bytes or head.count(b"\r\n") > limits.headers + 2:
            raise BadAnswer("too many headers, or too long ones")
        self._unseen_bytes, self._head = 0, b""
        status = parser.get_status_code()
        if status < 200:
            return
        self._is_in_head = False
        answer.status, answer.headers = status, Headers(head.partition(b"\r\n")[2])
        fields = answer.headers.lowered
        if (coding := fields.get("transfer-encoding")) is not None and coding.lower() != "chunked":
            raise BadAnswer(f"a transfer coding '{coding[:40]}'")
        self._keeps_alive = parser.should_keep_alive()
        if coding is None and (length := fields.get("content-length")) is not None:
            answer.content_length = int(length)
        self._ends_with_connection = coding is None and answer.content_length is None
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(answer)
        if self._writable is not None:
            self.resume_writing()
        if self._wants_head_only:
            # the parser does not know that no body comes
            self._keeps_alive = False
        if self._wants_head_only or status in _BODILESS or answer.content_length == 0:
            answer.end()

    def on_message_complete(self) -> None:
        """An answer is complete, with no body or one in chunks; or one that goes before the answer to the request."""
        if not self._is_in_head and self._answer is not None:
            self._answer.end()

    # the present request

    async def send_pieces(self, pieces: AsyncIterable[bytes], asked: asyncio.Future[Answer]) -> None:
        """Send a body as it comes, unless the server answers before its end: then it wants no more of it."""
        self._is_all_sent = False
        async for piece in pieces:
            if asked.done() or self._transport.is_closing():
                return
            if piece:
                self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.await_answer()
            if self._writable is not None:
                await self._writable
        if not asked.done() and not self._transport.is_closing():
            self._transport.write(b"0\r\n\r\n")
            self._is_all_sent = True

    def await_answer(self) -> None:
        """A reader of the answer waits from now on."""
        self._deadline.within(self._silence_s)

    def _late(self) -> None:
        if self._answer is None:
            self._transport.close()
        elif self._answer.is_awaited or (self._asked is not None and not self._asked.done()):
            self._fail(AnswerTimeout(f"nothing came for {self._silence_s:g} s"))

    def resume_reading(self) -> None:
        """The reader of the answer has made room."""
        is_full = self._answer is not None and self._answer.is_full
        if self._is_paused and not is_full and not self._is_lost and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def _fail(self, error: AnswerError) -> None:
        """Tell of `error`, unless the answer is whole already. The connection serves no other request."""
        answer, self._keeps_alive = self._answer, False
        if answer is not None:
            answer.fail(error)
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(error)
        if not self._is_lost and (answer is None or not answer.is_ended):
            self.abort()

    def _release(self) -> None:
        """The answer is whole: let the connection be used again, if it can be."""
        self._parser = self._answer = self._asked = self.on_body = None
        self.was_used = True
        is_usable, idle = self._keeps_alive and self._is_all_sent and not self._transport.is_closing(), self._pool.idle
        if is_usable and len(idle) < self.limits.most_idle:
            idle.append(self)
            if self._is_paused:
                self.resume_reading()
            self._deadline.within(self.limits.idle_s)
        else:
            self._transport.close()
