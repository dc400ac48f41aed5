"""The journal: a file to which a router appends what was used, before the database has it.

The first line names the writer; each further one is a batch with its number and its rows. A line that broke off was
never counted. A lock on the file tells that its router lives; the journals of dead ones are taken over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from router.operate.usage.rows import AMOUNTS, Rows, UsageKey, add, cleaned
from router.private_files import private, private_folder

SUFFIX, UNREADABLE = ".usage", ".unreadable"

_FIRST_NAMES = ("hour", "tenant", "key", "user", "model", "service_class", "pool", "kind", "currency")
"""The names of a row's key in journals that do not say them."""


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    writer: str
    amounts: tuple[str, ...]
    names: tuple[str, ...] = _FIRST_NAMES


class _Batch(msgspec.Struct, forbid_unknown_fields=True):
    seq: int
    rows: list[list[Any]]


_log = logging.getLogger("pointsman.usage")

_HEADS, _BATCHES = msgspec.json.Decoder(_Head), msgspec.json.Decoder(_Batch)


class Journal:
    """One router's journal in `folder`, open and locked. `seq` is the number of the newest batch."""

    def __init__(self, folder: Path) -> None:
        self.writer, self.seq, self._is_torn = uuid.uuid4().hex, 0, False
        private_folder(folder)
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
            # end a line that broke off and could not be cut, so that this one is not lost with it
            _write(self._file, b"\n" * self._is_torn + _line(self.seq + 1, rows))
            self._is_torn = False
        except OSError:
            self._is_torn = True
            with suppress(OSError):
                self._file.truncate(at)
                self._file.seek(at)
            raise
        self.seq += 1
        return self.seq

    def rewrite(self, batches: list[tuple[int, Rows]]) -> None:
        """Have `batches` in the file alone, by number. Raises OSError, and then the file is as before."""
        old, self._file = self._file, self._begun(batches)
        old.close()
        self._is_torn = False
        self.rewritten_bytes = self.size

    def close(self, *, is_done: bool) -> None:
        """Unlock the file, and remove it if all of it `is_done`."""
        if is_done:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _begun(self, batches: list[tuple[int, Rows]]) -> BinaryIO:
        """A new file in place of the old one, locked before it has its name."""
        draft = self.path.with_suffix(".draft")
        file: BinaryIO = open(draft, "wb", buffering=0, opener=private)  # noqa: SIM115 - it stays open
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
    """The journal of a router that no longer runs, locked. `batches` are whole, in order of their numbers; `unreadable`
    lines are none."""

    def __init__(
        self, path: Path, file: BinaryIO, writer: str, batches: list[tuple[int, Rows]], *, unreadable: int
    ) -> None:
        self.path, self.writer, self.batches, self.unreadable = path, writer, batches, unreadable
        self._file = file

    def after(self, seq: int) -> tuple[int, Rows]:
        """The sum of all batches behind the number `seq`, and the number of the last of them."""
        rows: Rows = {}
        for number, more in self.batches:
            if number > seq:
                add(rows, more)
        return max([seq, *(number for number, _ in self.batches)]), rows

    def remove(self) -> None:
        """Remove the file, or set it aside if there are lines that could not be read."""
        if self.unreadable:
            _log.error("%d lines of %s cannot be read, and it is kept as %s", self.unreadable, self.path, UNREADABLE)
            self.path.replace(self.path.with_suffix(UNREADABLE))
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
            # one by one: to split millions of them at once would hold every thread
            lines = iter(BytesIO(file.read()))
            head = _HEADS.decode(next(lines, b""))
            found = [_batch(line, head) for line in lines if line.endswith(b"\n") and line != b"\n"]
            batches = [batch for batch in found if batch is not None]
            orphan = Orphan(path, file, head.writer, batches, unreadable=len(found) - len(batches))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            file.close()
            continue
        yield orphan


def _batch(line: bytes, head: _Head) -> tuple[int, Rows] | None:
    """The batch of a line; None if it cannot be read, or one of its rows."""
    try:
        batch = _BATCHES.decode(line)
        rows: Rows = {}
        for row in batch.rows:
            given = dict(zip((*head.names, *head.amounts), row, strict=True))
            key = UsageKey(*(given.get(name, "") for name in UsageKey._fields))
            amounts = [given.get(name, 0) for name in AMOUNTS]
            if not (isinstance(key.hour, int) and _are(key[1:], str) and _are(amounts, int)):
                return None
            add(rows, {key: amounts})
    except (ValueError, RecursionError):
        # msgspec's errors are ValueErrors
        return None
    return batch.seq, cleaned(rows)


def _are(values: Iterable[Any], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _line(seq: int, rows: Rows) -> bytes:
    return msgspec.json.encode(_Batch(seq, [[*key, *amounts] for key, amounts in rows.items()])) + b"\n"


def _write(file: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
