"""What messages of both directions have: header fields, a body between its parser and its reader, and a deadline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping

Lines = Mapping[str, str] | bytes
"""Fields to send: by name, or as `header_lines` made them before."""

EMPTY_LINE = b"\r\n\r\n"
"""With the end of the line before it: the end of a head, and of a body in chunks (RFC 9112, sections 2.1 and 7.1)."""

_FRAMING = frozenset({"connection", "content-length", "date", "transfer-encoding"})

_POURED_BYTES = 32 << 10
"""What is poured at once, at most."""

_BESIDE_BYTES = 48
"""What a piece takes beside its bytes: a client may send them one by one, in chunks of their own."""


class Headers(Mapping[str, str]):
    """The fields in `lines`, which a parser has accepted, by name in any case. Fields of one name are one value, as RFC
    9110 joins them (5.2).

    `lowered` are all of them by lower-case name; it may not be changed. Bytes outside of ASCII are read as UTF-8; what
    is none becomes U+FFFD, so that each value can be written again.
    """

    __slots__ = ("lowered",)

    def __init__(self, lines: bytes | bytearray) -> None:
        by_name: dict[str, str] = {}
        for line in lines.decode("utf-8", "replace").split("\r\n"):
            name, colon, value = line.partition(":")
            if colon:
                name, value = name.lower(), value.strip(" \t")
                by_name[name] = f"{by_name[name]}, {value}" if name in by_name else value
        self.lowered = by_name

    def __repr__(self) -> str:
        # values may be keys
        return f"<Headers {', '.join(self)}>"

    def __getitem__(self, name: str) -> str:
        return self.lowered[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.lowered)

    def __len__(self) -> int:
        return len(self.lowered)


def header_lines(fields: Iterable[tuple[str, str]]) -> bytes:
    """`fields` as they are sent, each with its line end.

    Raises ValueError for a line break or a NUL in a field, which would begin another one, and for names that say how a
    message is framed: its sender writes those; and for half a surrogate pair.
    """
    count, lines = 0, []
    for name, value in fields:
        if name.lower() in _FRAMING:
            raise ValueError(f"the header {name} is not the caller's to set")
        lines.append(f"{name}: {value}\r\n")
        count += 1
    text = "".join(lines)
    if text.count("\n") != count or text.count("\r") != count or "\0" in text:
        raise ValueError("a header with a line break or a NUL")
    return text.encode()


def appended(before: bytes | bytearray, data: bytes) -> bytes | bytearray:
    """`before` and `data`. Copies what came before only once, however many pieces follow."""
    if not before:
        return data
    whole = before if isinstance(before, bytearray) else bytearray(before)
    whole += data
    return whole


def until_empty_line(before: bytes | bytearray, data: bytes) -> int:
    """How much of `data`, which follows `before`, goes to the end of the first empty line; all of it without one."""
    before = before[-3:]
    at = (before + data if before else data).find(EMPTY_LINE)
    return len(data) if at < 0 else at + len(EMPTY_LINE) - len(before)


class Incoming:
    """A message with a body that comes in. Filled by `put`, until it has all of its `content_length`, or `end` or
    `fail` is called; emptied by one reader.

    It `is_full` above `unread_bytes`: its sender should pause until there is room. `received` is how many bytes came.
    """

    content_length: int | None = None
    """None: the sender has not told it."""
    unread_bytes = 256 << 10
    is_ended = is_full = False
    received = 0
    _pieces: list[bytes] | tuple[()] = ()
    _size = 0
    _error: Exception | None = None
    _waiter: asyncio.Future[bool] | None = None
    _into: Callable[[bytes], bool] | None = None

    def on_room(self) -> None:
        """It was full, and is read from again."""

    def on_wait(self) -> None:
        """Its reader begins to wait."""

    @property
    def is_awaited(self) -> bool:
        """Does a reader wait?"""
        return self._waiter is not None and not self._waiter.done()

    def put(self, data: bytes) -> None:
        """`data` came, which is not more than there is."""
        if self._pieces:
            self._pieces.append(data)
        else:
            self._pieces = [data]
        size = len(data)
        self.received += size
        self._size += size + _BESIDE_BYTES
        if self._size > self.unread_bytes:
            self.is_full = True
        if self.received == self.content_length:
            self.is_ended = True
        if self._waiter is not None and (self.is_ended or self._into is None):
            self._wake()

    def deliver(self) -> bool:
        """Give a reader that pours what was put since the last time; does it wait for more?"""
        into, waiter, pieces = self._into, self._waiter, self._pieces
        if into is None or waiter is None or waiter.done() or not pieces:
            return False
        if self._size > _POURED_BYTES:
            self._wake()
            return False
        self._pieces, self._size = (), 0
        if self.is_full:
            self._has_room()
        try:
            goes_on = into(pieces[0] if len(pieces) == 1 else b"".join(pieces))
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

    def arrived(self, most_bytes: int) -> bytes | None:
        """All of the body, if that came already and is at most so long; else it is to be read."""
        if not self.is_ended or self.is_full or self._size > most_bytes:
            return None
        pieces, self._pieces, self._size = self._pieces, (), 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self) -> bytes:
        """What came since the last time, as it was sent; nothing at the end. Raises what it failed with."""
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
            if self._size > _POURED_BYTES:
                data = self._taken()
                for at in range(0, len(data), _POURED_BYTES):
                    if not into(data[at : at + _POURED_BYTES]):
                        self._put_back(data[at + _POURED_BYTES :])
                        return False
                    # others have their turn: events may have two bytes each
                    await asyncio.sleep(0)
            elif self._pieces:
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
        self._pieces, self._size = (), 0
        if self.is_full:
            self._has_room()
        return data

    def _put_back(self, data: bytes) -> None:
        if data:
            self._pieces, self._size = [data, *self._pieces], self._size + len(data) + _BESIDE_BYTES

    def _has_room(self) -> None:
        self.is_full = False
        self.on_room()

    async def _wait(self) -> bool:
        """Wait until something was put, or it was ended; False: the reader that pours wants no more."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            self.on_wait()
            return await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(True)


class Deadline:
    """Calls `late` once its moment has passed.

    A timer of the event loop is made only for an earlier moment than the present timer's: moving on costs a look at the
    clock. The moment `at` itself may be set to a later one. `cancel` it at the end, which lets go of the timer and of
    `late`.
    """

    __slots__ = ("_armed_at", "_late", "_loop", "_timer", "at")

    def __init__(self, late: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._late, self._loop = late, loop
        self.at = self._armed_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return "<Deadline>" if self.at == math.inf else f"<Deadline in {self.at - self._loop.time():.1f} s>"

    def within(self, seconds: float) -> None:
        """Be late `seconds` from now."""
        self.at = at = self._loop.time() + seconds
        if at < self._armed_at:
            self._arm(at)

    def clear(self) -> None:
        """Never be late."""
        self.at = math.inf

    def cancel(self) -> None:
        """Never be late, and leave no timer behind."""
        self.at = self._armed_at = math.inf
        # a method of the object that has this deadline: the two would wait for the garbage collector
        self._late = _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_at, self._timer = at, self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._armed_at, self._timer = math.inf, None
        if self.at <= self._loop.time():
            self.at = math.inf
            self._late()
        elif self.at < math.inf:
            self._arm(self.at)


def _nothing() -> None:
    pass
