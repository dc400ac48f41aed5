"""The parts of a prompt that need not be computed, since their KV was copied from chunks. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
"""Positions from the first up to the second."""


class Skips:
    """The positions of one sequence that are skipped, as spans in order. They lie within its prompt.

    `start` is the first skipped position: nothing behind it is exact. `stop` is the end of the last span.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def __repr__(self) -> str:
        return f"Skips({self.tokens} tokens in {len(self._spans)} spans)"

    def __bool__(self) -> bool:
        return bool(self._spans)

    @property
    def start(self) -> int | None:
        """The first skipped position; None if there is none."""
        return self._spans[0][0] if self._spans else None

    @property
    def stop(self) -> int:
        """The position behind the last skipped one, or 0."""
        return self._spans[-1][1] if self._spans else 0

    @property
    def tokens(self) -> int:
        """The number of skipped positions."""
        return self.tokens_from(0)

    def add(self, spans: Sequence[Span]) -> None:
        """Skip `spans` too, which lie behind all others."""
        assert all(start >= self.stop for start, _ in spans), "spans are added in order"
        self._spans += spans

    def tokens_from(self, position: int) -> int:
        """The number of skipped positions at or behind `position`."""
        # asked for every row of every step, and nearly always without a span
        if not self._spans:
            return 0
        return sum(stop - max(start, position) for start, stop in self._spans if stop > position)

    def behind(self, position: int) -> int:
        """The first position at or behind `position` that is not skipped."""
        for start, stop in self._spans:
            if start <= position < stop:
                position = stop
        return position

    def computed(self, position: int, tokens: int) -> Iterator[Span]:
        """The spans of the next `tokens` positions, from `position` on, that are not skipped."""
        for start, stop in self._spans:
            if stop <= position:
                continue
            if start > position:
                taken = min(tokens, start - position)
                yield position, position + taken
                tokens -= taken
                if not tokens:
                    return
            position = stop
        yield position, position + tokens


def budget_tokens(tokens: int, budget: float) -> int:
    """How many of `tokens` tokens a budget (0 to 1) computes again."""
    return min(tokens, math.ceil(budget * tokens - 1e-9))


def kept_spans(deviations: npt.NDArray[np.float32], computed: int, start: int) -> list[Span]:
    """The spans, from `start` on, of all tokens but the `computed` ones that deviate most (of equal ones the first)."""
    is_kept = np.ones(len(deviations) + 2, dtype=bool)
    is_kept[[0, -1]] = False
    is_kept[1 + np.argsort(-deviations, kind="stable")[:computed]] = False
    edges = np.flatnonzero(is_kept[1:] != is_kept[:-1]) + start
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
