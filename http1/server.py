"""The HTTP/1.1 server: where it listens, which connections may stay, and how it ends."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from http1.errors import HttpError
from http1.greeting import Greeting
from http1.limits import ServerLimits
from http1.listening import Acceptor, bound_sockets
from http1.request import ClientConnection, Handler, Response
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
