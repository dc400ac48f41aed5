"""Scribe: writes snapshots of the learned blocks, a slice at a time, and reads the published one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from router.fleet.beliefs import Beliefs
from router.shared.replicas.shelf import Shelf, Superseded
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
"""Share of the time between two snapshots: a router keeps the lease so long, and may then write the next one too."""


class Taken(NamedTuple):
    """A snapshot was taken over: the stream continues after `position`, and entries about a `covered` backend are old
    up to the position given there."""

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

    `on_event` gets `replicas_snapshot_written`, `_unwritten` (Redis failed), `_read`, and for unusable ones
    `_broken`, `_old` (the stream has dropped the entries that follow) and `_foreign` (of another version).
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
        """Write one slice, if a snapshot is due; this router has read the stream up to `position`. Never raises
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
        """Take over the published snapshot; None if there is no usable one, and then nothing was changed.

        `is_lost`: has the stream dropped entries after this position? Raises StoreFailed.
        """
        sealed = await self.calls.run(self.shelf.header)
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
            # two or three milliseconds each: let requests run in between
            await asyncio.sleep(0)
            self.beliefs.take_over(piece.picture(), counts=piece.counts)
            covered[piece.backend] = piece.position
        self.on_event("replicas_snapshot_read")
        return Taken(header.position, covered)

    async def close(self) -> None:
        """Close the shelf."""
        await self.shelf.close()

    async def _begun(self) -> _Draft | None:
        """A new draft, if it is due and no other router writes one."""
        now = self.clock()
        if now < self._next_at:
            return None
        self._next_at = now + self.every_s
        if not await self.calls.run(self.shelf.claim, self.by, _LEASE_SHARE * self.every_s):
            return None
        return _Draft(uuid.uuid4().hex, self._position, self._encoded())

    async def _go_on(self, draft: _Draft) -> None:
        if some := list(islice(draft.pieces, _WRITTEN_AT_ONCE)):
            await self.calls.run(self.shelf.append, draft.name, some)
            draft.written += len(some)
            return
        header = Header(VERSION, draft.name, draft.written, draft.position)
        self._draft = None
        try:
            before = await self.calls.run(self.shelf.publish, draft.name, encode(header), self.by)
        except Superseded:
            # this router stood still for longer than its claim held, and a newer snapshot may be there
            self.on_event("replicas_snapshot_unwritten")
            return
        self.on_event("replicas_snapshot_written")
        try:
            if before is not None:
                await self.calls.run(self.shelf.outdate, decode_header(before).name)
        except Unfit:
            pass  # of another program; its pieces expire

    def _encoded(self) -> Iterator[bytes]:
        """All pieces. Each backend's picture is made only when it is written, so it is up to date then."""
        left, names = self.most_bytes // KEY_BYTES, self.beliefs.learnt_of()
        for place, name in enumerate(names):
            picture = self.beliefs.picture(name, left // (len(names) - place))
            if picture is not None:
                left -= len(picture)
                position, counts = self._position, self.beliefs.counts_cached(name)
                yield from (encode(Residence.of(part, position, counts=counts)) for part in picture.parts(MOST_KEYS))

    async def _pieces_of(self, header: Header) -> list[Residence]:
        """All pieces of a snapshot. Raises Unfit: nothing of a broken snapshot is used."""
        pieces: list[Residence] = []
        start = 0
        while start < header.pieces:
            count = min(_READ_AT_ONCE, header.pieces - start)
            some = await self.calls.run(self.shelf.pieces, header.name, start, count)
            if len(some) != count:
                raise Unfit("broken")
            pieces += [piece for piece in map(decode_piece, some) if piece is not None]
            start += count
        return pieces
