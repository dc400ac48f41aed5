"""Files with one block each, in a folder that one process uses. Torch-free.

A block is written to a temporary file, which is then renamed: a process that dies leaves a whole block or none. Nothing
is synced to the disk, because a block that a power failure has damaged fails its checksum, and is computed again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from shards.kv.raw_block import HEADER_BYTES, AnotherBlock, BlockHeader, BlockLabel, BrokenBlock, checksum_of

_MOST_LANES = 64
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_SUFFIX = ".kv"
_PAGE_BYTES = 4096


def bytes_on_disk(size: int) -> int:
    """The room that a file of `size` bytes takes, in whole pages."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


class ForeignFolder(NamedTuple):
    """Blocks of another fingerprint, which this process cannot read; `size` in bytes."""

    path: Path
    size: int


class BlockFiles:
    """The blocks of one fingerprint in one lane of a directory, in files named by their keys.

    Lanes are numbered subfolders, each locked by the process that uses it; so shards that share `directory` do not
    share blocks. Files have mode 0600, folders 0700. Nothing is written once `may_write` is False. Raises OSError if
    `directory` cannot be used, or all 64 lanes are.
    """

    def __init__(self, directory: Path, fingerprint: bytes, *, may_write: Callable[[], bool] = lambda: True) -> None:
        self._may_write = may_write
        directory.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
        self._fingerprint = fingerprint
        self._lane, self._lock = _free_lane(directory)
        self._folder = self._lane / fingerprint.hex()[:32]
        for folder in (self._lane, self._folder):
            folder.mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
            _require_own(folder)
            folder.chmod(_PRIVATE_FOLDER)
        self._temporary = self._folder / "unfinished"

    def __repr__(self) -> str:
        return f"BlockFiles({self._folder})"

    def close(self) -> None:
        """Leave the lane to other processes."""
        os.close(self._lock)

    def scan(self) -> tuple[list[BlockHeader], int]:
        """The headers of all whole blocks, parents first, and the number of files that were deleted as broken.

        Only headers are read: the bytes behind them are checked when the block is. Raises OSError.
        """
        with suppress(FileNotFoundError):
            self._temporary.unlink()
        headers: list[BlockHeader] = []
        broken = 0
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                headers.append(self._header_at(path))
            except (BrokenBlock, AnotherBlock):
                path.unlink()
                broken += 1
        headers.sort(key=lambda header: header.label.depth)
        return headers, broken

    def foreign(self) -> list[ForeignFolder]:
        """Folders of other fingerprints in this lane, the longest unused first. Raises OSError."""
        folders = [path for path in self._lane.iterdir() if path != self._folder and path.is_dir()]
        folders.sort(key=lambda path: path.stat().st_mtime)
        return [ForeignFolder(path, sum(map(bytes_on_disk, _sizes(path)))) for path in folders]

    def write(self, header: BlockHeader, pieces: Sequence[memoryview]) -> None:
        """Store the block with the bytes `pieces`. Raises OSError; nothing is stored then."""
        if not self._may_write():
            raise OSError("the weights were changed, and this may be KV of others")
        descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, _PRIVATE_FILE)
        try:
            with FileIO(descriptor, "wb") as file:
                for piece in (memoryview(header.pack()), *pieces):
                    left = piece
                    while left:
                        left = left[file.write(left) :]
            self._temporary.rename(self._path(header.label.key))
        except OSError:
            with suppress(OSError):
                self._temporary.unlink()
            raise

    def read(self, label: BlockLabel, pieces: Sequence[memoryview]) -> None:
        """Read the block of `label` into `pieces`. Raises AnotherBlock, BrokenBlock, or OSError; the bytes of `pieces`
        have no meaning then.
        """
        with _opened(self._path(label.key)) as file:
            header = BlockHeader.unpack(file.read(HEADER_BYTES) or b"")
            if header.label != label:
                raise AnotherBlock(f"the file of key {label.key:016x} holds another block")
            if header.size != sum(map(len, pieces)) or not all(_fill(file, piece) for piece in pieces):
                raise BrokenBlock("it is not as long as a block")
        if checksum_of(pieces) != header.checksum:
            raise BrokenBlock("its bytes were changed")

    def delete(self, key: int) -> None:
        """Delete the block called `key`; no error if there is none. Raises OSError."""
        self._path(key).unlink(missing_ok=True)

    def delete_foreign(self, folder: ForeignFolder) -> None:
        """Delete the blocks of another fingerprint, as far as that is possible."""
        shutil.rmtree(folder.path, ignore_errors=True)

    def _path(self, key: int) -> Path:
        return self._folder / f"{key:016x}{_SUFFIX}"

    def _header_at(self, path: Path) -> BlockHeader:
        with _opened(path) as file:
            header = BlockHeader.unpack(file.read(HEADER_BYTES) or b"")
            size = os.fstat(file.fileno()).st_size
        if size != HEADER_BYTES + header.size:
            raise BrokenBlock("it is not as long as a block")
        if header.label.fingerprint != self._fingerprint or path != self._path(header.label.key):
            raise AnotherBlock("its name or folder belongs to another block")
        return header


def _free_lane(directory: Path) -> tuple[Path, int]:
    """The first lane of `directory` that no other process uses, and its locked file descriptor."""
    for lane in range(_MOST_LANES):
        lock = os.open(directory / f"{lane}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _PRIVATE_FILE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        except OSError:
            os.close(lock)
            raise
        else:
            return directory / str(lane), lock
    raise OSError(f"{_MOST_LANES} shards use {directory} already; give this one another directory")


def _require_own(folder: Path) -> None:
    """Raise OSError unless `folder` is one of this user, and no link: files of others there would be read as KV."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(f"{folder} is a link, or of another user; give --kv-dir a directory of this user")


def _opened(path: Path) -> FileIO:
    """The file at `path`, which is no link and no pipe. Raises BrokenBlock, OSError."""
    try:
        file = FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BrokenBlock("it is a link, or no file") from error
        raise
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise BrokenBlock("it is no file")


def _sizes(folder: Path) -> Iterator[int]:
    return (path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _fill(file: FileIO, piece: memoryview) -> bool:
    """Read all of `piece` from `file`; False if the file ends before."""
    left = piece
    while left:
        count = file.readinto(left)
        if not count:
            return False
        left = left[count:]
    return True
