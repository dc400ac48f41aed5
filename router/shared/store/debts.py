"""Debts: what was used and the shared store does not have yet, as it is sent, and as it lies on the disk meanwhile."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import msgspec

from policies.quota.budget import Charge, Reservation, meters

SUFFIX = ".owed"


class Debt(msgspec.Struct, frozen=True, array_like=True):
    """One settlement: the reservation's `id`, and of each meter its name, its rate and the amount that was used.

    `number` is its place among those of its `writer` and ledger, from 1 on: by it the store knows a debt again that
    comes a second time, however late. It belongs to the periods of `began_ms` (Unix time; 0: to those of its arrival).
    """

    ledger: str
    id: str
    writer: str
    number: int
    began_ms: int
    amounts: list[tuple[str, int, int]]

    @classmethod
    def of(cls, reservation: Reservation, charge: Charge, writer: str, number: int) -> Debt:
        """The debt of a request that was reserved with `reservation` and is to be charged `charge`."""
        metered = meters(reservation.descriptors)
        return cls(
            reservation.descriptors[0].ledger,
            reservation.id,
            writer,
            number,
            reservation.began_ms,
            [(meter.name, meter.rate, amount) for meter, amount in zip(metered, charge.amounts(metered), strict=True)],
        )


_DEBTS = msgspec.json.Decoder(Debt)
_ENCODER = msgspec.json.Encoder()


class DebtFile:
    """One router's debts to the store called `place`, in a file of `folder` that is made when there are some. A lock on
    it tells that its router lives. What was written survives the process, though not the machine."""

    def __init__(self, folder: Path, place: str) -> None:
        self._folder, self._place = folder, place
        self._path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
        self._file: BinaryIO | None = None
        self._head = _ENCODER.encode(place) + b"\n"
        self.count = 0
        """How many debts were added since it was empty."""

    def __repr__(self) -> str:
        return f"<DebtFile {self._path}>"

    def add(self, debts: Sequence[Debt]) -> None:
        """Append `debts`. Raises OSError, and then none of them is there."""
        if self._file is None:
            self._file = self._made()
        _append(self._file, debts)
        self.count += len(debts)

    def clear(self) -> None:
        """The store has all of them. Raises OSError."""
        if self._file is not None and self.count:
            self._file.truncate(len(self._head))
            self.count = 0

    def replace(self, debts: Sequence[Debt]) -> None:
        """Have `debts` alone. Raises OSError, and then all is as before."""
        old, path = self._file, self._path
        self._path = self._folder / f"{uuid.uuid4().hex}{SUFFIX}"
        try:
            self._file = self._made()
            _append(self._file, debts)
        except OSError:
            self._path.unlink(missing_ok=True)
            self._file, self._path = old, path
            raise
        self.count = len(debts)
        if old is not None:
            # both files have them for a moment, and no debt counts twice
            path.unlink(missing_ok=True)
            old.close()

    def close(self) -> None:
        """Leave what is there to the next router; a file without debts goes."""
        if self._file is not None:
            if not self.count:
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def left_behind(self) -> Iterator[LeftDebts]:
        """The debts of routers that no longer run, to the same store. Raises OSError."""
        if not self._folder.is_dir():
            return
        self._require_ours()
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path != self._path and (orphan := _taken(path, self._place)) is not None:
                yield orphan

    def _require_ours(self) -> None:
        """Raise PermissionError for a folder in which others can write: their debts would be charged."""
        found = self._folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{self._folder} belongs to another user, or others can write there")

    def _made(self) -> BinaryIO:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_ours()
        draft = self._path.with_suffix(".draft")
        file = os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600), "r+b", buffering=0)
        try:
            # locked before it has a name that others look for
            fcntl.flock(file, fcntl.LOCK_EX)
            _write(file, self._head)
            draft.rename(self._path)
        except BaseException:
            draft.unlink(missing_ok=True)
            file.close()
            raise
        return file


class LeftDebts:
    """The debts of a router that no longer runs. Its file is locked."""

    def __init__(self, path: Path, file: BinaryIO, debts: list[Debt]) -> None:
        self.debts = debts
        self._path, self._file = path, file

    def __repr__(self) -> str:
        return f"<LeftDebts {self._path}, {len(self.debts)} debts>"

    def remove(self) -> None:
        """The store has them."""
        self._path.unlink(missing_ok=True)
        self._file.close()

    def release(self) -> None:
        """Leave them for a later time."""
        self._file.close()


def _taken(path: Path, place: str) -> LeftDebts | None:
    """The debts in a file that no router has open; None for others, and for what is no such file."""
    try:
        file = path.open("rb", buffering=0)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # its router may have put another one in its place before we had the lock
        if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            # what broke off behind the last line end was never acknowledged
            lines = (line for line in BytesIO(file.read()) if line.endswith(b"\n"))
            if msgspec.json.decode(next(lines, b""), type=str) == place:
                # of a reservation of many requests each line has what they had used until then
                return LeftDebts(path, file, list({debt.id: debt for debt in _read(lines)}.values()))
    except (OSError, ValueError, RecursionError):
        pass
    file.close()
    return None


def _read(lines: Iterable[bytes]) -> Iterator[Debt]:
    for line in lines:
        try:
            yield _DEBTS.decode(line)
        except (ValueError, RecursionError):
            # one that a full disk has damaged
            continue


def _append(file: BinaryIO, debts: Iterable[Debt]) -> None:
    data = b"".join([_ENCODER.encode(debt) + b"\n" for debt in debts])
    written = 0
    try:
        while written < len(data):
            written += file.write(data[written:] if written else data)
    except OSError:
        # a part of a line would spoil the next one
        os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - written)
        raise


def _write(file: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
