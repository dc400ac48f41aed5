"""The journal: a file to which a router appends what was used, before the database has it.

The first line names the writer; each further one is a batch with its number and its rows. A line that broke off was
never counted. A lock on the file tells that its router lives; the journals of dead ones are taken over.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from router.operate.usage.rows import AMOUNTS, Rows, UsageKey, add

SUFFIX = ".usage"

_FIRST_NAMES = ("hour", "tenant", "key", "user", "model", "service_class", "pool", "kind", "currency")
"""The names of a row's key in journals that do not say them."""


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    writer: str
    amounts: tuple[str, ...]
    names: tuple[str, ...] = _FIRST_NAMES


class _Batch(msgspec.Struct, forbid_unknown_fields=True):
    seq: int
    rows: list[list[Any]]


_HEADS, _BATCHES = msgspec.json.Decoder(_Head), msgspec.json.Decoder(_Batch)


class Journal:
    """One router's journal in `folder`, open and locked. `seq` is the number of the newest batch."""

    def __init__(self, folder: Path) -> None:
        self.writer, self.seq = uuid.uuid4().hex, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{self.writer}{SUFFIX}"
        self._file: BinaryIO = self._begun([])
        self.rewritten_bytes = self.size

    def __repr__(self) -> str:
        return f"<Journal {self.path}, batch {self.seq}>"

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.tell()

    def append(self, rows: Rows) -> int:
        """Write `rows` as the next batch; returns its number. Raises OSError, and then nothing is counted."""
        at = self._file.tell()
        try:
            _write(self._file, _line(self.seq + 1, rows))
        except OSError:
            # a part of a line would spoil the next one
            self._file.truncate(at)
            self._file.seek(at)
            raise
        self.seq += 1
        return self.seq

    def rewrite(self, batches: list[tuple[int, Rows]]) -> None:
        """Have `batches` in the file alone, by number. Raises OSError, and then the file is as before."""
        old, self._file = self._file, self._begun(batches)
        old.close()
        self.rewritten_bytes = self.size

    def close(self, *, is_done: bool) -> None:
        """Unlock the file, and remove it if all of it `is_done`."""
        if is_done:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _begun(self, batches: list[tuple[int, Rows]]) -> BinaryIO:
        """A new file in place of the old one, locked before it has its name."""
        draft = self.path.with_suffix(".draft")
        file = draft.open("wb", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            head = msgspec.json.encode(_Head(self.writer, AMOUNTS, UsageKey._fields)) + b"\n"
            _write(file, head + b"".join(_line(seq, rows) for seq, rows in batches))
            os.fsync(file.fileno())
            draft.replace(self.path)
        except BaseException:
            file.close()
            draft.unlink(missing_ok=True)
            raise
        return file


class Orphan:
    """The journal of a router that no longer runs, locked. `batches` are whole, in order of their numbers."""

    def __init__(self, path: Path, file: BinaryIO, writer: str, batches: list[tuple[int, Rows]]) -> None:
        self.path, self.writer, self.batches = path, writer, batches
        self._file = file

    def after(self, seq: int) -> tuple[int, Rows]:
        """The sum of all batches behind the number `seq`, and the number of the last of them."""
        rows: Rows = {}
        for number, more in self.batches:
            if number > seq:
                add(rows, more)
        return max([seq, *(number for number, _ in self.batches)]), rows

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self._file.close()

    def release(self) -> None:
        """Leave the file for a later time."""
        self._file.close()


def orphans(folder: Path) -> Iterator[Orphan]:
    """The journals in `folder` that no router has open. A file that is no journal is left alone."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        file = path.open("rb", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # another router may have removed it, or its own may have put a new one in its place, before we had the lock
            if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                raise FileNotFoundError(path)
            head, *lines = file.read().split(b"\n")
            writer = _HEADS.decode(head)
            orphan = Orphan(path, file, writer.writer, _batches(lines[:-1], writer))
        except (OSError, msgspec.DecodeError):
            file.close()
            continue
        yield orphan


def _batches(lines: list[bytes], head: _Head) -> list[tuple[int, Rows]]:
    found = []
    for line in lines:
        try:
            batch = _BATCHES.decode(line)
        except msgspec.DecodeError:
            continue
        rows: Rows = {}
        for row in batch.rows:
            given = dict(zip((*head.names, *head.amounts), row, strict=True))
            key = UsageKey(*(given.get(name, "") for name in UsageKey._fields))
            add(rows, {key: [given.get(name, 0) for name in AMOUNTS]})
        found.append((batch.seq, rows))
    return found


def _line(seq: int, rows: Rows) -> bytes:
    return msgspec.json.encode(_Batch(seq, [[*key, *amounts] for key, amounts in rows.items()])) + b"\n"


def _write(file: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
