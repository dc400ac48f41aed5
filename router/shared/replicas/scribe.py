"""Scribe: writes snapshots of what was learnt, a slice at a time, and reads the one that is there."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from router.fleet.beliefs import Beliefs
from router.shared.replicas.shelf import Shelf
from router.shared.replicas.snapshot import (
    KEY_BYTES,
    MOST_BYTES,
    MOST_KEYS,
    VERSION,
    Header,
    Residence,
    Unfit,
    decode_header,
    decode_piece,
    encode,
)
from router.shared.store.base import StoreFailed
from router.shared.store.calls import Calls

_WRITTEN_AT_ONCE, _READ_AT_ONCE = 8, 16
"""Pieces of one round trip, about 100 and 200 KiB, so that neither Redis nor the event loop is held up."""

_LEASE_SHARE = 0.9
"""Of the time between two snapshots: whoever has the lease may write the next one too."""


class Taken(NamedTuple):
    """A snapshot was taken over: the stream goes on after `position`, and of a backend that is `covered` nothing is
    news up to the place that stands there."""

    position: str
    covered: Mapping[str, str]


@dataclass(slots=True)
class _Draft:
    """A snapshot that is being written."""

    name: str
    position: str
    pieces: Iterator[bytes]
    written: int = 0


@dataclass(slots=True)
class Scribe:
    """Keeps a snapshot of `beliefs` on `shelf`, a new one every `every_s`, written by any one of the routers.

    `on_event` hears of `replicas_snapshot_written`, `_unwritten` (Redis failed), `_read`, and of those that are of no
    use: `_broken`, `_old` (the stream no longer has what follows) and `_foreign` (of another version).
    """

    shelf: Shelf
    by: str
    beliefs: Beliefs
    clock: Callable[[], float]
    calls: Calls
    every_s: float
    on_event: Callable[[str], None]
    most_bytes: int = MOST_BYTES
    _draft: _Draft | None = None
    _next_at: float = field(init=False)
    _position: str = ""

    def __post_init__(self) -> None:
        self._next_at = self.clock() + self.every_s

    async def write(self, position: str) -> None:
        """Write one slice, if a snapshot is due; all that the stream said up to `position` was heard here. Never raises
        StoreFailed."""
        self._position = position
        try:
            if self._draft is None:
                self._draft = await self._begun()
            if self._draft is not None:
                await self._go_on(self._draft)
        except StoreFailed:
            self._draft = None
            self.on_event("replicas_snapshot_unwritten")

    async def read(self, is_lost: Callable[[str], bool]) -> Taken | None:
        """Take over the snapshot that is there; None if there is none of any use, and then nothing was taken over.

        `is_lost`: does the stream no longer have all that follows this place? Raises StoreFailed.
        """
        sealed = await self.calls.run(self.shelf.header())
        if sealed is None:
            return None
        try:
            header = decode_header(sealed)
            if is_lost(header.position):
                raise Unfit("old")
            pieces = await self._pieces_of(header)
        except Unfit as unfit:
            self.on_event(f"replicas_snapshot_{unfit.why}")
            return None
        covered = {}
        for piece in pieces:
            # two or three milliseconds each: requests go in between
            await asyncio.sleep(0)
            self.beliefs.take_over(piece.picture(), counts=piece.counts)
            covered[piece.backend] = piece.position
        self.on_event("replicas_snapshot_read")
        return Taken(header.position, covered)

    async def close(self) -> None:
        """Let go of the shelf."""
        await self.shelf.close()

    async def _begun(self) -> _Draft | None:
        """A new draft, if it is time for one and nobody else writes."""
        now = self.clock()
        if now < self._next_at:
            return None
        self._next_at = now + self.every_s
        if not await self.calls.run(self.shelf.claim(self.by, _LEASE_SHARE * self.every_s)):
            return None
        return _Draft(uuid.uuid4().hex, self._position, self._encoded())

    async def _go_on(self, draft: _Draft) -> None:
        if some := list(islice(draft.pieces, _WRITTEN_AT_ONCE)):
            await self.calls.run(self.shelf.append(draft.name, some))
            draft.written += len(some)
            return
        header = Header(VERSION, draft.name, draft.written, draft.position)
        before = await self.calls.run(self.shelf.publish(draft.name, encode(header)))
        self._draft = None
        self.on_event("replicas_snapshot_written")
        try:
            if before is not None:
                await self.calls.run(self.shelf.outdate(decode_header(before).name))
        except Unfit:
            pass  # of somebody else, whose pieces go by themselves

    def _encoded(self) -> Iterator[bytes]:
        """All pieces. A backend's picture is made when its turn has come, of what was heard until then."""
        left, names = self.most_bytes // KEY_BYTES, self.beliefs.learnt_of()
        for place, name in enumerate(names):
            picture = self.beliefs.picture(name, left // (len(names) - place))
            if picture is not None:
                left -= len(picture)
                position, counts = self._position, self.beliefs.counts_cached(name)
                yield from (encode(Residence.of(part, position, counts=counts)) for part in picture.parts(MOST_KEYS))

    async def _pieces_of(self, header: Header) -> list[Residence]:
        """All pieces of a snapshot, or Unfit: of a broken one nothing is believed."""
        pieces: list[Residence] = []
        start = 0
        while start < header.pieces:
            count = min(_READ_AT_ONCE, header.pieces - start)
            some = await self.calls.run(self.shelf.pieces(header.name, start, count))
            if len(some) != count:
                raise Unfit("broken")
            pieces += [piece for piece in map(decode_piece, some) if piece is not None]
            start += count
        return pieces
