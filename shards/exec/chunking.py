"""The documents of a request while their chunks are prepared. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from shards.kv.chunks import DocumentChunk

MOST_AT_ONCE = 4
"""Chunks that are computed side by side for one request."""


class ChunkKey(NamedTuple):
    """The name of the request that computes the chunk of a document: it is the engine's own, and no report has it."""

    request: Hashable
    document: int


class Chunking:
    """The chunks of a request's documents, in order, which are blended with a `budget` (0 to 1) computed again.

    The chunks of the documents `due` and `awaited` are computed first; those that were computed for this request, and
    not found in a cache, are `fresh`. The request `is_ready` once there are none left, and may then start.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.chunks: tuple[DocumentChunk, ...] = ()
        self.due: deque[int] = deque()
        self.awaited: set[int] = set()
        self.fresh: set[int] = set()
        self.is_ready = False

    def __repr__(self) -> str:
        return f"Chunking({len(self.chunks)}, {len(self.due)} due, {len(self.awaited)} awaited)"

    def prepare(self, chunks: Iterable[DocumentChunk], due: Iterable[int]) -> None:
        """Take the `chunks`, after the whole prompt has arrived; those with the numbers `due` are to be computed."""
        self.chunks, self.due = tuple(chunks), deque(due)

    def begin(self) -> list[int]:
        """The numbers of the chunks to compute next, which are awaited from now on."""
        begun = [self.due.popleft() for _ in range(min(len(self.due), MOST_AT_ONCE - len(self.awaited)))]
        self.awaited.update(begun)
        self.is_ready = not self.awaited
        return begun

    def end(self, document: int, *, is_fresh: bool) -> None:
        """Note that the chunk of `document` is no longer computed."""
        self.awaited.remove(document)
        if is_fresh:
            self.fresh.add(document)
