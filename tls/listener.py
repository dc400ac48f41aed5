"""A port with TLS: accepts connections, makes handshakes, and hands those that succeed to a protocol."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tls.certificates import Certificates
from tls.errors import TlsError

HANDSHAKE_S = 10.0
"""Longest handshake."""

MOST_HANDSHAKES = 1024
"""Most handshakes at the same time; a further one ends the oldest of the address that has most of them."""

MOST_OF_ONE_PEER = 128
"""Most handshakes of one address, or IPv6 network of 64 bits, at the same time; further connections are closed."""

_BACKLOG = 1024
_PAUSE_S = 0.2
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_log = logging.getLogger("pointsman.tls")


class _Handshake(ssl.SSLContext):
    """The context of one handshake at a time: event loops abandon a failed handshake without the alert that tells the
    peer why, so the alert is sent here. Making one takes 0.3 ms, so they are used again.
    """

    context: ssl.SSLContext
    connected: socket.socket

    def __new__(cls) -> _Handshake:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **named: Any) -> Any:
        """The SSLObject of the connection."""
        return _Alerting(self.context.wrap_bio(incoming, outgoing, *args, **named), outgoing, self.connected)


class _Alerting:
    """An SSLObject with another `do_handshake`."""

    def __init__(self, made: ssl.SSLObject, outgoing: ssl.MemoryBIO, connected: socket.socket) -> None:
        self._made, self._outgoing, self._connected = made, outgoing, connected
        # the rest is called for each piece of data
        self.read, self.write, self.pending = made.read, made.write, made.pending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def do_handshake(self) -> None:
        """Go on with the handshake. Raises ssl.SSLError."""
        try:
            self._made.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            with suppress(OSError):
                self._connected.send(self._outgoing.read())
            raise


class TlsListener:
    """Listens with `certificates`, which are looked at for each connection, and connects peers to a protocol of
    `factory`.
    """

    def __init__(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        certificates: Certificates,
        *,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._factory, self._certificates = factory, certificates
        self._handshake_s = handshake_s
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[asyncio.Task[None], str] = {}
        self._of_peer: Counter[str] = Counter()
        self._crowded_out: set[asyncio.Task[None]] = set()
        self._unused: list[_Handshake] = []

    def __repr__(self) -> str:
        return f"<TlsListener of {self._certificates.what}: {len(self._handshakes)} handshakes>"

    async def listen(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Listen at `host`; the port that it really has. Raises OSError."""
        loop = asyncio.get_running_loop()
        places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, place in dict.fromkeys(places):
                self._sockets.append(_bound(family, kind, protocol, (place[0], port, *place[2:]), shares_port))
                port = int(self._sockets[0].getsockname()[1])
        except OSError:
            await self.close()
            raise
        self._accepting = [asyncio.create_task(self._accept(each)) for each in self._sockets]
        return port

    async def close(self) -> None:
        """Listen no more, and end handshakes; connections that were handed on stay."""
        tasks = (*self._accepting, *self._handshakes, *self._crowded_out)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in self._sockets:
            each.close()
        self._sockets, self._accepting = [], []

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, place = await accepted(loop, listening)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    _log.warning("%s cannot accept connections: %s", self._certificates.what, error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._begin(connected, _peer_of(str(place[0])))
            # a task that is cancelled before its first step would not close the connection
            await asyncio.sleep(0)

    def _begin(self, connected: socket.socket, peer: str) -> None:
        if self._of_peer[peer] >= MOST_OF_ONE_PEER:
            connected.close()
            self._certificates.refusals.refuse(peer, TlsError(f"it has {MOST_OF_ONE_PEER} unfinished handshakes"))
            return
        if len(self._handshakes) >= MOST_HANDSHAKES:
            self._make_room()
        self._of_peer[peer] += 1
        task = asyncio.create_task(self._shake_hands(connected, peer))
        self._handshakes[task] = peer
        task.add_done_callback(self._end)

    def _make_room(self) -> None:
        """End the oldest handshake of the peer with most of them: a few peers that never finish keep no other out."""
        busiest = max(self._of_peer, key=self._of_peer.__getitem__)
        oldest = next(task for task, peer in self._handshakes.items() if peer == busiest)
        oldest.cancel()
        self._end(oldest)
        self._crowded_out.add(oldest)
        oldest.add_done_callback(self._crowded_out.discard)
        self._certificates.refusals.refuse(busiest, TlsError("its unfinished handshakes made room for others"))

    def _end(self, task: asyncio.Task[None]) -> None:
        if (peer := self._handshakes.pop(task, None)) is None:
            return
        self._of_peer[peer] -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer]

    async def _shake_hands(self, connected: socket.socket, peer: str) -> None:
        loop, handshake = asyncio.get_running_loop(), self._unused.pop() if self._unused else _Handshake()
        handshake.context, handshake.connected = self._certificates.context(), connected
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await loop.connect_accepted_socket(
                self._factory, connected, ssl=handshake, ssl_handshake_timeout=self._handshake_s
            )
        except (OSError, ssl.SSLError) as error:
            self._certificates.refusals.refuse(peer, error)
        except asyncio.CancelledError:
            # not close: the event loop has the descriptor, and closes it when its reading ends
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            self._unused.append(handshake)


def _peer_of(host: str) -> str:
    """The address that handshakes are counted by: all of an IPv6 network of 64 bits are one."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


async def accepted(loop: asyncio.AbstractEventLoop, listening: socket.socket) -> tuple[socket.socket, Any]:
    """The next connection, and the address of its peer. Raises OSError."""
    return await loop.sock_accept(listening)


def _bound(family: int, kind: int, protocol: int, place: tuple[object, ...], shares_port: bool) -> socket.socket:
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(place)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
