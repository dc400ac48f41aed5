"""The periods of budgets, all in UTC, numbered since 1970. The scripts for Redis number them alike."""

from __future__ import annotations

import enum
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
