"""Labels, files and a worker for tests of the disk tier."""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable

from shards.kv.block_files import BlockFiles
from shards.kv.disk_jobs import DiskJob, DiskOutcome, DiskRead, outcome_of
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.raw_block import BlockHeader, BlockLabel, BlockLabels, checksum_of

FINGERPRINT = bytes(range(32))
LABELS = BlockLabels("m", FINGERPRINT)


def a_block(token: int) -> bytes:
    return struct.pack("<I", token) * BLOCK_TOKENS


def a_label(*tokens: int, domain: str = "") -> BlockLabel:
    """The label of the last of the blocks of `tokens`."""
    label = LABELS.first(a_block(tokens[0]), domain=domain)
    for token in tokens[1:]:
        label = LABELS.after(label, a_block(token))
    return label


def a_header(label: BlockLabel, content: bytes, worth: float = 0.0) -> BlockHeader:
    return BlockHeader(label, worth, len(content), checksum_of([memoryview(content)]))


class LateDisk:
    """Does jobs no sooner than it must or chance wants: reads in any order, all others in theirs.

    `closed` once closed. If `fails`, writes do.
    """

    def __init__(
        self, files: BlockFiles, rng: random.Random | None = None, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.files, self._rng, self._clock = files, rng, clock
        self.reads: list[DiskJob] = []
        self.changes: deque[DiskJob] = deque()
        self._done: list[DiskOutcome] = []

    def start(self, job: DiskJob) -> None:
        (self.reads if isinstance(job, DiskRead) else self.changes).append(job)

    def outcomes(self) -> list[DiskOutcome]:
        if self._rng is None:
            self._run(len(self.reads) + len(self.changes))
        elif self._rng.random() < 0.5:
            self._run(self._rng.randint(1, 4))
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> None:
        self._run(1)

    def close(self) -> None:
        self._run(len(self.reads) + len(self.changes))
        self.files.close()

    def die(self) -> None:
        """End as a killed process does."""
        self.files.close()

    def _run(self, count: int) -> None:
        for _ in range(count):
            is_read = bool(self.reads) and (not self.changes or self._rng is None or self._rng.random() < 0.5)
            if is_read:
                job = self.reads.pop(0 if self._rng is None else self._rng.randrange(len(self.reads)))
            elif self.changes:
                job = self.changes.popleft()
            else:
                return
            self._done.append(outcome_of(job, self.files, self._clock))
