"""Logins that were refused, counted by address, port and reason: a flood of them becomes few records."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

MOST_ADDRESSES = 64
"""Entries of one minute; further ones count together, at the address OTHERS."""

OTHERS = "others"


def written(at: float) -> str:
    """A Unix time as text: ISO 8601, in UTC, with milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class RefusedLogins:
    """Counts refusals until they are taken. May be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, str], list[float]] = {}

    def __repr__(self) -> str:
        return f"<RefusedLogins {len(self._counts)} kinds>"

    def add(self, port: str, address: str, reason: str, at: float) -> None:
        """Count one refusal at `at`, in Unix time."""
        with self._lock:
            kind = (port, address, reason)
            if kind not in self._counts and len(self._counts) >= MOST_ADDRESSES:
                kind = (port, OTHERS, "several")
            counted = self._counts.setdefault(kind, [0, at, at])
            counted[0] += 1
            counted[2] = at

    def take(self) -> list[tuple[float, dict[str, Any]]]:
        """What was counted, as records with the time of each one's last refusal; and count anew."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return [
            (last, {"port": port, "address": address, "reason": reason, "count": int(count), "since": written(first)})
            for (port, address, reason), (count, first, last) in counts.items()
        ]
