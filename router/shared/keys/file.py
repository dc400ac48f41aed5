"""Issued keys in a local file: for one router, or several processes of one."""

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
from router.regular_file import read_regular
from router.shared.keys.base import Edit
from router.shared.keys.lines import decode, encode

Stamp = tuple[int, int, int]

_MOST_FILE_BYTES = 64 << 20
"""Of a file with some 200,000 keys."""


class FileKeys:
    """The book in the file at `path`, made with the first key. Written whole beside it, then put in its place.

    A writer holds a lock on `path.lock`, so that several processes lose nothing. If `path` is a link, the file that it
    leads to is replaced, not the link. A file that existed and is gone does not count as an empty book: its volume may
    be away.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._stamp: Stamp | None = None
        self._seen: KeyBook | None = None
        self._one_at_a_time = threading.Lock()

    def __repr__(self) -> str:
        return f"<FileKeys {self._path}, {len(self._seen or ())} keys>"

    async def look(self) -> KeyBook | None:
        return await asyncio.to_thread(self._look)

    async def change(self, edit: Edit) -> KeyBook:
        return await asyncio.to_thread(self._change, edit)

    async def close(self) -> None:
        """Nothing is done here."""

    def _look(self) -> KeyBook | None:
        with self._one_at_a_time:
            stamp = self._stamped()
            if self._seen is not None and stamp == self._stamp:
                return None
            self._seen, self._stamp = self._read(), stamp
            return self._seen

    def _change(self, edit: Edit) -> KeyBook:
        with self._one_at_a_time, self._locked():
            # a file that vanished is written again from the known keys
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
            return decode(read_regular(self._path, _MOST_FILE_BYTES), str(self._path))
        except FileNotFoundError as error:
            if self._stamp is not None:
                raise self._away("read", error) from error
            if not self._path.parent.is_dir():
                hint = "make it, or set server.keys_file to another file"
                raise ConfigError(f"there is no folder {self._path.parent} for the keys", hint=hint) from error
            return NO_KEYS
        except OSError as error:
            raise self._away("read", error) from error

    def _write(self, text: bytes) -> None:
        """Replace the file by `text`: after a crash the disk has the old file or the new one (POSIX rename)."""
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
        hint = "keys that were read before stay valid; check the file and its folder"
        return Unavailable(f"the file of keys cannot be {done}: {error}", hint=hint, retry_after_s=5.0)
