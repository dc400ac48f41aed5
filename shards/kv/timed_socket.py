"""A socket with a deadline: a peer that sends byte by byte cannot keep a thread busy. Torch-free."""

from __future__ import annotations

import math
import socket
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class TimedSocket:
    """A connection over `of`: all that follows a call of `within` has so many seconds in total.

    A timeout of a usual socket begins again with each byte that comes. Every call raises TimeoutError at the deadline.
    """

    def __init__(self, of: socket.socket) -> None:
        self._socket, self._until_s = of, math.inf
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __repr__(self) -> str:
        return f"TimedSocket({self._socket!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def peer(self) -> str:
        """The address of the other end, without its port."""
        return str(self._socket.getpeername()[0])

    def within(self, seconds: float) -> None:
        """Give what follows `seconds` in total."""
        self._until_s = time.monotonic() + seconds

    def secure(self, wrap: Callable[[socket.socket], ssl.SSLSocket]) -> None:
        """Go on over TLS; `wrap` makes a socket that has not shaken hands. Raises OSError, which ssl.SSLError is."""
        secured = wrap(self._socket)
        self._socket = secured
        self._hurry()
        secured.do_handshake()

    def is_quiet(self) -> bool:
        """Whether it is open at both ends and nothing has come."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def recv(self, size: int, /) -> bytes:
        self._hurry()
        return self._socket.recv(size)

    def recv_into(self, buffer: Any, /) -> int:
        self._hurry()
        return self._socket.recv_into(buffer)

    def sendall(self, data: Any, /) -> None:
        left = memoryview(data)
        while left:
            # sendall of TLS gives each record the whole time
            self._hurry()
            left = left[self._socket.send(left) :]

    def shutdown(self) -> None:
        """Break it off, from any thread. Raises OSError."""
        # not that of TLS, which would let a thread that reads go on in plain text
        socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _hurry(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other end took too long")
        self._socket.settimeout(None if left_s == math.inf else left_s)
