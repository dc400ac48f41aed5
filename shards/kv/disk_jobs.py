"""The work of a disk tier, on threads of its own. Torch-free."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from typing import NamedTuple, Protocol

from shards.kv.block_files import BlockFiles, ForeignFolder
from shards.kv.raw_block import BlockHeader, BlockLabel, checksum_of

READERS = 2
"""Threads that read: a checksum takes about as long as reading from a fast disk, so two keep the disk busy."""


class DiskJob(Protocol):
    """One piece of work; compared by identity."""

    def run(self, files: BlockFiles) -> None:
        """Do it. Raises OSError, and BrokenBlock or AnotherBlock for a block that cannot be used."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DiskRead:
    """Read the block of `label` into `pieces`."""

    label: BlockLabel
    pieces: Sequence[memoryview]

    def run(self, files: BlockFiles) -> None:
        """Read and compare it."""
        files.read(self.label, self.pieces)


@dataclass(frozen=True, slots=True, eq=False)
class DiskWrite:
    """Store the block of `label` with the bytes `pieces`, which nothing may change meanwhile."""

    label: BlockLabel
    worth: float
    pieces: Sequence[memoryview]

    def run(self, files: BlockFiles) -> None:
        """Write it with its checksum."""
        size = sum(map(len, self.pieces))
        files.write(BlockHeader(self.label, self.worth, size, checksum_of(self.pieces)), self.pieces)


@dataclass(frozen=True, slots=True, eq=False)
class DiskDelete:
    """Delete the block called `key`."""

    key: int

    def run(self, files: BlockFiles) -> None:
        """Delete it."""
        files.delete(self.key)


@dataclass(frozen=True, slots=True, eq=False)
class DiskSweep:
    """Delete the blocks of another fingerprint."""

    folder: ForeignFolder

    def run(self, files: BlockFiles) -> None:
        """Delete them."""
        files.delete_foreign(self.folder)


class DiskOutcome(NamedTuple):
    """The end of `job`, at `ended_s`; it `began_s`. `error` is None if it succeeded."""

    job: DiskJob
    error: Exception | None
    began_s: float
    ended_s: float


class DiskWorker(Protocol):
    """Does jobs: reads beside each other, all others one after the other, in the order of their start."""

    def start(self, job: DiskJob) -> None:
        """Start `job`. The caller bounds the number of unfinished jobs."""
        ...

    def outcomes(self) -> list[DiskOutcome]:
        """The outcomes since the last call."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when there is an outcome, or after `timeout_s`."""
        ...

    def close(self) -> None:
        """Finish all jobs and end the threads; nothing may be started afterwards."""
        ...


def outcome_of(job: DiskJob, files: BlockFiles, clock: Callable[[], float]) -> DiskOutcome:
    """Do `job` and return its outcome."""
    began_s = clock()
    try:
        job.run(files)
    except Exception as error:  # noqa: BLE001 - every exception of a job is the business of the tier that started it
        return DiskOutcome(job, error, began_s, clock())
    return DiskOutcome(job, None, began_s, clock())


class DiskThreads:
    """A `DiskWorker` with one thread for writes and deletions and `readers` for reads. It owns `files`."""

    def __init__(
        self, files: BlockFiles, clock: Callable[[], float] = time.monotonic, *, readers: int = READERS
    ) -> None:
        self._files, self._clock = files, clock
        self._reads: SimpleQueue[DiskJob | None] = SimpleQueue()
        self._changes: SimpleQueue[DiskJob | None] = SimpleQueue()
        self._done: deque[DiskOutcome] = deque()
        self._has_done = Condition()
        queues = [self._changes, *[self._reads] * readers]
        self._threads = [
            (queue, Thread(target=self._run, args=(queue,), name=f"kv-disk-{number}", daemon=True))
            for number, queue in enumerate(queues)
        ]
        for _, thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"DiskThreads({self._files!r}, {self._changes.qsize()} changes and {self._reads.qsize()} reads wait)"

    def start(self, job: DiskJob) -> None:
        """Queue `job`."""
        (self._reads if isinstance(job, DiskRead) else self._changes).put(job)

    def outcomes(self) -> list[DiskOutcome]:
        """The outcomes since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self, timeout_s: float) -> None:
        """Return when there is an outcome, or after `timeout_s`."""
        with self._has_done:
            self._has_done.wait_for(lambda: bool(self._done), timeout_s)

    def close(self) -> None:
        """Finish all jobs, end the threads and leave the folder to other processes."""
        for queue, _ in self._threads:
            queue.put(None)
        for _, thread in self._threads:
            thread.join()
        self._files.close()

    def _run(self, queue: SimpleQueue[DiskJob | None]) -> None:
        while (job := queue.get()) is not None:
            outcome = outcome_of(job, self._files, self._clock)
            with self._has_done:
                self._done.append(outcome)
                self._has_done.notify_all()
