"""A socket with a deadline: a peer that sends byte by byte cannot keep a thread busy. Torch-free."""

from __future__ import annotations

import math
import socket
import time
from typing import Any


class TimedSocket(socket.socket):
    """A connected socket, taken over from `of`: all that follows a call of `within` has so many seconds in total.

    A timeout of a usual socket begins again with each byte that comes. Sending and receiving raise TimeoutError at the
    deadline.
    """

    def __init__(self, of: socket.socket) -> None:
        super().__init__(of.family, of.type, of.proto, fileno=of.detach())
        self._until_s = math.inf
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def within(self, seconds: float) -> None:
        """Give what follows `seconds` in total."""
        self._until_s = time.monotonic() + seconds

    def is_quiet(self) -> bool:
        """Whether it is open at both ends and nothing has come."""
        self.setblocking(False)
        try:
            super().recv(1)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """See socket."""
        self._hurry()
        return super().recv(size, flags)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """See socket."""
        self._hurry()
        return super().recv_into(buffer, nbytes, flags)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """See socket."""
        self._hurry()
        super().sendall(data, flags)

    def _hurry(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other end took too long")
        self.settimeout(None if left_s == math.inf else left_s)
