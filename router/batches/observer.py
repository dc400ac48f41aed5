"""What batches report while they run, for metrics."""

from __future__ import annotations

from typing import Protocol

from router.batches.answers import How
from router.batches.job import Status


class BatchObserver(Protocol):
    """Hears of jobs and lines. Its methods are cheap."""

    def line(self, tenant: str, how: How) -> None:
        """A line of `tenant` ended so."""
        ...

    def job(self, tenant: str, status: Status) -> None:
        """A job of `tenant` ended so."""
        ...

    def again(self, code: str) -> None:
        """A line failed by an error with this code that may pass, and is sent again."""
        ...

    def room(self, *, jobs: int, inside: int, windows: float) -> None:
        """So many jobs run here, with `inside` lines at backends, which may have `windows` of them."""
        ...
