"""The files that the KV of a model depends on: whether they are still those that were read, and a digest of every byte.

Torch-free.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from shards.network.errors import BrokenCheckpoint

_log = logging.getLogger(__name__)

_THREADS = 4
_PIECE_BYTES = 4 << 20
_MOST_MEMORY_BYTES = 1 << 20
_MOST_REMEMBERED = 4096

SETTLED_S = 2.0
"""A file that was changed this short a time before it was read is not remembered: clocks of file systems are coarse."""

LOOK_EVERY_S = 1.0
"""Files in use are looked at no more often."""


class FileStamp(NamedTuple):
    """Equal for a file that was not changed. The last two are times in ns: of its bytes, and of anything about it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """From the answer of stat."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class DigestMemory:
    """Digests of files, kept in the file at `path` for later processes; one that cannot be trusted is not read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = self._read()

    def __repr__(self) -> str:
        return f"DigestMemory({self._path}: {len(self._known)} files)"

    def find(self, path: Path, stamp: FileStamp) -> str | None:
        """The digest of the file at `path`, if it was remembered with this `stamp`."""
        known = self._known.get(str(path.absolute()))
        return known[1] if known is not None and known[0] == stamp else None

    def keep(self, found: dict[Path, tuple[FileStamp, str]]) -> None:
        """Remember `found`; if it cannot be written, the files are read again next time."""
        for path, each in found.items():
            self._known.pop(str(path.absolute()), None)
            self._known[str(path.absolute())] = each
        newest = dict(list(self._known.items())[-_MOST_REMEMBERED:])
        temporary = self._path.with_suffix(".unfinished")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                temporary.unlink()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(newest))
            temporary.rename(self._path)
        except OSError as error:
            _log.warning("the digests of weights cannot be kept in %s: %s", self._path, error)

    def _read(self) -> dict[str, tuple[FileStamp, str]]:
        try:
            with os.fdopen(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
                if not (is_own and stat.S_ISREG(status.st_mode)):
                    _log.warning("%s is not a file of this user alone, and is not read", self._path)
                    return {}
                data = file.read(_MOST_MEMORY_BYTES)
            return msgspec.json.decode(data, type=dict[str, tuple[FileStamp, str]])
        except (OSError, ValueError, RecursionError):
            # a UnicodeDecodeError and msgspec's errors are ValueErrors
            return {}


class WeightFiles:
    """The files at `paths` as they are now: to be made before they are read. Raises BrokenCheckpoint.

    `clock` is the time in s since the epoch, as file systems have it.
    """

    def __init__(self, paths: Sequence[Path], *, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._looked_s = clock, float("-inf")
        self._open: dict[Path, int] = {}
        self._end = weakref.finalize(self, _close, self._open)
        self._pool: ThreadPoolExecutor | None = None
        self._digests: dict[Path, Future[str]] | None = None
        self._memory: DigestMemory | None = None
        self._stamps: dict[Path, FileStamp] = {}
        for path in paths:
            try:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._stamps[path] = FileStamp.of(os.fstat(self._open[path]))
            except OSError as error:
                raise BrokenCheckpoint(f"{path} cannot be read: {error}", hint="is the download complete?") from error
        self._began_s = clock()
        self._are_unchanged = True

    def __repr__(self) -> str:
        return f"WeightFiles({len(self._stamps)} files)"

    @property
    def number(self) -> int:
        """A number that differs for files that were changed or replaced, of 63 bits."""
        stamps = repr(sorted((str(path), tuple(stamp)) for path, stamp in self._stamps.items()))
        return int.from_bytes(hashlib.sha256(stamps.encode()).digest()[:8], "big") >> 1

    def require_same(self) -> None:
        """Raise BrokenCheckpoint if a file was changed or replaced since this was made."""
        for path, stamp in self._stamps.items():
            try:
                now = FileStamp.of(path.stat())
            except OSError as error:
                raise BrokenCheckpoint(f"{path} was removed while it was read: {error}") from error
            # not the last one: another link to a file changes nothing in it
            if now[:4] != stamp[:4]:
                raise BrokenCheckpoint(f"{path} was changed while it was read", hint="load it again")

    def are_unchanged(self) -> bool:
        """Whether no byte of a file in use was changed in place, as far as its size and time tell.

        Weights may be pages of their files, so that such a change would change the network. A file that was replaced
        by another one stays what it was. Once False, always False.
        """
        now_s = time.monotonic()
        if self._are_unchanged and now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            for path, descriptor in self._open.items():
                now = FileStamp.of(os.fstat(descriptor))
                if (now.size, now.modified_ns) != self._stamps[path][2:4]:
                    self._are_unchanged = False
                    _log.error("%s was changed while this shard uses it: no KV leaves the shard; start it anew", path)
        return self._are_unchanged

    def begin(self, memory: DigestMemory | None = None) -> None:
        """Have threads read each file that `memory` does not know, beside those that load the weights."""
        self._memory, self._digests = memory, {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-digest")
        for path, stamp in self._stamps.items():
            known = None if memory is None else memory.find(path, stamp)
            if known is None:
                self._digests[path] = self._pool.submit(_digest_of, self._open, path)
            else:
                self._digests[path] = Future()
                self._digests[path].set_result(known)

    def digest(self, memory: DigestMemory | None = None) -> str:
        """The SHA-256 of all files, as hex digits: their names and every byte. Waits for what has begun, or begins.

        Raises BrokenCheckpoint if a file was changed since this was made.
        """
        if self._digests is None:
            self.begin(memory)
        assert self._digests is not None, "it has begun"
        whole = hashlib.sha256()
        try:
            found = {path: (self._stamps[path], each.result()) for path, each in self._digests.items()}
        except OSError as error:
            raise BrokenCheckpoint(f"the weights cannot be read: {error}") from error
        self.require_same()
        for path, (stamp, digest) in found.items():
            whole.update(f"{path.name}\x00{stamp.size}\x00{digest}\n".encode())
        settled_ns = int((self._began_s - SETTLED_S) * 1e9)
        if self._memory is not None:
            self._memory.keep({path: each for path, each in found.items() if each[0].changed_ns < settled_ns})
        self._stop()
        return whole.hexdigest()

    def close(self) -> None:
        """Read no more."""
        self._end()
        self._stop()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _digest_of(opened: dict[Path, int], path: Path) -> str:
    """The SHA-256 of the bytes of `path`. Raises OSError, also if it was closed meanwhile."""
    digest, at = hashlib.sha256(), 0
    while True:
        descriptor = opened.get(path)
        if descriptor is None:
            raise OSError("it is read no more")
        piece = os.pread(descriptor, _PIECE_BYTES, at)
        if not piece:
            return digest.hexdigest()
        digest.update(piece)
        at += len(piece)


def _close(opened: dict[Path, int]) -> None:
    while opened:
        _, descriptor = opened.popitem()
        os.close(descriptor)
