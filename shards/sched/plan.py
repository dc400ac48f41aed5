"""The plan of the next step. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from shards.kv.keys import BLOCK_TOKENS
from shards.sched.cost import CostModel, StepShape, prefill_shape
from shards.sched.ranks import BACKGROUND

_NO_SLICE = 1 << 40

_BACKGROUND_SHARE = 0.25
"""Share of the time of decoding that prompts of the rank BACKGROUND may add: a better prompt that arrives waits for the
end of the step, and answers that are being decoded slow down."""

_LESSER_SHARE = 0.25
"""Share of a step's time for first units of lanes of a worse rank: with expensive units, ranks would lose effect."""


class Work(NamedTuple):
    """One sequence with tokens to compute, as the scheduler sees it; `rank` is the effective one.

    `ready_tokens` can be computed now: whole units, or the end of the prompt. `rest_tokens`: all that its prompt still
    lacks, arrived or not. `next_block` names the block that it would compute first, and `may_follow` means that it can
    take that block from the cache instead if another sequence computes it in this step. Up to `drafted_tokens` could be
    verified behind the token of a sequence that `is_decoding`; each takes `guess_s` before.
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
    drafted_tokens: int = 0
    guess_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """`step_s`: target duration of a step. `lanes`: long prompts that are prefilled side by side.
    `chunk_tokens`: most tokens of one prompt in one step. `batch_tokens`: most prefill tokens in one step, besides the
    unconditional grants. Chunks end at a multiple of `unit_tokens` of their prompt, or at its end.
    """

    step_s: float = 0.05
    lanes: int = 8
    chunk_tokens: int = 8192
    batch_tokens: int = 16384
    unit_tokens: int = BLOCK_TOKENS


def plan_step(work: Iterable[Work], cost: CostModel, limits: StepLimits) -> dict[int, int]:
    """The tokens that each sequence computes in this step, by its id; a sequence without an entry waits.

    Short prompts are those that half a step finishes. In order of rank and then arrival:

    1. Each decoding sequence gets its one token.
    2. The first long prompt gets a unit and the first short one all that it lacks, whatever the time: so there is
       always progress.
    3. Drafted tokens are verified within the remaining time, or within half of `step_s` if decoding alone exceeds it.
    4. Short prompts of the best rank get all that they lack, within the remaining time.
    5. The next long prompts get a unit each, up to `lanes` of them, within the remaining time, or within a quarter of
       it if their rank is worse than the first one's.
    6. The rest goes to the ranks in order: to short prompts first, then unit by unit in turn to the lanes.

    Bound: a step is expected to take at most `step_s`, or (if that is more) decoding, one unit and half of `step_s`.
    The first short prompt is always computed in the next step: it waits only for the running step.

    A sequence waits if another one computes its next block in this step, to find the block in the cache. Those of the
    rank BACKGROUND wait while prompts of better ranks are computed. While sequences of better ranks decode, prompts of
    BACKGROUND get one unit, or as many as take a quarter of the time of decoding.
    """
    decoding, prefilling = _split(work)
    if any(sequence.rank < BACKGROUND for sequence in prefilling):
        decoding, prefilling = _foreground(decoding), _foreground(prefilling)
    decoding_s, prefill_s = cost.predict_s(_decoding_shape(decoding)), limits.step_s
    if prefilling and prefilling[0].rank >= BACKGROUND and _foreground(decoding):
        prefill_s = min(prefill_s, _BACKGROUND_SHARE * decoding_s)
    chunks = _Chunks(cost, limits, limits.step_s * cost.most_share - decoding_s, prefill_s)
    prefilling.sort(key=attrgetter("rank", "arrival"))
    short, long = chunks.divide(prefilling)
    lanes = [sequence for sequence in long[:1] if chunks.open(sequence, at_any_cost=True)]
    any(chunks.grant_whole(sequence, at_any_cost=True) for sequence in short)
    drafts = chunks.verify(decoding)
    plan = {sequence.id: sequence.ready_tokens + drafts.get(sequence.id, 0) for sequence in decoding}
    for sequence in short:
        if sequence.rank == prefilling[0].rank:
            chunks.grant_whole(sequence)
    if long:
        lanes += chunks.open_lanes(long[1:], limits.lanes - len(lanes), best_rank=long[0].rank)
    for _, group in groupby(prefilling, key=attrgetter("rank")):
        same_rank = {sequence.id for sequence in group}
        for sequence in short:
            if sequence.id in same_rank:
                chunks.grant_whole(sequence)
        chunks.share([sequence for sequence in lanes if sequence.id in same_rank])
    plan.update(chunks.tokens)
    return plan


def shape_of(work: Iterable[Work], plan: dict[int, int]) -> StepShape:
    """The shape of `plan`, for the cost model."""
    shape, decoding, context = StepShape(), 0, 0
    for sequence in work:
        tokens = plan.get(sequence.id, 0)
        if sequence.is_decoding:
            decoding += tokens
            context += tokens * (sequence.computed_tokens + 1)
        elif tokens:
            shape += prefill_shape(sequence.computed_tokens, tokens)
    return shape + StepShape(decoding, 0.0, context)


def _split(work: Iterable[Work]) -> tuple[list[Work], list[Work]]:
    decoding: list[Work] = []
    prefilling: list[Work] = []
    for sequence in work:
        if sequence.ready_tokens > 0:
            (decoding if sequence.is_decoding else prefilling).append(sequence)
    return decoding, prefilling


def _decoding_shape(decoding: Collection[Work]) -> StepShape:
    """The shape of a token for each."""
    return StepShape(len(decoding), 0.0, sum(sequence.computed_tokens + 1 for sequence in decoding))


def _foreground(sequences: Iterable[Work]) -> list[Work]:
    return [sequence for sequence in sequences if sequence.rank < BACKGROUND]


class _Chunks:
    """The prefill of one step while it is distributed: at most `prefill_s` of the `left_s`, besides what is granted at
    any cost."""

    def __init__(self, cost: CostModel, limits: StepLimits, left_s: float, prefill_s: float) -> None:
        self._cost, self._limits, self._prefill_s = cost, limits, prefill_s
        self._left_s, self._left_tokens, self._granted_s = left_s, limits.batch_tokens, 0.0
        self._taken_blocks: set[Hashable] = set()
        self.tokens: dict[int, int] = {}

    def divide(self, prefilling: Iterable[Work]) -> tuple[list[Work], list[Work]]:
        """The prompts that half a step finishes, and the others."""
        short: list[Work] = []
        long: list[Work] = []
        for sequence in prefilling:
            (short if self._is_short(sequence) else long).append(sequence)
        return short, long

    def open(self, sequence: Work, *, at_any_cost: bool = False) -> bool:
        """Grant `sequence` its first unit if there is time, or always if `at_any_cost`. False if it gets nothing."""
        unit = self._next_unit(sequence)
        if self._steps_back(sequence) or not (at_any_cost or self._affords(sequence, unit)):
            return False
        self._grant(sequence, unit)
        return True

    def open_lanes(self, candidates: Iterable[Work], most: int, *, best_rank: int) -> list[Work]:
        """The first `most` of `candidates` that get a unit; ranks worse than `best_rank` share a quarter of the time.

        The first candidate without enough time ends it: otherwise cheaper ones behind it would keep it waiting.
        """
        lanes: list[Work] = []
        lesser_s = _LESSER_SHARE * self._left_s
        for sequence in candidates:
            unit = self._next_unit(sequence)
            if sequence.rank > best_rank:
                lesser_s -= self._seconds(sequence, unit)
            if len(lanes) >= most or lesser_s < 0 or not self._affords(sequence, unit):
                break
            if self.open(sequence):
                lanes.append(sequence)
        return lanes

    def grant_whole(self, sequence: Work, *, at_any_cost: bool = False) -> bool:
        """Grant all that is ready if there is time, or always if `at_any_cost`. False if it gets nothing now."""
        if (
            sequence.id in self.tokens
            or not (at_any_cost or self._affords(sequence, sequence.ready_tokens))
            or self._steps_back(sequence)
        ):
            return False
        self._grant(sequence, sequence.ready_tokens)
        return True

    def verify(self, decoding: Iterable[Work]) -> dict[Hashable, int]:
        """Grant drafted tokens from the remaining time, by the id of their sequence.

        If decoding alone takes all of it, from half of a step's time less the granted prefill.
        """
        room_s = self._left_s if self._left_s > 0 else self._limits.step_s / 2 - self._granted_s
        drafts: dict[Hashable, int] = {}
        for sequence in decoding:
            if not sequence.drafted_tokens:
                continue
            token_s = self._cost.marginal_s(StepShape(1, 0.0, sequence.computed_tokens + 1)) + sequence.guess_s
            tokens = sequence.drafted_tokens
            while tokens and tokens * token_s > room_s:
                tokens -= 1
            room_s, self._left_s = room_s - tokens * token_s, self._left_s - tokens * token_s
            drafts[sequence.id] = tokens
        return drafts

    def share(self, lanes: list[Work]) -> None:
        """Distribute the remaining time over `lanes`, a unit each in turn."""
        open_lanes = lanes
        while open_lanes:
            open_lanes = [sequence for sequence in open_lanes if self._extend(sequence)]

    def _is_short(self, sequence: Work) -> bool:
        """Whether the rest of its prompt has arrived, may be computed in one step, and takes at most half a step."""
        if (
            not sequence.rest_tokens
            == sequence.ready_tokens
            <= min(self._limits.chunk_tokens, sequence.slice_tokens or _NO_SLICE)
        ):
            return False
        return (
            self._cost.marginal_s(prefill_shape(sequence.computed_tokens, sequence.rest_tokens)) <= self._prefill_s / 2
        )

    def _extend(self, sequence: Work) -> bool:
        """Grant one more unit, if `sequence` may have it and there is time."""
        unit = self._next_unit(sequence)
        most = min(self._limits.chunk_tokens, sequence.slice_tokens or _NO_SLICE)
        if not unit or self.tokens[sequence.id] + unit > most or not self._affords(sequence, unit):
            return False
        self._grant(sequence, unit)
        return True

    def _next_unit(self, sequence: Work) -> int:
        granted = self.tokens.get(sequence.id, 0)
        unit = self._limits.unit_tokens
        return min(sequence.ready_tokens - granted, unit - (sequence.computed_tokens + granted) % unit)

    def _affords(self, sequence: Work, tokens: int) -> bool:
        left_s = min(self._left_s, self._prefill_s - self._granted_s)
        return tokens <= self._left_tokens and self._seconds(sequence, tokens) <= left_s

    def _seconds(self, sequence: Work, tokens: int) -> float:
        return self._cost.marginal_s(prefill_shape(sequence.computed_tokens + self.tokens.get(sequence.id, 0), tokens))

    def _steps_back(self, sequence: Work) -> bool:
        return sequence.may_follow and sequence.next_block in self._taken_blocks

    def _grant(self, sequence: Work, tokens: int) -> None:
        seconds = self._seconds(sequence, tokens)
        self._left_s, self._granted_s = self._left_s - seconds, self._granted_s + seconds
        self._left_tokens -= tokens
        self.tokens[sequence.id] = self.tokens.get(sequence.id, 0) + tokens
        if sequence.next_block is not None:
            self._taken_blocks.add(sequence.next_block)
