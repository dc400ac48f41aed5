"""Pools that sleep: scaled to zero, and started when a request comes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Wake:
    """Requests to a pool without a backend that is well wait for at most `within_s`, while one starts.

    To have it start, the router POSTs to `url`, signed with `secret`, or runs `command`; with neither, an autoscaler
    sees the waiting requests in the metrics.
    """

    within_s: float
    url: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    command: tuple[str, ...] = ()
