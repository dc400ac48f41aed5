"""A store in a folder of this machine, or of a shared file system with locks (NFS 4).

Documents are written beside their place and renamed; a log's last line that broke off is cut. A lock on a file is the
right to run a job: the kernel lets go of it when its process ends, however it ends.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from policies.errors import ConfigError
from router.batches.store.base import BatchStoreFailed
from router.batches.store.disk import failing_disk, is_at, locked, sweep_locked, sync_folder, with_folder, write_all
from router.batches.store.drafts import LocalDraft, LocalDrafts
from router.private_files import PRIVATE_FOLDER, private, private_folder

_DRAFTS, _LOCKS, _CHANGES = "drafts", "locks", "changes"
_CUT_BYTES = 1 << 16


class DirectoryStore:
    """See BatchStore."""

    look_s = 1.0
    shares_links = True

    def __init__(self, folder: Path) -> None:
        self._folder, self._locks, self._changes = folder, folder / _LOCKS, folder / _CHANGES
        self._drafts = LocalDrafts(folder / _DRAFTS, self._keep)

    def __repr__(self) -> str:
        return f"<DirectoryStore {self._folder}>"

    def open(self) -> None:
        try:
            self._drafts.open()
            for each in (self._locks, self._changes):
                private_folder(each)
            for entry in os.scandir(self._folder):
                # an earlier version left them open to others
                if entry.is_dir(follow_symlinks=False) and entry.stat().st_uid == os.geteuid():
                    Path(entry.path).chmod(PRIVATE_FOLDER)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"batches.store {self._folder} cannot be used: {reason}", hint="name a folder") from error

    def read(self, key: str) -> bytes | None:
        with failing_disk():
            try:
                return self._at(key).read_bytes()
            except FileNotFoundError:
                return None

    def write(self, key: str, data: bytes) -> None:
        draft = self.draft("")
        try:
            draft.write(data)
            draft.commit(key)
        finally:
            draft.discard()

    def change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """See BatchStore: one after the other."""
        with failing_disk():
            turn = locked(self._changes / hashlib.sha256(key.encode()).hexdigest()[:40], waits=True)
        assert turn is not None
        with turn:
            if (data := change(self.read(key))) is not None:
                self.write(key, data)

    def names(self, folder: str) -> Sequence[str]:
        with failing_disk():
            try:
                return sorted(entry.name for entry in os.scandir(self._at(folder)))
            except FileNotFoundError:
                return []

    def sizes(self, *keys: str) -> int:
        found: dict[tuple[int, int], int] = {}
        with failing_disk():
            for key in keys:
                for status in _below(self._at(key)):
                    found[status.st_dev, status.st_ino] = status.st_size
        return sum(found.values())

    def delete(self, key: str) -> None:
        with failing_disk():
            self._at(key).unlink(missing_ok=True)

    def draft(self, owner: str) -> LocalDraft:
        return self._drafts.begin(owner)

    def drafted(self, owner: str) -> int:
        return self._drafts.size(owner)

    def link(self, key: str, also: str) -> None:
        """See BatchStore. Raises FileNotFoundError."""
        with failing_disk():
            to = with_folder(self._at(also))
            with suppress(FileExistsError):
                to.hardlink_to(self._at(key))
            sync_folder(to.parent)

    def local(self, key: str) -> Path:
        path = self._at(key)
        if not path.is_file():
            raise FileNotFoundError(key)
        return path

    def log(self, key: str) -> DirectoryLog:
        with failing_disk():
            return DirectoryLog(with_folder(self._at(key)))

    def logged(self, key: str) -> Iterator[bytes]:
        with failing_disk(), suppress(FileNotFoundError), self._at(key).open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    def claim(self, job: str) -> DirectoryClaim | None:
        path = self._locks / job
        with failing_disk():
            file = locked(path)
        return None if file is None else DirectoryClaim(path, file)

    def scratch(self) -> Path:
        return self._drafts.folder

    def sweep(self) -> None:
        self._drafts.sweep()
        with failing_disk():
            sweep_locked(self._locks)
            sweep_locked(self._changes)

    def _at(self, key: str) -> Path:
        return self._folder / key

    def _keep(self, path: Path, key: str) -> None:
        with failing_disk():
            to = with_folder(self._at(key))
            path.replace(to)
            sync_folder(to.parent)


class DirectoryLog:
    """See AnswerFile."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "ab+", buffering=0, opener=private)  # noqa: SIM115 - it stays open
        self._file.truncate(_whole_bytes(self._file))
        sync_folder(path.parent)

    def __repr__(self) -> str:
        return f"<DirectoryLog {self._file.name}>"

    def append(self, data: bytes) -> None:
        with failing_disk():
            before = os.fstat(self._file.fileno()).st_size
            try:
                write_all(self._file, data)
                os.fsync(self._file.fileno())
            except OSError:
                # a part of a line would spoil the next one
                self._file.truncate(before)
                raise

    def close(self) -> None:
        self._file.close()


class DirectoryClaim:
    """See JobClaim. A lock needs no renewal."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file

    def __repr__(self) -> str:
        return f"<DirectoryClaim {self._path}>"

    @property
    def is_held(self) -> bool:
        return not self._file.closed and is_at(self._path, self._file)

    def renew(self) -> None:
        """See JobClaim. It is lost if its file was deleted."""
        if not self.is_held:
            raise BatchStoreFailed(f"the lock {self._path} was deleted")

    def close(self) -> None:
        self._file.close()


def _below(path: Path) -> Iterator[os.stat_result]:
    """The file at `path`, or all below it if it is a folder."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if not path.is_dir():
            yield path.stat()
            return
        for entry in os.scandir(path):
            with suppress(FileNotFoundError):
                yield entry.stat()


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
