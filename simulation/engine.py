"""One engine without a network: the shards' own scheduler over blocks of KV, whose steps only take time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shards.exec.request import Request
from shards.exec.sequence import Sequence
from shards.kv.keys import TOKEN_BYTES
from shards.kv.pool import BlockPool
from shards.kv.table import BlockTable
from shards.nouns import CacheEvent, Cause, Load, Submission
from shards.sched.cost import CostModel
from shards.sched.limits import Limits, Refusal
from shards.sched.warm_up import NEW_TOKENS, warm_up_prompts
from shards.scheduler import Scheduler, Step
from simulation.speed import Machine

LEAP_S = 0.25
"""Steps that only draw are taken together, up to this long: nothing is decided in them, what others see of the engine
is as old as that at most, and it learns its speed from the first of them. Many times faster than each by itself."""

_VOCABULARY = 2**32


class Drew(NamedTuple):
    """`tokens` that one choice of the request `key` drew; `is_last`: its answer is whole, and `cached` of the prompt
    were found in the cache.
    """

    key: Hashable
    choice: int
    tokens: int
    is_last: bool
    cached: int


@dataclass(slots=True)
class _Due:
    """A step that began at `began_s`, and `steps - 1` like it after it, each `later_s` longer than the one before."""

    step: Step
    began_s: float
    first_s: float
    later_s: float = 0.0
    steps: int = 1

    def seconds(self, steps: int) -> float:
        """How long the first `steps` of them take."""
        return steps * self.first_s + self.later_s * steps * (steps - 1) / 2

    @property
    def ends_s(self) -> float:
        """When the last of them ends."""
        return self.began_s + self.seconds(self.steps)


@dataclass(slots=True)
class Work:
    """What an engine has done: seconds with a step under way, steps, tokens of prompts computed and found in the cache,
    tokens drawn, and preemptions.
    """

    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drawn_tokens: int = 0
    preemptions: int = 0


class SimulatedEngine:
    """Serves as `shards.engine.Engine` does, on a clock that is told to it. `model` and domain name its blocks.

    `cost` is what it believes of its speed at first; without it, it warms up as a shard does before it serves.

    `begin` a step, and `end` it at `ends_s`; in between requests come and go. Nothing waits and nothing is random.
    """

    def __init__(self, machine: Machine, *, model: str, cost: CostModel | None = None, leap_s: float = LEAP_S) -> None:
        self.machine, self.work, self._leap_s = machine, Work(), leap_s
        options = machine.options
        self._pool = BlockPool(machine.blocks, model=model, options=options.pool)
        self._scheduler = Scheduler(self._pool, options, cost=cost or CostModel())
        self._limits = Limits(_VOCABULARY, machine.context_tokens, self._pool.guaranteed, has_tokenizer=True)
        self._answers: dict[Hashable, int] = {}
        self._arrivals = 0
        self._due: _Due | None = None
        if cost is None:
            self._warm_up()

    def __repr__(self) -> str:
        return f"<SimulatedEngine {self._scheduler!r}, {self.work.steps} steps>"

    @property
    def ends_s(self) -> float | None:
        """When the step that is under way ends; None between steps."""
        return self._due.ends_s if self._due else None

    @property
    def next_change_s(self) -> float | None:
        """When a step would do something although nothing else happens; None if never."""
        return self._scheduler.next_change_s

    @property
    def has_requests(self) -> bool:
        """Is anybody here?"""
        return bool(self._scheduler.roster.requests)

    def submit(self, submission: Submission, token_ids: bytes, *, new_tokens: int, now_s: float) -> Refusal | None:
        """Take a request whose answer will have `new_tokens`, or say why not."""
        refusal = self._limits.refusal(submission)
        waiting = len(self._scheduler.roster.waiting)
        if refusal is None and waiting + submission.choices > self._scheduler.options.max_waiting:
            refusal = Refusal(f"{waiting} sequences wait here already", Cause.OVERLOADED)
        if refusal is not None:
            return refusal
        self._cut_short(now_s)
        request = Request(submission, arrived_s=now_s)
        request.prompt += token_ids
        self._answers[submission.key] = min(new_tokens, submission.max_new_tokens)
        for choice in range(submission.choices):
            table = BlockTable(self._pool, submission.domain, rank=submission.rank)
            self._scheduler.roster.enter(Sequence(request, choice, arrival=self._arrivals, table=table))
            self._arrivals += 1
        return None

    def cancel(self, key: Hashable, now_s: float) -> None:
        """End a request at whatever it is doing; one that is not here has ended."""
        request = self._scheduler.roster.requests.get(key)
        if request is not None:
            self._cut_short(now_s)
            for one in self._scheduler.roster.sequences_of(request):
                self._finish(one)

    def begin(self, now_s: float) -> float | None:
        """Begin a step; when it ends, or None if there is nothing to compute."""
        assert self._due is None, "a step is under way"
        before = self._preemptions()
        step = self._scheduler.next_step(now_s)
        self.work.preemptions += self._preemptions() - before
        if not step.pieces:
            return None
        decoding = sum(piece.sequence.is_decoding for piece in step.pieces)
        first_s = self.machine.speed.seconds(step.shape, decoding=decoding)
        self._due = _Due(step, now_s, first_s)
        if decoding == len(step.pieces) and not self._scheduler.roster.waiting:
            self._leap(self._due, decoding)
        return self._due.ends_s

    def end(self) -> list[Drew]:
        """The step that is under way has ended; what was drawn in it."""
        due = self._due
        assert due is not None, "no step is under way"
        self._due = None
        self._scheduler.observe(due.step, due.first_s, steps=due.steps)
        self.work.busy_s += due.seconds(due.steps)
        self.work.steps += due.steps
        return list(self._drawn(due))

    def load(self) -> Load:
        """How busy it is, as a shard reports after each step."""
        return self._scheduler.load(step_s=0.0)

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """What its cache holds and no longer holds since the last call, in order."""
        return self._pool.prefix.drain_events()

    def check(self) -> None:
        """Prove the invariants of pool and scheduler, and that it knows the answer of everybody who is here."""
        self._pool.check([one.table.ids for one in self._scheduler.roster.running.values()])
        self._scheduler.check()
        assert self._answers.keys() == self._scheduler.roster.requests.keys(), "an answer is nobody's"

    def _warm_up(self) -> None:
        """Learn how fast it is from the prompts that a shard warms up with, and forget all else of them."""
        now_s = 0.0
        for tokens in warm_up_prompts(self.machine.context_tokens):
            submission = Submission(("warm-up", tokens), tokens, NEW_TOKENS)
            self.submit(submission, bytes(TOKEN_BYTES * tokens), new_tokens=NEW_TOKENS, now_s=now_s)
            while (ends_s := self.begin(now_s)) is not None:
                now_s = ends_s
                self.end()
            self._pool.clear()
        self._pool.prefix.drain_events()
        self.work = Work()

    def _leap(self, due: _Due, decoding: int) -> None:
        """Let `due` be as many steps as nobody could change: until the first answer ends, or for `leap_s`."""
        left = min(self._left(piece.sequence) for piece in due.step.pieces)
        due.later_s = self.machine.speed.context_s * decoding
        # where a profile leaves out what drawing takes, it takes no time
        due.steps = max(1, min(left, int(self._leap_s / due.first_s))) if due.first_s else left

    def _cut_short(self, now_s: float) -> None:
        """Somebody came or went: only the step that is under way now is taken to its end."""
        due = self._due
        if due is not None:
            due.steps = next((n for n in range(1, due.steps) if due.began_s + due.seconds(n) >= now_s), due.steps)

    def _left(self, one: Sequence) -> int:
        return self._answers[one.request.key] - len(one.output)

    def _drawn(self, due: _Due) -> Iterator[Drew]:
        scheduler = self._scheduler
        # in the engine's order: first everything is computed, then what was drawn is looked at
        for piece in due.step.pieces:
            if piece.sequence.arrival in scheduler.roster.running:
                scheduler.advance(piece)
        for piece in due.step.pieces:
            one = piece.sequence
            if one.arrival not in scheduler.roster.running:
                # cancelled meanwhile
                continue
            if not piece.draws:
                self.work.prompt_tokens += piece.tokens
                scheduler.store(one)
                continue
            if not one.output:
                self.work.prompt_tokens += piece.tokens
                self.work.cached_tokens += one.cached_tokens
            self._take(one, due.steps)
            yield self._told(one, due.steps)

    def _take(self, one: Sequence, steps: int) -> None:
        # its tokens are its own: nobody else's prompt goes on as its answer did
        scheduler, token = self._scheduler, one.arrival % _VOCABULARY
        scheduler.store(one)
        scheduler.take(one, token)
        if steps > 1:
            later = steps - 1
            one.table.grow(one.computed_tokens + later)
            one.computed_tokens += later
            one.output += [token] * later
        scheduler.store(one)
        self.work.drawn_tokens += steps

    def _told(self, one: Sequence, steps: int) -> Drew:
        is_last = self._left(one) <= 0
        told = Drew(one.request.key, one.choice, steps, is_last, one.request.cached_tokens)
        if is_last:
            self._finish(one)
        return told

    def _finish(self, one: Sequence) -> None:
        self._scheduler.finish(one)
        if not one.request.open_choices:
            del self._answers[one.request.key]

    def _preemptions(self) -> int:
        return sum(one.preemptions for one in self._scheduler.roster.requests.values())
