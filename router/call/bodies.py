"""The bodies of the requests that a router reads, parses and holds, within the memory of the SLA file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator
from typing import NamedTuple, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from policies.errors import Overloaded, RequestTooLarge
from router.text.turns import UNFINISHED, Turns, Unfinished, at_once, once, take_turn
from router.waiters import Waiter, Waiters

SLICE_BYTES = 256 * 2**10
"""A body is read in slices of this size: 1 ms each, in which the interpreter is mostly free for others."""

_OBJECT, _STRING, _COMMA = 1200, 220, 64
"""Bytes for each object, text and further element: itself, its parsed fields and its copy for other dialects."""

_COPIES = 3
"""A body as it came, while it is joined, and as a backend gets it."""

_MESSAGE = 800
"""Bytes for each message of a chat over gRPC."""

_TEXT_OBJECT, _TEXT_COMMA = 200, 44
"""Bytes for what is an object, array or element if a text is JSON itself, as the arguments of calls of tools are."""

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_MARKS = b"{[,"

_FEW = 4096
"""In a slice with at most this many quotes, what is beside its texts is copied: 0.3 ms at most, or else 1 ms."""

_VERY_FEW = 64
"""So many quotes are found one by one sooner than as an array."""

_SLOWER = 4
"""The work of a slice with more quotes, relative to others."""

_WIDE = 0xF0
"""The first byte of a character beyond the first 2**16: a text with one takes four bytes for each of its characters."""

_IS_HIGH = np.isin(np.arange(256), list(b"89abAB"))
"""Digits behind the first of \\ud83d, an escape with which such a character begins."""

_AHEAD = 3
"""Bytes by which slices overlap where escapes are looked for, which are one longer."""

_ARRAYS_FROM = 8 * 2**10
"""Size from which marks are counted as arrays: a quarter of the time."""

Codes = NDArray[np.uint8]


class BodyCost(NamedTuple):
    """What a body takes: `size` bytes of memory at most, `parsed` of them for its objects, lists and texts. The more it
    has of these, the longer it takes to parse."""

    size: int
    parsed: int


def cost_in_turns(body: bytes, most: float = math.inf) -> Generator[int, None, BodyCost]:
    """The cost of `body` as JSON. Yields the bytes that were read since, more of them where that took longer.

    It is read no further once it takes more than `most`.
    """
    codes, width, parsed, in_parsed, in_text, is_escaped = np.frombuffer(body, np.uint8), 1, 0, 0, False, False
    for start in range(0, len(body), SLICE_BYTES):
        stop = start + SLICE_BYTES
        piece = codes[start:stop]
        width = max(width, _width(body, start, stop + _AHEAD))
        places: list[int] | None = None
        if is_escaped or body.find(b"\\", start, stop) >= 0:
            quotes, is_escaped = _unescaped_quotes(body[start:stop], is_escaped=is_escaped)
        elif (places := _few_quotes(body, start, stop)) is None:
            quotes = piece == _QUOTE
        if places is None and np.count_nonzero(quotes) <= _FEW:
            places = np.flatnonzero(quotes).tolist()
        work = len(piece)
        if places is not None:
            # nothing is copied but what is beside texts
            texts, ends = (len(places) + in_text) // 2, [*(() if in_text else (-1,)), *places, len(piece)]
            beside = zip(ends[::2], ends[1::2], strict=False)
            copied = b"".join([body[start + end + 1 : start + begin] for end, begin in beside])
            outside = np.frombuffer(copied, np.uint8)
            own_objects, own_lists, own_commas = (_count(outside, mark) for mark in _MARKS)
            in_text ^= len(places) % 2 == 1
        else:
            inside = np.logical_xor.accumulate(quotes)
            if in_text:
                inside = ~inside
            in_text, outsides = bool(inside[-1]), ~inside
            texts = int(np.count_nonzero(quotes & outsides))
            own_objects, own_lists, own_commas = (int(np.count_nonzero((piece == mark) & outsides)) for mark in _MARKS)
            work *= _SLOWER
        # most slices have none of some marks, and that is found first
        objects, lists, commas = (_count(piece, mark) if body.find(mark, start, stop) >= 0 else 0 for mark in _MARKS)
        parsed += own_objects * _OBJECT + (texts + own_lists) * _STRING + own_commas * _COMMA
        in_parsed += (objects - own_objects + lists - own_lists) * _TEXT_OBJECT + (commas - own_commas) * _TEXT_COMMA
        if len(body) * (_COPIES + width) + parsed + in_parsed > most:
            break
        yield work
    return BodyCost(len(body) * (_COPIES + width) + parsed + in_parsed, parsed)


def _few_quotes(body: bytes, start: int, stop: int) -> list[int] | None:
    """Where quotes are in `body[start:stop]`, one found after the other; None if there are many."""
    found, at = list[int](), body.find(b'"', start, stop)
    while at >= 0:
        if len(found) == _VERY_FEW:
            return None
        found.append(at - start)
        at = body.find(b'"', at + 1, stop)
    return found


def _unescaped_quotes(piece: bytes, *, is_escaped: bool) -> tuple[NDArray[np.bool_], bool]:
    """Where texts begin and end in `piece`, the first byte of which may be escaped; and is the byte behind it?"""
    if is_escaped:
        piece = b"_" + piece[1:]
    codes = np.frombuffer(piece, np.uint8)
    slashes = codes == _BACKSLASH
    if np.any(slashes[1:] & slashes[:-1]):
        # pairs from the left: what is left of a run of backslashes escapes what follows it
        piece = piece.replace(rb"\\", b"__")
        codes = np.frombuffer(piece, np.uint8)
        slashes = codes == _BACKSLASH
    quotes = codes == _QUOTE
    quotes[1:] &= ~slashes[:-1]
    return quotes, piece.endswith(b"\\")


def _count(codes: Codes, mark: int) -> int:
    return int(np.count_nonzero(codes == mark))


def rough_cost(body: bytes) -> int:
    """The memory of `body`, at least, at once: for a small one. Its texts count as if they were JSON too."""
    if len(body) < _ARRAYS_FROM:
        objects, quotes, lists, commas = body.count(b"{"), body.count(b'"'), body.count(b"["), body.count(b",")
        width = 1 if body.isascii() and b"\\" not in body else _width(body)
    else:
        codes = np.frombuffer(body, np.uint8)
        objects, quotes, lists, commas = (_count(codes, mark) for mark in b'{"[,')
        width = _width(body)
    parts = objects * _OBJECT + (quotes // 2 + lists) * _STRING + commas * _COMMA
    return len(body) * (_COPIES + width) + parts


def _message_cost(message: bytes) -> int:
    """The same of a message over gRPC: its texts may be JSON, and LF is the tag of the messages of a chat."""
    return rough_cost(message) + message.count(b"\n") * _MESSAGE


def _message_cost_in_turns(message: bytes, _: float = math.inf) -> Generator[int, None, BodyCost]:
    yield len(message)
    cost = _message_cost(message)
    return BodyCost(cost, cost)


def _width(body: bytes, start: int = 0, stop: int | None = None) -> int:
    """Bytes of the texts in `body[start:stop]` for each of their own, once parsed: a text, and half of it again if it
    is JSON itself."""
    codes = np.frombuffer(body, np.uint8)[start:stop]
    highest = codes.max(initial=0)
    if highest >= _WIDE:
        return 6
    has_escape = False
    # one byte is found a hundred times as fast as two
    if body.find(b"\\", start, stop) >= 0:
        escapes = np.flatnonzero((codes[:-_AHEAD] == _BACKSLASH) & (codes[1 : 1 - _AHEAD] == ord("u")))
        if np.any((codes[escapes + 2] | 0x20 == ord("d")) & _IS_HIGH[codes[escapes + 3]]):
            return 6
        has_escape = len(escapes) > 0
    return 3 if has_escape or highest >= 0x80 else 1


class Costs(NamedTuple):
    """Estimates for one kind of body: of a small one at once, and of any in turns, up to a bound."""

    rough: Callable[[bytes], int]
    in_turns: Callable[[bytes, float], Generator[int, None, BodyCost]]


JSON = Costs(rough_cost, cost_in_turns)
PROTOBUF = Costs(_message_cost, _message_cost_in_turns)


_Result = TypeVar("_Result")

SMALL_BYTES = 64 * 2**10
"""Bodies up to here count only once they have come: a connection reads more than that ahead anyway."""

_INLINE_COST = 2**20
"""Bodies are parsed on the event loop if their objects, lists and texts cost up to this, in 3 ms at most; others in a
thread, one after the other."""

INLINE_BYTES = 3 * 2**19
"""Bodies up to this size are read and parsed there, unless they cost more: 0.3 ms and 0.5 ms for a megabyte of text."""

_ARRIVING = 4
"""One in so many bytes is for bodies that arrive; all others are for parsed ones."""

_OF_ONE = 6
"""One request may take one in so many bytes."""

_TURN_BYTES = 2**20

SHARE = 3
"""A tenant may hold this many times what stays free: alone three quarters, each of two three sevenths."""

WAIT_S = 10.0
"""Longest time that a request waits for memory."""

MOST_WAITING = 256
MOST_WAITING_OF_A_TENANT = 64
"""Requests that may wait: each of them keeps up to half a megabyte that its connection has read."""


class Bodies:
    """The memory of all bodies, `most` bytes: a part for those that arrive, and the rest for those that are parsed.

    A body that waits for the second holds some of the first, and never the other way round: they always move on.
    """

    def __init__(self, most: int) -> None:
        self.arriving, self.parsed = Memory(most // _ARRIVING), Memory(most - most // _ARRIVING)
        self.most_of_one = most // _OF_ONE
        """Bytes that one request may take."""
        # one thread, because each that runs makes the event loop wait for the interpreter, up to 5 ms every time
        self.turns = Turns(1, _TURN_BYTES, name="parse")

    def __repr__(self) -> str:
        return f"<Bodies arriving {self.arriving!r}, parsed {self.parsed!r}>"

    def resize(self, most: int) -> None:
        """Hold at most so many bytes from now on."""
        self.arriving.resize(most // _ARRIVING)
        self.parsed.resize(most - most // _ARRIVING)
        self.most_of_one = most // _OF_ONE

    def check(self) -> None:
        """No memory is held; for an idle router."""
        self.arriving.check()
        self.parsed.check()

    def close(self) -> None:
        """End the thread."""
        self.turns.close()


class Held(msgspec.Struct, eq=False):
    """The memory that one call of `tenant` holds, a context manager: it is given back at the end."""

    bodies: Bodies
    tenant: str = ""
    _arriving: int = 0
    _parsed: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Give all of it back."""
        if self._arriving:
            self._leave_arriving()
        if self._parsed:
            self.bodies.parsed.give_back(self.tenant, self._parsed)
            self._parsed = 0

    def __repr__(self) -> str:
        return f"<Held by {self.tenant}: {self._arriving} arriving, {self._parsed} parsed>"

    async def arrive(self, size: int) -> None:
        """Wait for the memory of a body of at most `size` bytes that arrives: its pieces, and all of it joined.

        Raises Overloaded.
        """
        memory = self.bodies.arriving
        await memory.take(self.tenant, 2 * size)
        self._arriving += 2 * size

    async def take(self, size: int, what: str, hint: str) -> None:
        """Hold `size` bytes for `what`. Raises RequestTooLarge with `hint` if that is more than one request may take,
        Overloaded.
        """
        most = self.bodies.most_of_one
        if self._parsed + size > most:
            message = f"{what} would take more than {most >> 20} MiB of memory, which one request may take"
            raise RequestTooLarge(message, hint=f"{hint}, or have the operator raise server.memory")
        await self.bodies.parsed.take(self.tenant, size)
        self._parsed += size

    async def parse(self, body: bytes, read: Callable[[bytes], _Result], costs: Costs = JSON) -> _Result:
        """What `read` makes of `body`, once there is memory for it. Raises RequestTooLarge, Overloaded."""
        bodies, is_quick = self.bodies, False
        if len(body) <= SMALL_BYTES:
            size = costs.rough(body)
            is_quick = size <= _INLINE_COST
        if not is_quick:
            size, parsed = await self._cost(body, costs)
            is_quick = len(body) <= INLINE_BYTES and parsed <= _INLINE_COST
        if not self._parsed and size <= bodies.most_of_one and bodies.parsed.lend(self.tenant, size):
            # as nearly every body
            self._parsed = size
        else:
            await self.take(size, "the body", "send fewer messages, members or token ids")
        result = read(body) if is_quick else await bodies.turns.run(self.tenant, once(lambda: read(body)))
        if self._arriving:
            self._leave_arriving()
        return result

    async def _cost(self, body: bytes, costs: Costs) -> BodyCost:
        """The cost of `body`: of a large one, or one that is slow to read, in turns with those of other tenants."""
        work = costs.in_turns(body, self.bodies.most_of_one)
        cost = take_turn(work, INLINE_BYTES) if len(body) <= INLINE_BYTES else UNFINISHED
        return await self.bodies.turns.run(self.tenant, work) if isinstance(cost, Unfinished) else cost

    async def run(self, work: Generator[int, None, _Result]) -> _Result:
        """The result of `work` on what is held: at once if that is small, or else in turns with other tenants.

        It yields the number of bytes that it has read since.
        """
        if self._parsed + self._arriving <= _INLINE_COST:
            return at_once(work)
        return await self.bodies.turns.run(self.tenant, work)

    def _leave_arriving(self) -> None:
        self.bodies.arriving.give_back(self.tenant, self._arriving)
        self._arriving = 0


class Memory:
    """Lends `most` bytes. Some of it stays free for a tenant that holds nothing, however many hold all they may.

    Tenants that wait get turns in rotation, and so does each request of a tenant.
    """

    def __init__(self, most: int, *, wait_s: float = WAIT_S) -> None:
        self._most, self._wait_s = most, wait_s
        self._held: Counter[str] = Counter()
        self._total = 0
        self._waiters = Waiters[str, int, bool](take_back=self._take_back, left=self._serve)
        self._waiting = self._waiters.by_owner

    def __repr__(self) -> str:
        return f"<Memory {self._total} of {self._most} bytes lent, {self.waiting} requests wait>"

    @property
    def lent(self) -> int:
        """Bytes that are lent now."""
        return self._total

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiters)

    def check(self) -> None:
        """Nothing is lent, and no request waits; for an idle router."""
        assert not self._total, f"{self!r}: memory was not given back"
        assert not self._held, f"{self!r}: tenants hold {self._held}"
        assert not self._waiting, f"{self!r}: a request waits"

    def resize(self, most: int) -> None:
        """Lend `most` bytes from now on; more may be lent until they are given back."""
        self._most = most
        if self._waiting:
            self._serve()

    def lend(self, tenant: str, size: int, *, in_turn: bool = False) -> bool:
        """Lend `size` bytes to `tenant` if it may have them at once; may it? Not before others that wait, unless it is
        `in_turn`."""
        if not size:
            return True
        held = self._held[tenant]
        if held + size > SHARE * (self._most - self._total - size) or (tenant in self._waiting and not in_turn):
            return False
        self._held[tenant] = held + size
        self._total += size
        return True

    async def take(self, tenant: str, size: int) -> None:
        """Lend `size` bytes to `tenant`, perhaps after a while. Raises Overloaded."""
        if self.lend(tenant, size):
            return
        if self._waiters.count_of(tenant) >= MOST_WAITING_OF_A_TENANT or self.waiting >= MOST_WAITING:
            raise _overloaded()
        try:
            await self._waiters.wait(tenant, size, timeout_s=self._wait_s)
        except TimeoutError:
            raise _overloaded() from None

    def give_back(self, tenant: str, size: int) -> None:
        """`tenant` holds `size` bytes less."""
        self._total -= size
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
        if self._waiting:
            self._serve()

    def _serve(self) -> None:
        """Lend to the requests that wait, one of each tenant in turn, until none of the first ones fits."""
        self._waiters.serve(lambda waiter: self.lend(waiter.owner, waiter.wish, in_turn=True) or None)

    def _take_back(self, waiter: Waiter[str, int, bool], _: bool) -> None:
        self.give_back(waiter.owner, waiter.wish)


def _overloaded() -> Overloaded:
    hint = "try again in a moment, or have the operator raise server.memory"
    return Overloaded("the router has no memory left for this request", hint=hint, retry_after_s=1.0)
