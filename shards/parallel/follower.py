"""Every process of a shard but the first: obeys the orders that come through its link."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import msgspec

from shards.exec.network import DrawingNetwork
from shards.kv.copier import InlineCopier
from shards.parallel.leader import PartNetwork
from shards.parallel.link import PartLink
from shards.parallel.orders import (
    Allocate,
    Answer,
    AskRoom,
    BatchReader,
    Compute,
    Copy,
    Host,
    Mask,
    Move,
    Orders,
    Prepare,
    Reserve,
)

_MOST_DUE = 2
"""Steps that a device may have ahead of it."""


class Follower:
    """Makes the calls of the first process on `part`, in their order."""

    def __init__(self, part: PartNetwork, link: PartLink) -> None:
        self._part, self._link = part, link
        self._reader = BatchReader()
        self._copier: InlineCopier | None = None
        self._due: deque[Hashable] = deque()

    def __repr__(self) -> str:
        return f"Follower({self._part!r})"

    def run(self) -> None:
        """Obey until the first process ends the link. Raises what a step raises: the whole shard ends then."""
        encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Orders).decode
        while (message := self._link.receive()) is not None:
            answer = self._obey(decode(message))
            if answer is not None:
                self._link.send(encode(answer))

    def _obey(self, order: Orders) -> Answer | None:
        if isinstance(order, Compute):
            self._compute(order)
        elif isinstance(order, Mask):
            assert isinstance(self._part, DrawingNetwork), "only a device draws"
            self._part.mask(self._due[-1], order.masks)
        elif isinstance(order, Copy):
            assert self._copier is not None, "host memory comes before copies"
            self._copier.start(order.copies)
        elif isinstance(order, Move):
            (self._part.deviations if order.measures else self._part.blend)(order.move)
        else:
            return self._answer(order)
        return None

    def _answer(self, order: Allocate | AskRoom | Host | Reserve | Prepare) -> Answer:
        """Its answer; ValueError and MemoryError are the first process's to report."""
        try:
            if isinstance(order, Allocate):
                self._part.allocate(order.blocks)
            elif isinstance(order, Host):
                self._copier = InlineCopier(self._part.host_memory(order.slots))
            elif isinstance(order, Prepare):
                assert isinstance(self._part, DrawingNetwork), "only a device is prepared"
                self._part.prepare(order.rows, order.drawn)
            elif isinstance(order, Reserve):
                assert isinstance(self._part, DrawingNetwork), "only a device has slots"
                self._part.reserve(order.rows)
            else:
                return Answer(self._room(order))
        except (ValueError, MemoryError) as error:
            return Answer(error=str(error) or "there is not enough memory")
        return Answer()

    def _room(self, order: AskRoom) -> int:
        room: int = self._part.room_bytes(  # type: ignore[attr-defined]
            batch_tokens=order.batch_tokens, rows=order.rows, shards=order.shards
        )
        return room

    def _compute(self, order: Compute) -> None:
        batch = self._reader.read(order)
        if order.drawings is None:
            self._part.forward(batch)
            return
        assert isinstance(self._part, DrawingNetwork), "only a device draws"
        if len(self._due) == _MOST_DUE:
            self._part.collect(self._due.popleft())
        self._due.append(self._part.submit(batch, order.drawings))
