"""What all streamed answers share whose last event ends them. Pure but for their own memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar

from backends.http.nonsense import MISSHAPEN, nonsense
from backends.http.sse import SseDecoder
from policies.errors import BackendFailed
from policies.nouns import Delta


class EventAnswer(ABC):
    """Fed with the body of a 200, server-sent events. A kind says what each means (`_read`), and which is the last.

    What comes behind the last is not looked at. `last_word` names it, for messages.
    """

    last_word: ClassVar[str]

    def __init__(self, backend: str) -> None:
        self.is_over = False
        self._backend, self._events = backend, SseDecoder()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._backend}: {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """What `data` adds. Raises BackendFailed at nonsense, and what an error event means."""
        for event in self._events.feed(data):
            if self.is_over:
                return
            yield from self.hear(event.data)

    def hear(self, data: bytes) -> list[Delta]:
        """What one event with `data` adds. Raises as `feed` does."""
        try:
            return list(self._read(data))
        except MISSHAPEN as error:
            raise nonsense(self._backend, data) from error

    def end(self) -> Iterator[Delta]:
        """Nothing more. Raises BackendFailed if the end came too early."""
        if not self.is_over:
            raise BackendFailed(f"{self._backend} ended its stream without {self.last_word}")
        return iter(())

    @abstractmethod
    def _read(self, data: bytes) -> Iterable[Delta]:
        """What one event says; sets `is_over` at the last. Raises what an error means, and MISSHAPEN at nonsense."""
