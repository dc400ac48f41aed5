"""The engine: takes requests, computes one plan per step, and reports all changes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import islice, takewhile, zip_longest

from shards.blender import Blender
from shards.draft_model import DraftModel
from shards.exec.chunking import Chunking, ChunkKey
from shards.exec.drawing import Sample
from shards.exec.hosting import KvExchange, open_hosting
from shards.exec.layout import allocate, kv_layout
from shards.exec.model_drafter import ModelDrafter
from shards.exec.moves import BlendingNetwork
from shards.exec.network import (
    AdaptableNetwork,
    DeviceLost,
    DrawingNetwork,
    FallibleNetwork,
    Network,
    WatchedNetwork,
)
from shards.exec.piece import Piece
from shards.exec.request import Request
from shards.exec.runner import Flight, Runner
from shards.exec.sampling import Sampler
from shards.exec.sequence import Sequence
from shards.exec.writer import Writer
from shards.grammar.compiler import CannotCompile, Compiler
from shards.grammar.grammars import Grammars, Outcome
from shards.kv.adapter_domain import adapter_digest, adapter_domain, tenant_domain
from shards.kv.block_files import BlockFiles
from shards.kv.chunks import LEAST_TOKENS, DocumentChunk
from shards.kv.copier import BlockMemory, Copier, usual_copier
from shards.kv.disk_jobs import DiskThreads, DiskWorker
from shards.kv.hand_over import HandOver
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES, chunk_domain
from shards.kv.lending import Loan
from shards.kv.offers import OpenOffer
from shards.kv.peer_server import PeerServer
from shards.kv.peer_wire import Offer
from shards.kv.pool import BlockPool
from shards.kv.raw_block import BlockLabel
from shards.kv.table import BlockTable
from shards.lora.shelf import AdapterShelf, CannotLoad
from shards.model import Model
from shards.nouns import (
    AdapterUse,
    CacheEvent,
    Cause,
    Drawn,
    Finished,
    FinishReason,
    KvSource,
    Pinned,
    Report,
    SamplingParams,
    Submission,
)
from shards.options import EngineOptions
from shards.sched.drafts import FEW_ROWS_ON_DEVICE, ON_HOST, DraftBounds
from shards.sched.limits import Limits, Refusal
from shards.scheduler import Scheduler, Step
from shards.shortage import gib, memory_for

__all__ = ["Engine", "EngineOptions"]

_SEEDS = 2**64

_PREDICTIONS_EVERY_S = 0.1

_HOST_SHARE = 0.1
"""The weight of a step in the average of what the host does beside a device: about the last ten count."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A step that was submitted at `started_s` and is not yet collected."""

    step: Step
    flight: Flight
    started_s: float


class Engine:
    """Serves `model` from one pool of KV blocks. Every call must come from the same thread.

    A sequence waits, runs, may be preempted, and finishes; `Scheduler` decides. Each step ends late requests, admits,
    shares what is cached, plans, computes, draws tokens, caches full blocks, and reports. If a device draws the tokens,
    a step is planned and submitted before the previous one is collected; reports then lag one step behind. `clock`
    times steps, deadlines and waiting; `rng` makes seeds for requests without one. `copier_of` makes the copier between
    device and host memory; `worker_of` makes the worker that moves blocks between host memory and disk, from their
    files and `clock`. A `draft_model` guesses tokens besides prompt lookup. Raises ValueError for invalid options,
    NotEnoughMemory if the system has too little, OSError if `kv_dir` cannot be used.
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        copier_of: Callable[[BlockMemory], Copier] = usual_copier,
        worker_of: Callable[[BlockFiles, Callable[[], float]], DiskWorker] = DiskThreads,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.model, self.options = model, options or EngineOptions()
        network = model.network
        layout = kv_layout(network, self.options)
        if layout.window is not None:
            self.options = replace(self.options, chunk_tokens=layout.chunk_tokens)
        self._runs_ahead = self._check_device(network)
        self._adapters = self._open_adapters(network)
        self._speculates = self.options.speculates
        self.draft_model = self._check_draft_model(draft_model)
        size = self.options.blocks(network.block_bytes) * network.block_bytes
        with memory_for(f"{gib(size)} of KV", hint="give the pool less"):
            allocate(network, layout)
            if isinstance(network, DrawingNetwork):
                network.reserve(self.options.max_running)
        self._clock, self._rng = clock, rng or random.Random()
        hosting = open_hosting(model, self.options, copier_of, worker_of=worker_of, clock=clock)
        self._copier = hosting.copier
        self._pool = BlockPool(
            layout.blocks,
            model=model.name,
            options=self.options.pool,
            copier=hosting.copier,
            directory=hosting.directory,
            peers=None if hosting.exchange is None else hosting.exchange.peers,
            lending=None if hosting.exchange is None else hosting.exchange.lending,
            layout=layout,
        )
        self.wake: Callable[[], None] = lambda: None
        """Called, from any thread, when `has_work` became true without a call of the engine."""
        self._exchange = hosting.exchange
        self._server = self._lend(hosting.exchange)
        self._handed_over: HandOver | None = None
        self._grammars = Grammars(Compiler.of(model))
        self._limits = Limits(
            network.vocabulary,
            network.context_tokens,
            self._pool.guaranteed,
            has_tokenizer=model.tokenizer is not None,
            shapes_answers=self.shapes_answers,
        )
        self._blender = self._make_blender(network)
        self._scheduler = Scheduler(
            self._pool,
            self.options,
            blender=self._blender,
            drafting=_bounds_of(network, self.options),
            draft_model=self.draft_model,
        )
        self._roster = self._scheduler.roster
        self._runner = Runner(network, deterministic=self.options.deterministic, rows=self.options.max_running)
        self._writers: dict[int, Writer] = {}
        self._due: _Due | None = None
        self._landed_s = float("-inf")
        self._finished: list[Finished] = []
        self._arrivals = self._steps = 0
        self._step_s = 0.0
        self._predicted_s = float("-inf")
        self._is_settled = True
        self._waited_s = 0.0
        self._lost = ""
        if isinstance(network, WatchedNetwork):
            network.watch(self._lose)

    def __repr__(self) -> str:
        return f"Engine({self.model.name}: {self._scheduler!r}, {self._steps} steps)"

    @property
    def shapes_answers(self) -> bool:
        """Whether it can constrain an answer to a grammar."""
        return self._grammars.can_compile

    @property
    def blends(self) -> bool:
        """Whether it takes KV of documents from chunks, for requests that permit it."""
        return self._blender is not None

    @property
    def has_work(self) -> bool:
        """Would a step compute or report anything? False stays False until a call or a deadline."""
        pool = self._pool
        if not self._is_settled or self._lost or self._finished or pool.prefix.has_events:
            return True
        if pool.lending.is_busy or pool.peers.has_offers:
            return True
        deadline_s = self.next_deadline_s
        return deadline_s is not None and deadline_s <= self._clock()

    @property
    def next_deadline_s(self) -> float | None:
        """When the engine needs a step even without a call, on its clock; None if never."""
        deadlines = [request.submission.deadline_s for request in self._roster.requests.values()]
        deadlines += [self._scheduler.next_change_s, self._scheduler.next_look_s, self._pool.pins.next_end_s]
        deadlines += [self._adapters.next_look_s] if self._adapters is not None else []
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def submit(self, submission: Submission) -> None:
        """Take a request. It finishes as REJECTED if it cannot be served, or if too many wait.

        A key that is in use ends the request that uses it.
        """
        self._is_settled = False
        known = self._roster.requests.get(submission.key)
        if known is not None:
            self._end(known, FinishReason.FAILED, message="its key was submitted a second time")
            return
        refusal = self._limits.refusal(submission)
        if refusal is None and submission.adapter:
            refusal = self._adapter_refusal(submission.adapter)
        if refusal is None and len(self._roster.waiting) + submission.choices > self.options.max_waiting:
            message = f"{len(self._roster.waiting)} sequences wait here already; try another shard, or later"
            refusal = Refusal(message, Cause.OVERLOADED)
        grammar = submission.sampling.grammar
        if (
            refusal is None
            and grammar is not None
            and not self._grammars.ask(submission.key, grammar, domain=submission.domain)
        ):
            refusal = Refusal("too many schemas wait here to be compiled; try later", Cause.OVERLOADED)
        if refusal is not None:
            self._finished += refusal.ends(submission)
            return
        request = Request(submission, arrived_s=self._clock())
        if submission.adapter and self._adapters is not None:
            self._adapters.ask(submission.key, submission.adapter)
        blend = submission.blend
        # a prompt that exceeds the window must be computed while it arrives
        if blend and blend.budget < 1 and self.blends and submission.prompt_tokens <= self.options.window_tokens:
            request.documents = Chunking(blend.budget)
        seed = self._rng.getrandbits(64) if submission.sampling.seed is None else submission.sampling.seed
        for choice in range(submission.choices):
            self._enqueue(request, choice, (seed + choice) % _SEEDS)

    def extend(self, key: Hashable, token_ids: bytes) -> None:
        """Append `token_ids` (little-endian uint32) to a prompt. An unknown key is ignored: its request has ended.

        Tokens that cannot be part of the prompt end the request as REJECTED, or as FAILED if it has already drawn.
        """
        request = self._roster.requests.get(key)
        if request is None:
            return
        self._is_settled = False
        missing = request.submission.prompt_tokens - request.arrived_tokens
        refusal = self._limits.piece_refusal(token_ids, missing_tokens=missing)
        ahead = request.arrived_tokens + len(token_ids) // TOKEN_BYTES - request.computed_tokens
        if refusal is not None:
            has_drawn = any(sequence.output for sequence in self._roster.sequences_of(request))
            reason = FinishReason.FAILED if has_drawn else FinishReason.REJECTED
            self._end(request, reason, message=refusal.message, cause=None if has_drawn else refusal.cause)
        elif ahead > self.options.window_tokens:
            message = (
                f"{ahead} prompt tokens came ahead of what is computed; the window is {self.options.window_tokens}"
            )
            self._end(request, FinishReason.FAILED, message=message)
        else:
            request.prompt += token_ids
            if request.is_whole and request.submission.answered_tokens:
                self._resume(request)
            if request.is_whole and request.documents is not None and not request.awaits_adapter:
                self._prepare(request, request.documents)

    def pace(
        self,
        key: Hashable,
        *,
        rank: int | None = None,
        prefill_slice: int | None = None,
        paused: bool | None = None,
    ) -> None:
        """Change a request's rank, prefill slice or pause; choices that already draw continue. None keeps a setting.

        `prefill_slice` 0 lets the engine choose again.
        """
        request = self._roster.requests.get(key)
        if request is None:
            return
        self._is_settled = False
        request.rank = request.rank if rank is None else rank
        for each in (request, *self._chunks_of(request)):
            each.rank = request.rank
            for sequence in self._roster.sequences_of(each):
                sequence.table.rank = request.rank
        request.is_paused = request.is_paused if paused is None else paused
        request.prefill_slice = request.prefill_slice if prefill_slice is None else prefill_slice or None

    def cancel(self, key: Hashable) -> None:
        """End a request in any state; each open choice finishes as CANCELLED."""
        request = self._roster.requests.get(key)
        if request is not None:
            self._is_settled = False
            self._end(request, FinishReason.CANCELLED)

    def clear_cache(self, domain: str | None = None) -> int:
        """Forget all cached blocks, or those of `domain` and its adapters; returns their number. The next report lists
        them.

        Sequences that run there continue, and no longer share blocks.
        """
        cleared = self._pool.clear(domain)
        if domain is not None:
            cleared += self._pool.clear(chunk_domain(domain))
        if self._blender is not None:
            self._blender.deviations.forget(domain)
        parked = [sequence for sequence in self._roster.waiting.values() if sequence.table.is_parked]
        for sequence in (*self._roster.running.values(), *parked):
            if domain is None or tenant_domain(sequence.table.domain) in (domain, chunk_domain(domain)):
                sequence.table.unchain()
        if self.draft_model is not None:
            self.draft_model.clear(domain, self._model_drafters())
        self._is_settled = False
        return cleared

    def pin(self, name: str, keys: Collection[int], *, domain: str, for_s: float) -> Pinned:
        """Pin the cached blocks of `keys` for `for_s` seconds under `name`, as far as `pin_share` allows.

        A second pin of the same name adds to the first, and never shortens it.
        """
        now_s = self._clock()
        held = takewhile(lambda key: self._pool.prefix.of_tenant(key, domain=domain) is not None, keys)
        pinned = self._pool.pins.pin(name, keys, domain=domain, until_s=now_s + for_s, now_s=now_s)
        # the next report's load contains the number of blocks that may still be pinned
        self._is_settled = False
        return Pinned(sum(1 for _ in held), pinned)

    def unpin(self, name: str) -> int:
        """End the pin `name`, if it exists; returns the number of blocks that no pin holds any more."""
        self._is_settled = False
        return self._pool.pins.unpin(name)

    def preserve(self, within_s: float) -> int:
        """Write all cached blocks to the directory for KV, pinned ones first; returns the number of blocks there.

        Takes `within_s` at most, plus the time of one block. No step may follow. Does nothing without a directory.
        """
        return self._pool.preserve(until_s=self._clock() + within_s)

    def hand_over(self, heirs: Items[str], *, within_s: float) -> None:
        """Offer all cached blocks to the shards at `heirs` (host:port), which fetch them during further steps.

        `is_handing_over` until that is over. Does nothing if this shard lends no KV, or the second time.
        """
        address = self.kv_address
        if address is None or self._exchange is None or self._handed_over is not None:
            return
        self._is_settled = False
        batches = self._pool.batches()
        self._handed_over = HandOver(batches, heirs, self._exchange.identity, address, within_s=within_s)

    @property
    def is_handing_over(self) -> bool:
        """Whether blocks are offered to other shards; from any thread."""
        return self._handed_over is not None and not self._handed_over.is_over

    def close(self) -> None:
        """End the threads that copy and exchange KV and compile grammars. No step may follow."""
        self._grammars.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._handed_over is not None:
            self._handed_over.close()
        self._pool.lending.close()
        if self._server is not None:
            self._server.close()
        self._pool.peers.close()
        self._pool.disk.close()
        if self._copier is not None:
            self._copier.close()

    def snapshot(self) -> tuple[CacheEvent, ...]:
        """Events that rebuild the present cache, parents before children."""
        return (*self._pool.prefix.snapshot(), *self._pool.disk.snapshot())

    def step(self) -> Report:
        """Do one step's work and return its changes. Cheap when there is nothing to do.

        Raises DeviceLost, or CopyFailed, if no later step could succeed; then the engine must not be used any more.
        """
        if self._lost:
            raise DeviceLost(self._lost)
        now_s = self._clock()
        self._end_late(now_s)
        for key, outcome in self._grammars.answers():
            self._shape(key, outcome)
        if self._adapters is not None:
            self._adapt_requests(self._adapters, now_s)
        step = self._scheduler.next_step(now_s)
        before, self._due = self._due, self._submit(step) if step.pieces else None
        self._waited_s = 0.0
        drawn = [] if before is None else self._collect(before)
        if self._due is not None and not self._release(self._due):
            self._due = None
        if self._due is not None and not (self._runs_ahead and self._due.flight.may_stay):
            drawn += self._collect(self._due)
            self._due = None
        is_awaited = self._grammars.is_awaited or (self._adapters is not None and self._adapters.is_awaited)
        self._is_settled = not (step.pieces or before or step.is_short or is_awaited)
        if step.pieces and self._runs_ahead:
            host_s = self._clock() - now_s - self._waited_s - step.drafting_s
            self._scheduler.overhead_s += _HOST_SHARE * (host_s - self._scheduler.overhead_s)
        return self._report(drawn)

    def check(self) -> None:
        """Assert the invariants of pool, sequences and requests."""
        tables = [sequence.table for sequence in self._roster.running.values()]
        self._pool.check([table.ids for table in tables])
        if self._pool.windows is not None:
            self._pool.windows.check([table.paged for table in tables])
        self._scheduler.check()
        if self._adapters is not None:
            self._adapters.check()
        if self.draft_model is not None:
            self.draft_model.check(self._model_drafters())
        assert self._writers.keys() == self._roster.waiting.keys() | self._roster.running.keys(), "a writer is lost"

    @property
    def kv_address(self) -> str | None:
        """Where other shards fetch KV: host:port, without a host if any address of this machine will do; None if they
        cannot.
        """
        if self._server is None or self.options.kv_listen is None:
            return None
        host = self.options.kv_listen[0]
        shown = "" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host  # noqa: S104 - compared
        return f"{shown}:{self._server.port}"

    @property
    def kv_group(self) -> str | None:
        """The fingerprint of the KV in hex digits: shards with the same one exchange KV; None if this one does not."""
        return None if self._server is None else self._server.fingerprint.hex()

    def _lose(self, reason: str) -> None:
        """Have the next step raise DeviceLost; from any thread."""
        self._lost = reason
        self.wake()

    def _lend(self, exchange: KvExchange | None) -> PeerServer | None:
        """The port at which other shards fetch blocks."""
        if exchange is None or self.options.kv_listen is None:
            return None

        files = self.model.files

        def lend(labels: Items[BlockLabel]) -> Loan:
            if files is not None and not files.are_unchanged():
                loan = Loan(labels)
                loan.hand_over(None)
                return loan
            loan = self._pool.lending.ask(labels)
            self.wake()
            return loan

        def consider(offer: Offer) -> OpenOffer:
            opened = self._pool.peers.ask(offer)
            self.wake()
            return opened

        host, port = self.options.kv_listen
        try:
            return PeerServer(host, port, exchange.identity, lend, consider)
        except OSError:
            self._pool.peers.close()
            self._pool.disk.close()
            if self._copier is not None:
                self._copier.close()
            raise

    def _check_device(self, network: Network) -> bool:
        """Whether steps run ahead. Raises ValueError if the network has no room for `max_running`."""
        draws, most = isinstance(network, DrawingNetwork), self.options.max_running
        if isinstance(network, DrawingNetwork) and most > network.most_rows:
            raise ValueError(f"max_running is {most}; this network draws at most {network.most_rows} tokens a step")
        return self.options.runs_ahead(is_possible=draws)

    def _check_draft_model(self, draft_model: DraftModel | None) -> DraftModel | None:
        """`draft_model`, bound to the model. Raises ValueError if it has other tokens, or nothing is verified."""
        if draft_model is not None:
            draft_model.bind(self.model)
            if not self._speculates:
                reason = "deterministic" if self.options.deterministic else "speculate off"
                raise ValueError(f"a draft model guesses tokens, and with {reason} none are verified: leave one out")
        return draft_model

    def _model_drafters(self) -> list[ModelDrafter]:
        sequences = (*self._roster.running.values(), *self._roster.waiting.values())
        return [sequence.model_drafter for sequence in sequences if sequence.model_drafter is not None]

    @property
    def adapter_use(self) -> AdapterUse | None:
        """Its LoRA adapters; None if it serves none."""
        return None if self._adapters is None else self._adapters.use

    def _open_adapters(self, network: Network) -> AdapterShelf | None:
        if not self.options.adapters.is_used:
            return None
        if not isinstance(network, AdaptableNetwork):
            raise ValueError("adapters change the matrices of a whole network; this one has none")
        return AdapterShelf(*network.adapt(self.options.adapters))

    def _adapter_refusal(self, name: str) -> Refusal | None:
        objection = "this shard serves no adapters" if self._adapters is None else self._adapters.objection(name)
        return None if objection is None else Refusal(objection)

    def _make_blender(self, network: Network) -> Blender | None:
        is_possible = isinstance(network, BlendingNetwork) and self._pool.windows is None
        if not self.options.blends(is_possible=is_possible):
            return None
        assert isinstance(network, BlendingNetwork), "only such a network blends"
        return Blender(self._pool, network)

    def _prepare(self, request: Request, documents: Chunking) -> None:
        """Have the chunks of `request`, which has arrived completely, computed as far as they are not on the device."""
        blend, blender = request.submission.blend, self._blender
        assert blend is not None, "only a request that permits it has documents"
        assert blender is not None, "only an engine that blends has documents"
        prompt, domain = bytes(request.prompt), request.domain
        spans = [span for span in blend.documents if span.stop - span.start >= LEAST_TOKENS]
        chunks = [DocumentChunk(prompt, start, stop) for start, stop in spans]
        held_tokens = min(len(sequence.look_up()) for sequence in self._roster.sequences_of(request)) * BLOCK_TOKENS
        due = [at for at, chunk in enumerate(chunks) if chunk.stop > held_tokens and blender.lacks(chunk, domain)]
        documents.prepare(chunks, due)
        self._begin_chunks(request, documents)

    def _begin_chunks(self, request: Request, documents: Chunking) -> None:
        submission = request.submission
        for number in documents.begin():
            prompt = documents.chunks[number].prompt
            tokens = len(prompt) // TOKEN_BYTES
            source = None if submission.source is None else KvSource(submission.source.address, tokens)
            chunk = Submission(
                ChunkKey(submission.key, number),
                tokens,
                1,
                domain=chunk_domain(request.domain),
                rank=request.rank,
                sampling=SamplingParams(ignore_eos=True),
                preemptible=submission.preemptible,
                source=source,
            )
            computed = Request(chunk, arrived_s=request.arrived_s)
            computed.adapter = request.adapter
            computed.prompt += prompt
            self._enqueue(computed, 0, 0)

    def _end_chunk(self, key: ChunkKey, *, is_fresh: bool) -> None:
        """Let the request of a chunk, if it is still there, go on without it."""
        request = self._roster.requests.get(key.request)
        if request is not None and request.documents is not None:
            request.documents.end(key.document, is_fresh=is_fresh)
            self._begin_chunks(request, request.documents)

    def _chunks_of(self, request: Request) -> list[Request]:
        """The requests that compute chunks of `request`."""
        awaited = request.documents.awaited if request.documents is not None else ()
        return [self._roster.requests[ChunkKey(request.key, number)] for number in awaited]

    def _enqueue(self, request: Request, choice: int, seed: int) -> None:
        submission = request.submission
        sampling = submission.sampling
        stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else self.model.eos_token_ids)
        sampler = Sampler(
            sampling,
            seed=seed,
            stop_token_ids=stop_ids,
            vocabulary=self._limits.vocabulary,
            drawn=submission.answered_tokens,
        )
        table = BlockTable(self._pool, submission.domain, rank=submission.rank)
        unit_tokens, lag = self.options.unit_tokens, int(self._runs_ahead)
        may_draft = self._speculates and not sampler.remembers
        model_drafter = None
        if may_draft and self.draft_model is not None and submission.max_new_tokens > 1:
            model_drafter = self.draft_model.drafter(submission, sampler)
        sequence = Sequence(
            request,
            choice,
            arrival=self._arrivals,
            table=table,
            unit_tokens=unit_tokens,
            lag=lag,
            may_draft=may_draft,
            model_drafter=model_drafter,
        )
        self._arrivals += 1
        self._writers[sequence.arrival] = Writer(submission, sampler, self.model.tokenizer)
        self._roster.enter(sequence)

    def _resume(self, request: Request) -> None:
        """Let the writers of `request`, which has arrived completely, go on behind the tokens drawn elsewhere."""
        prompt_tokens = request.submission.prompt_tokens
        answered = request.token_ids(prompt_tokens - request.submission.answered_tokens, prompt_tokens).tolist()
        for sequence in self._roster.sequences_of(request):
            self._writers[sequence.arrival].resume(answered)

    def _shape(self, key: Hashable, outcome: Outcome) -> None:
        """Let the request `key` begin with its compiled grammar, or reject it if the grammar cannot be compiled."""
        request = self._roster.requests[key]
        if isinstance(outcome, CannotCompile):
            self._end(request, FinishReason.REJECTED, message=str(outcome), cause=Cause.GRAMMAR)
            return
        request.awaits_grammar = False
        for sequence in self._roster.sequences_of(request):
            self._writers[sequence.arrival].sampler.guide = outcome.guide()

    def _adapt_requests(self, adapters: AdapterShelf, now_s: float) -> None:
        """Let requests begin with adapters that were loaded; forget the KV of adapters that were replaced."""
        for key, outcome in adapters.answers(now_s):
            request = self._roster.requests[key]
            if isinstance(outcome, CannotLoad):
                self._end(request, FinishReason.REJECTED, message=str(outcome), cause=Cause.INVALID)
                continue
            request.adapter, request.awaits_adapter = outcome, False
            request.domain = adapter_domain(request.submission.domain, outcome.name, outcome.digest)
            for sequence in self._roster.sequences_of(request):
                sequence.table.domain = request.domain
            if request.is_whole and request.documents is not None:
                self._prepare(request, request.documents)
        for digest in adapters.take_replaced():
            self._pool.clear_adapter(digest)
            for sequence in (*self._roster.running.values(), *self._roster.waiting.values()):
                if adapter_digest(sequence.table.domain) == digest:
                    sequence.table.unchain()

    def _end_late(self, now_s: float) -> None:
        for request in list(self._roster.requests.values()):
            deadline_s = request.submission.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._end(request, FinishReason.DEADLINE, message="its deadline has passed")

    def _end(self, request: Request, reason: FinishReason, *, message: str = "", cause: Cause | None = None) -> None:
        chunks = self._chunks_of(request)
        for sequence in self._roster.sequences_of(request):
            self._finish(sequence, sequence.finished(reason, message=message, cause=cause))
        for chunk in chunks:
            self._end(chunk, reason)

    def _finish(self, sequence: Sequence, finished: Finished) -> None:
        self._grammars.leave(sequence.request.key)
        self._scheduler.finish(sequence)
        del self._writers[sequence.arrival]
        if self._adapters is not None and not sequence.request.open_choices:
            self._adapters.leave(sequence.request.key)
        if isinstance(finished.key, ChunkKey):
            self._end_chunk(finished.key, is_fresh=not finished.cached_tokens)
        else:
            self._finished.append(finished)

    def _submit(self, step: Step) -> _Due | None:
        """Start computing `step`; None if that failed."""
        started_s = self._clock()
        try:
            flight = self._runner.submit(step.pieces, lambda sequence: self._writers[sequence.arrival].sampler)
        except Exception as error:  # noqa: BLE001 - an exception of the network must cost its own batch only
            self._fail_all(step, error)
            return None
        # the next plan comes after this step, and may share its blocks
        stores = self._runs_ahead and flight.may_stay
        for piece in step.pieces:
            self._scheduler.advance(piece)
            if stores:
                self._scheduler.store(piece.sequence)
        return _Due(step, flight, started_s)

    def _release(self, due: _Due) -> bool:
        """Let a step draw, once the one before it is collected; False if that failed."""
        try:
            self._runner.release(due.flight)
        except Exception as error:  # noqa: BLE001 - as in `_submit`
            self._fail_all(due.step, error)
            return False
        return True

    def _collect(self, due: _Due) -> list[Drawn]:
        """Wait for a step's tokens. Tokens of sequences that have ended meanwhile are dropped."""
        waits_from_s = self._clock()
        try:
            samples = iter(self._runner.collect(due.flight))
        except Exception as error:  # noqa: BLE001 - as in `_submit`
            self._fail_all(due.step, error)
            return []
        self._waited_s += self._clock() - waits_from_s
        drawn: list[Drawn] = []
        for piece in due.step.pieces:
            own = [next(samples)] if piece.draws and not piece.draft else list(islice(samples, piece.logits))
            if piece.sequence.arrival not in self._writers:
                continue
            if not piece.draws:
                self._scheduler.store(piece.sequence)
            elif (taken := self._take(piece, own)) is not None and not piece.sequence.request.is_chunk:
                drawn.append(taken)
        landed_s = self._clock()
        self._step_s, self._landed_s = landed_s - max(due.started_s, self._landed_s), landed_s
        self._scheduler.observe(due.step, self._step_s)
        self._step_s += due.step.drafting_s
        return drawn

    def _fail_all(self, step: Step, error: Exception) -> None:
        """End the sequences of `step`. Raises DeviceLost if every later step would fail too."""
        network = self.model.network
        if isinstance(network, FallibleNetwork) and not network.device_answers():
            raise DeviceLost(f"the device does not answer after a step failed: {error}") from error
        for piece in step.pieces:
            if piece.sequence.arrival in self._writers:
                self._fail(piece.sequence, f"the step failed: {type(error).__name__}: {error}")

    def _fail(self, sequence: Sequence, message: str) -> None:
        sequence.table.distrust()
        self._finish(sequence, sequence.finished(FinishReason.FAILED, message=message))

    def _give_up(self, sequence: Sequence, grammar_fault: str) -> None:
        """End `sequence`, for which no token could be drawn, because of its grammar or of its numbers."""
        if grammar_fault:
            message = f"the grammar is too complex to go on: {grammar_fault}"
            self._finish(sequence, sequence.finished(FinishReason.REJECTED, message=message, cause=Cause.GRAMMAR))
            return
        self._fail(sequence, "there is no token to draw: logits, with penalties and bias, are not finite numbers")

    def _take(self, piece: Piece, samples: list[Sample | None]) -> Drawn | None:
        """Append drawn tokens up to the first that differs from the draft, and finish the sequence after its last."""
        sequence, taken = piece.sequence, list[Sample]()
        if not piece.draft and samples[0] is not None:
            # nearly every row of every step
            token_id, logprobs = samples[0]
            self._goes_on(sequence, token_id)
            return Drawn(sequence.request.key, sequence.choice, (token_id,), () if logprobs is None else (logprobs,))
        for sampled, drafted in zip_longest(samples, piece.draft):
            if sampled is None:
                self._give_up(sequence, self._writers[sequence.arrival].grammar_fault)
                break
            if taken:
                self._scheduler.accept(sequence, by_model=piece.by_model)
            taken.append(sampled)
            if not self._goes_on(sequence, sampled.token_id) or sampled.token_id != drafted:
                break
        of_all = tuple(sampled.logprobs for sampled in taken if sampled.logprobs is not None)
        tokens = tuple(sampled.token_id for sampled in taken)
        return Drawn(sequence.request.key, sequence.choice, tokens, of_all) if taken else None

    def _goes_on(self, sequence: Sequence, token_id: int) -> bool:
        """Append a drawn token; False if it was the last, and the sequence has finished."""
        end = self._writers[sequence.arrival].note(token_id)
        if end is not None:
            # a block with the last token is not cached
            self._scheduler.store(sequence)
        self._scheduler.take(sequence, token_id)
        if end is None:
            self._scheduler.store(sequence)
        else:
            self._finish(sequence, sequence.finished(end.reason, stop=end.stop, by_token=end.by_token))
        return end is None

    def _report(self, drawn: list[Drawn]) -> Report:
        self._steps += 1
        finished = tuple(self._finished)
        self._finished.clear()
        return Report(
            step=self._steps,
            drawn=tuple(drawn),
            progress=self._scheduler.drain_progress(),
            finished=finished,
            cache=self._pool.prefix.drain_events(),
            load=self._scheduler.load(self._step_s, uncaptured_steps=self._runner.uncaptured_steps),
            predictions=self._predict(),
            adapters=None if self._adapters is None else self._adapters.take_change(),
        )

    def _predict(self) -> Mapping[Hashable, float]:
        now_s = self._clock()
        if now_s - self._predicted_s < _PREDICTIONS_EVERY_S:
            return {}
        self._predicted_s = now_s
        predictions = self._scheduler.predictions(now_s)
        return {key: seconds for key, seconds in predictions.items() if not isinstance(key, ChunkKey)}


def _bounds_of(network: Network, options: EngineOptions) -> DraftBounds:
    """The bounds of drafts for `network`: a device has graphs for steps of so many rows and no more."""
    if not isinstance(network, DrawingNetwork):
        return ON_HOST
    return DraftBounds(FEW_ROWS_ON_DEVICE, options.drawn_rows(network.most_rows))
