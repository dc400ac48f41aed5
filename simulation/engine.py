"""One engine without a network: the shards' own scheduler and KV blocks; its steps only take time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from shards.exec.request import Request
from shards.exec.sequence import Sequence
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES
from shards.kv.pool import BlockPool, OutOfBlocks
from shards.kv.table import BlockTable
from shards.nouns import CacheEvent, Cause, Load, Submission
from shards.sched.cost import CostModel
from shards.sched.limits import Limits, Refusal
from shards.sched.warm_up import NEW_TOKENS, warm_up_prompts
from shards.scheduler import Scheduler, Step
from simulation.speed import Machine

LEAP_S = 0.25
"""Steps that only decode are computed together, up to this many seconds: nothing is decided in them. Its reports are at
most that old, and it learns its speed from the first of them. Many times faster than single steps."""

_VOCABULARY = 2**32
_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class Drew(NamedTuple):
    """`tokens` generated for one choice of the request `key`; `is_last`: its answer is complete; `cached`: tokens of
    the prompt that were in the cache.
    """

    key: Hashable
    choice: int
    tokens: int
    is_last: bool
    cached: int


class StoredBlock(NamedTuple):
    """A block of the cache: its tokens (little-endian uint32) come behind those of `parent`, if it has one."""

    key: int
    parent: int | None
    token_ids: bytes
    domain: str


@dataclass(slots=True)
class _Due:
    """A step that began at `began_s`, and `steps - 1` steps after it, each `later_s` longer than the one before."""

    step: Step
    began_s: float
    first_s: float
    later_s: float = 0.0
    steps: int = 1

    def seconds(self, steps: int) -> float:
        """Duration of the first `steps` of them."""
        return steps * self.first_s + self.later_s * steps * (steps - 1) / 2

    @property
    def ends_s(self) -> float:
        """When the last of them ends."""
        return self.began_s + self.seconds(self.steps)


@dataclass(slots=True)
class Work:
    """Totals of an engine: seconds with a running step, steps, prompt tokens computed and found in the cache,
    tokens generated, and preemptions. `cached_tokens` includes the `fetched_tokens` of `fetches` from other engines.
    """

    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drawn_tokens: int = 0
    preemptions: int = 0
    fetches: int = 0
    fetched_tokens: int = 0


class SimulatedEngine:
    """Works like `shards.engine.Engine`, with the time as an argument. `model` and the domain are part of block keys.

    `cost` is its initial estimate of its speed; without it, it warms up as a shard does before it serves.
    `begin` a step, and `end` it at `ends_s`; in between requests may be added or cancelled. No call waits, and none is
    random.
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
        """When the running step ends; None between steps."""
        return self._due.ends_s if self._due else None

    @property
    def next_change_s(self) -> float | None:
        """Time of the next step that would change something without a new request; None if there is none."""
        return self._scheduler.next_change_s

    @property
    def has_requests(self) -> bool:
        """Whether it has any request."""
        return bool(self._scheduler.roster.requests)

    def slow_down(self, factor: float) -> None:
        """Let every step from the next on take `factor` times as long as now. It learns this from those steps."""
        self.machine = replace(self.machine, speed=self.machine.speed.times(factor))

    def submit(self, submission: Submission, token_ids: bytes, *, new_tokens: int, now_s: float) -> Refusal | None:
        """Add a request with an answer of `new_tokens`, or return the reason of its rejection."""
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

    def cancel(self, key: Hashable, now_s: float) -> bool:
        """End a request in any state; False if it is not here, because it has ended already."""
        request = self._scheduler.roster.requests.get(key)
        if request is None:
            return False
        self._cut_short(now_s)
        for sequence in self._scheduler.roster.sequences_of(request):
            self._finish(sequence)
        return True

    def begin(self, now_s: float) -> float | None:
        """Begin a step; returns when it ends, or None if there is nothing to compute."""
        assert self._due is None, "a step is running"
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
        """End the running step; returns the tokens that it generated."""
        due = self._due
        assert due is not None, "no step is running"
        self._due = None
        self._scheduler.observe(due.step, due.first_s, steps=due.steps)
        self.work.busy_s += due.seconds(due.steps)
        self.work.steps += due.steps
        return list(self._drawn(due))

    def load(self) -> Load:
        """Its load, as a shard reports it after each step."""
        return self._scheduler.load(step_s=0.0)

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """The changes of its cache since the last call, in order."""
        return self._pool.prefix.drain_events()

    def stored_block(self, key: int) -> StoredBlock | None:
        """The cached block that `key` names; None if it has been evicted."""
        found = self._pool.prefix.named(key)
        if found is None:
            return None
        return StoredBlock(key, found.parent.key if found.parent else None, found.token_ids, found.domain)

    def held_tokens(self, token_ids: bytes, domain: str) -> int:
        """How much of the beginning of a prompt is in the cache."""
        # a table without blocks: it looks only
        path, limit = BlockTable(self._pool, domain).path, len(token_ids) // _BLOCK_BYTES
        self._pool.prefix.extend_path(path, _blocks_of(token_ids), limit=limit, domain=domain)
        return BLOCK_TOKENS * len(path)

    def adopt(self, token_ids: bytes, tokens: int, domain: str, *, rank: int = 0) -> int:
        """Put the first `tokens` of a prompt, in whole blocks, into the cache as if they had been computed here.

        Returns the number of new tokens: 0 if there is no room.
        """
        limit, table = tokens // BLOCK_TOKENS, BlockTable(self._pool, domain, rank=rank)
        had = table.follow(_blocks_of(token_ids), limit=limit)
        try:
            table.grow(BLOCK_TOKENS * limit)
            table.store(_blocks_of(token_ids), computed_tokens=BLOCK_TOKENS * limit)
            new_tokens = BLOCK_TOKENS * (limit - had)
        except OutOfBlocks:
            new_tokens = 0
        table.release()
        self.work.fetches += new_tokens > 0
        self.work.fetched_tokens += new_tokens
        return new_tokens

    def check(self) -> None:
        """Assert the invariants of pool and scheduler, and that it has the answer's length of every request."""
        self._pool.check([sequence.table.ids for sequence in self._scheduler.roster.running.values()])
        self._scheduler.check()
        assert self._answers.keys() == self._scheduler.roster.requests.keys(), "an answer has no request"

    def _warm_up(self) -> None:
        """Learn its speed from the prompts that a shard warms up with, and forget everything else about them."""
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
        """Extend `due` by steps that cannot change: until the first answer ends, or for `leap_s`."""
        left = min(self._left(piece.sequence) for piece in due.step.pieces)
        due.later_s = self.machine.speed.context_s * decoding
        # a profile without times for decoding makes decode-only steps take no time
        due.steps = max(1, min(left, int(self._leap_s / due.first_s))) if due.first_s else left

    def _cut_short(self, now_s: float) -> None:
        """A request was added or cancelled: only the step that runs now continues to its end."""
        due = self._due
        if due is not None:
            due.steps = next((n for n in range(1, due.steps) if due.began_s + due.seconds(n) >= now_s), due.steps)

    def _left(self, sequence: Sequence) -> int:
        return self._answers[sequence.request.key] - len(sequence.output)

    def _drawn(self, due: _Due) -> Iterator[Drew]:
        scheduler = self._scheduler
        # in the engine's order: first all pieces are computed, then their tokens are processed
        for piece in due.step.pieces:
            if piece.sequence.arrival in scheduler.roster.running:
                scheduler.advance(piece)
        for piece in due.step.pieces:
            sequence = piece.sequence
            if sequence.arrival not in scheduler.roster.running:
                # cancelled meanwhile
                continue
            if not piece.draws:
                self.work.prompt_tokens += piece.tokens
                scheduler.store(sequence)
                continue
            if not sequence.output:
                self.work.prompt_tokens += piece.tokens
                self.work.cached_tokens += sequence.cached_tokens
            self._take(sequence, due.steps)
            yield self._drew(sequence, due.steps)

    def _take(self, sequence: Sequence, steps: int) -> None:
        # a token of its own, so that no other prompt continues its answer in the cache
        scheduler, token = self._scheduler, sequence.arrival % _VOCABULARY
        scheduler.store(sequence)
        scheduler.take(sequence, token)
        if steps > 1:
            later = steps - 1
            sequence.table.grow(sequence.computed_tokens + later)
            sequence.computed_tokens += later
            sequence.output += [token] * later
        scheduler.store(sequence)
        self.work.drawn_tokens += steps

    def _drew(self, sequence: Sequence, steps: int) -> Drew:
        is_last = self._left(sequence) <= 0
        drew = Drew(sequence.request.key, sequence.choice, steps, is_last, sequence.request.cached_tokens)
        if is_last:
            self._finish(sequence)
        return drew

    def _finish(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        if not sequence.request.open_choices:
            del self._answers[sequence.request.key]

    def _preemptions(self) -> int:
        return sum(request.preemptions for request in self._scheduler.roster.requests.values())


def _blocks_of(token_ids: bytes) -> Callable[[int], bytes]:
    return lambda at: token_ids[at * _BLOCK_BYTES : (at + 1) * _BLOCK_BYTES]
