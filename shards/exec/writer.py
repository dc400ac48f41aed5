"""Draws the tokens of one sequence, and decides when it stops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tokenizers import Tokenizer

from shards.exec.sampling import Sampler
from shards.exec.stop import StopStrings
from shards.nouns import FinishReason, Submission


class End(NamedTuple):
    """The reason for the end of an answer. `stop` is the stop string that ended it; `by_token`: a stop token did."""

    reason: FinishReason
    stop: str = ""
    by_token: bool = False


class Writer:
    """Draws and watches one answer. It survives a preemption, so that the answer continues unchanged."""

    def __init__(self, submission: Submission, sampler: Sampler, tokenizer: Tokenizer | None) -> None:
        self.sampler = sampler
        self._submission = submission
        stop = submission.sampling.stop
        self._stops = StopStrings(tokenizer, stop) if stop and tokenizer else None

    def __repr__(self) -> str:
        return f"Writer({self.sampler!r}, {self._stops!r})"

    @property
    def grammar_fault(self) -> str:
        """The reason why its grammar allows no token; empty if it has none, or that does."""
        return "" if self.sampler.guide is None else self.sampler.guide.fault

    def resume(self, token_ids: Iterable[int]) -> None:
        """Watch on behind `token_ids`, the beginning of the answer, which was drawn elsewhere."""
        if self._stops is not None:
            for token_id in token_ids:
                self._stops.push(token_id)

    def note(self, token_id: int) -> End | None:
        """Take a drawn token; returns the answer's end if this is the last token, else None."""
        self.sampler.note(token_id)
        stop = self._stops.push(token_id) if self._stops else None
        if token_id in self.sampler.stop_token_ids:
            return End(FinishReason.STOP, by_token=True)
        if stop is not None and self.sampler.drawn > self._submission.sampling.min_new_tokens:
            return End(FinishReason.STOP, stop)
        if self.sampler.guide is not None and self.sampler.guide.is_over:
            return End(FinishReason.STOP)
        drawn_here = self.sampler.drawn - self._submission.answered_tokens
        return End(FinishReason.LENGTH) if drawn_here >= self._submission.max_new_tokens else None
