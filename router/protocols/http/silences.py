"""Signs of life for streams that wait: many clients give up after some minutes without an event, and a prefill or a
queue may take longer.

Sources: undici gives up after 300 s without a head, or without a part of the body (`headersTimeout`, `bodyTimeout`);
Codex after `stream_idle_timeout_ms`, 300 s, without an event.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

LOOK_S = 5.0
"""Seconds between two looks at the streams that wait."""


class Waiting(Protocol):
    """A stream with a client that may wait."""

    def tell_wait(self) -> None:
        """Send a sign of life, if it is time for one."""
        ...


class Silences:
    """Has each stream tell its client now and then that it waits. One timer for all: a request costs no timer."""

    def __init__(self) -> None:
        self._streams = set[Waiting]()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Silences of {len(self._streams)} streams>"

    def add(self, stream: Waiting) -> None:
        """Look after `stream` until it is discarded."""
        self._streams.add(stream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def discard(self, stream: Waiting) -> None:
        """The call of `stream` has ended; idempotent."""
        self._streams.discard(stream)

    def _look(self) -> None:
        self._timer = None
        for stream in tuple(self._streams):
            stream.tell_wait()
        if self._streams:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
