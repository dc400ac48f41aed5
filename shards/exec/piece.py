"""The part of one sequence that a step computes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shards.exec.sequence import Sequence
from shards.kv.table import blocks_for


class Piece(NamedTuple):
    """Tokens `start` up to `stop` of `sequence`; everything before them has KV, or is about to: of pieces of the same
    step too.

    The last tokens may be a `draft`, which is guessed (`by_model`, or by prompt lookup) and follows the known tokens;
    all others are known, at least to the device. A piece that `draws` needs the logits of its last known token, and of
    all tokens behind it.
    """

    sequence: Sequence
    start: int
    stop: int
    draws: bool
    draft: tuple[int, ...] = ()
    by_model: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.stop - self.start

    @property
    def known_stop(self) -> int:
        """The beginning of the draft, or `stop` without one."""
        return self.stop - len(self.draft)

    @property
    def logits(self) -> int:
        """The number of its tokens that need logits; they are the last ones."""
        return 1 + len(self.draft) if self.draws else 0

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks of all positions up to `stop`."""
        ids, count = self.sequence.table.ids, blocks_for(self.stop)
        return ids if len(ids) == count else ids[:count]

    @property
    def is_unseen(self) -> bool:
        """Whether its token is known only to the device."""
        return self.known_stop > self.sequence.seen_tokens

    def cut(self) -> Iterator[Piece]:
        """The pieces that are computed for equal bits: units of its prompt, then single tokens."""
        sequence, start = self.sequence, self.start
        prompt_tokens = sequence.request.submission.prompt_tokens
        while start < self.stop:
            unit = sequence.unit_tokens - start % sequence.unit_tokens
            end = min(self.stop, start + unit, prompt_tokens) if start < prompt_tokens else start + 1
            yield Piece(sequence, start, end, self.draws and end == self.stop)
            start = end


def tokens_of(pieces: list[Piece]) -> int:
    """The number of tokens of some pieces, of which there is nearly always one."""
    return pieces[0].tokens if len(pieces) == 1 else sum(piece.tokens for piece in pieces)
