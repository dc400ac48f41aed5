"""Messages that are queued for a stream, counted in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


class Outbox(Generic[M]):
    """A queue of at most `limit_bytes` serialized bytes with one reader, all on one event loop.

    `push` never waits: the writer is a step of the engine, which must not wait for a slow reader.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.queued_bytes = 0
        self._messages: deque[tuple[M, int]] = deque()
        self._filled = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Outbox {len(self._messages)} messages, {self.queued_bytes} of {self.limit_bytes} bytes>"

    def push(self, message: M) -> bool:
        """Queue `message` and return True; False, with nothing queued, if it does not fit."""
        size_bytes = message.ByteSize()
        if self.queued_bytes + size_bytes > self.limit_bytes:
            return False
        self._messages.append((message, size_bytes))
        self.queued_bytes += size_bytes
        self._filled.set()
        return True

    async def take(self) -> M:
        """The oldest message, as soon as there is one."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        message, size_bytes = self._messages.popleft()
        self.queued_bytes -= size_bytes
        return message

    def clear(self) -> None:
        """Drop the queued messages."""
        self._messages.clear()
        self.queued_bytes = 0

    def check(self) -> None:
        """Raise AssertionError if the bytes were miscounted."""
        assert self.queued_bytes == sum(size for _, size in self._messages), "bytes were miscounted"
        assert self.queued_bytes <= self.limit_bytes, "the outbox is over its limit"
