"""What a step computes of one sequence. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shards.exec.sequence import Sequence


class Piece(NamedTuple):
    """Tokens `start` up to `stop` of `sequence`, all of which are known; everything before them has KV."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many they are."""
        return self.stop - self.start

    @property
    def draws(self) -> bool:
        """Are the logits of its last token wanted?"""
        return self.sequence.draws_at(self.stop)

    def cut(self) -> Iterator[Piece]:
        """The pieces that a sequence of equal bits is computed in: units of its prompt, then single tokens."""
        sequence, start = self.sequence, self.start
        prompt_tokens = sequence.request.submission.prompt_tokens
        while start < self.stop:
            unit = sequence.unit_tokens - start % sequence.unit_tokens
            end = min(self.stop, start + unit, prompt_tokens) if start < prompt_tokens else start + 1
            yield Piece(sequence, start, end)
            start = end
