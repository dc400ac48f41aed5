"""Writes the audit log from a thread. Several router processes of one machine write one chain, in turns."""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from policies.errors import ConfigError
from router.operate.audit.chain import MOST_LINE_BYTES, START, BrokenChainError, Chain, ChainPlace, place_of
from router.operate.audit.files import files_of, last_lines, set_aside
from router.operate.audit.refused import RefusedLogins, written
from router.private_files import NO_ROOM

MOST_WAITING = 1024
"""Records that wait to be written."""

REFUSED_EVERY_S = 60.0
"""Time between two records of the same refused logins."""

HEAD_EVERY_S = 3600.0
"""Time between two lines of the router's own log that name the last record."""

ROTATE_EVERY_S = 60.0
"""Time between two tries to set a file aside that has its size."""

_RETRY_S = 1.0
_PATIENCE_S = 5.0
_MOST_SHOWN = 1000
"""Characters of a text in a record that was too long."""

_log = logging.getLogger("pointsman.audit")


class AuditRecord(NamedTuple):
    """A record that waits: its event and details, its time in Unix time, and a future that ends when it is written."""

    event: str
    details: Mapping[str, Any]
    at: float
    written: Future[None]


class AuditLog:
    """Appends to the file at `path`, which becomes `path.1` above `file_bytes`; `keep` files are kept.

    `trouble` is why the last write failed: then records wait, and are tried again every second. A file that cannot be
    set aside is written further: `overdue` is why. `on_event` gets `audit_failed`, `audit_overdue`, `audit_lost` for
    each record that found no place to wait, and `audit_broken` if the end of the file is not as a router left it.
    `open` starts the thread, `close` writes what waits, within five seconds.
    """

    def __init__(
        self,
        path: Path,
        chain: Chain,
        *,
        file_bytes: int = 64 << 20,
        keep: int = 16,
        unix_time: Callable[[], float] = time.time,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path, self._chain, self._file_bytes, self._keep = path, chain, file_bytes, keep
        self._unix_time, self._on_event = unix_time, on_event
        self._router = f"{socket.gethostname()}:{os.getpid()}"
        self._waiting: queue.Queue[AuditRecord | None] = queue.Queue(MOST_WAITING)
        self._refused = RefusedLogins()
        self._lost = 0
        self.trouble: str | None = None
        self.overdue: str | None = None
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)
        # of the thread
        self._left: tuple[tuple[int, int], ChainPlace] | None = None
        self._head = START
        self._unsynced: list[AuditRecord] = []
        self._rotate_at = 0.0
        self._told_at = self._taken_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<AuditLog {self.path}, {self._waiting.qsize()} wait{f', {self.trouble}' if self.trouble else ''}>"

    def put(self, event: str, **details: Any) -> Future[None]:
        """Have a record written soon. The result comes when it is on the disk, or at once if it is lost."""
        record = AuditRecord(event, details, self._unix_time(), Future())
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._lost += 1
            self._on_event("audit_lost")
            record.written.set_result(None)
        return record.written

    def refused(self, port: str, address: str, reason: str) -> None:
        """Count a refused login. A record follows within a minute."""
        self._refused.add(port, address, reason, self._unix_time())

    def open(self) -> None:
        """Begin to write. Raises ConfigError if the file cannot be written, but for a disk that is full. Blocks."""
        opened = self._made("opened", {"seals": self._chain.kind})
        try:
            self._write([opened])
        except OSError as error:
            if error.errno in NO_ROOM:
                _log.error("the audit log %s cannot be written: %s", self.path, error)
                self._waiting.put_nowait(opened)
                self._thread.start()
                return
            raise ConfigError(
                f"the audit log {self.path} cannot be written: {error}", hint="name another file with audit.file"
            ) from error
        self._thread.start()

    def close(self) -> None:
        """Write what waits, within five seconds. Blocks."""
        if self._thread.ident is None:
            return
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_PATIENCE_S)
        self._thread.join(_PATIENCE_S)

    def _made(self, event: str, details: Mapping[str, Any]) -> AuditRecord:
        return AuditRecord(event, details, self._unix_time(), Future())

    def _run(self) -> None:
        batch: list[AuditRecord] = []
        goes_on = True
        while goes_on:
            goes_on = self._gather(batch)
            if not goes_on or time.monotonic() - self._taken_at >= REFUSED_EVERY_S:
                self._taken_at = time.monotonic()
                batch += [AuditRecord("refused", details, at, Future()) for at, details in self._refused.take()]
            if not goes_on:
                batch.append(self._made("closed", {}))
            lost, self._lost = self._lost, 0
            if lost:
                batch.append(self._made("lost", {"count": lost}))
            if (batch or self._unsynced) and self._try(batch):
                batch = []
        self._tell()

    def _gather(self, batch: list[AuditRecord]) -> bool:
        """Add what waits to `batch`; if nothing does, wait a second. Returns whether the log goes on."""
        if len(batch) >= MOST_WAITING:
            # nothing can be written: what comes now stays in the queue
            time.sleep(_RETRY_S)
            return True
        with suppress(queue.Empty):
            record = self._waiting.get(timeout=_RETRY_S)
            while record is not None:
                batch.append(record)
                record = self._waiting.get_nowait()
            return False
        return True

    def _try(self, batch: list[AuditRecord]) -> bool:
        try:
            self._write(batch)
        except OSError as error:
            if self.trouble is None:
                _log.error("the audit log %s cannot be written: %s", self.path, error)
                self._on_event("audit_failed")
            self.trouble = str(error)
            return False
        if self.trouble is not None:
            _log.info("the audit log %s is written again", self.path)
        self.trouble = None
        written, self._unsynced = [*self._unsynced, *batch], []
        for record in written:
            if record.written.set_running_or_notify_cancel():
                record.written.set_result(None)
        if time.monotonic() - self._told_at >= HEAD_EVERY_S:
            self._tell()
        return True

    def _tell(self) -> None:
        """Name the last record in the router's own log, which is often kept elsewhere: so a shortened file shows."""
        self._told_at = time.monotonic()
        _log.info("the audit log %s ends with record %d:%s", self.path, *self._head)

    def _write(self, batch: list[AuditRecord]) -> None:
        """Append `batch`, and take what is in the file out of it. Raises OSError if it is not, or not on the disk.

        Setting the file aside is another matter: it fails without failing what was appended.
        """
        with self._locked(), self._opened() as descriptor:
            self._append(descriptor, batch)
            if os.fstat(descriptor).st_size >= self._file_bytes and time.monotonic() >= self._rotate_at:
                self._set_aside()

    def _append(self, descriptor: int, batch: list[AuditRecord]) -> None:
        size = os.fstat(descriptor).st_size
        lines, after, extra = bytearray(), *self._end(descriptor)
        if extra and extra[0].details.get("torn_bytes") and os.fstat(descriptor).st_size == size:
            # it may be appended to and not cut: the torn line is ended, and the next record says so
            lines += b"\n"
        ends = []
        for record in (*extra, *batch):
            line, after = self._line(record, after)
            lines += line
            ends.append(len(lines))
        try:
            _write_all(descriptor, lines)
            os.fsync(descriptor)
        except OSError:
            kept = _cut(descriptor, size)
            # of a file that cannot be cut, each record that is whole stays, and is not written again
            whole = max(0, sum(end <= kept for end in ends) - len(extra))
            self._unsynced += batch[:whole]
            del batch[:whole]
            raise
        self._head = after
        status = os.fstat(descriptor)
        self._left = ((status.st_ino, status.st_size), after)

    def _set_aside(self) -> None:
        try:
            set_aside(self.path, self._keep)
            self.overdue = None
        except OSError as error:
            self._rotate_at = time.monotonic() + ROTATE_EVERY_S
            if self.overdue is None:
                _log.error("the audit log %s has its size and cannot be set aside, so it grows: %s", self.path, error)
                self._on_event("audit_overdue")
            self.overdue = str(error)

    def _line(self, record: AuditRecord, after: ChainPlace) -> tuple[bytes, ChainPlace]:
        """The line of `record` and its place. Details that are too long, or cannot be written, are left out."""
        try:
            line, place = self._chain.line(self._shown(record), after)
            if len(line) < MOST_LINE_BYTES:
                return line, place
            problem = f"the record had {len(line):,} bytes"
        except (TypeError, ValueError, RecursionError, msgspec.EncodeError) as error:
            problem = f"the record could not be written: {type(error).__name__}"
        return self._chain.line(self._shown(record._replace(details=_shortened(record.details, problem))), after)

    def _end(self, descriptor: int) -> tuple[ChainPlace, list[AuditRecord]]:
        """The place of the file's last line, and records that say what is wrong with it, if anything is."""
        status = os.fstat(descriptor)
        if self._left is not None and self._left[0] == (status.st_ino, status.st_size):
            return self._left[1], []
        lines, torn = last_lines(descriptor)
        extra: list[AuditRecord] = []
        line = lines[0] if lines else b""
        left = START if self._left is None else self._left[1]
        # behind a line that is no record, the chain goes on at the last one that is
        last = next((place for place in map(place_of, lines) if place is not None), left)
        if line:
            if self._left is not None and self._left[0][0] == status.st_ino and self._left[0][1] > status.st_size:
                self._broke(extra, f"the file is shorter than before, when it had record {left.seq}")
            place = self._checked(line, extra, max(last, left))
            return place, [*self._repaired(descriptor, status.st_size, torn), *extra]
        older = [file for file in files_of(self.path) if file != self.path]
        before = self._checked(_last_of(older[-1]), extra, START) if older else START
        if before.seq < left.seq:
            self._broke(extra, f"the file is gone, with record {left.seq}")
        return max(before, left), [*self._repaired(descriptor, status.st_size, torn), *extra]

    def _repaired(self, descriptor: int, size: int, torn: int) -> list[AuditRecord]:
        """A record of a torn line: a router was killed while it wrote, and no part of this line was ever promised."""
        if not torn:
            return []
        _cut(descriptor, size - torn)
        return [self._made("repaired", {"torn_bytes": torn})]

    def _checked(self, line: bytes, extra: list[AuditRecord], otherwise: ChainPlace) -> ChainPlace:
        """The place of `line`, or `otherwise` if it is no line of this log."""
        try:
            return self._chain.check(line, None)[1]
        except BrokenChainError as error:
            self._broke(extra, f"its last line {error}")
            return otherwise

    def _broke(self, extra: list[AuditRecord], why: str) -> None:
        _log.error("the audit log %s was changed by another program: %s", self.path, why)
        self._on_event("audit_broken")
        extra.append(self._made("broken", {"reason": why}))

    def _shown(self, record: AuditRecord) -> dict[str, Any]:
        return {"at": written(record.at), "router": self._router, "event": record.event, **record.details}

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the file, so that no other process writes."""
        descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _last_of(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return next(iter(last_lines(descriptor)[0]), b"")
    finally:
        os.close(descriptor)


def _cut(descriptor: int, size: int) -> int:
    """Have no more than `size` bytes in the file: how many more it has, if it may only be appended to."""
    with suppress(OSError):
        os.ftruncate(descriptor, size)
    return os.fstat(descriptor).st_size - size


def _shortened(details: Mapping[str, Any], problem: str) -> dict[str, Any]:
    """Those of `details` that are short texts and numbers, and what was wrong with all of them."""
    kept: dict[str, Any] = {}
    for name, value in details.items():
        if isinstance(value, str):
            kept[name] = value[:_MOST_SHOWN].encode("utf-8", "replace").decode()
        elif value is None or isinstance(value, bool | int | float):
            kept[name] = value
    return {**kept, "shortened": problem}


def _write_all(descriptor: int, data: bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
