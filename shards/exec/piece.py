"""What a step computes of one sequence. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shards.exec.sequence import Sequence


class Piece(NamedTuple):
    """Tokens `start` up to `stop` of `sequence`; everything before them has KV, or is about to.

    The last ones may be a `draft`, which is guessed and follows what is known; all others are known, to the device at
    least. It `draws` if the logits of its last known token are wanted, and of all behind it.
    """

    sequence: Sequence
    start: int
    stop: int
    draws: bool
    draft: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """How many they are."""
        return self.stop - self.start

    @property
    def known_stop(self) -> int:
        """Where the draft begins, if there is one."""
        return self.stop - len(self.draft)

    @property
    def logits(self) -> int:
        """Of how many of its tokens the logits are wanted; they are the last ones."""
        return 1 + len(self.draft) if self.draws else 0

    @property
    def is_unseen(self) -> bool:
        """Is its token one that only the device knows?"""
        return self.known_stop > self.sequence.seen_tokens

    def cut(self) -> Iterator[Piece]:
        """The pieces that a sequence of equal bits is computed in: units of its prompt, then single tokens."""
        sequence, start = self.sequence, self.start
        prompt_tokens = sequence.request.submission.prompt_tokens
        while start < self.stop:
            unit = sequence.unit_tokens - start % sequence.unit_tokens
            end = min(self.stop, start + unit, prompt_tokens) if start < prompt_tokens else start + 1
            yield Piece(sequence, start, end, self.draws and end == self.stop)
            start = end
