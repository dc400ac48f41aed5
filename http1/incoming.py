"""The bytes of one body between the parser that finds them and the one reader that takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

_BESIDE_BYTES = 48
"""What a piece takes beside its bytes: a client may send them one by one, in chunks of their own."""


class Incoming:
    """Filled by `put`, then `end` or `fail`; emptied by one reader.

    It `is_full` above `most_bytes`: its sender should pause until `on_room` is called. `on_wait` is called when the
    reader begins to wait.
    """

    __slots__ = (
        "_error",
        "_into",
        "_most_bytes",
        "_on_room",
        "_on_wait",
        "_pieces",
        "_size",
        "_waiter",
        "is_ended",
        "is_full",
    )

    def __init__(self, most_bytes: int, on_room: Callable[[], None], on_wait: Callable[[], None]) -> None:
        self._most_bytes, self._on_room, self._on_wait = most_bytes, on_room, on_wait
        self._pieces: list[bytes] = []
        self._size = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._into: Callable[[bytes], bool] | None = None
        self.is_ended = self.is_full = False

    def __repr__(self) -> str:
        return f"<Incoming {self._size} bytes{', ended' if self.is_ended else ''}>"

    @property
    def is_awaited(self) -> bool:
        """Does a reader wait?"""
        return self._waiter is not None and not self._waiter.done()

    def put(self, data: bytes) -> None:
        """`data` came."""
        self._pieces.append(data)
        self._size += len(data) + _BESIDE_BYTES
        self.is_full = self._size > self._most_bytes
        if self._waiter is not None and self._into is None:
            self._wake()

    def deliver(self) -> bool:
        """Give a reader that pours what was put since the last time; does it wait for more?"""
        into, waiter = self._into, self._waiter
        if into is None or waiter is None or waiter.done() or not self._pieces:
            return False
        try:
            goes_on = into(self._taken())
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the reader raises it
            if not waiter.done():
                waiter.set_exception(error)
            return False
        if not goes_on and not waiter.done():
            waiter.set_result(False)
        return goes_on

    def end(self) -> None:
        """All of it came."""
        self.is_ended = True
        if self._waiter is not None:
            self._wake()

    def fail(self, error: Exception) -> None:
        """No more will come, because of `error`: the reader is told after what came before. The first error counts."""
        if self._error is None and not self.is_ended:
            self._error = error
            if self._waiter is not None:
                self._wake()

    def whole(self, most_bytes: int) -> bytes | None:
        """All of it, if that came already and is at most so long."""
        if not self.is_ended or self._size > most_bytes:
            return None
        return self._taken()

    async def read(self) -> bytes:
        """What came since the last time; nothing at the end. Raises what it failed with."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.is_ended:
                return b""
            await self._wait()
        return self._taken()

    async def pour(self, into: Callable[[bytes], bool]) -> bool:
        """Give `into` what comes in the moment that it is delivered, without a switch of tasks, until that returns
        False: is this the end? Raises what it failed with, and what `into` raises.
        """
        while True:
            if self._pieces:
                if not into(self._taken()):
                    return False
            elif self._error is not None:
                raise self._error
            elif self.is_ended:
                return True
            else:
                self._into = into
                try:
                    if not await self._wait():
                        return False
                finally:
                    self._into = None

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, as it comes. Raises as `read` does."""
        while data := await self.read():
            yield data

    def _taken(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        if self.is_full:
            self.is_full = False
            self._on_room()
        return data

    async def _wait(self) -> bool:
        """Wait until something was put, or it was ended; False: the reader that pours wants no more."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            self._on_wait()
            return await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(True)
