"""Decides which sequences run and what each step computes, on any clock and without torch. The engine and simulations
use it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from shards.blender import Blender
from shards.exec.piece import Piece, tokens_of
from shards.exec.request import Request
from shards.exec.sequence import Sequence
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.pool import BlockPool, OutOfBlocks
from shards.kv.table import blocks_for
from shards.nouns import Load, Progress
from shards.options import EngineOptions
from shards.roster import Roster
from shards.sched.admit import Victim, Waiting, admit
from shards.sched.cost import CostModel, StepShape, prefill_shape
from shards.sched.drafts import MOST_DRAFTED, ON_HOST, DraftBounds, Prospect, draft_lengths
from shards.sched.forecast import Decoding, Pending, predict_ttft_s
from shards.sched.plan import Work, plan_step, shape_of
from shards.sched.ranks import effective_rank
from shards.sched.room import Claim, Room

if TYPE_CHECKING:
    from shards.draft_model import DraftModel

_LOOK_S = 0.02
"""An engine without other work looks this often for blocks that were written."""

_CATCH_UP_SHARE = 0.25
"""A draft model computes what it lacks of an answer within this share of the time that the rest of it may take without
drafts: otherwise there is too little left to gain."""


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step; the block tables have room for it. `shape` is its cost in the terms of the cost model.

    `is_short` if a sequence was left out that can continue without a new event: its KV was being copied from the host
    or read from disk, or there was no free block for it. A draft model took `drafting_s` before it.
    """

    pieces: tuple[Piece, ...]
    shape: StepShape
    is_short: bool = False
    drafting_s: float = 0.0


class Scheduler:
    """Decides on the sequences of `roster` and the blocks of `pool`. It never waits and has no clock of its own.

    Each step: `next_step`, compute it, `advance` every piece, `store` its full blocks in the cache, `take` the drawn
    token of each piece, `finish` completed sequences, `observe` the duration. One more step may be planned between
    `advance` and `take`; until then only the device knows the drawn tokens. As long as the taken token equals the
    drafted one, `accept` it and take the token drawn behind it.

    A `draft_model` computes its guesses in `next_step`, as a `blender` moves its KV there.
    """

    def __init__(
        self,
        pool: BlockPool,
        options: EngineOptions,
        *,
        cost: CostModel | None = None,
        blender: Blender | None = None,
        drafting: DraftBounds = ON_HOST,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.pool, self.options, self.blender, self._drafting = pool, options, blender, drafting
        self._draft_model = draft_model
        self.overhead_s = 0.0
        """What a step with drafts takes longer, as no other is submitted ahead of its end."""
        self.roster = Roster()
        self.cost = cost or CostModel()
        self._moved: dict[Hashable, Request] = {}
        self._stepped_s = float("-inf")
        self._drafted_tokens = self._accepted_tokens = 0
        self._model_drafted_tokens = self._model_accepted_tokens = 0

    def __repr__(self) -> str:
        return f"Scheduler({self.roster!r}, {self.pool!r})"

    def next_step(self, now_s: float) -> Step:
        """Preempt and start the sequences that are due, share what is cached, and plan."""
        self._stepped_s = now_s
        self.pool.pins.expire(now_s)
        self.pool.settle_tiers()
        if self.pool.windows is not None:
            # before others start: pages of one chunk are claimed only until it is computed
            for sequence in self.roster.running.values():
                sequence.table.slide(sequence.computed_tokens)
        self._admit(now_s)
        running = self.roster.running
        for sequence in running.values():
            if sequence.share():
                self._note_progress(sequence)
        ready = [sequence for sequence in running.values() if sequence.ready_tokens]
        landed = [sequence for sequence in ready if sequence.table.is_landed] if self._is_copying else ready
        if self.pool.disk.is_open:
            landed = [sequence for sequence in landed if not self._awaits_disk(sequence)]
        if self.pool.peers.is_open:
            landed = [sequence for sequence in landed if not self._awaits_peer(sequence)]
        if self.blender is not None:
            landed = [
                sequence
                for sequence in landed
                if sequence.request.documents is None or self._blend(self.blender, sequence)
            ]
        drafts = self._drafts(landed)
        work = [
            sequence.work(self._rank(sequence, now_s), drafted_tokens=drafts.get(sequence.arrival, 0))
            for sequence in landed
        ]
        plan = plan_step(work, self.cost, self.options.step)
        drafting_s = 0.0 if self._draft_model is None else self._consult(self._draft_model, landed, work, plan)
        planned = [self._pieces(running[arrival], tokens) for arrival, tokens in plan.items()]
        served = [pieces for pieces in planned if self._grow(pieces[-1])]
        self._look_ahead(pieces[-1] for pieces in served)
        shape = shape_of(work, {pieces[0].sequence.arrival: tokens_of(pieces) for pieces in served})
        is_short = len(landed) < len(ready) or len(served) < len(planned)
        return Step(tuple(piece for pieces in served for piece in pieces), shape, is_short, drafting_s)

    @property
    def _is_copying(self) -> bool:
        """Whether KV is being copied from the host."""
        self.pool.has_landed(())
        return bool(self.pool.host.flights.landing)

    @property
    def next_change_s(self) -> float | None:
        """When a running sequence next becomes preemptible again; None if none is protected or no sequence waits."""
        if not self.roster.waiting:
            return None
        spared = (sequence.spared_s for sequence in self.roster.running.values() if sequence.spared_s is not None)
        ends = (spared_s + self.options.preempt_cooldown_s for spared_s in spared)
        return min((end_s for end_s in ends if end_s > self._stepped_s), default=None)

    @property
    def next_look_s(self) -> float | None:
        """When to look for blocks that were written to disk, fetched or lent; None if there are none."""
        return self._stepped_s + _LOOK_S if self.pool.is_moving else None

    def advance(self, piece: Piece) -> None:
        """Record that `piece` is computed, or will be before everything that is computed from now on."""
        sequence = piece.sequence
        sequence.advance(piece.known_stop)
        sequence.unseen += piece.draws
        if not sequence.output:
            self._note_progress(sequence)

    def store(self, sequence: Sequence) -> None:
        """Cache the full blocks of `sequence`, as far as its tokens are known on the host."""
        # called twice for every row of every step, and almost always without effect
        if sequence.computed_tokens // BLOCK_TOKENS > len(sequence.table.path):
            sequence.table.store(sequence.block_tokens, computed_tokens=sequence.storable_tokens)

    def take(self, sequence: Sequence, token_id: int) -> None:
        """Record that `sequence` has drawn `token_id`, whether it still runs or waits to continue."""
        sequence.unseen -= 1
        sequence.append(token_id)

    def accept(self, sequence: Sequence, *, by_model: bool = False) -> None:
        """The last token of `sequence` equals the draft: its KV exists, and one more token was drawn behind it.

        `by_model`: the draft model guessed it.
        """
        sequence.computed_tokens += 1
        sequence.unseen += 1
        self._accepted_tokens += 1
        self._model_accepted_tokens += by_model

    def observe(self, step: Step, elapsed_s: float, *, steps: int = 1) -> None:
        """Learn that `step` took `elapsed_s`."""
        self.cost.observe(step.shape, elapsed_s, steps=steps)
        for piece in step.pieces:
            if piece.draft:
                self._drafted_tokens += len(piece.draft)
                self._model_drafted_tokens += len(piece.draft) * piece.by_model

    def finish(self, sequence: Sequence) -> None:
        """End `sequence`: free its blocks on the device and on the host."""
        if self.blender is not None:
            self.blender.measure(sequence)
        if sequence.model_drafter is not None:
            sequence.model_drafter.end()
        sequence.table.release()
        self.roster.leave(sequence)

    def load(self, step_s: float, *, uncaptured_steps: int = 0) -> Load:
        """The engine's load; its last step took `step_s`, and this number ran without a graph that should have."""
        return Load(
            running=len(self.roster.running),
            waiting=len(self.roster.waiting),
            waiting_tokens=sum(
                request.submission.prompt_tokens - request.computed_tokens for request in self.roster.requests.values()
            ),
            blocks_total=self.pool.size,
            blocks_free=self.pool.free,
            blocks_pinnable=self.pool.pins.room,
            prefill_s_per_token=self.cost.prefill_s_per_token,
            step_s=step_s,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            model_drafted_tokens=self._model_drafted_tokens,
            model_accepted_tokens=self._model_accepted_tokens,
            disk=self.pool.disk.use,
            peers=self.pool.peers.use,
            uncaptured_steps=uncaptured_steps,
        )

    def drain_progress(self) -> tuple[Progress, ...]:
        """The progress of all prompts that have advanced since the last call."""
        progress = tuple(
            Progress(request.key, request.computed_tokens, request.cached_tokens, request.blended_tokens)
            for request in self._moved.values()
            if not request.is_chunk
        )
        self._moved.clear()
        return progress

    def predictions(self, now_s: float) -> dict[Hashable, float]:
        """Predicted seconds until the first token, by request key, for runnable requests that have not drawn yet."""
        running, waiting = self.roster.running, self.roster.waiting
        pending = [
            self._pending(sequence, now_s)
            for sequence in (*running.values(), *waiting.values())
            if not sequence.has_drawn
        ]
        if not pending:
            return {}
        decoding = [sequence for sequence in running.values() if sequence.is_decoding]
        meanwhile = Decoding(
            rows=len(decoding),
            context_tokens=sum(sequence.known_tokens for sequence in decoding),
            # as if all of it were on the device: a copy takes a step or two, much less than the lifetime
            steps_left=tuple(sequence.claim()._replace(is_steady=True).steps_left for sequence in decoding),
        )
        return predict_ttft_s(
            (request for request in pending if request is not None),
            meanwhile,
            cost=self.cost,
            limits=self.options.step,
            free_slots=self.options.max_running - len(running),
        )

    def check(self) -> None:
        """Assert that every running sequence can finish, and the invariants of pool and roster."""
        self.roster.check()
        running = self.roster.running
        assert len(running) <= self.options.max_running, "too many sequences run"
        assert self._room().is_sound, "running sequences could run out of blocks"

    def _rank(self, sequence: Sequence, now_s: float) -> int:
        return effective_rank(sequence.request.rank, now_s - sequence.request.arrived_s, self.options.ageing_s)

    def _room(self) -> Room:
        # pins and floors leave at least the guaranteed part of the pool to running sequences, now and at any time
        claims = {arrival: sequence.claim() for arrival, sequence in self.roster.running.items()}
        return Room(self.pool.guaranteed, claims, pages=self.pool.windows.size if self.pool.windows else 0)

    def _admit(self, now_s: float) -> None:
        running, waiting = self.roster.running, self.roster.waiting
        candidates = [sequence for sequence in waiting.values() if sequence.is_startable]
        if not candidates:
            return
        slots = self.options.max_running - len(running)
        victims = list(self._victims(now_s))
        worst = max((victim.rank for victim in victims), default=0)
        # measuring the room takes a tenth of a millisecond, and on a full engine the result is not used
        if slots <= 0 and all(sequence.request.rank >= worst for sequence in candidates):
            return
        candidates.sort(key=lambda sequence: (self._rank(sequence, now_s), sequence.arrival))
        admission = admit(
            (
                Waiting(sequence.arrival, sequence.request.rank, partial(self._claim, sequence), sequence.overtaken)
                for sequence in candidates
            ),
            self._room(),
            slots=slots,
            victims=victims,
        )
        for arrival in admission.overtaken:
            waiting[arrival].overtaken += 1
        for arrival in admission.preempted:
            self._preempt(arrival)
        for arrival in admission.admitted:
            self._start(arrival, now_s)

    def _victims(self, now_s: float) -> Iterator[Victim]:
        for sequence in self.roster.running.values():
            request = sequence.request
            is_spared = sequence.spared_s is not None and now_s - sequence.spared_s < self.options.preempt_cooldown_s
            if not is_spared and request.submission.preemptible and request.preemptions < self.options.most_preemptions:
                yield Victim(sequence.arrival, request.rank, sequence.arrival)

    def _claim(self, sequence: Sequence) -> Claim:
        """The blocks that `sequence` would hold and need if it started now, with its cached prefix even if shared."""
        claim = sequence.claim()
        if sequence.table.is_parked:
            return claim._replace(is_steady=False)
        blocks = tuple(cached.block for cached in sequence.look_up() if cached.block is not None)
        return claim._replace(blocks=blocks)

    def _start(self, arrival: int, now_s: float) -> None:
        sequence = self.roster.start(arrival)
        # a sequence that was preempted, or had to wait until its rank improved, is not preempted at once
        if sequence.request.preemptions or self._rank(sequence, now_s) < sequence.request.rank:
            sequence.spared_s = now_s
        if sequence.table.is_parked:
            sequence.table.unpark()

    def _preempt(self, arrival: int) -> None:
        """Let `arrival` wait again: its KV goes to host memory, or is dropped and computed again."""
        sequence = self.roster.put_back(arrival)
        sequence.request.preemptions += 1
        if sequence.model_drafter is not None:
            sequence.model_drafter.release()
        if not (sequence.computed_tokens and sequence.table.park()):
            sequence.start_over()

    def _awaits_disk(self, sequence: Sequence) -> bool:
        """Whether the next blocks of `sequence` are being read from disk, which is predicted to be faster than to
        compute them. Starts to read them.
        """
        labels = sequence.seek(self.pool.disk.find)
        if not labels:
            return False
        disk, tokens = self.pool.disk, len(labels) * BLOCK_TOKENS
        if disk.wait_s(labels) >= self.cost.marginal_s(prefill_shape(sequence.computed_tokens, tokens)):
            disk.decline()
            return False
        return disk.fetch(labels, domain=sequence.table.domain)

    def _awaits_peer(self, sequence: Sequence) -> bool:
        """Whether the next blocks of `sequence` are being fetched from the shard that was named for it, which is
        predicted to be faster than to compute them. Begins to fetch them.
        """
        source = sequence.request.submission.source
        if source is None:
            return False
        labels = sequence.seek(partial(self.pool.peers.find, source=source))
        if not labels:
            return False
        peers, tokens = self.pool.peers, len(labels) * BLOCK_TOKENS
        if peers.wait_s(labels) >= self.cost.marginal_s(prefill_shape(sequence.computed_tokens, tokens)):
            peers.decline()
            return False
        return peers.fetch(labels, source, domain=sequence.table.domain)

    def _drafts(self, landed: Collection[Sequence]) -> dict[int, int]:
        """The number of guessed tokens to verify for each sequence, if there is time."""
        if self._draft_model is not None:
            self._draft_model.expect(landed)
        prospects = [prospect for sequence in landed if (prospect := sequence.prospect) is not None]
        return self._lengths(prospects, landed) if prospects and self._may_draft(landed) else {}

    def _may_draft(self, landed: Collection[Sequence]) -> bool:
        """False while a prompt is computed: it needs the time itself, and already shares the fixed cost of the step."""
        return all(sequence.is_decoding for sequence in landed) and self._may_hurry

    def _lengths(self, prospects: Collection[Prospect], decoding: Collection[Sequence]) -> dict[int, int]:
        return draft_lengths(
            prospects,
            rows=len(decoding),
            context_tokens=sum(sequence.computed_tokens + 1 for sequence in decoding),
            cost=self.cost,
            bounds=self._drafting,
            overhead_s=self.overhead_s,
        )

    def _consult(
        self, model: DraftModel, landed: Collection[Sequence], work: Collection[Work], plan: dict[int, int]
    ) -> float:
        """Have `model` compute the guesses of `plan`, and in the time that is left what it lacks of other answers.

        Returns the seconds that it took.
        """
        before_s = model.spent_s
        model.guess(
            {
                sequence: plan[sequence.arrival] - 1 + sequence.unseen
                for sequence in landed
                if sequence.is_decoding and plan.get(sequence.arrival, 0) > 1 and sequence.drafter is not None
                if sequence.drafter.is_model
            }
        )
        behind = self._worth_following(model, landed)
        if behind:
            step_s = self.options.step.step_s
            left_s = step_s * self.cost.most_share - self.cost.predict_s(shape_of(work, plan))
            spare_s = left_s - (model.spent_s - before_s)
            # as for drafts: if decoding alone takes all of it
            model.catch_up(behind, spare_s if left_s > 0 else step_s / 2)
        return model.spent_s - before_s

    def _worth_following(self, model: DraftModel, landed: Collection[Sequence]) -> list[Sequence]:
        """The sequences of which `model` lacks KV, if it would be expected to gain by guesses and there is time."""
        decoding_s = self.cost.predict_s(StepShape(len(landed), 0.0, sum(each.computed_tokens + 1 for each in landed)))
        behind = [
            sequence
            for sequence in landed
            if (drafter := sequence.model_drafter) is not None and drafter.is_behind
            if model.catch_up_s(drafter) <= _CATCH_UP_SHARE * sequence.left_tokens * decoding_s
        ]
        if not behind or not self._may_draft(landed):
            return []
        prospects = [
            Prospect(0, behind[0].computed_tokens, drafter.chance, drafter.later_chance, MOST_DRAFTED, drafter.guess_s)
            for drafter in (behind[0].model_drafter,)
            if drafter is not None
        ]
        return behind if self._lengths(prospects, landed) else []

    @property
    def _may_hurry(self) -> bool:
        """Could every running sequence have all its blocks at once? Then the order of their growth does not matter."""
        running, blocks = self.roster.running.values(), self.pool.guaranteed
        # the sum is an upper bound, since it counts shared blocks more than once, and it is 100 times as fast
        return sum(sequence.request.peak_blocks for sequence in running) <= blocks or self._room().is_sound_at_any_pace

    def _blend(self, blender: Blender, sequence: Sequence) -> bool:
        """Whether `sequence` can be computed now, with what was blended into it; it waits for a copy if not."""
        before = sequence.skips.tokens
        may_go_on = blender.blend(sequence)
        if sequence.skips.tokens > before:
            self._note_progress(sequence)
        return may_go_on

    def _pieces(self, sequence: Sequence, tokens: int) -> list[Piece]:
        """The pieces of the next `tokens` tokens of `sequence`: several where it skips some."""
        start, stop = sequence.computed_tokens, sequence.computed_tokens + tokens
        pieces: list[Piece] = []
        if sequence.skips:
            *others, (start, stop) = sequence.spans(tokens)
            pieces = [Piece(sequence, *span, draws=False) for span in others]
        known = sequence.known_tokens
        if stop <= known or (drafter := sequence.drafter) is None:
            # logits are needed after the last known token
            return [*pieces, Piece(sequence, start, min(stop, known), draws=stop >= known)]
        unseen = sequence.unseen
        draft = drafter.draft(stop - known + unseen)[unseen:]
        return [*pieces, Piece(sequence, start, known + len(draft), True, draft, drafter.is_model)]

    def _look_ahead(self, pieces: Iterable[Piece]) -> None:
        """Evict the blocks that the next step needs if it is like this one, so that copies to the host overlap."""
        if self.pool.host.size:
            self.pool.make_room(
                sum(blocks_for(piece.stop + piece.tokens) - len(piece.sequence.table) for piece in pieces)
            )

    def _grow(self, piece: Piece) -> bool:
        """Make room for `piece`. `Room` guarantees it; if it fails all the same, one request pays and not the batch."""
        try:
            piece.sequence.table.grow(piece.stop)
        except OutOfBlocks:
            self._preempt(piece.sequence.arrival)
            return False
        return True

    def _note_progress(self, sequence: Sequence) -> None:
        request = sequence.request
        computed = min(sequence.computed_tokens, request.submission.prompt_tokens)
        if computed > request.computed_tokens:
            request.computed_tokens = computed
            self._moved[request.key] = request
        if sequence.choice == 0 and not request.preemptions:
            request.cached_tokens, request.blended_tokens = sequence.cached_tokens, sequence.blended_tokens

    def _pending(self, sequence: Sequence, now_s: float) -> Pending | None:
        request = sequence.request
        if request.is_held:
            return None
        skipped_tokens = sequence.skips.tokens_from(sequence.computed_tokens)
        rest_tokens = request.submission.prompt_tokens - sequence.computed_tokens - skipped_tokens
        rank = self._rank(sequence, now_s)
        return Pending(
            request.key, rank, sequence.arrival, sequence.computed_tokens, rest_tokens, not self._runs(sequence)
        )

    def _runs(self, sequence: Sequence) -> bool:
        return sequence.arrival in self.roster.running
