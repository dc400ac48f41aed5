"""The state of a feed, as shown to operators, and the trust in its events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from router.fleet.feeds.sink import RankCache

_WHILE_UNSURE = 0.9
_HALF_LIFE_S = 10.0


class FeedState(StrEnum):
    """`empty`: nothing is known yet. `live`: every event so far was received. `gap`: some are missing, and known blocks
    may be out of date. `resync`: the missing events are being replayed."""

    EMPTY = "empty"
    LIVE = "live"
    GAP = "gap"
    RESYNC = "resync"


@dataclass(slots=True)
class FeedCounts:
    """Counts since the start.

    `batches` were applied, `repeats` had been received before, `gaps` were noticed, `resyncs` ended one way or another,
    `restarts` of the engine were noticed, `cleared` counts how often everything was forgotten, `undecodable` events or
    messages could not be read, `unknown` ones had a tag from another version, `ignored` ones were of cache groups that
    do not count, `dropped` messages found no room while waiting for a replay.
    """

    batches: int = 0
    repeats: int = 0
    gaps: int = 0
    resyncs: int = 0
    restarts: int = 0
    cleared: int = 0
    undecodable: int = 0
    unknown: int = 0
    ignored: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class FeedHealth:
    """One source's feed at one moment.

    `age_s`: for how long the known blocks may have been out of date; 0 while live, None while nothing is known.
    `is_whole`: it began while the engine was empty, so it covers every block that is there.
    `quiet_s`: seconds since the engine's last message; an idle engine sends none. `trouble` is the last problem,
    empty without one.
    """

    source: RankCache
    state: FeedState
    connected: bool
    age_s: float | None
    quiet_s: float | None
    counts: FeedCounts
    trouble: str = ""
    is_whole: bool = False

    @property
    def confidence(self) -> float:
        """The probability that a block in the feed is still there: P(hit) of a match, in [0, 1].

        1 while live. From 0.9 on it halves every 10 s while events are missing. 0 while nothing is known.
        """
        if self.state is FeedState.LIVE:
            return 1.0
        if self.age_s is None:
            return 0.0
        return float(_WHILE_UNSURE * 0.5 ** (self.age_s / _HALF_LIFE_S))
