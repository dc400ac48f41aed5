"""One connection to a server: a request goes out, its answer comes back, and then the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any, Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from http1.answer import Answer
from http1.deadline import Deadline
from http1.errors import AnswerError, AnswerTimeout, BadAnswer, Disconnected
from http1.headers import Headers
from http1.incoming import Incoming
from http1.limits import ClientLimits

_COPIED_BYTES = 16 << 10
"""Bodies up to this size are joined with their head into one write."""

Body = bytes | AsyncIterable[bytes] | None
"""Of a request: whole, in pieces, or none."""


class Pool(Protocol):
    """The connections of a client."""

    limits: ClientLimits

    def add(self, connection: ServerConnection) -> None:
        """A connection was made."""
        ...

    def take_back(self, connection: ServerConnection) -> bool:
        """A connection is free; is it kept?"""
        ...

    def discard(self, connection: ServerConnection) -> None:
        """A connection was lost."""
        ...


class ServerConnection(asyncio.Protocol):
    """The parser calls the methods that begin with on_.

    `was_used` says that it had an answer before; `is_unanswered`, that nothing came for the present request.
    """

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool, self._loop, self._limits = pool, loop, pool.limits
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._transport: Any = None
        self._deadline = Deadline(self._late, loop)
        self._silence_s = 0.0
        self._writable: asyncio.Future[None] | None = None
        self._is_lost = self._is_paused = self._is_eof = False
        self.was_used, self.is_unanswered = False, True
        # of the present request; without `_incoming` there is none
        self._answer: asyncio.Future[Answer] | None = None
        self._incoming: Incoming | None = None
        self._is_all_sent = self._keeps_alive = True
        self._wants_head_only = self._is_interim = self._ends_with_connection = False
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_bytes = self._unseen_bytes = 0

    def __repr__(self) -> str:
        return f"<ServerConnection {'lost' if self._is_lost else 'idle' if self._incoming is None else 'in use'}>"

    async def ask(self, method: str, head: bytes, body: Body, silence_s: float) -> Answer:
        """The answer to a request, as soon as its head came. Raises AnswerError; that, and a cancellation, close the
        connection, unless all of the answer has come.
        """
        self.is_unanswered = True
        if self._is_lost or self._transport.is_closing():
            raise Disconnected("the server closed the connection")
        self._silence_s, self._wants_head_only, self._head_bytes = silence_s, method == "HEAD", 0
        incoming = self._incoming = Incoming(self._limits.unread_bytes, self._resume, self._wait)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._answer = answer
        try:
            self._deadline.within(silence_s)
            if body is None or (isinstance(body, bytes) and len(body) <= _COPIED_BYTES):
                self._transport.write(head + body if body else head)
            elif isinstance(body, bytes):
                self._transport.write(head)
                self._transport.write(body)
            else:
                await self._send_pieces(head, body, answer)
            return await answer
        except BaseException:
            if answer.done() and not answer.cancelled():
                # it may have come, or failed, in the moment of a cancellation
                answer.exception()
            if self._incoming is incoming:
                self.abort()
            raise

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
        incoming = self._incoming
        if incoming is None:
            # an answer to no request would be taken for that of the next
            self.abort()
            return
        self.is_unanswered = False
        self._unseen_bytes += len(data)
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._fail(BadAnswer("the server changes to another protocol"))
        except HttpParserError as error:
            ours = error.__context__
            self._keeps_alive = False
            self._fail(ours if isinstance(ours, AnswerError) else BadAnswer(f"no HTTP: {error}"))
        if incoming.is_ended:
            self._release()
        elif self._unseen_bytes > self._limits.head_bytes:
            self._fail(BadAnswer(f"a head of more than {self._limits.head_bytes} bytes"))
        elif incoming.deliver():
            self._deadline.within(self._silence_s)
        elif incoming.is_full and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The server sends no more."""
        self._is_eof = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has gone, or the connection was closed here."""
        self._is_lost = True
        self._deadline.cancel()
        self.resume_writing()
        self._pool.discard(self)
        if self._incoming is not None and self._ends_with_connection and self._is_eof:
            self._incoming.end()
        failure = Disconnected(f"the connection ended too early{f': {exc}' if exc else ''}")
        failure.__cause__ = exc
        self._fail(failure)
        # it refers back to this connection, which would wait for the garbage collector
        self._parser = None

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
        if self._incoming is None or self._incoming.is_ended:
            raise BadAnswer("more than one answer")
        self._fields, self._unseen_bytes = [], 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header came; or a trailer, which is dropped."""
        self._fields.append((name, value))
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._limits.head_bytes or len(self._fields) > self._limits.headers:
            raise BadAnswer("too many headers, or too long ones")

    def on_headers_complete(self) -> None:
        """A head is complete."""
        assert self._parser is not None
        self._unseen_bytes, status = 0, self._parser.get_status_code()
        self._is_interim = status < 200
        if self._is_interim:
            return
        headers, self._fields = Headers(self._fields), []
        fields = headers.lowered
        if (coding := fields.get("transfer-encoding")) is not None and coding.lower() != "chunked":
            raise BadAnswer(f"a transfer coding '{coding[:40]}'")
        self._keeps_alive = self._parser.should_keep_alive()
        self._ends_with_connection = coding is None and "content-length" not in fields
        assert self._incoming is not None
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(Answer(status, headers, self._incoming, self.abort))
        if self._writable is not None:
            self.resume_writing()
        if self._wants_head_only:
            # the parser does not know that no body comes
            self._keeps_alive = False
            self._incoming.end()

    def on_body(self, data: bytes) -> None:
        """A part of the body came."""
        self._unseen_bytes = 0
        if self._incoming is not None and not self._incoming.is_ended:
            self._incoming.put(data)

    def on_message_complete(self) -> None:
        """An answer is complete, or one that goes before it (RFC 9110, section 15.2)."""
        if not self._is_interim and self._incoming is not None:
            self._incoming.end()

    # the present request

    async def _send_pieces(self, head: bytes, pieces: AsyncIterable[bytes], answer: asyncio.Future[Answer]) -> None:
        """Send a body as it comes, unless the server answers before its end: then it wants no more of it."""
        self._is_all_sent = False
        self._transport.write(head)
        async for piece in pieces:
            if answer.done() or self._transport.is_closing():
                return
            if piece:
                self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self._wait()
            if self._writable is not None:
                await self._writable
        if not answer.done() and not self._transport.is_closing():
            self._transport.write(b"0\r\n\r\n")
            self._is_all_sent = True

    def _wait(self) -> None:
        """A reader waits from now on."""
        self._deadline.within(self._silence_s)

    def _late(self) -> None:
        if self._incoming is None:
            self._transport.close()
        elif self._incoming.is_awaited or (self._answer is not None and not self._answer.done()):
            self._fail(AnswerTimeout(f"nothing came for {self._silence_s:g} s"))

    def _resume(self) -> None:
        """The reader has made room."""
        is_full = self._incoming is not None and self._incoming.is_full
        if self._is_paused and not is_full and not self._is_lost and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def _fail(self, error: AnswerError) -> None:
        """Tell of `error`, unless the answer is whole already."""
        if self._incoming is not None:
            self._incoming.fail(error)
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
        if not self._is_lost and (self._incoming is None or not self._incoming.is_ended):
            self.abort()

    def _release(self) -> None:
        """The answer is whole: let the connection be used again, if it can be."""
        self._incoming = None
        self.was_used = True
        is_usable = self._keeps_alive and self._is_all_sent and not self._transport.is_closing()
        if is_usable and self._pool.take_back(self):
            if self._is_paused:
                self._resume()
            self._deadline.within(self._limits.idle_s)
        else:
            self._transport.close()
