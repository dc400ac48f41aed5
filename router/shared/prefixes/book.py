"""Every prefix that is kept, as far as this router knows, and which of two routers' words of one counts."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator

from router.shared.prefixes.prefix import Key, Prefix

_MARK_BITS = 10


class Book:
    """Prefixes by tenant and id. What was asked for last counts, whichever router was asked: `Prefix.version` tells.

    Of one that was dropped nothing older is heard for `silent_s`: what was said of it before may still be on its way.
    At most `most` are known, of all tenants and routers. `now` is Unix time, `by` this router's name.
    """

    def __init__(self, now: Callable[[], float], by: str, *, silent_s: float, most: int) -> None:
        self._now, self._silent_s, self._most = now, silent_s, most
        self._mark = zlib.crc32(by.encode()) % (1 << _MARK_BITS)
        self._known: dict[Key, Prefix] = {}
        self._heard_at: dict[Key, float] = {}
        self._dropped: dict[Key, tuple[int, float]] = {}
        # nothing is to be forgotten before: all are looked through when something is, not with each call and news
        self._next_end = math.inf

    def __repr__(self) -> str:
        return f"<Book of {len(self)} prefixes>"

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._known.values())

    def __getitem__(self, key: Key) -> Prefix:
        return self._known[key]

    @property
    def is_full(self) -> bool:
        """May no other prefix be known?"""
        return len(self) >= self._most

    def find(self, key: Key) -> Prefix | None:
        """What is known of it."""
        return self._known.get(key)

    def next_version(self, key: Key) -> int:
        """Unix time in µs, or as much more as makes it later than all that is known of this prefix; below it this
        router's mark, so that no two routers have the same."""
        known = self._known.get(key)
        last = max(known.version if known else 0, self.dropped_at(key))
        at_us = max(round(self._now() * 1e6), (last >> _MARK_BITS) + 1)
        return (at_us << _MARK_BITS) + self._mark

    def dropped_at(self, key: Key) -> int:
        """The version as which it was dropped, if that was a moment ago; 0 otherwise."""
        return self._dropped.get(key, (0, 0.0))[0]

    def silence_s(self, key: Key) -> float:
        """For how long nothing was heard of it."""
        return self._now() - self._heard_at[key]

    def accepts(self, news: Prefix) -> bool:
        """Does it say something later than what is known, of a prefix that may be known?"""
        known = self._known.get(news.key)
        if known is not None:
            return known.stamp < news.stamp
        if self.is_full or news.expires_at <= self._now():
            return False
        return news.key not in self._dropped or news.version > self.dropped_at(news.key)

    def enter(self, prefix: Prefix) -> None:
        """This is how it is now."""
        self._known[prefix.key], self._heard_at[prefix.key] = prefix, self._now()
        self._next_end = min(self._next_end, prefix.expires_at)

    def drop(self, key: Key, version: int) -> None:
        """It is known no longer, and what is older than `version` will not be heard."""
        self._known.pop(key, None)
        self._heard_at.pop(key, None)
        self.note_dropped(key, version)

    def note_dropped(self, key: Key, version: int) -> None:
        """It was dropped then, whatever has come of it since."""
        until = self._now() + self._silent_s
        self._dropped[key] = (max(version, self.dropped_at(key)), until)
        while len(self._dropped) > self._most:
            del self._dropped[next(iter(self._dropped))]
        self._next_end = min(self._next_end, until)

    def forget_old(self) -> list[Key]:
        """Which prefixes are over by now; they are known no longer."""
        now = self._now()
        if now < self._next_end:
            return []
        over = [key for key, prefix in self._known.items() if prefix.expires_at <= now]
        for key in over:
            del self._known[key], self._heard_at[key]
        self._dropped = {key: (version, until) for key, (version, until) in self._dropped.items() if until > now}
        self._next_end = min(self._ends(), default=math.inf)
        return over

    def check(self) -> None:
        """Nothing is kept without bound or for too long."""
        assert len(self) <= self._most, f"{self!r}: knows too many"
        assert len(self._dropped) <= self._most, f"{self!r}: remembers too many that were dropped"
        assert self._heard_at.keys() == self._known.keys(), f"{self!r}: has heard of others than it knows"
        assert self._next_end <= min(self._ends(), default=math.inf), f"{self!r}: forgets too late"

    def _ends(self) -> Iterator[float]:
        yield from (prefix.expires_at for prefix in self._known.values())
        yield from (until for _, until in self._dropped.values())
