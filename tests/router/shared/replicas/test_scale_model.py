"""The model behind docs/scale.md: what grows with what, and where one cell ends."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.scale_parts.model import (
    AT_FULL_PACE,
    EVERY_S,
    Costs,
    Fleet,
    decision_s,
    exponent,
    most_requests,
    needs,
    routers_needed,
)

COSTS = Costs(
    **{field.name: 1e-6 if field.name.endswith("_s") else 10.0 for field in dataclasses.fields(Costs)}  # type: ignore[arg-type]
)


def a_cell(routers: int, *, rate_each: float = 300.0, learns: bool = True) -> Fleet:
    return Fleet(routers, 80 * routers, rate_each * routers, learns=learns)


@pytest.mark.parametrize(("size", "slope"), [(lambda n: n, 1.0), (lambda n: 5 * n * n, 2.0), (lambda _: 7, 0.0)])
def test_an_exponent_is_the_slope_on_logarithmic_axes(size, slope) -> None:  # type: ignore[no-untyped-def]
    assert exponent([1, 2, 4, 8], [size(n) for n in (1, 2, 4, 8)]) == pytest.approx(slope)


def test_a_router_alone_hears_nothing_of_others() -> None:
    alone = needs(a_cell(1), COSTS)
    assert alone.news == alone.changes == 0
    assert alone.own > 0


def test_own_work_follows_from_a_routers_part_and_what_it_hears_from_all() -> None:
    few, many = needs(Fleet(8, 80, 80.0), COSTS), needs(Fleet(64, 80, 640.0), COSTS)
    assert many.own == pytest.approx(few.own)
    assert many.news / few.news == pytest.approx(63 / 7)
    assert many.changes / few.changes == pytest.approx(63 / 7)


def test_exchanges_do_not_grow_beyond_the_routers_at_full_pace() -> None:
    at_pace = needs(a_cell(AT_FULL_PACE), COSTS)
    assert at_pace.exchanges == pytest.approx(AT_FULL_PACE / EVERY_S)
    assert needs(a_cell(64), COSTS).exchanges == pytest.approx(at_pace.exchanges)
    assert needs(a_cell(64), COSTS).interval_s == pytest.approx(8 * EVERY_S)


def test_every_byte_that_is_written_is_read_by_all() -> None:
    found = needs(a_cell(16), COSTS)
    of_exchanges = found.exchanges * COSTS.exchange_in_bytes
    assert found.bytes_out - of_exchanges == pytest.approx(16 * (found.bytes_in - of_exchanges))
    assert found.entries_read == pytest.approx(16 * found.entries_written)


def test_a_quiet_router_still_gives_a_sign_of_life() -> None:
    assert needs(Fleet(4, 8, 1e-9), COSTS).entries_written == pytest.approx(4)


def test_caches_with_events_cost_events_instead_of_lessons() -> None:
    learns, reports = needs(a_cell(8), COSTS), needs(a_cell(8, learns=False), COSTS)
    assert learns.events == 0 < reports.events
    assert reports.bytes_in < learns.bytes_in


def test_adding_routers_to_one_cell_brings_less_and_less() -> None:
    each = [most_requests(a_cell(routers), COSTS) / routers for routers in (1, 8, 64)]
    assert each[0] > each[1] > each[2] > 0
    found = needs(dataclasses.replace(a_cell(8), requests_per_s=8 * each[1]), COSTS)
    assert found.router == pytest.approx(0.7, rel=1e-3)


def test_a_cell_with_more_backends_than_a_router_can_hear_serves_nothing() -> None:
    assert most_requests(Fleet(64, 100_000, 1.0, learns=False), COSTS) == 0


def test_cells_serve_what_one_cell_cannot() -> None:
    whole = Fleet(1, 5000, 200_000.0)
    assert routers_needed(whole, COSTS, in_each_cell=None, most=2000) is None
    assert routers_needed(whole, COSTS, in_each_cell=8, most=2000) is not None


def test_a_small_deployment_needs_one_router_and_a_larger_one_whole_cells() -> None:
    assert routers_needed(Fleet(1, 8, 10.0), COSTS, in_each_cell=None) == 1
    assert routers_needed(Fleet(1, 8, 10.0), COSTS, in_each_cell=8) == 8


@pytest.mark.parametrize(
    ("backends", "took_ms"), [(1, 0.09), (2, 0.09), (100, 0.57), (316, 0.9), (1000, 1.44), (5000, 2.38), (9000, 2.38)]
)
def test_a_decision_takes_as_long_as_measured_and_between_that_in_between(backends: int, took_ms: float) -> None:
    assert 1000 * decision_s(backends) == pytest.approx(took_ms, rel=0.02)


def test_more_backends_make_own_requests_dearer_where_caches_are_learned() -> None:
    few, many = (needs(Fleet(1, count, 100.0), COSTS).own for count in (500, 5000))
    assert many - few == pytest.approx(100.0 * (4500e-6 + decision_s(5000) - decision_s(500)))
