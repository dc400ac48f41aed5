"""Predicts the first token of requests that have not drawn: the queue, priced by the cost model. Pure, torch-free."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import groupby, islice
from operator import attrgetter
from typing import NamedTuple

from shards.sched.cost import CostModel, StepShape, prefill_shape
from shards.sched.plan import StepLimits


class Pending(NamedTuple):
    """A request that has not drawn: `rest_tokens` of its prompt lack KV behind `computed_tokens`.

    `rank` is the effective one. `needs_slot` if it does not run yet.
    """

    key: Hashable
    rank: int
    arrival: int
    computed_tokens: int
    rest_tokens: int
    needs_slot: bool


class Decoding(NamedTuple):
    """The sequences that decode meanwhile: `context_tokens` over all `rows`; `steps_left` of each row, at most."""

    rows: int = 0
    context_tokens: int = 0
    steps_left: tuple[int, ...] = ()


def predict_ttft_s(
    pending: Iterable[Pending], decoding: Decoding, *, cost: CostModel, limits: StepLimits, free_slots: int
) -> dict[Hashable, float]:
    """Predicted seconds from now until each request draws its first token. O(n log n).

    Better ranks come first; within a rank the short prompts, then the long ones, `lanes` of them side by side. Each
    step has the part of `step_s` that decoding leaves. A request without a slot waits until enough decoding sequences
    must have ended. Blocks are assumed to be available.
    """
    pace = _Pace(cost, limits, decoding)
    slots = _Slots(decoding, free_slots, pace)
    predictions: dict[Hashable, float] = {}
    ahead_s = 0.0
    for _, group in groupby(sorted(pending, key=attrgetter("rank", "arrival")), key=attrgetter("rank")):
        same_rank = list(group)
        works_s = [
            cost.marginal_s(prefill_shape(request.computed_tokens, request.rest_tokens)) for request in same_rank
        ]
        for request, work_s, end_s in zip(same_rank, works_s, _ends_s(works_s, limits), strict=True):
            wait_s = slots.wait_s() if request.needs_slot else 0.0
            seconds = max(pace.seconds(ahead_s + end_s), wait_s + pace.seconds(work_s))
            predictions[request.key] = min(seconds, predictions.get(request.key, seconds))
        ahead_s += sum(works_s)
    return predictions


def _ends_s(works_s: Sequence[float], limits: StepLimits) -> list[float]:
    """The end of each of `works_s`, in order of arrival, in seconds of prefill since the first one's start."""
    ends_s = [0.0] * len(works_s)
    now_s = 0.0
    long: list[int] = []
    for place, work_s in enumerate(works_s):
        if work_s <= limits.step_s / 2:
            now_s += work_s
            ends_s[place] = now_s
        else:
            long.append(place)
    # all lanes advance at the same speed: `served_s` is the progress of a lane that was open all along
    lanes: list[tuple[float, int]] = []
    served_s = 0.0
    entering = iter(long)
    while True:
        for place in islice(entering, limits.lanes - len(lanes)):
            heappush(lanes, (served_s + works_s[place], place))
        if not lanes:
            return ends_s
        sharing = len(lanes)
        end_s, done = heappop(lanes)
        now_s += (end_s - served_s) * sharing
        served_s = end_s
        ends_s[done] = now_s


class _Pace:
    """The duration of prefill beside decoding."""

    def __init__(self, cost: CostModel, limits: StepLimits, decoding: Decoding) -> None:
        self.base_s = cost.predict_s(StepShape(decoding.rows, 0.0, decoding.context_tokens))
        # if decoding leaves no time, each step still computes a unit
        least_s = cost.marginal_s(prefill_shape(0, limits.unit_tokens))
        self._share_s = max(limits.step_s - self.base_s, least_s, 1e-6)

    def seconds(self, work_s: float) -> float:
        """The duration of the steps that hold `work_s` of prefill."""
        steps = int(work_s / self._share_s)
        return steps * (self.base_s + self._share_s) + self.base_s + (work_s - steps * self._share_s)


class _Slots:
    """The times at which slots become free, as they are taken in order."""

    def __init__(self, decoding: Decoding, free: int, pace: _Pace) -> None:
        self._step_s = pace.base_s
        self._free = max(0, free)
        self._ends = sorted(decoding.steps_left)
        self._asked = 0

    def wait_s(self) -> float:
        """Seconds until the next request in the queue has a slot."""
        place = self._asked - self._free
        self._asked += 1
        if place < 0 or not self._ends:
            return 0.0
        rounds, place = divmod(place, len(self._ends))
        return (self._ends[place] + rounds * self._ends[-1]) * self._step_s
