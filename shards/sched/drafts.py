"""How many guessed tokens a step should verify. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from shards.sched.cost import CostModel, StepShape

MOST_DRAFTED = 16
"""Guessed tokens of one sequence in one step: behind more than these even a good guess seldom holds."""

CAUTION = 1.5
"""So many times its cost a guessed token must be worth: the first one of a row costs more than the next, which the
model does not know."""

FEW_ROWS = 8
LEAST_SHARE = 0.66
"""Beyond few rows a step waits for what it computes, and a guessed token takes at least this share of what a row takes
on average. The model cannot tell rows from the rest of a step while their number stays the same. Seen at 8 rows: 0.66
with the bundled model, 0.4 with the shape of Qwen3-0.6B in int8."""


class Prospect(NamedTuple):
    """A decoding sequence that has a guess: the next token is right with probability `first`, each one behind a right
    one with `later`. At most `most` of them may be verified, behind `computed_tokens` and the token that is certain.
    """

    id: int
    computed_tokens: int
    first: float
    later: float
    most: int


def draft_lengths(prospects: Iterable[Prospect], *, rows: int, context_tokens: int, cost: CostModel) -> dict[int, int]:
    """How many guessed tokens of each sequence to verify, by its id; who is not named verifies none.

    As many as raise the expected tokens per second of a step that decodes `rows` sequences with `context_tokens` of
    context together, and nothing else. A guessed token counts as `CAUTION` more rows; a prompt token, which prefill
    computes with many others, costs much less. Where rows are many, `LEAST_SHARE` bounds it from below. The n-th one is
    worth the chance that all up to it are right. The best of all sequences come first, as long as their tokens per
    second are above those of the step with all before them, which is where the quotient has its maximum.
    """
    tokens, seconds = float(rows), cost.predict_s(StepShape(rows, 0.0, context_tokens))
    least_s = LEAST_SHARE * max(0.0, 1.0 - FEW_ROWS / rows) * seconds / rows
    lengths: dict[int, int] = {}
    open_ends = [
        (-one.first / max(_token_s(one, cost, least_s), _NEXT_TO_NOTHING_S), one.id, one.first, one)
        for one in prospects
        if one.most > 0
    ]
    heapify(open_ends)
    while open_ends:
        rate, id_, chance, one = heappop(open_ends)
        if -rate * seconds <= tokens:
            break
        tokens, seconds = tokens + chance, seconds + _token_s(one, cost, least_s)
        lengths[id_] = lengths.get(id_, 0) + 1
        if lengths[id_] < one.most:
            heappush(open_ends, (rate * one.later, id_, chance * one.later, one))
    return lengths


_NEXT_TO_NOTHING_S = 1e-12
"""A token that is said to cost nothing."""


def _token_s(one: Prospect, cost: CostModel, least_s: float) -> float:
    return CAUTION * max(least_s, cost.marginal_s(StepShape(1, 0.0, one.computed_tokens + 1)))
