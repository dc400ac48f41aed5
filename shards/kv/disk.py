"""The tier on disk: blocks that left the device, and all cached blocks after an orderly stop. Torch-free."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shards.kv.block_files import ForeignFolder, bytes_on_disk
from shards.kv.disk_index import DiskEntry, DiskIndex
from shards.kv.disk_jobs import DiskDelete, DiskOutcome, DiskRead, DiskSweep, DiskWorker, DiskWrite
from shards.kv.host import HostTier
from shards.kv.prefix import DISK, CachedBlock, PrefixCache
from shards.kv.raw_block import HEADER_BYTES, BlockHeader, BlockLabel, BlockLabels, RawMemory, domain_digest
from shards.nouns import CacheChange, CacheEvent, DiskUse

_log = logging.getLogger(__name__)

_LATE_BYTES = 2 << 20
"""Most bytes that the engine's thread copies in one step, if that is not less than one block."""

_MOST_READS = 64

_PAUSE_S = 30.0
"""Nothing is written for so long after a write has failed."""

_PRIOR_BYTES_PER_S = 500e6
"""Assumed rate of reading before the first read: that of a SATA disk."""

_NEWEST = 0.2
"""Weight of the newest read in the measured time of reading."""

_FADES = 0.02
"""Share of the measured time that becomes the assumed one again with each read that was not worth it."""


class KvDirectory(NamedTuple):
    """An opened directory for KV: at most `most_bytes` of blocks, with the labels of `labels`, moved by `worker`.

    `memory` is the host memory; its last `staging` slots are for blocks that wait to be written. `headers` are those
    found in the directory, parents first, and `foreign` the folders of other fingerprints. `broken` files were deleted.
    `clock` times reads.
    """

    worker: DiskWorker
    memory: RawMemory
    labels: BlockLabels
    most_bytes: int
    staging: int
    headers: Sequence[BlockHeader] = ()
    foreign: Sequence[ForeignFolder] = ()
    broken: int = 0
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class DiskCounts:
    """Counts of blocks since the start, as in DiskUse."""

    written: int = 0
    read: int = 0
    broken: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(slots=True, eq=False)
class _Reading:
    """A block on its way from disk into host slot `slot`, held. `job` is None until the slot is quiet."""

    entry: DiskEntry
    label: BlockLabel
    domain: str
    slot: int
    job: DiskRead | None = None
    has_landed: bool = False


@dataclass(slots=True, eq=False)
class _Writing:
    """A block on its way to the disk from `slot` of the host memory. `job` is None until it has been copied there."""

    entry: DiskEntry
    label: BlockLabel
    slot: int
    job: DiskWrite | None = None


@dataclass(slots=True)
class _ReadTime:
    """The measured time between two blocks that are read one after the other, in seconds."""

    prior_s: float
    block_s: float = field(init=False)
    _ended_s: float = float("-inf")

    def __post_init__(self) -> None:
        self.block_s = self.prior_s

    def observe(self, began_s: float, ended_s: float) -> None:
        took_s = max(0.0, ended_s - max(began_s, self._ended_s))
        self._ended_s = max(ended_s, self._ended_s)
        self.block_s += _NEWEST * (took_s - self.block_s)

    def fade(self) -> None:
        self.block_s += _FADES * (self.prior_s - self.block_s)


class DiskTier:
    """Writes blocks that leave the device to a directory, and reads them back into the host tier.

    A block that leaves the device is copied into a staging slot and written from there. If none is free and the block
    is in the host tier, it is copied from there later, if it is still there then. A block is read when a prompt
    continues with it, and then is a cached block of the host tier. Domain, prefix and tokens are compared exactly, by
    the label; a damaged file is deleted, and its block computed again. If a write fails, nothing is written for half a
    minute.

    Within `most_bytes` files of other fingerprints are deleted first, then the block of least worth, children before
    parents. Every call comes from the engine's thread, and none waits for the disk, except `preserve` and `finish`.
    Without a directory there are no blocks.
    """

    def __init__(self, prefix: PrefixCache, host: HostTier, directory: KvDirectory | None = None) -> None:
        self._prefix, self._host, self._directory = prefix, host, directory
        self.counts = DiskCounts()
        self._index = DiskIndex()
        self._foreign: deque[ForeignFolder] = deque()
        self._late: deque[CachedBlock] = deque(maxlen=max(1, host.size))
        self._writes: dict[int, _Writing] = {}
        self._reads: dict[int, _Reading] = {}
        self._most_reads = min(_MOST_READS, host.size // 2)
        self._staging = [host.size + number for number in range(directory.staging if directory else 0)]
        self._time, self._file_bytes = _ReadTime(0.0), 0
        self._paused_until_s = self._moved_s = 0.0
        if directory is not None:
            self._open(directory)

    def __repr__(self) -> str:
        return f"DiskTier({self._index!r}, {len(self._reads)} are read, {len(self._writes)} written)"

    @property
    def is_open(self) -> bool:
        """Whether there is a directory."""
        return self._directory is not None

    @property
    def is_busy(self) -> bool:
        """Whether blocks are being read or written, or wait for it."""
        return bool(self._reads or self._writes or (self._late and not self._is_paused))

    @property
    def blocks(self) -> int:
        """The number of blocks on disk."""
        return len(self._index) - sum(writing.entry in self._index for writing in self._writes.values())

    @property
    def use(self) -> DiskUse | None:
        """Its contents and its work so far; None without a directory."""
        counts = self.counts
        if self._directory is None:
            return None
        return DiskUse(self.blocks, counts.written, counts.read, counts.broken, counts.failed, counts.skipped)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those of other fingerprints included."""
        return self._index.used + sum(folder.size for folder in self._foreign)

    def save(self, cached: CachedBlock, block: int) -> None:
        """`cached` leaves device block `block`: copy it to be written, now or later, unless it is on disk."""
        if self._directory is None:
            return
        entry = self._index.get(cached.key)
        if entry is not None:
            self._index.raise_worth(entry, cached.worth)
        elif self._staging and not self._is_paused:
            writing = self._enter(cached, cached.worth, self._staging[-1])
            if writing is not None:
                self._host.flights.save(block, self._staging.pop())
        elif cached.slot is not None:
            self._late.append(cached)
        else:
            self.counts.skipped += 1

    def settle(self, now: float) -> None:
        """Take over what was read and written since the last call, and start the next jobs.

        `now` is the time of the pool's clock, in turnovers.
        """
        if self._directory is None:
            return
        for outcome in self._directory.worker.outcomes():
            self._end(outcome)
        self._admit(now)
        self._begin_reads()
        self._copy_late()
        self._begin_writes()

    def find(
        self, path: Sequence[CachedBlock], tokens_of: Callable[[int], bytes], *, limit: int, domain: str
    ) -> list[BlockLabel]:
        """The labels of the blocks on disk that continue `path`, up to `limit` blocks in total and 64 at a time."""
        found: list[BlockLabel] = []
        if self._directory is None or not len(self._index):
            return found
        labels = self._directory.labels
        label = labels.of(path[-1]) if path else None
        for at in range(len(path), min(limit, len(path) + self._most_reads)):
            tokens = tokens_of(at)
            label = labels.first(tokens, domain=domain) if label is None else labels.after(label, tokens)
            if self._index.find(label) is None:
                break
            found.append(label)
        return found

    def wait_s(self, labels: Sequence[BlockLabel]) -> float:
        """Predicted seconds until the blocks of `labels` are in the host tier.

        If reads take longer than that, it is the time for which none has ended: a disk that hangs looks ever slower.
        """
        assert self._directory is not None, "there is no directory"
        further = sum(label.key not in self._reads for label in labels)
        expected_s = (len(self._reads) + further) * self._time.block_s
        return max(expected_s, self._directory.clock() - self._moved_s) if self._reads else expected_s

    def fetch(self, labels: Sequence[BlockLabel], *, domain: str) -> bool:
        """Start to read the blocks of `labels`, as far as there is room; False if not even the first is being read."""
        for label in labels:
            entry = self._index.find(label)
            if label.key in self._reads:
                continue
            slot = self._host.take() if entry is not None and len(self._reads) < self._most_reads else None
            if slot is None or entry is None:
                break
            if not self._reads and self._directory is not None:
                self._moved_s = self._directory.clock()
            self._index.use(entry)
            self._reads[label.key] = _Reading(entry, label, domain, slot)
        self._begin_reads()
        return bool(labels) and labels[0].key in self._reads

    def decline(self) -> None:
        """Note that computing was predicted to be faster: the measured time of reading fades a little."""
        self._time.fade()

    def lacks(self, cached: CachedBlock) -> bool:
        """Whether the disk neither has `cached` nor is about to."""
        return self._directory is not None and self._index.get(cached.key) is None

    def preserve(self, cached: CachedBlock, *, worth: float, until_s: float) -> None:
        """Copy `cached` into a staging slot, if there is room for it; waits for one until `until_s`.

        No other copies may be unfinished. The block is written once `begin` was called behind the copy.
        """
        while not self._staging and self._has_jobs and self._wait(until_s):
            pass
        if not self._staging or self._is_paused or not self._has_time(until_s):
            return
        writing = self._enter(cached, worth, self._staging[-1])
        if writing is None:
            return
        self._staging.pop()
        if cached.block is not None:
            self._host.flights.save(cached.block, writing.slot)
        elif cached.slot is not None:
            self._copy(cached.slot, writing.slot)

    def begin(self) -> None:
        """Start to write the blocks with finished copies."""
        if self._directory is not None:
            self._begin_writes()

    def finish(self, until_s: float) -> None:
        """Wait until everything that was begun is written and read, or until `until_s` of the directory's clock."""
        while self._has_jobs and self._wait(until_s):
            pass

    def forget(self, key: int) -> None:
        """Delete the block called `key`: its KV may be wrong."""
        entry = self._index.get(key)
        if entry is not None:
            self._delete(entry)

    def clear(self, domain: str | None = None) -> set[int]:
        """Delete all blocks, or those of `domain`; returns their keys. Those that are being read are dropped."""
        if self._directory is None:
            return set()
        digest = None if domain is None else domain_digest(domain)
        gone = [entry for entry in self._index if digest in (None, entry.domain)]
        for entry in gone:
            self._delete(entry)
        return {entry.key for entry in gone}

    def snapshot(self) -> tuple[CacheEvent, ...]:
        """One event with all blocks on disk, parents before children; none if there are no blocks."""
        written = sorted((entry for entry in self._index if entry.is_written), key=lambda entry: entry.depth)
        keys = tuple(entry.key for entry in written)
        return (CacheEvent(CacheChange.STORED, keys, DISK),) if keys else ()

    def close(self) -> None:
        """Finish the started jobs and end their threads."""
        if self._directory is not None:
            self._directory.worker.close()

    def check(self) -> None:
        """Assert that the index is consistent, within its size, and that each job holds its slot."""
        self._index.check()
        if self._directory is not None and not self._foreign:
            assert self._index.used <= self._directory.most_bytes, "there is too much on disk"
        assert len(self._reads) <= self._most_reads, "too many blocks are being read"
        assert all(self._host.is_held(reading.slot) for reading in self._reads.values()), (
            "a slot is read into, not held"
        )
        staging = [*self._staging, *(writing.slot for writing in self._writes.values())]
        reserved = 0 if self._directory is None else self._directory.staging
        assert sorted(staging) == [self._host.size + number for number in range(reserved)], "a staging slot is lost"

    @property
    def _is_paused(self) -> bool:
        return self._directory is not None and self._directory.clock() < self._paused_until_s

    def _open(self, directory: KvDirectory) -> None:
        memory, self._foreign = directory.memory, deque(directory.foreign)
        block_bytes = sum(map(len, memory.raw(0)))
        self._file_bytes = bytes_on_disk(HEADER_BYTES + block_bytes)
        self._time = _ReadTime(block_bytes / _PRIOR_BYTES_PER_S)
        self.counts.broken = directory.broken
        newest = max((header.worth for header in directory.headers), default=0.0)
        for header in directory.headers:
            if header.size != block_bytes or self._index.get(header.label.key) is not None:
                directory.worker.start(DiskDelete(header.label.key))
                continue
            # the clock of this process starts at 0: what was used last is as old as that
            entry = self._index.add(header.label, size=self._file_bytes, worth=header.worth - newest)
            self._have(entry)
        self._make_room(0, float("inf"))
        # a hundred thousand headers take a hundred megabytes
        self._directory = directory._replace(headers=(), foreign=())

    def _have(self, entry: DiskEntry) -> None:
        entry.is_written = True
        self._index.rest(entry, entry.worth)
        self._prefix.tell(CacheChange.STORED, DISK, entry.key)

    def _delete(self, entry: DiskEntry) -> None:
        """Delete `entry` and its file. A job that moves it finds it gone when it ends."""
        assert self._directory is not None, "there is no directory"
        self._index.remove(entry)
        if entry.is_written:
            self._prefix.tell(CacheChange.EVICTED, DISK, entry.key)
        self._directory.worker.start(DiskDelete(entry.key))

    def _make_room(self, size: int, worth: float) -> bool:
        """Delete until `size` more bytes fit; False if only blocks worth `worth` or more are left."""
        assert self._directory is not None, "there is no directory"
        while self.used_bytes + size > self._directory.most_bytes:
            if self._foreign:
                self._directory.worker.start(DiskSweep(self._foreign.popleft()))
                continue
            victim = self._index.victim()
            if victim is None or victim.worth >= worth:
                return False
            self._delete(victim)
        return True

    @property
    def _has_jobs(self) -> bool:
        jobs = [writing.job for writing in self._writes.values()], [reading.job for reading in self._reads.values()]
        return any(job is not None for kind in jobs for job in kind)

    def _has_time(self, until_s: float) -> bool:
        return self._directory is not None and self._directory.clock() < until_s

    def _wait(self, until_s: float) -> bool:
        """Wait for the end of a job and take it over; False at `until_s`."""
        if self._directory is None or not self._has_time(until_s):
            return False
        self._directory.worker.wait(until_s - self._directory.clock())
        for outcome in self._directory.worker.outcomes():
            self._end(outcome)
        self._drop_landed()
        return True

    def _enter(self, cached: CachedBlock, worth: float, slot: int) -> _Writing | None:
        """Make room for `cached` on disk, to be written from `slot`; None if there is none."""
        assert self._directory is not None, "there is no directory"
        label = self._directory.labels.of(cached)
        if label.key in self._writes:
            # it was cleared while it was written, and is cached again
            return None
        # in the index first, so that its own parent is not deleted for it
        entry = self._index.add(label, size=0, worth=worth)
        if not self._make_room(self._file_bytes, worth):
            self._index.remove(entry)
            self.counts.skipped += 1
            return None
        self._index.resize(entry, self._file_bytes)
        writing = self._writes[label.key] = _Writing(entry, label, slot)
        return writing

    def _copy_late(self) -> None:
        """Copy blocks of the host tier that are not on disk yet into staging slots."""
        left = max(1, _LATE_BYTES // max(1, self._file_bytes))
        while self._late and self._staging and left and not self._is_paused:
            cached = self._late.popleft()
            if cached not in self._prefix or cached.slot is None or not self.lacks(cached):
                continue
            if self._host.flights.is_slot_busy(cached.slot):
                # copies run in order: those behind it have not landed either
                self._late.appendleft(cached)
                return
            writing = self._enter(cached, cached.worth, self._staging[-1])
            if writing is not None:
                self._copy(cached.slot, self._staging.pop())
                left -= 1

    def _copy(self, slot: int, to_slot: int) -> None:
        assert self._directory is not None, "there is no directory"
        memory = self._directory.memory
        for source, target in zip(memory.raw(slot), memory.raw(to_slot), strict=True):
            target[:] = source

    def _begin_writes(self) -> None:
        assert self._directory is not None, "there is no directory"
        for writing in [writing for writing in self._writes.values() if writing.job is None]:
            if self._host.flights.is_slot_busy(writing.slot):
                continue
            if writing.entry in self._index:
                pieces = self._directory.memory.raw(writing.slot)
                writing.job = DiskWrite(writing.label, writing.entry.worth, pieces)
                self._directory.worker.start(writing.job)
            else:
                # it was cleared or distrusted meanwhile
                self._staging.append(self._writes.pop(writing.label.key).slot)

    def _begin_reads(self) -> None:
        for reading in self._reads.values():
            if reading.job is None and self._directory and not self._host.flights.is_slot_busy(reading.slot):
                reading.job = DiskRead(reading.label, self._directory.memory.raw(reading.slot))
                self._directory.worker.start(reading.job)

    def _end(self, outcome: DiskOutcome) -> None:
        job = outcome.job
        if isinstance(job, DiskWrite):
            self._end_write(self._writes.pop(job.label.key), outcome.error)
        elif isinstance(job, DiskRead):
            reading = self._reads[job.label.key]
            self._moved_s = outcome.ended_s
            if outcome.error is None:
                self._time.observe(outcome.began_s, outcome.ended_s)
                reading.has_landed = True
            else:
                self._end_read(reading)
                if reading.entry in self._index:
                    _log.warning("a block on disk cannot be used and is computed again: %s", outcome.error)
                    self.counts.broken += 1
                    self._delete(reading.entry)
        elif outcome.error is not None:
            _log.warning("a file of the KV directory cannot be deleted: %s", outcome.error)

    def _end_write(self, writing: _Writing, error: Exception | None) -> None:
        assert self._directory is not None, "there is no directory"
        self._staging.append(writing.slot)
        if error is not None:
            _log.warning("a block cannot be written to disk; the next try is in %.0f s: %s", _PAUSE_S, error)
            self.counts.failed += 1
            self._paused_until_s = self._directory.clock() + _PAUSE_S
            self._index.remove(writing.entry)
        elif writing.entry in self._index:
            self.counts.written += 1
            self._have(writing.entry)

    def _admit(self, now: float) -> None:
        """Let landed blocks into the host tier, parents first; those without a cached parent are dropped."""
        landed = [reading for reading in self._reads.values() if reading.has_landed]
        for reading in sorted(landed, key=lambda reading: reading.label.depth):
            if reading.label.depth and reading.label.parent in self._reads and reading.entry in self._index:
                # its parent is still being read
                continue
            cached = self._cached_as(reading) if reading.entry in self._index else None
            if cached is not None:
                self.counts.read += 1
                cached.chain, cached.worth = reading.label.chain, max(reading.entry.worth, now)
                self._host.enter(cached, reading.slot)
            self._end_read(reading)
            if cached is not None and cached.parent is not None:
                # it was a leaf of the host tier until now
                self._host.settle(cached.parent)

    def _cached_as(self, reading: _Reading) -> CachedBlock | None:
        """The new cached block of `reading`; None if its parent is gone or the block is cached again already."""
        assert self._directory is not None, "there is no directory"
        label, parent = reading.label, None
        if label.depth:
            parent = self._prefix.named(label.parent, domain=reading.domain)
            labels = self._directory.labels
            if parent is None or labels.after(labels.of(parent), label.token_ids) != label:
                return None
        return self._prefix.admit(parent, label.token_ids, domain=reading.domain)

    def _drop_landed(self) -> None:
        for reading in [reading for reading in self._reads.values() if reading.has_landed]:
            self._end_read(reading)

    def _end_read(self, reading: _Reading) -> None:
        del self._reads[reading.label.key]
        self._index.rest(reading.entry, reading.entry.worth)
        self._host.release(reading.slot)
