"""All pinned prefixes known to this router, with a version that decides between different routers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator

from router.shared.prefixes.prefix import Key, Prefix

_MARK_BITS = 10


class Book:
    """Prefixes by tenant and id. The version of the latest request wins, whichever router got it: `Prefix.version`.

    After a prefix was dropped, older versions of it are ignored for `silent_s`, because they may still be on their way.
    It holds at most `most` prefixes, of all tenants and routers. `now` is Unix time, `by` this router's name.
    """

    def __init__(self, now: Callable[[], float], by: str, *, silent_s: float, most: int) -> None:
        self._now, self._silent_s, self._most = now, silent_s, most
        self._mark = zlib.crc32(by.encode()) % (1 << _MARK_BITS)
        self._known: dict[Key, Prefix] = {}
        self._heard_at: dict[Key, float] = {}
        self._dropped: dict[Key, tuple[int, float]] = {}
        # earliest time at which an entry expires; only then all are scanned, not with each call and message
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
        """Whether no further prefix fits."""
        return len(self) >= self._most

    def find(self, key: Key) -> Prefix | None:
        """The known prefix of this key; None if there is none."""
        return self._known.get(key)

    def next_version(self, key: Key) -> int:
        """A version later than all known ones of this prefix: Unix time in µs, or more if needed, with this router's
        mark in the low bits, so that no two routers make the same version."""
        known = self._known.get(key)
        last = max(known.version if known else 0, self.dropped_at(key))
        at_us = max(round(self._now() * 1e6), (last >> _MARK_BITS) + 1)
        return (at_us << _MARK_BITS) + self._mark

    def dropped_at(self, key: Key) -> int:
        """The version with which it was dropped, if that was within `silent_s`; 0 otherwise."""
        return self._dropped.get(key, (0, 0.0))[0]

    def silence_s(self, key: Key) -> float:
        """Seconds since the last message about this prefix."""
        return self._now() - self._heard_at[key]

    def accepts(self, news: Prefix) -> bool:
        """Whether `news` is later than the known state, of a prefix that the book may hold."""
        known = self._known.get(news.key)
        if known is not None:
            return known.stamp < news.stamp
        if self.is_full or news.expires_at <= self._now():
            return False
        return news.key not in self._dropped or news.version > self.dropped_at(news.key)

    def enter(self, prefix: Prefix) -> None:
        """Replace the known state by `prefix`."""
        self._known[prefix.key], self._heard_at[prefix.key] = prefix, self._now()
        self._next_end = min(self._next_end, prefix.expires_at)

    def drop(self, key: Key, version: int) -> None:
        """Remove it, and ignore versions older than `version` from now on."""
        self._known.pop(key, None)
        self._heard_at.pop(key, None)
        self.note_dropped(key, version)

    def note_dropped(self, key: Key, version: int) -> None:
        """Record that it was dropped with this version, without removing a later one."""
        until = self._now() + self._silent_s
        self._dropped[key] = (max(version, self.dropped_at(key)), until)
        while len(self._dropped) > self._most:
            del self._dropped[next(iter(self._dropped))]
        self._next_end = min(self._next_end, until)

    def forget_old(self) -> list[Key]:
        """Remove the prefixes that have expired, and return their keys."""
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
        """Assert that nothing is kept without bound or for too long."""
        assert len(self) <= self._most, f"{self!r}: has too many prefixes"
        assert len(self._dropped) <= self._most, f"{self!r}: has too many dropped prefixes"
        assert self._heard_at.keys() == self._known.keys(), f"{self!r}: has times of other prefixes"
        assert self._next_end <= min(self._ends(), default=math.inf), f"{self!r}: forgets too late"

    def _ends(self) -> Iterator[float]:
        yield from (prefix.expires_at for prefix in self._known.values())
        yield from (until for _, until in self._dropped.values())
