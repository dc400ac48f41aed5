"""The order of a prompt's documents, where the client left it open: the one of which a backend holds most. Pure.

A prefix cache holds beginnings of prompts, so the orders that it holds form a tree: behind a block, the blocks that
continue it. The search descends this tree with the documents of one prompt, by the keys that their blocks would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

BLOCK_BYTES = 256
"""Bytes of one block of a prompt: 64 token ids of 4 bytes, or a chunk of text."""

MOST_TRIED = 1500
"""Most documents that one search tries, each at some place: about 1.5 ms."""


class Holders(Protocol):
    """The backends that hold blocks, as bits of a mask. It does not change during a search."""

    @property
    def all(self) -> int:
        """Every backend that may hold any."""
        ...

    def of(self, key: int, depth: int, among: int) -> int:
        """Those of `among` that hold the block `key`, which has `depth` blocks before it."""
        ...


class Order(NamedTuple):
    """`places` are the numbers of the documents in their order. `held` blocks at the beginning of the prompt are held
    by one backend, those before the first document included.
    """

    places: tuple[int, ...]
    held: int


class _Spot(NamedTuple):
    """A spot in a prompt behind `depth` blocks, which all of `among` hold, the last with the key `key`, and `rest`,
    which is less than a block.
    """

    depth: int
    key: int
    among: int
    rest: bytes = b""

    def behind(self, data: bytes, holders: Holders) -> _Spot:
        """The spot behind `data`; with none in `among` if not all of its blocks are held, behind those that are."""
        depth, key, among, rest = self
        data = rest + data
        for at in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
            longer = xxh3_64_intdigest(data[at : at + BLOCK_BYTES], key)
            left = holders.of(longer, depth, among)
            if not left:
                return _Spot(depth, key, 0)
            depth, key, among = depth + 1, longer, left
        return _Spot(depth, key, among, data[len(data) - len(data) % BLOCK_BYTES :])


class _Path:
    """Documents one behind the other up to `spot`, all held. Of the `others`, the first `tried` were tried there."""

    def __init__(self, places: tuple[int, ...], others: Sequence[int], spot: _Spot) -> None:
        self.places, self.others, self.spot, self.tried = places, others, spot, 0

    def __repr__(self) -> str:
        return f"<_Path {self.places}, {self.tried} of {len(self.others)} tried>"


def best_order(
    start: bytes,
    documents: Sequence[bytes],
    *,
    root: int,
    holders: Holders,
    fixed: int = 0,
    most_tried: int = MOST_TRIED,
) -> Order:
    """The order of `documents` of which the most blocks are held behind `start`, the prompt before the first of them.

    All are token ids or all are text; keys are below `root`. `documents` come in the order that is best where nothing
    is held, and the first `fixed` of them stay in front. The best is found unless it takes more than `most_tried`.
    """
    spot, everything = _Spot(0, root, holders.all).behind(start, holders), range(len(documents))
    for place in range(fixed):
        if spot.among:
            spot = spot.behind(documents[place], holders)
    if not spot.among:
        return Order(tuple(everything), spot.depth)
    search = _Search(documents, holders, most_tried)
    places, held = search.run(_Path(tuple(range(fixed)), everything[fixed:], spot))
    chosen = frozenset(places)
    return Order((*places, *(place for place in everything if place not in chosen)), held)


class _Search:
    """Dives along the first documents that are held, then tries what was left out on the way, near the root first."""

    def __init__(self, documents: Sequence[bytes], holders: Holders, most_tried: int) -> None:
        self._documents, self._holders, self._tries = documents, holders, most_tried
        self._best: tuple[int, ...] = ()
        self._held = 0

    def __repr__(self) -> str:
        return f"<_Search {self._best}, {self._held} blocks, {self._tries} tries left>"

    def run(self, path: _Path) -> tuple[tuple[int, ...], int]:
        """The beginning of an order, behind `path`, with the most held blocks, and their number."""
        spot = path.spot
        size = len(spot.rest) + sum(len(self._documents[place]) for place in path.others)
        most = spot.depth + size // BLOCK_BYTES
        self._best, self._held = path.places, spot.depth
        unfinished = deque([path])
        while unfinished and self._tries and self._held < most:
            path = unfinished.popleft()
            while (longer := self._longer(path)) is not None:
                unfinished.append(path)
                path = longer
        return self._best, self._held

    def _longer(self, path: _Path) -> _Path | None:
        """`path` with the next of its others that is held behind it whole; None if there is none."""
        spot, of, others = path.spot, self._holders.of, path.others
        depth, key, among, rest = spot
        room = BLOCK_BYTES - len(rest)
        while path.tried < len(others) and self._tries:
            place = others[path.tried]
            path.tried += 1
            self._tries -= 1
            data = self._documents[place]
            # most are not held at all, which their first block shows
            if len(data) >= room and not of(xxh3_64_intdigest(rest + data[:room], key), depth, among):
                continue
            behind, places = spot.behind(data, self._holders), (*path.places, place)
            if behind.depth > self._held:
                self._best, self._held = places, behind.depth
            if behind.among:
                at = path.tried - 1
                return _Path(places, (*others[:at], *others[at + 1 :]), behind)
        return None
