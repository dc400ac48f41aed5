"""Copies of contents of a remote store, in a folder of this machine."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from router.private_files import private

MOST_BYTES = 8 << 30
"""Copies of more bytes than this are dropped, those first that were not used for longest."""


class LocalCopies:
    """The copies that processes of this machine have of `store`. They never change, and any may be dropped: a file that
    is open stays."""

    def __init__(self, folder: Path, *, store: str, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self._store, self._most_bytes = folder, store, most_bytes

    def __repr__(self) -> str:
        return f"<LocalCopies {self.folder}>"

    def get(self, key: str, load: Callable[[], Iterable[bytes]]) -> Path:
        """The copy of the content `key`; made of the pieces that `load` returns if there is none."""
        path = self._at(key)
        with suppress(FileNotFoundError):
            os.utime(path)
            return path
        draft = self.folder / f"{uuid.uuid4().hex}.part"
        try:
            with open(draft, "wb", opener=private) as file:
                file.writelines(load())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        self._bound(path)
        return path

    def drop(self, key: str) -> None:
        """Have no copy of `key`."""
        self._at(key).unlink(missing_ok=True)

    def sweep(self, before: float) -> None:
        """Drop copies that were not used since this Unix time."""
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                if entry.stat().st_mtime < before:
                    Path(entry.path).unlink(missing_ok=True)

    def _at(self, key: str) -> Path:
        return self.folder / hashlib.sha256(f"{self._store} {key}".encode()).hexdigest()[:40]

    def _bound(self, kept: Path) -> None:
        """Drop the oldest copies that are too much, but never `kept`."""
        found = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                seen = entry.stat()
                found.append((seen.st_mtime, seen.st_size, Path(entry.path)))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._most_bytes:
                return
            if path != kept:
                path.unlink(missing_ok=True)
                total -= size
