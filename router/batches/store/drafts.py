"""Contents that are being written, as files in a folder of this machine: a folder for each owner. A draft is locked, so
that what a killed router left can be told from what is still written."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from router.batches.store.disk import failing_disk, locked, sweep_locked, with_folder, write_all
from router.private_files import private_folder

Keep = Callable[[Path, str], object]
"""Has the file, which is on the disk, as the content of a key."""


class LocalDrafts:
    """All of `folder`."""

    def __init__(self, folder: Path, keep: Keep) -> None:
        self.folder, self._keep = folder, keep

    def __repr__(self) -> str:
        return f"<LocalDrafts in {self.folder}>"

    def open(self) -> None:
        """Have the folder. Raises OSError."""
        private_folder(self.folder)

    def begin(self, owner: str) -> LocalDraft:
        with failing_disk():
            while True:
                path = with_folder(self.folder / owner / uuid.uuid4().hex)
                # a sweep may have the lock of a new file for a moment
                if (file := locked(path)) is not None:
                    return LocalDraft(path, file, self._keep)

    def size(self, owner: str) -> int:
        """Bytes of the drafts of `owner`, those of other routers included that share the folder."""
        return sum(_sizes(self.folder / owner))

    def sweep(self) -> None:
        """Drop drafts of routers that do not run any more."""
        with failing_disk():
            sweep_locked(self.folder)


class LocalDraft:
    """See ContentDraft."""

    def __init__(self, path: Path, file: BinaryIO, keep: Keep) -> None:
        self._path, self._file, self._keep = path, file, keep
        self.size = 0

    def __repr__(self) -> str:
        return f"<LocalDraft {self._path}, {self.size} bytes>"

    def write(self, data: bytes) -> None:
        with failing_disk():
            write_all(self._file, data)
        self.size += len(data)

    def written(self) -> BinaryIO:
        return self._path.open("rb")

    def commit(self, key: str) -> None:
        with failing_disk():
            os.fsync(self._file.fileno())
        self._keep(self._path, key)
        self.discard()

    def discard(self) -> None:
        if not self._file.closed:
            # as long as it is locked, no other file has its name
            self._path.unlink(missing_ok=True)
            self._file.close()


def _sizes(folder: Path) -> Iterator[int]:
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                yield entry.stat().st_size
