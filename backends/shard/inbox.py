"""A shard's messages about one request that its reader has not taken yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from policies.errors import ExpectedError
from shards.nouns import Drawn, TokenLogprobs
from shards.wire.v1 import shard_pb2 as wire


@dataclass(slots=True)
class Piece:
    """One choice's new tokens since the last piece, and its finish reason if it ended."""

    choice: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: wire.Finished | None = None


@dataclass(frozen=True, slots=True)
class News:
    """Everything since the last time: prefill progress, then one piece per choice that moved.

    `expected_s` is the predicted time of the first token, if the shard reports it.
    """

    progress: wire.Progress | None
    expected_s: float | None
    pieces: tuple[Piece, ...]


class Inbox:
    """Filled by the stream, emptied by one reader. A slow reader gets bigger pieces, never more of them.

    Memory is bounded by what the request may generate: `max_new_tokens` for each choice.
    """

    def __init__(self, choices: int) -> None:
        self.open_choices = set(range(choices))
        self._progress: wire.Progress | None = None
        self._expected_s: float | None = None
        self._pieces: dict[int, Piece] = {}
        self._failure: ExpectedError | None = None
        self._filled = asyncio.Event()

    def __repr__(self) -> str:
        waiting = sum(len(piece.token_ids) for piece in self._pieces.values())
        return f"<Inbox {waiting} tokens wait, {len(self.open_choices)} choices open>"

    @property
    def is_over(self) -> bool:
        """Will the shard say nothing more about this request?"""
        return not self.open_choices or self._failure is not None

    def hear_tokens(self, drawn: Drawn) -> None:
        """Keep new tokens of a choice."""
        piece = self._piece(drawn.choice)
        piece.token_ids += drawn.token_ids
        piece.logprobs += drawn.logprobs

    def hear_progress(self, progress: wire.Progress) -> None:
        """Keep how far the prompt is; only the newest counts."""
        self._progress = progress
        self._filled.set()

    def hear_prediction(self, expected_s: float) -> None:
        """Keep how long the first token is expected to take; only the newest counts."""
        self._expected_s = expected_s
        self._filled.set()

    def hear_end(self, end: wire.Finished) -> None:
        """Keep how a choice ended."""
        self._piece(end.choice).end = end
        self.open_choices.discard(end.choice)

    def fail(self, failure: ExpectedError) -> None:
        """The next `take` raises `failure` and drops all messages before: half a step is not an answer."""
        if not self.is_over:
            self._failure = failure
        self._filled.set()

    async def take(self) -> News:
        """All news since the last call, as soon as there is any. Raises the failure of `fail`."""
        await self._filled.wait()
        self._filled.clear()
        if self._failure is not None:
            raise self._failure
        news = News(self._progress, self._expected_s, tuple(self._pieces.values()))
        self._progress, self._expected_s, self._pieces = None, None, {}
        return news

    def _piece(self, choice: int) -> Piece:
        self._filled.set()
        return self._pieces.setdefault(choice, Piece(choice))
