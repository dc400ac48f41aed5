"""A message that arrives in pieces takes a bounded amount of memory until it is read."""

from __future__ import annotations

import pytest

from http1.incoming import Incoming


@pytest.mark.parametrize("piece_bytes", [1, 100, 64 * 2**10])
async def test_it_is_full_by_what_its_pieces_take_however_small_they_are(piece_bytes: int) -> None:
    most, pieces = 256 * 2**10, 0
    rooms: list[bool] = []
    incoming = Incoming(most, lambda: rooms.append(True), lambda: None)
    while not incoming.is_full:
        incoming.put(b"a" * piece_bytes)
        pieces += 1
    assert pieces * (piece_bytes + 33) <= most + 64 * 2**10
    assert await incoming.read() == b"a" * piece_bytes * pieces
    assert rooms == [True]
    assert not incoming.is_full
