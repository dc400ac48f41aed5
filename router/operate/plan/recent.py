"""The requests of the last hour, and how many backends those of the last minutes needed: for autoscalers."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping

from router.operate.diagnose.logged import LoggedRequest, logged_request
from router.operate.plan.plan import needs_since
from router.operate.telemetry.decision_record import Ended, record_of

KEPT_S = 3600.0
"""How long a request shows the capacity of its backend. After a rush that is what tells how many may go."""

MOST_KEPT = 10_000
"""Most requests that are kept: some 6 MB, and 0.3 s of computation in the thread that reads."""

RECENT_S = 300.0
"""The load of this time counts. Its P95 forgets peaks shorter than 15 s."""

SAME_FOR_S = 10.0
"""The result is kept for this time, so that several readers cost what one does."""

READ_WITHIN_S = 600.0
"""Requests are kept only while the result was read within this time."""


class RecentRequests:
    """Keeps requests while `needed` is read. `put` may be called in another thread than `needed`."""

    def __init__(self, clock: Callable[[], float], unix_time: Callable[[], float]) -> None:
        self._clock, self._unix_time = clock, unix_time
        self.read_until = -math.inf
        """Requests should be put before this time of the clock."""
        self._kept: deque[LoggedRequest] = deque(maxlen=MOST_KEPT)
        self._keeping = threading.Lock()
        self._computing = threading.Lock()
        self._needed: dict[str, float] = {}
        self._same_until = -math.inf

    def __repr__(self) -> str:
        return f"<RecentRequests {len(self._kept)}>"

    def put(self, ended: Ended) -> None:
        """Keep a request that has ended."""
        request = logged_request(record_of(ended, is_brief=True))
        with self._keeping:
            self._kept.append(request)

    def needed(self) -> Mapping[str, float]:
        """Pool -> the backends that the requests of the last RECENT_S needed, as `pointsman plan` computes it.

        0 where none arrived, NaN where every class missed a target at every load. A pool without an answer since
        metrics are read is not there. Takes up to 0.3 s.
        """
        with self._computing:
            now = self._clock()
            if now >= self.read_until:
                # requests are missing since
                self._needed, self._same_until = {}, -math.inf
                with self._keeping:
                    self._kept.clear()
            self.read_until = now + READ_WITHIN_S
            if now >= self._same_until:
                self._needed = self._computed()
                self._same_until = now + SAME_FOR_S
            return dict(self._needed)

    def _computed(self) -> dict[str, float]:
        now_s = self._unix_time()
        with self._keeping:
            kept = tuple(self._kept)
        requests = sorted((each for each in kept if each.ended_s > now_s - KEPT_S), key=lambda each: each.at_s)
        computed = dict.fromkeys(self._needed, 0.0)
        for pool, need in needs_since(now_s - RECENT_S, requests).items():
            if need is None:
                computed[pool] = 0.0
            else:
                computed[pool] = math.nan if need.needed is None else float(need.needed)
        return computed
