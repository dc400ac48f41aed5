"""Blends the KV of cached chunks into prompts. Torch-free: the network moves the KV."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shards.exec.moves import BlendingNetwork, KvMove
from shards.exec.sequence import Sequence
from shards.exec.skips import budget_tokens, kept_spans
from shards.kv.chunks import DocumentChunk
from shards.kv.deviations import Deviations
from shards.kv.keys import chunk_domain
from shards.kv.pool import BlockPool, OutOfBlocks
from shards.kv.prefix import CachedBlock
from shards.kv.table import BlockTable


class Blender:
    """Gives sequences the KV of their documents' chunks, as far as it is on the device.

    A document is computed in place the first time, and then its KV is compared with that of its chunk. From then on
    the chunk's KV is copied, its keys are rotated by the distance, and only the tokens that deviated most are computed
    again. A document without a chunk on the device is computed in place.
    """

    def __init__(self, pool: BlockPool, network: BlendingNetwork) -> None:
        self._pool, self._network = pool, network
        self.deviations = Deviations()

    def __repr__(self) -> str:
        return f"Blender({self.deviations!r})"

    def lacks(self, chunk: DocumentChunk, domain: str) -> bool:
        """Whether the whole chunk is not on the device."""
        return self._path(chunk, domain) is None

    def blend(self, sequence: Sequence) -> bool:
        """Give `sequence` the next of its documents that have chunks. False if it must wait, for a copy to the device.

        Measures documents that were computed in place since.
        """
        documents = sequence.request.documents
        if documents is None or not documents.is_ready:
            return True
        self.measure(sequence)
        while sequence.settled < len(documents.chunks):
            chunk = documents.chunks[sequence.settled]
            if chunk.stop > sequence.computed_tokens and not self._settle(sequence, chunk):
                return False
            sequence.settled += 1
        return True

    def measure(self, sequence: Sequence) -> None:
        """Compare the documents that `sequence` has computed in place with their chunks."""
        documents, table = sequence.request.documents, sequence.table
        if documents is None or table.is_parked:
            return
        for document in list(sequence.unmeasured):
            chunk = documents.chunks[document]
            if chunk.stop > sequence.computed_tokens:
                break
            sequence.unmeasured.remove(document)
            path = self._path(chunk, table.domain)
            if path is not None and self._has_landed(path):
                move = _move(path, chunk, table, chunk.start, chunk.stop)
                self.deviations.learn(table.domain, path[-1].key, self._network.deviations(move))

    def _settle(self, sequence: Sequence, chunk: DocumentChunk) -> bool:
        """Blend `chunk` into `sequence`, or leave its document to be computed. False if it cannot be read yet."""
        path = self._path(chunk, sequence.table.domain)
        if path is None:
            return True
        if not self._has_landed(path):
            return False
        documents = sequence.request.documents
        assert documents is not None, "only a request with documents has chunks"
        tokens = chunk.stop - chunk.start
        computed = budget_tokens(tokens, documents.budget)
        deviations = self.deviations.of(sequence.table.domain, path[-1].key, tokens)
        if deviations is None and 0 < computed < tokens:
            sequence.unmeasured.append(sequence.settled)
            return True
        # the last token of a prompt is always computed: its logits are needed
        start, stop = sequence.computed_tokens, min(chunk.stop, sequence.known_tokens - 1)
        ranked = np.zeros(tokens, dtype=np.float32) if deviations is None else deviations
        spans = kept_spans(ranked, computed, chunk.start)
        spans = [(max(begin, start), min(end, stop)) for begin, end in spans if begin < stop and end > start]
        if spans:
            self._copy(sequence, chunk, spans)
        return True

    def _copy(self, sequence: Sequence, chunk: DocumentChunk, spans: list[tuple[int, int]]) -> None:
        """Let `sequence` skip `spans`, and give it the chunk's KV there, if there are blocks for it."""
        table, documents = sequence.table, sequence.request.documents
        held = BlockTable(self._pool, chunk_domain(table.domain), rank=table.rank)
        held.follow(chunk.block_tokens, limit=chunk.blocks)
        try:
            table.grow(spans[-1][1])
            self._network.blend(_move(held.path, chunk, table, spans[0][0], spans[-1][1]))
        except OutOfBlocks:
            return
        finally:
            # later copies into these blocks come after this one, on every device
            held.release()
        assert documents is not None, "only a request with documents has chunks"
        sequence.skip(spans, is_reused=sequence.settled not in documents.fresh)

    def _path(self, chunk: DocumentChunk, domain: str) -> list[CachedBlock] | None:
        """The chunk's blocks, all on the device; None if they are not."""
        path: list[CachedBlock] = []
        domain = chunk_domain(domain)
        self._pool.prefix.extend_path(path, chunk.block_tokens, limit=chunk.blocks, domain=domain)
        return path if len(path) == chunk.blocks and all(cached.block is not None for cached in path) else None

    def _has_landed(self, path: Iterable[CachedBlock]) -> bool:
        return self._pool.has_landed([cached.block for cached in path if cached.block is not None])


def _move(path: Iterable[CachedBlock], chunk: DocumentChunk, table: BlockTable, start: int, stop: int) -> KvMove:
    """The copy of positions `start` up to `stop` of the prompt from the chunk's blocks."""
    source = tuple(cached.block for cached in path if cached.block is not None)
    return KvMove(source, start - chunk.start + chunk.sink_tokens, table.ids, start, stop - start)
