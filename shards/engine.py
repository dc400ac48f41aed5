"""The engine: requests go in, each step computes one plan and reports all that it changed."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from shards.exec.request import Request
from shards.exec.runner import Piece, Runner
from shards.exec.sampling import Sample, Sampler
from shards.exec.sequence import Sequence
from shards.exec.stop import StopStrings
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES
from shards.kv.pool import BlockPool
from shards.kv.table import BlockTable
from shards.model import Model
from shards.nouns import CacheEvent, Cause, Drawn, Finished, FinishReason, Load, Progress, Report, Submission
from shards.sched.admit import Waiting, admit
from shards.sched.cost import CostModel
from shards.sched.limits import MOST_CHOICES, Limits, Refusal
from shards.sched.plan import StepLimits, plan_step, shape_of

_SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`kv_blocks` blocks of KV, or as many as `kv_bytes` hold. Sequences run or wait: `max_running`, `max_waiting`.

    `window_tokens`: how much of a prompt may arrive ahead of what is computed. `step_s`: what a step should take;
    `lanes`, `chunk_tokens` and `batch_tokens` are those of `StepLimits`.
    """

    kv_blocks: int | None = None
    kv_bytes: int = 2**30
    max_running: int = 64
    max_waiting: int = 512
    window_tokens: int = 65536
    step_s: float = 0.05
    lanes: int = 8
    chunk_tokens: int = 8192
    batch_tokens: int = 16384

    def blocks(self, block_bytes: int) -> int:
        """How many blocks of `block_bytes` the engine gets. Raises ValueError if there is not one."""
        blocks = self.kv_bytes // block_bytes if self.kv_blocks is None else self.kv_blocks
        if blocks < 1:
            raise ValueError(f"{self.kv_bytes} bytes hold no KV block of {block_bytes} bytes; give the engine more")
        if self.window_tokens < BLOCK_TOKENS:
            raise ValueError(f"window_tokens is {self.window_tokens}; a block of {BLOCK_TOKENS} must fit in")
        return blocks

    @property
    def step(self) -> StepLimits:
        """What bounds a plan."""
        return StepLimits(self.step_s, self.lanes, self.chunk_tokens, self.batch_tokens)


class Engine:
    """Serves `model` from one pool of KV blocks. Every call must come from the same thread.

    A sequence waits, runs, is finished. It starts when its peak (prompt and answer, less what running sequences hold
    of its prefix) is free or evictable, so whoever runs can finish. Each step is: end what is late, admit, share
    what is cached, plan, compute, draw, cache what became full, report. `clock` times steps and deadlines; `rng`
    gives seeds to those who have none.
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.model, self.options = model, options or EngineOptions()
        network = model.network
        blocks = self.options.blocks(network.block_bytes)
        network.allocate(blocks)
        self._clock, self._rng = clock, rng or random.Random()
        self._limits = Limits(network.vocabulary, network.context_tokens, blocks, model.tokenizer is not None)
        self._pool = BlockPool(blocks, model=model.name)
        self._runner = Runner(network)
        self._cost = CostModel()
        self._requests: dict[Hashable, Request] = {}
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._finished: list[Finished] = []
        self._moved: dict[Hashable, Request] = {}
        self._arrivals = self._steps = 0
        self._step_s = 0.0
        self._is_settled = True

    def __repr__(self) -> str:
        return (
            f"Engine({self.model.name}: {len(self._running)} running, {len(self._waiting)} waiting, {self._pool!r}, "
            f"{self._steps} steps)"
        )

    @property
    def has_work(self) -> bool:
        """Would a step compute or report anything? Only a call or a passing deadline changes a False."""
        if not self._is_settled or self._finished or self._pool.prefix.has_events:
            return True
        deadline_s = self.next_deadline_s
        return deadline_s is not None and deadline_s <= self._clock()

    @property
    def next_deadline_s(self) -> float | None:
        """When the engine wants a step although nothing else happens, on its clock; None if never."""
        deadlines = [one.submission.deadline_s for one in self._requests.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def submit(self, submission: Submission) -> None:
        """Take a request. One that cannot be served, or finds too many waiting, finishes as REJECTED.

        A key that is in use already ends the request that uses it.
        """
        self._is_settled = False
        known = self._requests.get(submission.key)
        if known is not None:
            self._end(known, FinishReason.FAILED, message="its key was submitted a second time")
            return
        refusal = self._limits.refusal(submission)
        if refusal is None and len(self._waiting) + submission.choices > self.options.max_waiting:
            message = f"{len(self._waiting)} sequences wait here already; try another shard, or later"
            refusal = Refusal(message, Cause.OVERLOADED)
        if refusal is not None:
            self._reject(submission, refusal)
            return
        request = self._requests[submission.key] = Request(submission)
        seed = self._rng.getrandbits(64) if submission.sampling.seed is None else submission.sampling.seed
        for choice in range(submission.choices):
            self._enqueue(request, choice, (seed + choice) % _SEEDS)

    def extend(self, key: Hashable, token_ids: bytes) -> None:
        """Append `token_ids` (little-endian uint32) to a prompt. An unknown key is ignored: its request has ended.

        What cannot be a part of the prompt ends the request as REJECTED, or FAILED once it has drawn.
        """
        request = self._requests.get(key)
        if request is None:
            return
        self._is_settled = False
        missing = request.submission.prompt_tokens - request.arrived_tokens
        refusal = self._limits.piece_refusal(token_ids, missing_tokens=missing)
        ahead = request.arrived_tokens + len(token_ids) // TOKEN_BYTES - request.computed_tokens
        if refusal is not None:
            has_drawn = any(one.output for one in self._sequences_of(request))
            reason = FinishReason.FAILED if has_drawn else FinishReason.REJECTED
            self._end(request, reason, message=refusal.message, cause=None if has_drawn else refusal.cause)
        elif ahead > self.options.window_tokens:
            message = (
                f"{ahead} prompt tokens came ahead of what is computed; the window is {self.options.window_tokens}"
            )
            self._end(request, FinishReason.FAILED, message=message)
        else:
            request.prompt += token_ids

    def pace(
        self,
        key: Hashable,
        *,
        rank: int | None = None,
        prefill_slice: int | None = None,
        paused: bool | None = None,
    ) -> None:
        """Steer a request's start and prefill; what has begun to draw goes on. None leaves a setting as it is.

        `prefill_slice` 0 lets the engine decide again.
        """
        request = self._requests.get(key)
        if request is None:
            return
        self._is_settled = False
        request.rank = request.rank if rank is None else rank
        request.is_paused = request.is_paused if paused is None else paused
        request.prefill_slice = request.prefill_slice if prefill_slice is None else prefill_slice or None

    def cancel(self, key: Hashable) -> None:
        """End a request at whatever it is doing; each choice that is open finishes as CANCELLED."""
        request = self._requests.get(key)
        if request is not None:
            self._is_settled = False
            self._end(request, FinishReason.CANCELLED)

    def clear_cache(self) -> None:
        """Forget all that is cached; the next report says so. What runs goes on, and shares nothing any more."""
        self._pool.clear()
        for one in self._running.values():
            one.table.unchain()

    def snapshot(self) -> tuple[CacheEvent, ...]:
        """Events that build the cache as it is now, parents before children."""
        return self._pool.prefix.snapshot()

    def step(self) -> Report:
        """Do one step's work and say what it changed. Cheap when there is nothing to do."""
        self._end_late(self._clock())
        self._admit()
        for one in self._running.values():
            self._share(one)
        work = [one.work() for one in self._running.values() if one.ready_tokens]
        plan = plan_step(work, self._cost, self.options.step)
        pieces = [(self._running[arrival], tokens) for arrival, tokens in plan.items()]
        drawn: list[Drawn] = []
        if pieces:
            started_s = self._clock()
            drawn = self._compute(pieces)
            self._step_s = self._clock() - started_s
            self._cost.observe(shape_of(work, plan), self._step_s)
        self._is_settled = not pieces
        return self._report(drawn)

    def check(self) -> None:
        """Prove the invariants of pool, sequences and requests."""
        self._pool.check([one.table.ids for one in self._running.values()])
        outstanding = sum(one.outstanding_blocks for one in self._running.values())
        assert outstanding <= self._pool.available, "running sequences could run out of blocks"
        assert len(self._running) <= self.options.max_running, "too many sequences run"
        assert not self._running.keys() & self._waiting.keys(), "a sequence runs and waits"
        for one in self._waiting.values():
            assert not len(one.table), "a waiting sequence holds blocks"
        everyone = {**self._waiting, **self._running}
        for arrival, one in everyone.items():
            assert one.arrival == arrival, "a sequence is filed under another's number"
            assert self._requests[one.request.key] is one.request, "a sequence has outlived its request"
            one.check()
        for request in self._requests.values():
            open_choices = len(self._sequences_of(request))
            assert open_choices == request.open_choices > 0, "a request has lost count of its choices"

    def _reject(self, submission: Submission, refusal: Refusal) -> None:
        choices = submission.choices if 1 <= submission.choices <= MOST_CHOICES else 1
        for choice in range(choices):
            self._finished.append(
                Finished(
                    key=submission.key,
                    choice=choice,
                    reason=FinishReason.REJECTED,
                    prompt_tokens=submission.prompt_tokens,
                    cached_tokens=0,
                    output_tokens=0,
                    message=refusal.message,
                    cause=refusal.cause,
                )
            )

    def _enqueue(self, request: Request, choice: int, seed: int) -> None:
        sampling = request.submission.sampling
        stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else self.model.eos_token_ids)
        sampler = Sampler(sampling, seed=seed, stop_token_ids=stop_ids, vocabulary=self._limits.vocabulary)
        stops = StopStrings(self.model.tokenizer, sampling.stop) if sampling.stop and self.model.tokenizer else None
        table = BlockTable(self._pool, request.submission.domain)
        one = Sequence(request, choice, arrival=self._arrivals, table=table, draws=(sampler, stops))
        self._arrivals += 1
        self._waiting[one.arrival] = one

    def _sequences_of(self, request: Request) -> list[Sequence]:
        return [one for one in (*self._waiting.values(), *self._running.values()) if one.request is request]

    def _end_late(self, now_s: float) -> None:
        for request in list(self._requests.values()):
            deadline_s = request.submission.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._end(request, FinishReason.DEADLINE, message="its deadline has passed")

    def _end(self, request: Request, reason: FinishReason, *, message: str = "", cause: Cause | None = None) -> None:
        for one in self._sequences_of(request):
            self._finish(one, one.finished(reason, message=message, cause=cause))

    def _finish(self, one: Sequence, finished: Finished) -> None:
        self._finished.append(finished)
        self._waiting.pop(one.arrival, None)
        self._running.pop(one.arrival, None)
        one.table.release()
        one.request.open_choices -= 1
        if not one.request.open_choices:
            del self._requests[one.request.key]

    def _admit(self) -> None:
        slots = self.options.max_running - len(self._running)
        if slots <= 0 or not self._waiting:
            return
        room = self._pool.available - sum(one.outstanding_blocks for one in self._running.values())
        admission = admit(self._candidates(), slots=slots, blocks=room)
        for arrival in admission.overtaken:
            self._waiting[arrival].overtaken += 1
        for arrival in admission.admitted:
            self._running[arrival] = self._waiting.pop(arrival)

    def _candidates(self) -> Iterator[Waiting]:
        """Who could start, in the order in which they are served, each matched with the cache when it is its turn."""
        ready = [one for one in self._waiting.values() if one.request.prompt and not one.request.is_paused]
        for one in sorted(ready, key=lambda one: (one.request.rank, one.arrival)):
            request = one.request
            domain, limit = request.submission.domain, request.matchable_blocks
            self._pool.prefix.extend_path(one.match, request.block_tokens, limit=limit, domain=domain)
            # who holds a block holds its parents, so the held ones come first
            held = bisect_left(one.match, True, key=lambda cached: not self._pool.is_held(cached.block))
            yield Waiting(one.arrival, request.peak_blocks - held, one.overtaken)

    def _share(self, one: Sequence) -> None:
        """Take from the cache what continues a prompt that stands on a block boundary."""
        if one.output or one.computed_tokens % BLOCK_TOKENS:
            return
        found = one.table.follow(one.request.block_tokens, limit=one.request.matchable_blocks) * BLOCK_TOKENS
        if found:
            one.computed_tokens += found
            one.cached_tokens += found
            self._note_progress(one)

    def _note_progress(self, one: Sequence) -> None:
        request = one.request
        computed = min(one.computed_tokens, request.submission.prompt_tokens)
        if computed > request.computed_tokens:
            request.computed_tokens = computed
            self._moved[request.key] = request
        if one.choice == 0:
            request.cached_tokens = one.cached_tokens

    def _compute(self, pieces: list[Piece]) -> list[Drawn]:
        try:
            for one, tokens in pieces:
                one.table.grow(one.computed_tokens + tokens)
            samples = iter(self._runner.run(pieces))
        except Exception as error:  # noqa: BLE001 - whatever the network raises must cost its own batch only
            for one, _ in pieces:
                self._fail(one, f"the step failed: {type(error).__name__}: {error}")
            return []
        drawn: list[Drawn] = []
        for one, tokens in pieces:
            draws = one.draws_after(tokens)
            sampled = next(samples) if draws else None
            if draws and sampled is None:
                self._fail(one, "the model's logits are not finite numbers")
                continue
            self._advance(one, tokens)
            if sampled is not None:
                drawn.append(self._take(one, sampled))
        return drawn

    def _fail(self, one: Sequence, message: str) -> None:
        one.table.distrust()
        self._finish(one, one.finished(FinishReason.FAILED, message=message))

    def _advance(self, one: Sequence, tokens: int) -> None:
        full = one.computed_tokens // BLOCK_TOKENS
        one.computed_tokens += tokens
        if one.computed_tokens // BLOCK_TOKENS > full:
            one.table.store(one.block_tokens, computed_tokens=one.computed_tokens)
        if not one.output:
            self._note_progress(one)

    def _take(self, one: Sequence, sampled: Sample) -> Drawn:
        """Append a drawn token, and finish the sequence if it was the last."""
        token, submission = sampled.token_id, one.request.submission
        one.output.append(token)
        one.sampler.note(token)
        stop = one.stops.push(token) if one.stops else None
        is_free_to_stop = len(one.output) >= submission.sampling.min_new_tokens
        if token in one.sampler.stop_token_ids:
            self._finish(one, one.finished(FinishReason.STOP))
        elif stop is not None and is_free_to_stop:
            self._finish(one, one.finished(FinishReason.STOP, stop=stop))
        elif len(one.output) >= submission.max_new_tokens:
            self._finish(one, one.finished(FinishReason.LENGTH))
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        return Drawn(submission.key, one.choice, (token,), logprobs)

    def _report(self, drawn: list[Drawn]) -> Report:
        self._steps += 1
        progress = tuple(Progress(one.key, one.computed_tokens, one.cached_tokens) for one in self._moved.values())
        finished = tuple(self._finished)
        self._moved.clear()
        self._finished.clear()
        return Report(self._steps, tuple(drawn), progress, finished, self._pool.prefix.drain_events(), self._load())

    def _load(self) -> Load:
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=sum(one.submission.prompt_tokens - one.computed_tokens for one in self._requests.values()),
            blocks_total=self._pool.size,
            blocks_free=self._pool.available,
            prefill_s_per_token=self._cost.prefill_s_per_token,
            step_s=self._step_s,
        )
