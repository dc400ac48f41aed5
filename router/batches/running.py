"""One job while this router runs it: its lines are sent as there is room, and each answer is kept as it comes."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

import msgspec
from msgspec.structs import replace

from policies.errors import (
    BackendFailed,
    CutOff,
    ExpectedError,
    NoBackend,
    Overloaded,
    PrefillFailed,
    QuotaExceeded,
    RequestFails,
)
from policies.sla.batches import BatchSettings
from router.batches.answers import AnswerLog, Done, LineAnswer, answers_in
from router.batches.ending import end_job, finalizing
from router.batches.job import Job, JobTokens
from router.batches.line_call import LineCall, LineReply
from router.batches.line_places import LinePlaces
from router.batches.lines import read_line
from router.batches.observer import BatchObserver
from router.batches.order import LineOrder, OrderedLine, order_of
from router.batches.pace import Pace
from router.batches.quota_turns import QuotaTurns
from router.batches.rate import Rate
from router.batches.room import LineRoom
from router.batches.shelf import BatchShelf, log_key
from router.batches.shown import answered
from router.batches.storage import Storage
from router.batches.store.base import JobClaim
from router.call.gateway import Gateway
from router.call.identify import identity_again
from router.call.pipeline import serve
from router.protocols.aliases import changed_bytes
from router.protocols.dialects import DIALECTS

READ_AHEAD = 64
"""Places that are read from the order at a time."""

MOST_TRIES = 5
"""Tries of a line if its backend fails; a line that finds no backend or no quota is tried until its job expires."""

_FIRST_REST_S, _MOST_REST_S = 1.0, 60.0

_STORAGE_LOOKS = 10
"""Looks for news between two at what a tenant stores."""

_SPREAD = 0.2
"""A pause for want of quota is longer by up to this share."""

_PASSING = (Overloaded, NoBackend, QuotaExceeded, CutOff)
"""Failures that say nothing of the line."""

_log = logging.getLogger("pointsman.batches")


@dataclass(frozen=True, slots=True)
class BatchMeans:
    """What all jobs of a router run with."""

    gateway: Callable[[], Gateway]
    shelf: BatchShelf
    storage: Storage
    settings: Callable[[], BatchSettings]
    room: LineRoom
    observer: BatchObserver
    unix_time: Callable[[], float]
    rng: random.Random
    pace: Pace
    is_sorted: bool = True


class JobRun:
    """A claimed job from its first line to its end; `run` it once."""

    def __init__(self, job: Job, claim: JobClaim, means: BatchMeans) -> None:
        self._job, self._claim, self._means = job, claim, means
        self._done, self._rate = Done(), Rate(means.gateway().clock)
        self._cancelled_at: float | None = job.cancelling_at
        self._stopped, self._is_over, self._has_storage = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._has_storage.set()
        self._turns = QuotaTurns()
        self._models = job.models

    def __repr__(self) -> str:
        return f"<JobRun {self._job.id}, {self.job.counts}>"

    @property
    def job(self) -> Job:
        """The job as it was saved last. No client sees more: after a crash its progress does not step back."""
        return self._job if self._job.has_ended else replace(self._job, cancelling_at=self._cancelled_at)

    def _as_of_now(self) -> Job:
        """The job with its counts and its estimated end."""
        counts = self._done.counts(self._job.counts.total)
        return replace(
            self._job,
            counts=counts,
            models=self._models,
            tokens=self._done.tokens,
            cancelling_at=self._cancelled_at,
            seconds_left=self._rate.seconds(counts.left),
        )

    def cancel(self, at: float) -> None:
        """Stop sending lines, and end those that are at backends; idempotent."""
        if self._cancelled_at is None:
            self._cancelled_at = at
        self._stopped.set()

    async def run(self) -> None:
        """Run the job to its end. If this is cancelled, the next owner goes on behind the answers that are kept.

        Raises BatchStoreFailed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._hold())
                await self._work()
                self._is_over.set()
        except BaseExceptionGroup as failures:
            raise _first_of(failures) from failures
        self._means.observer.job(self._job.tenant, self._job.status)

    async def _hold(self) -> None:
        """Keep the claim until the job is over: lines are put in order, and results written, for minutes."""
        while not self._is_over.is_set():
            await self._means.pace.run(self._claim.renew)
            await self._rest(self._is_over)

    async def _rest(self, until: asyncio.Event, most_s: float = math.inf) -> None:
        """Return at the next look for news, or when `until` is set."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(self._means.shelf.store.look_s, most_s))):
                await until.wait()

    async def _work(self) -> None:
        await self._means.pace.run(self._recall)
        if self._job.status != "finalizing":
            order = await self._means.pace.opened(self._ordered)
            assert order is not None
            self._models = self._models or tuple(map(self._meant, order.models))
            try:
                await self._answer_all(order)
            finally:
                await self._means.pace.run(order.close)
        await self._end()

    def _recall(self) -> None:
        """Know the lines that were answered before."""
        for _ in answers_in(self._means.shelf.store, log_key(self._job), self._done, self._means.pace):
            pass

    def _ordered(self) -> LineOrder:
        gateway, shelf = self._means.gateway(), self._means.shelf
        return order_of(
            shelf.input(self._job),
            shelf.store.scratch(),
            self._means.pace,
            most_bytes=gateway.config.server.max_body_bytes,
            leave_out=self._done.__contains__,
            is_sorted=self._means.is_sorted,
        )

    async def _answer_all(self, order: LineOrder) -> None:
        """Send the lines of `order` until all are answered, the job is cancelled or it expires."""
        kept = await self._means.pace.opened(lambda: self._means.shelf.store.log(log_key(self._job)))
        assert kept is not None
        log, answered = AnswerLog(kept, self._means.pace), asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                # not cancelled at the end: a thread that writes progress would go on, and write it behind the end
                group.create_task(self._watch(answered))
                sending = group.create_task(self._send(order, log))
                stopping = asyncio.create_task(self._stopped.wait())
                try:
                    await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    answered.set()
                    stopping.cancel()
                    sending.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            self._turns.close()
            await log.close()

    async def _send(self, order: LineOrder, log: AnswerLog) -> None:
        """A task for each line, as many at a time as may be at backends."""
        slots, share = asyncio.Semaphore(self._means.settings().concurrent), self._means.room.share
        async with asyncio.TaskGroup() as group:
            for at in count(0, READ_AHEAD):
                places = await self._means.pace.run(order.places, at, READ_AHEAD)
                texts = await self._means.pace.run(self._texts, places)
                for place, raw in zip(places, texts, strict=True):
                    await self._has_storage.wait()
                    await slots.acquire()
                    line = partial(self._line, place, raw, order.models[place.model], log)
                    group.create_task(share.measured(line)).add_done_callback(lambda _: slots.release())
                if len(places) < READ_AHEAD:
                    return

    def _texts(self, places: list[OrderedLine]) -> list[bytes]:
        with self._means.shelf.input(self._job).open("rb") as file:
            texts = []
            for place in places:
                file.seek(place.line.offset)
                texts.append(file.read(place.line.size))
        return texts

    async def _line(self, place: OrderedLine, raw: bytes, model: str, log: AnswerLog) -> None:
        """Answer one line and keep its answer."""
        job, text = self._job, read_line(raw)
        meant, body = self._meant(model), bytes(text.body)
        if meant != model:
            # only a body that could be read names no model
            body = changed_bytes(body, {"model": meant})
        call, reply = await self._replied(body, meant)
        how, shown = answered(job.api, call, text.custom_id, reply)
        usage = reply.usage
        tokens = JobTokens(
            usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens or 0
        )
        answer = LineAnswer(place.line.number, how, tokens, msgspec.Raw(shown))
        # an answer that has come is kept, even if the job is cancelled now
        writing = asyncio.ensure_future(log.append(answer))
        # of a line that was cancelled meanwhile, no task asks for a failure to write
        writing.add_done_callback(_retrieve)
        await asyncio.shield(writing)
        if self._done.add(answer):
            self._rate.add()
            self._means.observer.line(job.tenant, how)

    def _meant(self, model: str) -> str:
        """`model`, or of a line that names none the only one that the tenant may use."""
        gateway = self._means.gateway()
        return gateway.models.meant(model, self._job.tenant, gateway.config)

    async def _replied(self, body: bytes, model: str) -> tuple[str, LineReply]:
        """The id of the call that was answered, and its reply, after as many tries as it takes."""
        means, places = self._means, None
        for attempt in count(1):
            call = next(means.gateway().ids)
            avoiding = await self._enter(call, model, places)
            try:
                reply, rest_s = await self._called(call, body, attempt, avoiding)
            finally:
                places = means.room.leave(call)
                self._turns.leave(call)
            if reply is not None:
                return call, reply
            await asyncio.sleep(rest_s)
        raise AssertionError("tries have no end")

    async def _enter(self, call: str, model: str, places: LinePlaces | None) -> frozenset[str]:
        """Return when there may be quota for the call and there is room: the backends that have none."""
        while True:
            await self._turns.take(call)
            try:
                avoiding = await self._means.room.enter(call, self._job.tenant, model, places)
            except asyncio.CancelledError:
                self._turns.leave(call)
                raise
            if self._turns.holds(call):
                return avoiding
            # it would be refused as another line was in the meantime
            self._means.room.leave(call)

    async def _called(
        self,
        id: str,  # noqa: A002
        body: bytes,
        attempt: int,
        avoiding: frozenset[str],
    ) -> tuple[LineReply | None, float]:
        """The reply to one try; None and a pause in seconds if it failed for now."""
        means, job = self._means, self._job
        gateway = means.gateway()
        call = LineCall(
            id,
            body,
            DIALECTS[job.endpoint],
            headers=job.headers,
            created_s=int(means.unix_time()),
            service_class=means.settings().service_class,
            avoiding=avoiding,
            on_placed=lambda backend: self._placed(id, backend),
            on_begun=lambda: means.room.begun(id),
        )
        try:
            known = identity_again(job.granted, gateway.config, gateway.keys)
            await serve(call, gateway, known=known)
            return call.reply(), 0.0
        except ExpectedError as error:
            is_passing = isinstance(error, _PASSING)
            may_pass = isinstance(error, BackendFailed | PrefillFailed) and not isinstance(error, RequestFails)
            if not is_passing and not (may_pass and attempt < MOST_TRIES):
                return call.failure(error), 0.0
            rest_s = min(_MOST_REST_S, error.retry_after_s or _FIRST_REST_S * 2 ** min(attempt - 1, 6))
            means.observer.again(error.code)
            # what was decided is told now, so that its room knows the places
            gateway.later.flush()
            if isinstance(error, QuotaExceeded):
                # others of this job would be refused too; other routers ask a little earlier or later
                self._turns.refused(rest_s * (1.0 + _SPREAD * means.rng.random()))
                return None, 0.0
            return None, rest_s * (0.5 + means.rng.random())

    def _placed(self, call: str, backend: str) -> None:
        self._turns.passed(call)
        self._means.room.placed(call, backend)

    async def _watch(self, answered: asyncio.Event) -> None:
        """Report progress until all is `answered`, and stop when the job was cancelled or has expired."""
        means = self._means
        for look in count():
            if look:
                await self._rest(answered, self._job.expires_at - means.unix_time())
            if answered.is_set():
                return
            if means.unix_time() >= self._job.expires_at:
                self._stopped.set()
            if look % _STORAGE_LOOKS == 0:
                await self._look_at_storage()
            seen = await self._means.pace.run(means.shelf.job, self._job.tenant, self._job.id)
            if seen is not None and seen.cancelling_at is not None:
                self.cancel(seen.cancelling_at)
            if (now := self._as_of_now()) != self._job:
                await self._save(now)

    async def _look_at_storage(self) -> None:
        """Send no more lines while the tenant stores all that it may: answers would be more."""
        is_full = await self._means.pace.run(self._means.storage.is_full, self._job.tenant)
        if is_full and self._has_storage.is_set():
            _log.info("batch %s waits: '%s' stores as many bytes as it may", self._job.id, self._job.tenant)
            self._has_storage.clear()
        elif not is_full:
            self._has_storage.set()

    async def _save(self, job: Job) -> None:
        self._job = await self._means.pace.run(self._means.shelf.save_job, job)

    async def _end(self) -> None:
        """Write the results, then the job's last state."""
        means, now = self._means, self._means.unix_time()
        # if the claim was lost, the next owner ends the job; ending it here would drop the log of that owner
        await self._means.pace.run(self._claim.renew)
        job = self._as_of_now()
        if job.status != "finalizing":
            await self._save(finalizing(job, now, means.rng))
        work = partial(end_job, self._job, means.shelf, means.pace, means.unix_time, means.settings())
        self._job = await means.pace.run(work)
        _log.info("batch %s of %s has ended: %s", job.id, job.tenant, self._job.status)


def _first_of(failures: BaseExceptionGroup) -> BaseException:
    """The first exception of a group, or of the groups in it."""
    first = failures.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def _retrieve(written: asyncio.Future[None]) -> None:
    if not written.cancelled():
        written.exception()
