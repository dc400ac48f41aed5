from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.operate.dashboard.window import SLOT_S, SLOTS, WINDOW_S, Sketch, Window

durations = st.lists(st.floats(1e-4, 9e3), min_size=1, max_size=200)


def a_sketch(values: list[float]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


@given(durations, st.floats(0.01, 1.0))
def test_a_quantile_is_at_most_two_percent_off(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert a_sketch(values).quantile(share) == pytest.approx(exact, rel=0.02)


@given(durations, durations)
def test_what_is_merged_knows_what_both_knew(first: list[float], second: list[float]) -> None:
    merged = Sketch.merged([a_sketch(first), a_sketch(second)])
    assert len(merged) == len(first) + len(second)
    assert merged.quantile(0.5) == a_sketch([*first, *second]).quantile(0.5)


def test_those_beyond_a_target_are_counted() -> None:
    sketch = a_sketch([0.1, 0.2, 0.3, 5.0])
    assert [sketch.count_above(target) for target in (0.05, 0.25, 1.0, 9.0)] == [4, 2, 1, 0]


def test_an_empty_sketch_has_no_quantiles() -> None:
    assert Sketch().quantile(0.5) is None


@pytest.mark.parametrize("extreme", [0.0, -1.0, 1e-9, 1e12])
def test_impossible_durations_take_no_further_memory(extreme: float) -> None:
    sketch = a_sketch([extreme])
    assert len(sketch) == 1
    assert 0 < (sketch.quantile(1.0) or 0) < 1.1e4


def test_what_is_older_than_a_window_is_forgotten() -> None:
    window: Window[list[int]] = Window(list)
    window.at(100.0).append(1)
    window.at(100.0 + SLOT_S).append(2)
    assert [*window.within(100.0 + SLOT_S)] == [[1], [2]]
    assert [*window.within(100.0 + WINDOW_S)] == [[2]]
    assert [*window.within(100.0 + 2 * WINDOW_S)] == []


@given(st.lists(st.floats(0, 500), max_size=60).map(sorted))
def test_a_window_never_holds_more_than_its_slots(times: list[float]) -> None:
    window: Window[list[float]] = Window(list)
    for time in times:
        window.at(time).append(time)
        seen = [*window.within(time)]
        assert len(seen) <= SLOTS
        assert all(time - WINDOW_S - SLOT_S < value <= time for slot in seen for value in slot)
