"""What stores do in folders of this machine: private files, durable names, and locks that end with their process.

A lock is held on the file that has its name. A file may be swept between the moment in which it is opened and that in
which it is locked, so an owner looks again when it has the lock; and only the owner of a lock may sweep its file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from router.batches.store.base import BatchStoreFailed
from router.private_files import private, private_folder


@contextmanager
def failing_disk() -> Iterator[None]:
    """Raise BatchStoreFailed in place of OSError, but for a file that is not there."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BatchStoreFailed(f"the store of batches failed: {error}") from error


def with_folder(path: Path) -> Path:
    """`path`; its folder exists afterwards."""
    private_folder(path.parent)
    return path


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write all of `data`, whatever part of it the system takes at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def locked(path: Path, *, waits: bool = False) -> BinaryIO | None:
    """The file at `path`, begun if it is not there, open and locked until it is closed; None if another owner has the
    lock, unless this `waits`."""
    while True:
        file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115 - it stays open
        if not _has_lock(file, waits=waits):
            return None
        if is_at(path, file):
            return file
        file.close()


def is_at(path: Path, file: BinaryIO) -> bool:
    """Whether `file` is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def sweep_locked(folder: Path) -> None:
    """Drop the files in `folder`, and in folders there, that no living owner has locked."""
    for entry in os.scandir(folder):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            sweep_locked(path)
            continue
        with suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
            if _has_lock(file) and is_at(path, file):
                path.unlink(missing_ok=True)


def _has_lock(file: BinaryIO, *, waits: bool = False) -> bool:
    """Whether `file` is locked for us now; it is closed otherwise."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    except BaseException:
        file.close()
        raise
    return True
