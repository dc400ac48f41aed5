"""Loads over time: sums of spans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.operate.plan.load import Load, Span

SPANS = st.lists(
    st.builds(lambda start, length, amount: Span(start, start + length, amount), *[st.integers(0, 50)] * 3), max_size=30
)


def test_a_load_changes_when_spans_begin_and_end() -> None:
    load = Load([Span(0, 4), Span(2, 6, 10)])
    assert [load.at(time) for time in (-1, 0, 2, 4, 6)] == [0, 1, 11, 10, 0]
    assert load.mean(0, 4) == (2 * 1 + 2 * 11) / 4
    assert load.mean(3, 3) == 11
    assert (load.highest(0, 1), load.highest(0, 10), load.highest(5, 5)) == (1, 11, 0)


def test_a_quantile_is_weighted_by_time() -> None:
    load = Load([Span(0, 100), Span(10, 14, 5)])
    assert load.quantile(0.95, 0, 100) == 1
    assert load.quantile(0.97, 0, 100) == 6
    assert Load([]).quantile(0.95, 0, 100) == 0


@given(SPANS, st.integers(0, 60), st.integers(1, 60))
def test_loads_are_those_of_each_second_counted_alone(spans: list[Span], start: int, length: int) -> None:
    load = Load(spans)
    seconds = range(start, start + length)
    counted = [sum(amount for begins, ends, amount in spans if begins <= second < ends) for second in seconds]
    assert [load.at(second) for second in seconds] == counted
    assert load.highest(start, start + length) == max(counted)
    assert abs(load.mean(start, start + length) - sum(counted) / length) < 1e-6
    assert load.quantile(1.0, start, start + length) == max(counted)
    at_most = load.quantile(0.5, start, start + length)
    assert sum(level <= at_most for level in counted) >= length / 2
