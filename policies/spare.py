"""Spare capacity: how many lines of batches may be at each backend, so that other requests do not notice. Pure.

Each backend has a window of lines. It grows while lines fill it, up to what other requests do not notice, and is halved
when other requests wait, as TCP's is (Chiu and Jain, Analysis of the increase and decrease algorithms, 1989).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from policies.nouns import BackendView

UNKNOWN_LIMIT = 8
"""Requests at once of a backend that reports no limit and has no learned one yet."""

EVERY_S = 1.0
"""Time between two changes of a window."""

_RESERVED = 8
"""One place in so many stays free for requests that arrive."""

_FIRST, _LEAST, _MOST = 2.0, 0.25, 4096.0
"""A window below 1 is one line where no other request is."""

_PREFILL_S = 0.0005
"""Prefill of other requests that is as good as none."""

_COMPUTED = 1
"""Most prompts of lines that a shared backend computes at a time: a request that arrives waits for them at most."""

_RESTS_EVERY_S, _REST_S = 20.0, 2.0
"""A shared backend rests from lines so often and so long: to compare."""


@dataclass(slots=True)
class _Window:
    size: float = _FIRST
    changed_at: float | None = None
    is_filled: bool = False


@dataclass(slots=True)
class Spare:
    """The windows of all backends of one router. Times are those of the router's clock."""

    _windows: dict[str, _Window] = field(default_factory=dict)

    def window(self, backend: str) -> float:
        """Lines that may be at `backend`, as far as other requests allow it."""
        return self._of(backend).size

    def room(self, backend: BackendView, lines: int, now: float, *, is_shared: bool, computed: int = 0) -> int:
        """Further lines that `backend`, as a request of the last class sees it, may get beside its `lines`, of which so
        many prompts are being `computed`. `is_shared`: it has had other requests of late."""
        if not backend.healthy or backend.draining or backend.may_take == 0 or backend.needs_prefill:
            return 0
        if backend.waiting > lines or (is_shared and rests(backend.name, now)):
            return 0
        if is_shared and (backend.queue_s > _PREFILL_S or computed >= _COMPUTED):
            # prompts that are computed side by side take each other's time
            return 0
        limit = backend.adaptive_limit if backend.max_requests is None else backend.max_requests
        limit = UNKNOWN_LIMIT if limit is None else limit
        there = max(lines, backend.running + backend.waiting)
        free = limit - there - (-(-limit // _RESERVED) if limit > 1 else 0)
        allowed = self._allowed(backend, lines)
        if lines >= allowed:
            self._of(backend.name).is_filled = True
        room = max(0, min(free, allowed - lines))
        return min(room, _COMPUTED - computed) if is_shared else room

    def may_have_room(self, backend: str, now: float, computed: int) -> bool:
        """Whether `room` of a shared backend may be more than 0."""
        return computed < _COMPUTED and not rests(backend, now)

    def avoids(self, backend: BackendView, lines: int, now: float, *, is_shared: bool) -> bool:
        """Whether no further line may go to `backend`, though others have room: its window is full, or it rests."""
        return lines >= self._allowed(backend, lines) or (is_shared and rests(backend.name, now))

    def _allowed(self, backend: BackendView, lines: int) -> int:
        size, there = self._of(backend.name).size, max(lines, backend.running + backend.waiting)
        return int(size) if size >= 1.0 else int(there == lines)

    def tick(self, backend: str, now: float, *, most: float | None, waits: bool) -> None:
        """Change the window of `backend`, at most once in EVERY_S. Other requests do not notice `most` lines there;
        None: it has no other requests. One `waits`: there is no room to spare."""
        window = self._of(backend)
        if window.changed_at is not None and now - window.changed_at < EVERY_S:
            return
        window.changed_at = now
        if waits:
            window.size /= 2.0
        elif window.is_filled:
            window.size = 2.0 * window.size if most is None else window.size + 1.0
        window.size = max(_LEAST, min(window.size, _MOST if most is None else most))
        window.is_filled = False

    def follow(self, backends: Container[str]) -> None:
        """Forget all but these."""
        for name in [name for name in self._windows if name not in backends]:
            del self._windows[name]

    def _of(self, backend: str) -> _Window:
        return self._windows.setdefault(backend, _Window())


def rests(backend: str, now: float) -> bool:
    """Whether a shared backend gets no lines now; backends rest at different times."""
    shift = sum(backend.encode()) % 10 * _REST_S
    return (now + shift) % _RESTS_EVERY_S < _REST_S
