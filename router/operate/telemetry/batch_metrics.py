"""The metrics of batches: jobs and lines by how they ended, and the room that lines have."""

from __future__ import annotations

from router.batches.answers import How
from router.batches.job import Status
from router.operate.telemetry.metrics import Metrics


class BatchMetrics:
    """See BatchObserver."""

    def __init__(self, metrics: Metrics) -> None:
        self._lines = metrics.counter("batch_lines", "Lines of batches by how they ended", ("tenant", "how"))
        self._jobs = metrics.counter("batch_jobs", "Batches by how they ended", ("tenant", "status"))
        self._again = metrics.counter("batch_retries", "Tries of lines that failed for now, by error code", ("code",))
        self._running = metrics.gauge("batch_jobs_running", "Batches that this router runs", ())
        self._inside = metrics.gauge("batch_lines_in_flight", "Lines of batches that this router has sent", ())
        self._windows = metrics.gauge(
            "batch_window", "Lines that all backends together may have, as far as other requests allow it", ()
        )

    def __repr__(self) -> str:
        return "<BatchMetrics>"

    def line(self, tenant: str, how: How) -> None:
        self._lines[tenant, how].inc()

    def job(self, tenant: str, status: Status) -> None:
        self._jobs[tenant, status].inc()

    def again(self, code: str) -> None:
        self._again[code].inc()

    def room(self, *, jobs: int, inside: int, windows: float) -> None:
        self._running[()].set(jobs)
        self._inside[()].set(inside)
        self._windows[()].set(windows)
