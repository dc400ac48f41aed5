"""Decides which sequences run and what each step computes, on any clock and without torch. The engine and simulations
use it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from shards.exec.piece import Piece
from shards.exec.request import Request
from shards.exec.sequence import Sequence
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.pool import BlockPool, OutOfBlocks
from shards.kv.table import blocks_for
from shards.nouns import Load, Progress
from shards.options import EngineOptions
from shards.roster import Roster
from shards.sched.admit import Victim, Waiting, admit
from shards.sched.cost import CostModel, StepShape
from shards.sched.drafts import draft_lengths
from shards.sched.forecast import Decoding, Pending, predict_ttft_s
from shards.sched.plan import plan_step, shape_of
from shards.sched.ranks import effective_rank
from shards.sched.room import Claim, Room


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step; the block tables have room for it. `shape` is its cost in the terms of the cost model.

    `is_short` if a sequence was left out that can continue without a new event: its KV was being copied from the host,
    or there was no free block for it.
    """

    pieces: tuple[Piece, ...]
    shape: StepShape
    is_short: bool = False


class Scheduler:
    """Decides on the sequences of `roster` and the blocks of `pool`. It never waits and has no clock of its own.

    Each step: `next_step`, compute it, `advance` every piece, `store` its full blocks in the cache, `take` the drawn
    token of each piece, `finish` completed sequences, `observe` the duration. One more step may be planned between
    `advance` and `take`; until then only the device knows the drawn tokens. As long as the taken token equals the
    drafted one, `accept` it and take the token drawn behind it.
    """

    def __init__(self, pool: BlockPool, options: EngineOptions, *, cost: CostModel | None = None) -> None:
        self.pool, self.options = pool, options
        self.roster = Roster()
        self.cost = cost or CostModel()
        self._moved: dict[Hashable, Request] = {}
        self._stepped_s = float("-inf")
        self._drafted_tokens = self._accepted_tokens = 0

    def __repr__(self) -> str:
        return f"Scheduler({self.roster!r}, {self.pool!r})"

    def next_step(self, now_s: float) -> Step:
        """Preempt and start the sequences that are due, share what is cached, and plan."""
        self._stepped_s = now_s
        self.pool.pins.expire(now_s)
        self._admit(now_s)
        running = self.roster.running
        for one in running.values():
            if one.share():
                self._note_progress(one)
        ready = [one for one in running.values() if one.ready_tokens]
        landed = [one for one in ready if one.table.is_landed] if self._is_copying else ready
        drafts = self._drafts(landed)
        work = [one.work(self._rank(one, now_s), drafted_tokens=drafts.get(one.arrival, 0)) for one in landed]
        plan = plan_step(work, self.cost, self.options.step)
        pieces = [self._piece(running[arrival], tokens) for arrival, tokens in plan.items()]
        served = tuple(piece for piece in pieces if self._grow(piece))
        self._look_ahead(served)
        shape = shape_of(work, {piece.sequence.arrival: piece.tokens for piece in served})
        return Step(served, shape, is_short=len(landed) < len(ready) or len(served) < len(pieces))

    @property
    def _is_copying(self) -> bool:
        """Is KV being copied from the host?"""
        self.pool.has_landed(())
        return bool(self.pool.host.flights.landing)

    @property
    def next_change_s(self) -> float | None:
        """When a running sequence next becomes preemptible again; None if none is protected or no sequence waits."""
        if not self.roster.waiting:
            return None
        spared = (one.spared_s for one in self.roster.running.values() if one.spared_s is not None)
        ends = (spared_s + self.options.preempt_cooldown_s for spared_s in spared)
        return min((end_s for end_s in ends if end_s > self._stepped_s), default=None)

    def advance(self, piece: Piece) -> None:
        """Record that `piece` is computed, or will be before everything that is computed from now on."""
        one = piece.sequence
        one.computed_tokens = piece.known_stop
        one.unseen += piece.draws
        if not one.output:
            self._note_progress(one)

    def store(self, one: Sequence) -> None:
        """Cache the full blocks of `one`, as far as its tokens are known on the host."""
        # called twice for every row of every step, and almost always without effect
        if one.computed_tokens // BLOCK_TOKENS > len(one.table.path):
            one.table.store(one.block_tokens, computed_tokens=one.storable_tokens)

    def take(self, one: Sequence, token_id: int) -> None:
        """Record that `one` has drawn `token_id`, whether it still runs or waits to continue."""
        one.unseen -= 1
        one.append(token_id)

    def accept(self, one: Sequence) -> None:
        """The last token of `one` equals the draft: its KV exists, and one more token was drawn behind it."""
        one.computed_tokens += 1
        one.unseen += 1
        self._accepted_tokens += 1

    def observe(self, step: Step, elapsed_s: float, *, steps: int = 1) -> None:
        """Learn that `step` took `elapsed_s`."""
        self.cost.observe(step.shape, elapsed_s, steps=steps)
        self._drafted_tokens += sum(len(piece.draft) for piece in step.pieces)

    def finish(self, one: Sequence) -> None:
        """End `one`: free its blocks on the device and on the host."""
        one.table.release()
        self.roster.leave(one)

    def load(self, step_s: float) -> Load:
        """The engine's load; its last step took `step_s`."""
        return Load(
            running=len(self.roster.running),
            waiting=len(self.roster.waiting),
            waiting_tokens=sum(
                one.submission.prompt_tokens - one.computed_tokens for one in self.roster.requests.values()
            ),
            blocks_total=self.pool.size,
            blocks_free=self.pool.available,
            blocks_pinnable=self.pool.pins.room,
            prefill_s_per_token=self.cost.prefill_s_per_token,
            step_s=step_s,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def drain_progress(self) -> tuple[Progress, ...]:
        """The progress of all prompts that have advanced since the last call."""
        progress = tuple(Progress(one.key, one.computed_tokens, one.cached_tokens) for one in self._moved.values())
        self._moved.clear()
        return progress

    def predictions(self, now_s: float) -> dict[Hashable, float]:
        """Predicted seconds until the first token, by request key, for runnable requests that have not drawn yet."""
        running, waiting = self.roster.running, self.roster.waiting
        decoding = [one for one in running.values() if one.is_decoding]
        meanwhile = Decoding(
            rows=len(decoding),
            context_tokens=sum(one.known_tokens for one in decoding),
            # as if all of it were on the device: a copy takes a step or two, much less than the lifetime
            steps_left=tuple(one.claim()._replace(is_steady=True).steps_left for one in decoding),
        )
        pending = [self._pending(one, now_s) for one in (*running.values(), *waiting.values()) if not one.has_drawn]
        return predict_ttft_s(
            (one for one in pending if one is not None),
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

    def _rank(self, one: Sequence, now_s: float) -> int:
        return effective_rank(one.request.rank, now_s - one.request.arrived_s, self.options.ageing_s)

    def _room(self) -> Room:
        # pins and floors leave at least the guaranteed part of the pool to running sequences, now and at any time
        return Room(self.pool.guaranteed, {arrival: one.claim() for arrival, one in self.roster.running.items()})

    def _admit(self, now_s: float) -> None:
        running, waiting = self.roster.running, self.roster.waiting
        candidates = [one for one in waiting.values() if one.is_startable]
        if not candidates:
            return
        slots = self.options.max_running - len(running)
        victims = list(self._victims(now_s))
        worst = max((victim.rank for victim in victims), default=0)
        # measuring the room takes a tenth of a millisecond, and on a full engine the result is not used
        if slots <= 0 and all(one.request.rank >= worst for one in candidates):
            return
        candidates.sort(key=lambda one: (self._rank(one, now_s), one.arrival))
        admission = admit(
            (Waiting(one.arrival, one.request.rank, partial(self._claim, one), one.overtaken) for one in candidates),
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
        for one in self.roster.running.values():
            request = one.request
            is_spared = one.spared_s is not None and now_s - one.spared_s < self.options.preempt_cooldown_s
            if not is_spared and request.submission.preemptible and request.preemptions < self.options.most_preemptions:
                yield Victim(one.arrival, request.rank, one.arrival)

    def _claim(self, one: Sequence) -> Claim:
        """The blocks that `one` would hold and need if it started now, with its cached prefix even if shared."""
        claim = one.claim()
        if one.table.is_parked:
            return claim._replace(is_steady=False)
        blocks = tuple(cached.block for cached in one.look_up() if cached.block is not None)
        return claim._replace(blocks=blocks)

    def _start(self, arrival: int, now_s: float) -> None:
        one = self.roster.start(arrival)
        # a sequence that was preempted, or had to wait until its rank improved, is not preempted at once
        if one.request.preemptions or self._rank(one, now_s) < one.request.rank:
            one.spared_s = now_s
        if one.table.is_parked:
            one.table.unpark()

    def _preempt(self, arrival: int) -> None:
        """Let `arrival` wait again: its KV goes to host memory, or is dropped and computed again."""
        one = self.roster.put_back(arrival)
        one.request.preemptions += 1
        if not (one.computed_tokens and one.table.park()):
            one.start_over()

    def _drafts(self, landed: Collection[Sequence]) -> dict[int, int]:
        """The number of guessed tokens to verify for each sequence, if there is time.

        Empty while a prompt is computed: it needs the time itself, and already shares the fixed cost of the step.
        """
        prospects = [prospect for one in landed if (prospect := one.prospect) is not None]
        if not prospects or any(not one.is_decoding for one in landed) or not self._may_hurry:
            return {}
        decoding = [one.computed_tokens + 1 for one in landed if one.is_decoding]
        return draft_lengths(prospects, rows=len(decoding), context_tokens=sum(decoding), cost=self.cost)

    @property
    def _may_hurry(self) -> bool:
        """Could every running sequence have all its blocks at once? Then the order of their growth does not matter."""
        running, blocks = self.roster.running.values(), self.pool.guaranteed
        # the sum is an upper bound, since it counts shared blocks more than once, and it is 100 times as fast
        return sum(one.request.peak_blocks for one in running) <= blocks or self._room().is_sound_at_any_pace

    def _piece(self, one: Sequence, tokens: int) -> Piece:
        stop = one.computed_tokens + tokens
        if one.drafter is None or stop <= one.known_tokens:
            # logits are needed after the last known token
            return Piece(one, one.computed_tokens, stop, draws=stop == one.known_tokens)
        return Piece(one, one.computed_tokens, stop, draws=True, draft=one.drafter.draft(stop - one.known_tokens))

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

    def _note_progress(self, one: Sequence) -> None:
        request = one.request
        computed = min(one.computed_tokens, request.submission.prompt_tokens)
        if computed > request.computed_tokens:
            request.computed_tokens = computed
            self._moved[request.key] = request
        if one.choice == 0 and not request.preemptions:
            request.cached_tokens = one.cached_tokens

    def _pending(self, one: Sequence, now_s: float) -> Pending | None:
        request = one.request
        if request.is_held:
            return None
        rest_tokens = request.submission.prompt_tokens - one.computed_tokens
        rank = self._rank(one, now_s)
        return Pending(request.key, rank, one.arrival, one.computed_tokens, rest_tokens, not self._runs(one))

    def _runs(self, one: Sequence) -> bool:
        return one.arrival in self.roster.running
