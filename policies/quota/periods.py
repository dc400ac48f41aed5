"""The periods of budgets, all in UTC, numbered since 1970. The scripts for Redis number them alike."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
_MONDAY = 3
"""Days from a Monday to the first of January 1970."""


class Period(enum.StrEnum):
    """The time after which a budget is whole again. Weeks begin on Mondays."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"

    @property
    def code(self) -> int:
        """Its number in the scripts for Redis."""
        return _CODES[self]

    def holds(self, now_ms: int) -> bool:  # noqa: ARG002 - as any period
        """Whether a budget of it counts what begins at `now_ms`."""
        return True

    def is_over(self, now_ms: int) -> bool:  # noqa: ARG002 - as any period
        """Whether nothing after `now_ms` belongs to a budget of it."""
        return False

    def number(self, now_ms: int) -> int:
        """The number of the period in which `now_ms` lies."""
        match self:
            case Period.HOUR:
                return now_ms // HOUR_MS
            case Period.DAY:
                return now_ms // DAY_MS
            case Period.WEEK:
                return (now_ms // DAY_MS + _MONDAY) // 7
            case Period.MONTH:
                at = datetime.fromtimestamp(now_ms // 1000, UTC)
                return (at.year - 1970) * 12 + at.month - 1

    def begins_ms(self, number: int) -> int:
        """When the period of this number begins."""
        match self:
            case Period.HOUR:
                return number * HOUR_MS
            case Period.DAY:
                return number * DAY_MS
            case Period.WEEK:
                return (number * 7 - _MONDAY) * DAY_MS
            case Period.MONTH:
                return round(datetime(1970 + number // 12, number % 12 + 1, 1, tzinfo=UTC).timestamp()) * 1000

    def left_ms(self, now_ms: int) -> int:
        """Milliseconds until the next period begins."""
        return self.begins_ms(self.number(now_ms) + 1) - now_ms


_CODES = {Period.DAY: 0, Period.HOUR: -1, Period.WEEK: -2, Period.MONTH: -3}

_NO_END = 99_999
"""The day, in the year 2243, that stands for no end."""


@dataclass(frozen=True, slots=True)
class Span:
    """A fixed period: the days from the first to the last, both included, in days since 1970. None: for ever."""

    name: str
    first_day: int = 0
    last_day: int | None = None

    @property
    def code(self) -> int:
        """Its number in the scripts for Redis: its first day and the day behind its last one, below all others."""
        return -(self.first_day * (_NO_END + 1) + (_NO_END if self.last_day is None else self.last_day + 1))

    def holds(self, now_ms: int) -> bool:
        """Whether a budget of it counts what begins at `now_ms`."""
        return self.first_day <= now_ms // DAY_MS and not self.is_over(now_ms)

    def is_over(self, now_ms: int) -> bool:
        """Whether nothing after `now_ms` belongs to a budget of it."""
        return self.last_day is not None and now_ms // DAY_MS > self.last_day

    def number(self, now_ms: int) -> int:  # noqa: ARG002 - as any period
        """Its first day: a budget of which that is put off begins anew."""
        return self.first_day

    def left_ms(self, now_ms: int) -> int | None:
        """Milliseconds until its end; None for ever."""
        return None if self.last_day is None else (self.last_day + 1) * DAY_MS - now_ms

    def __str__(self) -> str:
        return self.name
