"""The number of guessed tokens that a step should verify. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from shards.sched.cost import CostModel, StepShape

MOST_DRAFTED = 16
"""Most guessed tokens of one sequence in one step: beyond this even a good guess is seldom right."""

CAUTION = 1.5
"""A guessed token must gain this many times its cost: the first one of a row costs more than the next, which the model
does not know."""

FEW_ROWS = 8
LEAST_SHARE = 0.66
"""Beyond few rows a step is bound by computation, and a guessed token takes at least this share of a row's average
time. The model cannot separate rows from the rest of a step while their number stays the same. Observed at 8 rows:
0.66 with the bundled model, 0.4 with the shape of Qwen3-0.6B in int8."""

FEW_ROWS_ON_DEVICE = 128
"""The same on a GPU, which computes some 300 bfloat16 rows in the time in which it reads the weights (H100: 989 TFLOP/s
by 3.35 TB/s); half of that, because attention and the head do not follow that rule. Not measured."""


class Prospect(NamedTuple):
    """A decoding sequence with a guess: the next token is right with probability `first`, and each later one, behind a
    right one, with `later`. At most `most` of them may be verified, behind `computed_tokens` and the certain token.
    Each guess takes `guess_s` before the step.
    """

    id: int
    computed_tokens: int
    first: float
    later: float
    most: int
    guess_s: float = 0.0


class DraftBounds(NamedTuple):
    """Up to `few_rows` rows a guessed token may be nearly free. A step draws at most `most_drawn` tokens, if there is a
    bound.
    """

    few_rows: int = FEW_ROWS
    most_drawn: int | None = None


ON_HOST = DraftBounds()


def draft_lengths(
    prospects: Iterable[Prospect],
    *,
    rows: int,
    context_tokens: int,
    cost: CostModel,
    bounds: DraftBounds = ON_HOST,
    overhead_s: float = 0.0,
) -> dict[int, int]:
    """The number of guessed tokens to verify for each sequence, by its id; a sequence without an entry verifies none.

    The numbers maximise the expected tokens per second of a step that only decodes `rows` sequences with
    `context_tokens` of context in total. A guessed token counts as `CAUTION` more rows; a prompt token, which prefill
    computes with many others, costs much less. If there are many rows, `LEAST_SHARE` is a lower bound. The n-th guess
    is worth the probability that all guesses up to it are right, and takes the time in which it is guessed. The best
    guesses of all sequences are taken first, as long as their tokens per second exceed those of the step with all
    guesses before; that maximises the quotient.

    `overhead_s`: what a step with guesses takes beside that, because the next one cannot be submitted ahead of its end.
    """
    plain_s = cost.predict_s(StepShape(rows, 0.0, context_tokens))
    tokens, seconds = float(rows), plain_s + overhead_s
    left = None if bounds.most_drawn is None else bounds.most_drawn - rows
    least_s = LEAST_SHARE * max(0.0, 1.0 - bounds.few_rows / rows) * plain_s / rows
    lengths: dict[int, int] = {}
    open_ends = [
        (
            -prospect.first / max(_token_s(prospect, cost, least_s), _NEXT_TO_NOTHING_S),
            prospect.id,
            prospect.first,
            prospect,
        )
        for prospect in prospects
        if prospect.most > 0
    ]
    heapify(open_ends)
    while open_ends and (left is None or sum(lengths.values()) < left):
        rate, id_, chance, prospect = heappop(open_ends)
        if -rate * seconds <= tokens:
            break
        tokens, seconds = tokens + chance, seconds + _token_s(prospect, cost, least_s)
        lengths[id_] = lengths.get(id_, 0) + 1
        if lengths[id_] < prospect.most:
            heappush(open_ends, (rate * prospect.later, id_, chance * prospect.later, prospect))
    return lengths if tokens * plain_s > rows * seconds or not overhead_s else {}


_NEXT_TO_NOTHING_S = 1e-12
"""A lower bound of the time of a token, in case the model predicts none."""


def _token_s(prospect: Prospect, cost: CostModel, least_s: float) -> float:
    verified_s = max(least_s, cost.marginal_s(StepShape(1, 0.0, prospect.computed_tokens + 1)))
    return CAUTION * verified_s + prospect.guess_s
