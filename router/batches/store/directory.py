"""A store in a folder of this machine, or of a shared file system with locks (NFS 4).

Documents are written beside their place and renamed; a log's last line that broke off is cut. A lock on a file is the
right to run a job: the kernel lets go of it when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from policies.errors import ConfigError
from router.batches.store.base import BatchStoreFailed

T = TypeVar("T")

_DRAFTS, _LOCKS = "drafts", "locks"
_CUT_BYTES = 1 << 16


class DirectoryStore:
    """See BatchStore."""

    look_s = 1.0

    def __init__(self, folder: Path) -> None:
        self._folder, self._drafts, self._locks = folder, folder / _DRAFTS, folder / _LOCKS

    def __repr__(self) -> str:
        return f"<DirectoryStore {self._folder}>"

    def open(self) -> None:
        """See BatchStore."""
        try:
            for each in (self._drafts, self._locks):
                each.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"batches.store {self._folder} cannot be used: {reason}", hint="name a folder") from error

    def read(self, key: str) -> bytes | None:
        """See BatchStore."""
        with _failing():
            try:
                return self._at(key).read_bytes()
            except FileNotFoundError:
                return None

    def write(self, key: str, data: bytes) -> None:
        """See BatchStore."""
        draft = self.draft()
        try:
            draft.write(data)
            draft.commit(key)
        finally:
            draft.discard()

    def names(self, folder: str) -> Sequence[str]:
        """See BatchStore."""
        with _failing():
            try:
                return sorted(entry.name for entry in os.scandir(self._at(folder)))
            except FileNotFoundError:
                return []

    def sizes(self, folder: str) -> int:
        """See BatchStore."""
        total = 0
        with _failing(), suppress(FileNotFoundError):
            for entry in os.scandir(self._at(folder)):
                with suppress(FileNotFoundError):
                    total += entry.stat().st_size
        return total

    def delete(self, key: str) -> None:
        """See BatchStore."""
        with _failing():
            self._at(key).unlink(missing_ok=True)

    def draft(self) -> DirectoryDraft:
        """See BatchStore."""
        with _failing():
            return DirectoryDraft(self._drafts / uuid.uuid4().hex, self._at)

    def link(self, key: str, also: str) -> None:
        """See BatchStore. Raises FileNotFoundError."""
        with _failing():
            to = _made(self._at(also))
            with suppress(FileExistsError):
                to.hardlink_to(self._at(key))
            _sync_folder(to.parent)

    def local(self, key: str) -> Path:
        """See BatchStore."""
        path = self._at(key)
        if not path.is_file():
            raise FileNotFoundError(key)
        return path

    def log(self, key: str) -> DirectoryLog:
        """See BatchStore."""
        with _failing():
            return DirectoryLog(_made(self._at(key)))

    def logged(self, key: str) -> Iterator[bytes]:
        """See BatchStore."""
        with _failing(), suppress(FileNotFoundError), self._at(key).open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    def claim(self, job: str) -> DirectoryClaim | None:
        """See BatchStore."""
        with _failing():
            file = (self._locks / job).open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return None
            return DirectoryClaim(file)

    def scratch(self) -> Path:
        """See BatchStore."""
        return self._drafts

    def sweep(self, before: float) -> None:
        """See BatchStore."""
        with _failing():
            for folder in (self._drafts, self._locks):
                for entry in os.scandir(folder):
                    with suppress(FileNotFoundError):
                        if entry.stat().st_mtime < before:
                            Path(entry.path).unlink(missing_ok=True)

    def _at(self, key: str) -> Path:
        return self._folder / key


class DirectoryDraft:
    """See ContentDraft."""

    def __init__(self, path: Path, at: Callable[[str], Path]) -> None:
        self._path, self._at = path, at
        self._file: BinaryIO | None = path.open("wb", buffering=0)
        self.size = 0

    def __repr__(self) -> str:
        return f"<DirectoryDraft {self._path}, {self.size} bytes>"

    def write(self, data: bytes) -> None:
        """See ContentDraft."""
        assert self._file is not None
        with _failing():
            _write(self._file, data)
        self.size += len(data)

    def commit(self, key: str) -> None:
        """See ContentDraft."""
        assert self._file is not None
        with _failing():
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            to = _made(self._at(key))
            self._path.replace(to)
            _sync_folder(to.parent)

    def discard(self) -> None:
        """See ContentDraft."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path.unlink(missing_ok=True)


class DirectoryLog:
    """See AnswerFile."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab+", buffering=0)
        self._file.truncate(_whole_bytes(self._file))
        _sync_folder(path.parent)

    def __repr__(self) -> str:
        return f"<DirectoryLog {self._file.name}>"

    def append(self, data: bytes) -> None:
        """See AnswerFile."""
        with _failing():
            before = os.fstat(self._file.fileno()).st_size
            try:
                _write(self._file, data)
                os.fsync(self._file.fileno())
            except OSError:
                # a part of a line would spoil the next one
                self._file.truncate(before)
                raise

    def close(self) -> None:
        """See AnswerFile."""
        self._file.close()


class DirectoryClaim:
    """See JobClaim. A lock needs no renewal."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __repr__(self) -> str:
        return f"<DirectoryClaim {self._file.name}>"

    @property
    def is_held(self) -> bool:
        """See JobClaim."""
        return not self._file.closed

    def renew(self) -> None:
        """See JobClaim."""
        os.utime(self._file.fileno())

    def close(self) -> None:
        """See JobClaim."""
        self._file.close()


@contextmanager
def _failing() -> Iterator[None]:
    """Raise BatchStoreFailed in place of OSError, but for a file that is not there."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BatchStoreFailed(f"the store of batches failed: {error}") from error


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _whole_bytes(file: BinaryIO) -> int:
    """Bytes of `file` up to and including its last newline."""
    end = os.fstat(file.fileno()).st_size
    while end:
        begin = max(0, end - _CUT_BYTES)
        found = os.pread(file.fileno(), end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _write(file: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
