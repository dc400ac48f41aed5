"""Periods of budgets: numbered without a gap, in UTC, weeks from Monday, months of the calendar."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.quota.periods import DAY_MS, Period

TIMES = st.integers(0, 4_102_444_800_000)
"""From 1970 to 2100, in milliseconds."""


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("period", "last", "first"),
    [
        (Period.HOUR, "2026-11-24T12:59:59.999", "2026-11-24T13:00"),
        (Period.DAY, "2026-11-24T23:59:59.999", "2026-11-25"),
        (Period.WEEK, "2026-11-29T23:59:59.999", "2026-11-30"),  # a Sunday and a Monday
        (Period.MONTH, "2028-02-29T23:59:59.999", "2028-03-01"),
        (Period.MONTH, "2026-12-31T23:59:59.999", "2027-01-01"),
    ],
)
def test_a_period_ends_where_people_expect_it(period: Period, last: str, first: str) -> None:
    assert period.number(ms(first)) == period.number(ms(last)) + 1
    assert period.left_ms(ms(last)) == 1
    assert period.begins_ms(period.number(ms(first))) == ms(first)


@pytest.mark.parametrize("period", Period)
@given(now_ms=TIMES)
def test_each_time_lies_in_the_period_of_its_number(period: Period, now_ms: int) -> None:
    number = period.number(now_ms)
    begins, ends = period.begins_ms(number), period.begins_ms(number + 1)
    assert begins <= now_ms < ends
    assert period.left_ms(now_ms) == ends - now_ms <= 31 * DAY_MS
