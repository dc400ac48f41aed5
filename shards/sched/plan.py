"""What the next step computes. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from shards.kv.keys import BLOCK_TOKENS
from shards.sched.cost import CostModel, StepShape, prefill_shape


class Work(NamedTuple):
    """One sequence with tokens to compute, as the scheduler sees it.

    `ready_tokens` can be computed now: whole blocks, or what ends the prompt. `rest_tokens`: all that its prompt still
    lacks, arrived or not. `next_block` names what it would compute first, and `may_follow` says that it could take
    that block from the cache instead if another sequence computes it in this step.
    """

    id: int
    rank: int
    arrival: int
    computed_tokens: int
    ready_tokens: int
    rest_tokens: int
    is_decoding: bool
    slice_tokens: int | None = None
    next_block: Hashable = None
    may_follow: bool = False


@dataclass(frozen=True, slots=True)
class StepLimits:
    """`step_s`: the time that a step should take. `lanes`: how many long prompts are prefilled side by side.

    `chunk_tokens`: most of one prompt in one step. `batch_tokens`: most prefill in one step beyond the one block that
    each lane gets anyway.
    """

    step_s: float = 0.05
    lanes: int = 8
    chunk_tokens: int = 8192
    batch_tokens: int = 16384


def plan_step(work: Iterable[Work], cost: CostModel, limits: StepLimits) -> dict[int, int]:
    """How many tokens each sequence computes in this step, by its id; who is not named waits.

    1. Each decoding sequence gets its one token.
    2. The first `lanes` long prompts, by rank and then arrival, get a block each.
    3. What is left of the time goes to the ranks in order: first to prompts so short that half a step finishes them
       (so they never wait behind long ones), then block by block in turn to the lanes.
    Somebody with work always gets some: the first short prompt is served whatever the time says. A sequence whose next
    block another one computes in this step steps back, to find it in the cache.
    """
    decoding, prefilling = _split(work)
    chunks = _Chunks(cost, limits, sum(one.computed_tokens + 1 for one in decoding), len(decoding))
    prefilling.sort(key=attrgetter("rank", "arrival"))
    short_s = limits.step_s / 2
    short = [
        one
        for one in prefilling
        if _can_end(one, limits) and cost.marginal_s(prefill_shape(one.computed_tokens, one.rest_tokens)) <= short_s
    ]
    short_ids = {one.id for one in short}
    lanes = chunks.open_lanes(one for one in prefilling if one.id not in short_ids)
    by_rank = sorted([*short, *lanes], key=attrgetter("rank"))
    for _, group in groupby(by_rank, key=attrgetter("rank")):
        same_rank = list(group)
        for one in same_rank:
            if one.id in short_ids:
                chunks.grant_whole(one)
        chunks.share([one for one in same_rank if one.id not in short_ids])
    plan = {one.id: one.ready_tokens for one in decoding}
    plan.update(chunks.tokens)
    return plan


def shape_of(work: Iterable[Work], plan: dict[int, int]) -> StepShape:
    """What `plan` costs, in the cost model's terms."""
    shape, decoding, context = StepShape(), 0, 0
    for one in work:
        tokens = plan.get(one.id, 0)
        if one.is_decoding:
            decoding += tokens
            context += tokens * (one.computed_tokens + 1)
        elif tokens:
            shape += prefill_shape(one.computed_tokens, tokens)
    return shape + StepShape(decoding, 0.0, context)


def _split(work: Iterable[Work]) -> tuple[list[Work], list[Work]]:
    decoding: list[Work] = []
    prefilling: list[Work] = []
    for one in work:
        if one.ready_tokens > 0:
            (decoding if one.is_decoding else prefilling).append(one)
    return decoding, prefilling


def _can_end(one: Work, limits: StepLimits) -> bool:
    """Could one step compute all that its prompt lacks? It is all here and no bound forbids it."""
    return one.rest_tokens == one.ready_tokens <= min(limits.chunk_tokens, one.slice_tokens or one.ready_tokens)


class _Chunks:
    """The prefill of one step while it is handed out."""

    def __init__(self, cost: CostModel, limits: StepLimits, decode_context: int, decoding: int) -> None:
        self._cost, self._limits = cost, limits
        self._left_s = limits.step_s - cost.predict_s(StepShape(decoding, 0.0, decode_context))
        self._left_tokens = limits.batch_tokens
        self._taken_blocks: set[Hashable] = set()
        self._served_short = False
        self.tokens: dict[int, int] = {}

    def open_lanes(self, candidates: Iterable[Work]) -> list[Work]:
        """The sequences that get a lane; each is granted its first block."""
        lanes: list[Work] = []
        for one in candidates:
            if len(lanes) == self._limits.lanes:
                break
            if not self._steps_back(one):
                self._grant(one, min(one.ready_tokens, BLOCK_TOKENS))
                lanes.append(one)
        return lanes

    def grant_whole(self, one: Work) -> None:
        """Grant all that is ready if time and tokens are left; the first one is not asked whether they are."""
        seconds = self._cost.marginal_s(prefill_shape(one.computed_tokens, one.ready_tokens))
        fits = seconds <= self._left_s and one.ready_tokens <= self._left_tokens
        if (fits or not self._served_short) and not self._steps_back(one):
            self._served_short = True
            self._grant(one, one.ready_tokens)

    def share(self, lanes: list[Work]) -> None:
        """Hand what is left of the time to `lanes`, a block each in turn."""
        open_lanes = lanes
        while open_lanes:
            open_lanes = [one for one in open_lanes if self._extend(one)]

    def _extend(self, one: Work) -> bool:
        """Grant one more block, if `one` may have it and it can be afforded."""
        granted = self.tokens[one.id]
        most = min(one.ready_tokens, self._limits.chunk_tokens, one.slice_tokens or one.ready_tokens)
        more = min(one.ready_tokens - granted, BLOCK_TOKENS)
        if more <= 0 or granted + more > most or more > self._left_tokens:
            return False
        if self._cost.marginal_s(prefill_shape(one.computed_tokens + granted, more)) > self._left_s:
            return False
        self._grant(one, more)
        return True

    def _steps_back(self, one: Work) -> bool:
        if one.may_follow and one.next_block in self._taken_blocks:
            return True
        if one.next_block is not None:
            self._taken_blocks.add(one.next_block)
        return False

    def _grant(self, one: Work, tokens: int) -> None:
        granted = self.tokens.get(one.id, 0)
        self._left_s -= self._cost.marginal_s(prefill_shape(one.computed_tokens + granted, tokens))
        self._left_tokens -= tokens
        self.tokens[one.id] = granted + tokens
