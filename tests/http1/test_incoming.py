"""A message that arrives in pieces takes a bounded amount of memory until it is read."""

from __future__ import annotations

import asyncio

import pytest

from http1.errors import ClientGone
from http1.message import Incoming


def an_incoming() -> Incoming:
    return Incoming()


def put(incoming: Incoming, *pieces: bytes) -> bool:
    for piece in pieces:
        incoming.put(piece)
    return incoming.deliver()


class Pot:
    """What was poured; it wants no more after a piece that ends in "."."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def __call__(self, data: bytes) -> bool:
        if data == b"!":
            raise ClientGone("a client has gone")
        self.pieces.append(data)
        return not data.endswith(b".")


async def pouring(incoming: Incoming, pot: Pot) -> asyncio.Task[bool]:
    task = asyncio.create_task(incoming.pour(pot))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("piece_bytes", [1, 100, 64 * 2**10])
async def test_it_is_full_by_what_its_pieces_take_however_small_they_are(piece_bytes: int) -> None:
    most, pieces = 256 * 2**10, 0
    rooms: list[bool] = []

    class Roomy(Incoming):
        def on_room(self) -> None:
            rooms.append(True)

    incoming = Roomy()
    incoming.unread_bytes = most
    while not incoming.is_full:
        incoming.put(b"a" * piece_bytes)
        pieces += 1
    assert pieces * (piece_bytes + 33) <= most + 64 * 2**10
    assert await incoming.read() == b"a" * piece_bytes * pieces
    assert rooms == [True]
    assert not incoming.is_full


async def test_what_is_poured_comes_in_the_moment_that_it_is_delivered_and_together() -> None:
    incoming, pot = an_incoming(), Pot()
    incoming.put(b"before")
    reading = await pouring(incoming, pot)
    assert pot.pieces == [b"before"]
    assert put(incoming, b"a", b"b")
    assert pot.pieces == [b"before", b"ab"]
    incoming.put(b"last")
    incoming.end()
    assert await reading
    assert pot.pieces == [b"before", b"ab", b"last"]


async def test_a_reader_that_wants_no_more_leaves_the_rest() -> None:
    incoming, pot = an_incoming(), Pot()
    reading = await pouring(incoming, pot)
    assert not put(incoming, b"enough.")
    assert not put(incoming, b"more")
    assert not await reading
    assert pot.pieces == [b"enough."]
    incoming.end()
    assert await incoming.pour(pot)
    assert pot.pieces == [b"enough.", b"more"]


async def test_a_reader_gets_its_own_error_and_what_it_failed_with_after_what_came_before() -> None:
    incoming = an_incoming()
    reading = await pouring(incoming, Pot())
    assert not put(incoming, b"!")
    with pytest.raises(ClientGone):
        await reading
    pot = Pot()
    reading = await pouring(incoming, pot)
    incoming.put(b"first")
    incoming.fail(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await reading
    assert pot.pieces == [b"first"]


async def test_a_reader_that_is_cancelled_gets_nothing_more() -> None:
    incoming, pot = an_incoming(), Pot()
    reading = await pouring(incoming, pot)
    reading.cancel()
    assert not put(incoming, b"late")
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert pot.pieces == []
    assert await incoming.read() == b"late"


async def test_a_reader_that_is_cancelled_while_it_fails_is_cancelled() -> None:
    incoming = an_incoming()

    def into(data: bytes) -> bool:
        reading.cancel()
        raise ClientGone("a client has gone")

    reading = asyncio.create_task(incoming.pour(into))
    await asyncio.sleep(0)
    assert not put(incoming, b"a")
    with pytest.raises(asyncio.CancelledError):
        await reading


def test_what_came_as_a_whole_and_is_small_needs_no_reader() -> None:
    incoming = an_incoming()
    incoming.put(b"half")
    assert incoming.arrived(1000) is None
    incoming.put(b" and half")
    incoming.end()
    assert incoming.arrived(5) is None
    assert incoming.arrived(1000) == b"half and half"
    empty = an_incoming()
    empty.end()
    assert empty.arrived(1000) == b""


async def test_much_at_once_is_poured_in_slices_with_turns_for_others() -> None:
    incoming, pot, turns = an_incoming(), Pot(), 0
    task = await pouring(incoming, pot)
    data = bytes(range(97, 122)) * 8000
    assert not put(incoming, data)
    incoming.end()
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert await task
    assert b"".join(pot.pieces) == data
    assert max(map(len, pot.pieces)) <= 32 << 10
    assert turns >= len(pot.pieces) == 7


async def test_a_reader_that_wants_no_more_of_a_slice_gets_the_rest_later() -> None:
    incoming, pot = an_incoming(), Pot()
    data = b"a" * ((32 << 10) - 1) + b"." + b"b" * 50_000
    incoming.put(data)
    incoming.end()
    assert not await incoming.pour(pot)
    assert await incoming.pour(pot)
    assert b"".join(pot.pieces) == data
