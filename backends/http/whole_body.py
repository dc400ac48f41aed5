"""The common part of answers in one piece. Pure but for their own memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from policies.errors import BackendFailed
from policies.nouns import Delta


class WholeBody(ABC):
    """Fed with the body of a 200, of at most `limit_bytes`, which is read at its end."""

    def __init__(self, backend: str, *, limit_bytes: int = 64 << 20) -> None:
        self.is_over = False
        self._backend, self._limit_bytes = backend, limit_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._backend}: {self._size} bytes>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """Nothing yet. Raises BackendFailed if the body is too long."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size > self._limit_bytes:
            raise BackendFailed(f"{self._backend} answered more than {self._limit_bytes} bytes")
        return iter(())

    def end(self) -> Iterator[Delta]:
        """The answer and its usage. Raises BackendFailed for invalid answers, and the error in the body."""
        deltas = self._read(self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces))
        self.is_over = True
        return iter(deltas)

    @abstractmethod
    def _read(self, whole: bytes) -> list[Delta]:
        """The Deltas of `whole`. Raises as `end` does."""
