"""All batches of one router: takes files and jobs, runs those that no other router runs, and drops old ones."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from typing import Any

from msgspec.structs import replace

from policies.errors import QuotaExceeded
from policies.sla.batches import BatchSettings
from router.batches.checking import check
from router.batches.job import Job
from router.batches.pace import Interrupted, Pace
from router.batches.running import BatchMeans, JobRun
from router.batches.store.base import BatchStoreFailed
from router.supervise import supervise

AGAIN_S = 1.0
"""A job that stopped at a failure rests for so long."""

SWEEP_S = 600.0
"""Time between two looks for what is too old."""

ABANDONED_S = 86_400.0
"""What was begun so long ago, and is a part of no job or file, belongs to none that will still come."""

MOST_RUNNING = 16
"""Jobs that one router runs at a time, one of each tenant."""

_log = logging.getLogger("pointsman.batches")


class Batches:
    """An async context manager: entered it runs jobs, left it has stopped them where they are."""

    def __init__(self, means: BatchMeans) -> None:
        self.means = means
        self.shelf, self.room, self.storage = means.shelf, means.room, means.storage
        self._running: dict[str, JobRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._asked = asyncio.Event()
        self._beginning = Counter[str]()

    def __repr__(self) -> str:
        return f"<Batches {list(self._running)} run here>"

    async def __aenter__(self) -> Batches:
        await self.pace.run(self.shelf.store.open)
        self._loops = [
            asyncio.create_task(supervise("batches", self._keep_running), name="batches"),
            asyncio.create_task(supervise("old batches", self._keep_sweeping), name="old batches"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pace.stop()
        tasks = [*self._loops, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.room.close()
        self.pace.close()

    @property
    def settings(self) -> BatchSettings:
        """Those of the SLA file in effect."""
        return self.means.settings()

    @property
    def pace(self) -> Pace:
        """The threads that read and write its store."""
        return self.means.pace

    def running(self) -> Iterator[Job]:
        """The jobs that run here, as they were saved last."""
        return (running.job for running in self._running.values())

    async def begin(self, job: Job, give_input: Callable[[], None], *, input_bytes: int = 0) -> None:
        """Take `job`; `give_input` has its input in the store, which takes so many bytes more by that, and blocks.

        Raises QuotaExceeded, and what `give_input` raises.
        """
        self._beginning[job.tenant] += 1
        try:
            await self.pace.run(self._add, job, give_input, input_bytes, self._beginning[job.tenant])
        finally:
            self._beginning[job.tenant] -= 1
            if not self._beginning[job.tenant]:
                del self._beginning[job.tenant]
        self._asked.set()

    def _add(self, job: Job, give_input: Callable[[], None], input_bytes: int, beginning: int) -> None:
        """Have `job` in the store, one of so many that begin at once. Blocks."""
        most, has = self.settings.max_jobs, sum(1 for _ in self.shelf.open_jobs(job.tenant))
        if has + beginning > most:
            raise QuotaExceeded(
                f"'{job.tenant}' has {has} batches that have not ended, which is its limit",
                hint="wait for one to end, or cancel one",
                retry_after_s=60.0,
            )
        with self.storage.upload(job.tenant) as upload:
            upload.announce(input_bytes)
            give_input()
            try:
                self.shelf.add_job(job)
            except BatchStoreFailed:
                with suppress(BatchStoreFailed):
                    self.shelf.drop_input(job)
                raise

    async def cancel(self, job: Job) -> Job:
        """Cancel `job` unless it has ended; how it stands then."""
        if job.has_ended or job.is_cancelling:
            return job
        at = self.means.unix_time()
        await self.pace.run(self.shelf.cancel, job, at)
        if (running := self._running.get(job.id)) is not None:
            running.cancel(at)
        self._asked.set()
        return replace(job, cancelling_at=at)

    async def _keep_running(self) -> None:
        while True:
            try:
                await self._look()
            except BatchStoreFailed as error:
                _log.warning("%s", error)
            self.room.follow()
            self.means.observer.room(jobs=len(self._running), inside=self.room.inside, windows=self.room.windows)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.shelf.store.look_s):
                    await self._asked.wait()
            self._asked.clear()

    async def _look(self) -> None:
        """Check new jobs, and run one of each tenant, the one that expires first; end those that ran out of time."""
        busy = {running.job.tenant for running in self._running.values()}
        for tenant, jobs in (await self.pace.run(self._open_jobs)).items():
            for job in sorted(jobs, key=lambda job: job.expires_at):
                if job.id in self._tasks:
                    continue
                if job.status == "validating" and not job.is_cancelling:
                    self._begin(job, self._checked(job))
                    continue
                has_turn = tenant not in busy and len(self._running) < MOST_RUNNING
                if (has_turn or self._is_over(job)) and await self._start(job):
                    busy.add(tenant)

    def _is_over(self, job: Job) -> bool:
        return job.is_cancelling or job.has_ended or self.means.unix_time() >= job.expires_at

    def _begin(self, job: Job, work: Coroutine[Any, Any, None], claimed: ExitStack | None = None) -> None:
        """Do `work` on `job` in a task of its own, and give back what is `claimed` for it."""
        claimed = claimed or ExitStack()

        async def whole() -> None:
            try:
                with claimed:
                    await work
            except Interrupted:
                _log.info("batch %s goes on at the next router", job.id)
            except (BatchStoreFailed, OSError) as error:
                # the folder for temporary files may be full as well
                _log.warning("batch %s goes on later: %s", job.id, error)
                await asyncio.sleep(AGAIN_S)
            except Exception:  # noqa: BLE001 - whatever it was, other jobs go on
                _log.exception("batch %s stopped by an unplanned exception, and goes on later", job.id)
                await asyncio.sleep(AGAIN_S)

        def end(_: asyncio.Task[None]) -> None:
            # a task that is cancelled before its first step takes none
            work.close()
            claimed.close()
            del self._tasks[job.id]
            self._asked.set()

        self._tasks[job.id] = task = asyncio.create_task(whole(), name=f"batch {job.id}")
        task.add_done_callback(end)

    def _open_jobs(self) -> dict[str, list[Job]]:
        """Those that have not ended, by tenant. Blocks."""
        found: dict[str, list[Job]] = {}
        for tenant, name in self.shelf.open_jobs():
            if (job := self.shelf.job(tenant, name)) is not None:
                found.setdefault(tenant, []).append(job)
        return found

    async def _checked(self, job: Job) -> None:
        """Check the file of a new job, unless another router does."""

        def claimed() -> None:
            claim = self.shelf.store.claim(job.id)
            if claim is None:
                return
            try:
                if (now := self.shelf.job(job.tenant, job.id)) is not None:
                    self._check(now)
            finally:
                claim.close()

        await self.pace.run(claimed)

    def _check(self, job: Job) -> None:
        """Check the file of a new job, which is claimed. Blocks."""
        if job.status != "validating":
            return
        settings, gateway = self.settings, self.means.gateway()
        found = check(
            self.shelf.input(job),
            self.pace,
            endpoint=job.endpoint,
            most_lines=settings.max_lines,
            most_bytes=gateway.config.server.max_body_bytes,
        )
        now = self.means.unix_time()
        if found.problems:
            failed = replace(job, status="failed", problems=found.problems, ended_at=now)
            self.shelf.close_job(self.shelf.save_job(failed))
            self.means.observer.job(job.tenant, "failed")
            return
        counts = replace(job.counts, total=found.lines)
        self.shelf.save_job(replace(job, status="in_progress", in_progress_at=now, counts=counts))

    async def _start(self, job: Job) -> bool:
        """Run `job` here, if no other router does."""
        claim = await self.pace.opened(lambda: self.shelf.store.claim(job.id))
        if claim is None:
            return False
        with ExitStack() as claimed:
            claimed.callback(claim.close)
            now = await self.pace.run(self.shelf.job, job.tenant, job.id)
            if now is None or now.has_ended:
                if now is not None:
                    # its last owner ended in between
                    await self.pace.run(self.shelf.close_job, now)
                return False
            self._running[job.id] = running = JobRun(now, claim, self.means)
            claimed.callback(self._running.pop, job.id)
            self._begin(job, running.run(), claimed.pop_all())
        return True

    async def _keep_sweeping(self) -> None:
        while True:
            try:
                await self.pace.run(self._sweep)
            except BatchStoreFailed as error:
                _log.warning("%s", error)
            await asyncio.sleep(SWEEP_S)

    def _sweep(self) -> None:
        """Drop files that have expired, old jobs, and what was begun and not finished. Blocks."""
        now, keep_s = self.means.unix_time(), self.settings.keep_s
        for tenant in self.shelf.tenants():
            for name in self.shelf.files(tenant):
                file = self.shelf.file(tenant, name)
                if file is not None and now >= file.expires_at:
                    self.shelf.drop_file(file)
            for name in self.shelf.jobs(tenant):
                job = self.shelf.job(tenant, name)
                if job is not None and job.ended_at is not None and now >= job.ended_at + keep_s:
                    self.shelf.drop_job(job)
        self.shelf.sweep(now - ABANDONED_S)
        self.shelf.store.sweep()
