"""Reports of this router's running requests to the others: what changed at once, and everything now and then."""

from __future__ import annotations

from router.fleet.cluster.cluster import Cluster
from router.shared.replicas.news import Running


class OwnTraffic:
    """What to report of the running requests of `cluster`.

    Reports have the backends where they have changed. A report is due every `again_s` even if nothing has changed: it
    is a sign of life. Every `whole_s` one has all backends, which repairs a lost report, and so has the first one after
    a pause, in which others may have counted this router as gone.
    """

    def __init__(self, cluster: Cluster, *, again_s: float, whole_s: float) -> None:
        self._cluster, self._again_s, self._whole_s = cluster, again_s, whole_s
        self._seen: dict[str, int] = {}
        self._reported_at = self._whole_at = -1e9

    def __repr__(self) -> str:
        return f"<OwnTraffic of {self._cluster!r}>"

    def due(self, now: float) -> Running | None:
        """The report that is due at `now`; None if nothing has changed."""
        changes = self._cluster.traffic_since(self._seen)
        is_late = now - self._reported_at >= 2 * self._again_s
        if is_late or now - self._whole_at >= self._whole_s:
            self._reported_at = self._whole_at = now
            return Running(self._cluster.traffic())
        if changes or now - self._reported_at >= self._again_s:
            self._reported_at = now
            return Running(None, changes)
        return None

    def lost(self) -> None:
        """A report may not have arrived: the next one has everything."""
        self._whole_at = -1e9
