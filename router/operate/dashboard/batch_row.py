"""The batches that this router runs, for the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from router.batches.batches import Batches

MOST_SHOWN = 50


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One batch: requests by how they ended, and the estimated seconds until all have; None: unknown."""

    id: str
    tenant: str
    api: str
    status: str
    total: int
    succeeded: int
    failed: int
    seconds_left: float | None
    expires_in_s: float


def batch_rows(batches: Batches | None, unix_s: float) -> Iterator[BatchRow]:
    """Those that run now."""
    for job in () if batches is None else batches.running():
        counts = job.counts
        yield BatchRow(
            job.id,
            job.tenant,
            job.api,
            "cancelling" if job.is_cancelling else job.status.replace("_", " "),
            counts.total,
            counts.succeeded,
            counts.errored,
            job.seconds_left,
            max(0.0, job.expires_at - unix_s),
        )
