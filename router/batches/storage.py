"""The bytes that tenants may store: what is there, and what is on its way to this router. All methods block."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Self

from policies.errors import QuotaExceeded
from router.batches.shelf import BatchShelf
from router.batches.store.base import ContentDraft

_LEAST_GRANT = 1 << 20


class Storage:
    """Holds each tenant to `most` bytes. May be used from several threads."""

    def __init__(self, shelf: BatchShelf, most: Callable[[], int]) -> None:
        self._shelf, self._most = shelf, most
        self._lock = threading.Lock()
        self._unwritten = Counter[str]()
        """By tenant: bytes that uploads may still write. What they have written is seen in the store."""

    def __repr__(self) -> str:
        return f"<Storage in {self._shelf!r}, {sum(self._unwritten.values())} bytes on their way>"

    def is_full(self, tenant: str) -> bool:
        """Whether `tenant` stores all that it may. Raises BatchStoreFailed."""
        return self._shelf.stored_bytes(tenant) >= self._most()

    def upload(self, tenant: str) -> FileUpload:
        """What one call of `tenant` is to store; leave it at the end."""
        return FileUpload(self, tenant)

    def grant(self, tenant: str, size: int) -> None:
        """Let `tenant` write so many bytes. Raises QuotaExceeded, BatchStoreFailed."""
        # taken first and counted then: of two calls at once, both may be refused, and never are both too much let in
        self.count(tenant, size)
        try:
            with self._lock:
                unwritten = self._unwritten[tenant]
            stored, most = self._shelf.stored_bytes(tenant), self._most()
            if stored + unwritten > most:
                raise QuotaExceeded(
                    f"files, batches and results of '{tenant}' take {stored:,} bytes, and {most:,} are its limit",
                    hint="delete files that are not needed any more, or wait until batches have ended",
                )
        except BaseException:
            self.count(tenant, -size)
            raise

    def count(self, tenant: str, size: int) -> None:
        """So many bytes more may be written by uploads, or fewer."""
        with self._lock:
            self._unwritten[tenant] += size
            if not self._unwritten[tenant]:
                del self._unwritten[tenant]


class FileUpload:
    """A context: what its tenant stores by one call. Not for two threads at a time."""

    def __init__(self, storage: Storage, tenant: str) -> None:
        self._storage, self._tenant = storage, tenant
        self._lock = threading.Lock()
        self._granted = self._written = 0
        self._is_over = False

    def __repr__(self) -> str:
        return f"<FileUpload of {self._tenant}, {self._written} bytes, {self._granted} more granted>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over = True
            self._storage.count(self._tenant, -self._granted)

    def announce(self, size: int) -> None:
        """So many bytes are about to come. Raises QuotaExceeded, BatchStoreFailed."""
        self._storage.grant(self._tenant, size)
        self._take(-size)

    def write(self, draft: ContentDraft, data: bytes) -> None:
        """Write `data` to `draft`. Raises QuotaExceeded, BatchStoreFailed."""
        if (missing := len(data) - self._granted) > 0:
            try:
                # as much again as there is, so that the store is not looked at for each piece
                self.announce(max(missing, _LEAST_GRANT, self._written))
            except QuotaExceeded:
                self.announce(missing)
        draft.write(data)
        self._storage.count(self._tenant, -len(data))
        self._take(len(data))
        self._written += len(data)

    def _take(self, size: int) -> None:
        """Have so many bytes less of what is granted."""
        with self._lock:
            self._granted -= size
            if self._is_over:
                # its call was cancelled while a thread wrote
                self._storage.count(self._tenant, size)
