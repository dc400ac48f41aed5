"""Listening sockets. Connections are accepted a few at a time, also while file descriptors are short."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable

ACCEPTS = 32
"""Most connections that are accepted before other events get their turn."""

PAUSE_S = 0.05
"""Time without accepting while there are too few descriptors and no connection can be closed."""

_BACKLOG = 4096
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


async def bound_sockets(host: str, port: int, *, shares_port: bool = False) -> list[socket.socket]:
    """Listening sockets at every address of `host`, all at one port. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound = list[socket.socket]()
    try:
        for family, kind, protocol, _, where in dict.fromkeys(found):
            listener = socket.socket(family, kind, protocol)
            bound.append(listener)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # port 0 is any free one: the same for all
            listener.bind((where[0], bound[0].getsockname()[1] or port, *where[2:]))
            listener.listen(_BACKLOG)
    except BaseException:
        for listener in bound:
            listener.close()
        raise
    return bound


class Acceptor:
    """Passes each connection of `listening` to `take`, with whether descriptors are short.

    `make_room` closes a connection, and returns whether there was one to close.
    """

    def __init__(
        self, listening: socket.socket, take: Callable[[socket.socket], None], make_room: Callable[[], bool]
    ) -> None:
        self._listening, self._take, self._make_room = listening, take, make_room
        self._loop = asyncio.get_running_loop()
        self._highest = _highest_descriptor()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listening, self._accept)

    def __repr__(self) -> str:
        return f"<Acceptor at {self._listening.getsockname() if self._listening.fileno() >= 0 else 'nothing'}>"

    def close(self) -> None:
        """Accept no more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORT:
                    raise
                if not self._make_room():
                    self._rest()
                return
            # the kernel gives the lowest free number: a high one tells that all below are in use
            is_short = connection.fileno() >= self._highest
            connection.setblocking(False)
            self._take(connection)
            if is_short and not self._make_room():
                self._rest()
                return

    def _rest(self) -> None:
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._accept)


def _highest_descriptor() -> int:
    """The number from which on a descriptor of a client takes what connections to backends and files need."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = 1 << 30
    return most - min(512, max(8, most // 8))
