"""The HTTP/1.1 server: where it listens, its connections, and how it ends."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any

from http1.deadline import Deadline
from http1.errors import BodyTimeout, ClientGone, HttpError
from http1.greeting import Abortable, Greeting
from http1.limits import ServerLimits
from http1.listening import Acceptor, bound_sockets
from http1.message import Lines, header_lines
from http1.request import Handler, Request, Requests, Response, Stream
from http1.seldom import Seldom

LIMITS = ("connections", "connections_of_address", "descriptors")
"""What `on_limit` is called with."""

_SENTENCES = {
    "connections": "closed %d connections without a request, the last of %s: there are too many",
    "connections_of_address": "closed %d connections without a known key, the last of %s: its address has too many",
    "descriptors": "closed %d connections without a request, the last of %s: few file descriptors are left (ulimit -n)",
}

_LOG_EVERY_S = 10.0

_FLOOD = 64
"""An address is not taken for a flood before so many of its connections were closed in a second."""

log = logging.getLogger("pointsman.http")


def refusal(error: HttpError) -> Response:
    """What a client is told that did something wrong with HTTP itself."""
    return Response(error.status, f"{error.reason}\n".encode(), {"Content-Type": "text/plain; charset=utf-8"})


class WaitingStrangers:
    """Connections of unknown clients on which no handler runs, oldest first, and by address."""

    def __init__(self) -> None:
        self._all: dict[ClientConnection, None] = {}
        self._by_address: dict[str, dict[ClientConnection, None]] = {}

    def __repr__(self) -> str:
        return f"<WaitingStrangers {len(self)} at {len(self._by_address)} addresses>"

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(self._all)

    def add(self, connection: ClientConnection) -> None:
        """The server waits for this client from now on."""
        self._all[connection] = None
        self._by_address.setdefault(connection.address, {})[connection] = None

    def discard(self, connection: ClientConnection) -> None:
        """The client has begun a request, or has gone."""
        if connection in self._all:
            del self._all[connection]
            own = self._by_address[connection.address]
            del own[connection]
            if not own:
                del self._by_address[connection.address]

    def count_at(self, address: str) -> int:
        """How many of them wait at `address`."""
        return len(self._by_address.get(address, ()))

    def oldest_at(self, address: str) -> ClientConnection:
        """The one that has waited longest at `address`. Raises KeyError if there is none."""
        return next(iter(self._by_address[address]))


class HttpServer:
    """Answers requests with `handler`. `limits` may be replaced while it runs, for connections that begin afterwards.
    `refuse` gives the answer to a request that HTTP itself does not allow. `accepted` counts connections. `on_limit` is
    called with one of LIMITS for each connection that is closed or refused because of it.

    `clock` is Unix time in seconds, for the date of answers.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits | None = None,
        *,
        refuse: Callable[[HttpError], Response] = refusal,
        on_limit: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.handler, self.refuse, self.limits = handler, refuse, limits or ServerLimits()
        self.is_draining, self.accepted = False, 0
        self.clock, self._on_limit = clock, on_limit
        self._connections: set[ClientConnection] = set()
        self._greetings: dict[ClientConnection, Greeting] = {}
        self.unserved: dict[ClientConnection, None] = {}
        """Connections on which no handler runs, the one that waits longest first; changed by the connections too."""
        self.strangers = WaitingStrangers()
        self._listeners: list[Acceptor] = []
        self._logged = Seldom(_LOG_EVERY_S, clock)
        self._second, self._closed_of = 0, Counter[str]()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<HttpServer {len(self._connections)} connections{', draining' if self.is_draining else ''}>"

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections) + len(self._greetings)

    @property
    def waiting(self) -> int:
        """On how many connections no handler runs."""
        return len(self.unserved)

    def connection(self) -> ClientConnection:
        """The protocol of one connection, for a listener that accepts it in place of `listen`."""
        return ClientConnection(self, asyncio.get_running_loop())

    async def listen(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Listen at `host`; the port that it really has. Raises OSError. Several addresses may be listened at."""
        sockets = await bound_sockets(host, port, shares_port=shares_port)
        for listening in sockets:
            self._listeners.append(Acceptor(listening, self._greet, partial(self._make_room, "descriptors")))
        return int(sockets[0].getsockname()[1])

    async def close(self, grace_s: float = 0.0) -> None:
        """Listen no more, close idle connections, and let requests end: those that take longer than `grace_s` are
        cancelled. Returns when no handler runs any more.
        """
        self.is_draining = True
        while self._listeners:
            self._listeners.pop().close()
        for connection in tuple(self._connections):
            connection.retire()
        for greeting in tuple(self._greetings.values()):
            greeting.abort()
        if not await self._is_emptied(grace_s):
            for connection in tuple(self._connections):
                connection.abort()
            await self._is_emptied(None)

    async def _is_emptied(self, within_s: float | None) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while self.connections:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def add(self, connection: ClientConnection, peer: object) -> bool:
        """A client has connected, from a socket with the name `peer`; may it stay?"""
        connection.address = group_of(peer)
        self._greeted(connection)
        self._connections.add(connection)
        has_room = self.connections <= self.limits.connections or self._make_room("connections")
        return has_room and not self.is_draining

    def wait(self, connection: ClientConnection) -> None:
        """No handler runs for this stranger. If too many strangers at its address wait, the oldest is closed."""
        self.unserved[connection] = None
        self.strangers.add(connection)
        address, most = connection.address, self.limits.strangers
        if most is not None and self.strangers.count_at(address) > most and not self.limits.is_exempt(address):
            self._shut(self.strangers.oldest_at(address), "connections_of_address")

    def discard(self, connection: ClientConnection) -> None:
        """A client has gone, and its handler has ended."""
        self._connections.discard(connection)
        self._forget(connection)
        self._changed.set()

    def _greet(self, connected: socket.socket) -> None:
        """Serve a client that has just connected; at once close what an address sends too many of."""
        self.accepted += 1
        try:
            address = group_of(connected.getpeername())
        except OSError:
            # it has gone already
            connected.close()
            return
        if self._is_flood(address):
            connected.close()
            self._limited("connections_of_address", address)
            return
        connection = self.connection()
        self._greetings[connection] = Greeting(connected, connection, on_end=lambda: self._greeted(connection))

    def _greeted(self, connection: ClientConnection) -> None:
        if self._greetings.pop(connection, None) is not None:
            self._changed.set()

    def _is_flood(self, address: str) -> bool:
        """Whether so many connections of `address` were closed in this second that a new one is not worth a look."""
        if (second := int(self.clock())) != self._second:
            self._second = second
            self._closed_of.clear()
        return self.limits.strangers is not None and self._closed_of[address] >= max(_FLOOD, self.limits.strangers)

    def _make_room(self, limit: str) -> bool:
        """Close the connection that is missed least, the oldest stranger before all others; whether there was one."""
        oldest = next(iter(self.strangers or self.unserved), None)
        if oldest is not None:
            self._shut(oldest, limit)
        return oldest is not None

    def _forget(self, connection: ClientConnection) -> None:
        self.unserved.pop(connection, None)
        self.strangers.discard(connection)

    def _shut(self, connection: ClientConnection, limit: str) -> None:
        self._forget(connection)
        if limit == "connections_of_address":
            self._closed_of[connection.address] += 1
        connection.abort()
        self._limited(limit, connection.address)

    def _limited(self, limit: str, address: str) -> None:
        self._on_limit(limit)
        if (count := self._logged.count(limit)) is not None:
            log.warning(_SENTENCES[limit], count, address)


def group_of(peer: object) -> str:
    """The address in a client's socket name, as its connections are counted: an IPv6 network of 64 bits is one."""
    host = peer[0] if isinstance(peer, tuple) and peer else ""
    if not isinstance(host, str) or ":" not in host:
        return host if isinstance(host, str) else ""
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


@lru_cache(maxsize=1)
def _date_line(second: int) -> bytes:
    """The header line that dates an answer."""
    return f"Date: {formatdate(second, usegmt=True)}\r\n".encode()


_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_BODILESS = frozenset({204, 304})
_COPIED_BYTES = 16 << 10
"""Bodies up to this size are joined with their head into one write."""


class ClientConnection(Abortable):
    """What a client sends goes through the parser at once; requests wait in order for the one that is handled.

    Where the client cannot be understood any more, it is answered what it had asked before, then refused.
    """

    def __init__(self, owner: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._owner, self._loop, self._limits = owner, loop, owner.limits
        self._requests = Requests(self._limits, self)
        self._transport: Any = None
        self._current: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._reading = Deadline(self._late_to_send, loop)
        self._writing = Deadline(self._late_to_read, loop)
        self._writable: asyncio.Future[None] | None = None
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
        if self._transport is not None:
            self._transport.abort()

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = transport
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
        if is_over or self._transport.get_extra_info("ssl_object") is not None:
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
        self._writable = self._loop.create_future()
        self._watch_unsent()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writing.clear()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

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
        elif self._current is None and self._transport.get_write_buffer_size():
            # the client has not read its answer yet: how long that may take is another question
            self._reading.within(self._limits.linger_s)
        else:
            self.abort()

    def proceed(self) -> None:
        """Begin with what waits, and read on, or not, according to what is unread."""
        if self._transport.is_closing() or self._rest is not None:
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
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def await_body(self) -> None:
        """The handler waits for a body, perhaps for one that its client has not begun to send."""
        request = self._current
        if request is None or not request.waits_for_continue or self._transport.is_closing():
            return
        if request.stream is None and not request.received:
            request.waits_for_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

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
                if self._writable is not None:
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
        if self._transport.is_closing():
            raise ClientGone("the client has gone")
        head = self._head(request, reply.status, reply.headers, len(reply.body))
        body = b"" if reply.status in _BODILESS or (request is not None and request.method == "HEAD") else reply.body
        if len(body) <= _COPIED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

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
        if self._transport.is_closing():
            raise ClientGone("the client has gone")
        if data:
            self._transport.write(data)
        return self._writable is None

    async def drained(self) -> None:
        """Return once the client has read enough of what was sent. Raises ClientGone."""
        if self._writable is not None:
            await self._writable
        if self._transport.is_closing():
            raise ClientGone("the client has gone")

    def _watch_unsent(self) -> None:
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._writing.within(self._limits.write_s)

    def _late_to_read(self) -> None:
        """Nothing was sent for too long, or at least not enough."""
        if self._transport.get_write_buffer_size() < self._unsent_bytes:
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
        if not lingers or not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:
            # the client was faster
            self.abort()
            return
        self._resume_reading()
        self._reading.within(self._limits.linger_s)
