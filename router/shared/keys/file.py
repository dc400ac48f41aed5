"""Issued keys in a file of this machine: for one router, or several processes of one."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policies.errors import ConfigError, Unavailable
from policies.keys import NO_KEYS, KeyBook
from router.shared.keys.base import Edit
from router.shared.keys.lines import decode, encode

Stamp = tuple[int, int, int]


class FileKeys:
    """The book in the file at `path`, made with the first key. Written whole beside it, then put in its place.

    Who changes it holds a lock on `path.lock`, so that several processes lose nothing. A link stays one: all this is
    done where it leads. A file that was there and is
    gone is not taken for an empty one: its volume may be away.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp: Stamp | None = None
        self._seen: KeyBook | None = None
        self._one_at_a_time = threading.Lock()

    def __repr__(self) -> str:
        return f"<FileKeys {self._path}, {len(self._seen or ())} keys>"

    async def look(self) -> KeyBook | None:
        """See KeyStore."""
        return await asyncio.to_thread(self._look)

    async def change(self, edit: Edit) -> KeyBook:
        """See KeyStore."""
        return await asyncio.to_thread(self._change, edit)

    async def close(self) -> None:
        """See KeyStore."""

    def _look(self) -> KeyBook | None:
        with self._one_at_a_time:
            stamp = self._stamped()
            if self._seen is not None and stamp == self._stamp:
                return None
            self._seen, self._stamp = self._read(), stamp
            return self._seen

    def _change(self, edit: Edit) -> KeyBook:
        with self._one_at_a_time, self._locked():
            # one that vanished is made again of what is known
            is_lost = self._seen is not None and self._stamp is not None and self._stamped() is None
            book = edit(self._seen or NO_KEYS if is_lost else self._read())
            self._write(encode(book))
            self._seen, self._stamp = book, self._stamped()
            return book

    def _stamped(self) -> Stamp | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._away("read", error) from error
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> KeyBook:
        try:
            return decode(self._path.read_bytes(), str(self._path))
        except FileNotFoundError as error:
            if self._stamp is not None:
                raise self._away("read", error) from error
            if not self._path.parent.is_dir():
                hint = "make it, or name another file as server.keys_file"
                raise ConfigError(f"there is no folder {self._path.parent} for the keys", hint=hint) from error
            return NO_KEYS
        except OSError as error:
            raise self._away("read", error) from error

    def _write(self, text: bytes) -> None:
        """Put `text` in the file's place: a crash leaves the old one or the new one (POSIX rename), on the disk."""
        path = self._path.resolve()
        new = path.with_name(f"{path.name}.new")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._away("written", error) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self._path.resolve()
        try:
            lock = os.open(path.with_name(f"{path.name}.lock"), os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._away("written", error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _away(self, done: str, error: OSError) -> Unavailable:
        hint = "those that were known are still valid; see to the file and its folder"
        return Unavailable(f"the file of keys cannot be {done}: {error}", hint=hint, retry_after_s=5.0)
