"""Streamed answers that are passed on unchanged. Pure but for their own memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from backends.http.sse import SseBlocks, data_in, is_plain
from policies.errors import BackendErred, ExpectedError
from policies.nouns import Delta

_MORE_THAN_TEXT: Mapping[str, Any] = MappingProxyType({})

MOST_HELD_BYTES = 64 << 10
"""Bytes that may wait for the first event with content: comments, and events that only name a role."""


class PassedBlocks(ABC):
    """Fed with a stream, gives its own bytes back in as many Deltas as pieces were fed, then the last one with usage.

    Nothing is passed on before the first event with content, so that another backend may still be tried. A
    dialect defines the meaning of each event (`_take`); `last_word` names the last one.
    """

    last_word: ClassVar[str]

    def __init__(self, backend: str) -> None:
        self.is_over = False
        self._backend, self._blocks = backend, SseBlocks()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._pieces, self._may_go, self._is_out = 0, False, False
        self._text: str | None = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._backend}: {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """The Deltas in `data`. Raises BackendFailed at nonsense, and the error of an error event."""
        payload = self._blocks.plain(data)
        if payload is None or self.is_over:
            return self._cut(data)
        try:
            deltas = self._take(data, payload)
        except ExpectedError as error:
            return self._broken_off(error)
        if self._held and (self._may_go or self._held_bytes > MOST_HELD_BYTES):
            return iter((*deltas, self._let_go()))
        return iter(deltas)

    def _cut(self, data: bytes) -> Iterator[Delta]:
        """The same for bytes that begin or end anywhere."""
        try:
            for block in self._blocks.feed(data):
                if self.is_over:
                    return
                payload = block[6:-2] if is_plain(block) else data_in(block)
                if payload is None:
                    self._hold(block)
                else:
                    yield from self._take(block, payload)
        except ExpectedError as error:
            yield from self._broken_off(error)
        if self._held and (self._may_go or self._held_bytes > MOST_HELD_BYTES):
            yield self._let_go()

    def _broken_off(self, error: ExpectedError) -> Iterator[Delta]:
        """Raises `error`. A client that has seen the beginning also gets the bytes before it."""
        if self._is_out and self._held:
            yield self._let_go()
        raise error

    def end(self) -> Iterator[Delta]:
        """Nothing more. Raises BackendFailed if the end came too early."""
        if not self.is_over:
            raise BackendErred(f"{self._backend} ended its stream without {self.last_word}")
        return iter(())

    @abstractmethod
    def _take(self, block: bytes, payload: bytes) -> Iterable[Delta]:
        """Hold the part of `block`, with data `payload`, that the client gets; returns Deltas that are ready now.

        Sets `is_over` at the last. Raises as `feed` does.
        """

    def _hold(self, block: bytes, pieces: int = 0, text: str | None = "") -> None:
        """Hold `block`, which adds `pieces` to the answer, with this `text` if it is parsed; None: more than text."""
        self._held.append(block)
        self._held_bytes += len(block)
        if pieces:
            self._pieces += pieces
            self._may_go = True
            self._text = None if self._text is None or text is None else self._text + text

    def _let_go(self, choice: int = 0, finish: str | None = None) -> Delta:
        """All that is held, as one Delta."""
        raw = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        tokens, text = self._pieces, self._text
        self._pieces, self._text = 0, ""
        self._held.clear()
        self._held_bytes = 0
        self._may_go = self._is_out = True
        beside = _MORE_THAN_TEXT if text is None else None
        return Delta(text or "", choice, finish_reason=finish, message=beside, raw=raw, tokens=tokens)
