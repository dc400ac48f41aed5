"""Percentiles, text and picture of a benchmark."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.client.bench_report import BenchResult, BenchTimes, as_svg, as_text, spread
from router.client.chats import Reply
from router.client.load import Timed


def answered(first_s: float, end_s: float, *, cached: int | None = 30, backend: str = "own-0") -> Timed:
    return Timed(0.0, 0.0, reply=Reply("x", first_s, end_s, 100, cached, 11, "stop", {"backend": backend}))


def a_result(*more: Timed) -> BenchResult:
    hundred = tuple(answered(number / 1000, number / 1000 + 0.1) for number in range(1, 101))
    return BenchResult("100 requests to <m>, 8 at a time", 10.0, (*hundred, *more))


def test_percentiles_are_nearest_ranks() -> None:
    ttft, tpot, whole = a_result().measures
    assert [ttft.quantile(share) for share in (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)] == [
        0.001,
        0.05,
        0.09,
        0.095,
        0.099,
        0.1,
    ]
    assert ttft.mean_s == pytest.approx(0.0505)
    assert tpot.quantile(0.5) == pytest.approx(0.01)
    assert whole.quantile(1.0) == pytest.approx(0.2)


@given(st.lists(st.floats(0.0, 100.0), min_size=1), st.floats(0.0, 1.0))
def test_a_percentile_is_a_value_that_was_measured_and_enough_are_below(seconds: list[float], share: float) -> None:
    measure = BenchTimes("x", tuple(sorted(seconds)))
    found = measure.quantile(share)
    assert found in seconds
    assert sum(value <= found for value in seconds) >= share * len(seconds)


def test_the_text_has_counts_percentiles_and_failures() -> None:
    text = as_text(a_result(Timed(0.0, 0.0, failure="answered 429: busy"), answered(0.01, 0.11, backend="own-1")))
    assert "101 answered and 1 failed in 10.0 s: 10.1 requests and 111 output tokens per second" in text
    assert "  failed 1 times: answered 429: busy" in text
    assert "Prompts of 100 tokens, 30% of them cached; answers of 11 tokens" in text
    assert "Backends: own-0 100, own-1 1" in text
    assert "ms               mean      p50      p90      p95      p99      max" in text
    assert "TTFT             50.1     50.0     90.0     95.0     99.0    100.0" in text


def test_a_benchmark_without_an_answer_has_its_failures() -> None:
    result = BenchResult("1 request", 0.0, (Timed(0.0, 0.0, failure="no"),))
    assert as_text(result).splitlines()[-1] == "  failed 1 times: no"
    assert result.record()["requests_per_s"] == 0.0
    ET.fromstring(as_svg(result))
    assert [measure.mean_s for measure in result.measures] == [0.0, 0.0, 0.0]


def test_a_server_that_tells_no_cached_tokens_is_not_given_any() -> None:
    result = BenchResult("1 request", 1.0, (answered(0.1, 0.2, cached=None),))
    assert result.record()["cached_tokens"] is None
    assert "cached" not in as_text(result)


def test_a_server_that_names_no_backends_has_no_line_of_them() -> None:
    timed = Timed(0.0, 0.0, reply=Reply("x", 0.1, 0.2, 100, None, 11, "stop", {}))
    assert "Backends" not in as_text(BenchResult("1 request", 1.0, (timed,)))


def test_answers_that_came_whole_have_no_time_per_token() -> None:
    result = BenchResult("2 requests", 1.0, (answered(0.1, 0.2), answered(0.2, 0.2)))
    assert result.measures[1].seconds == (pytest.approx(0.01),)
    assert "TPOT counts 1 of 2 answers; the others came whole" in as_text(result)
    assert "TPOT counts" not in as_text(a_result())


def test_the_record_is_json() -> None:
    record = json.loads(json.dumps(a_result().record()))
    assert record["times_s"]["TTFT"]["p99"] == 0.099
    assert (record["answered"], record["failed"], record["cached_tokens"]) == (100, 0, 3000)


def test_a_spread_has_the_most_requests_where_its_bar_is_highest() -> None:
    assert spread([1.0, 1.0, 1.0, 2.0]) == f"1,000.0 ms |█{' ' * 38}▃| 2,000.0 ms"
    assert spread([0.5]).startswith("500.0 ms |█")


def test_the_picture_is_svg_with_a_curve_for_each_time() -> None:
    picture = as_svg(a_result())
    root = ET.fromstring(picture)
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("polyline") == 3
    texts = [element.text for element in root.iter() if element.text]
    assert "100 requests to <m>, 8 at a time" in texts
    assert "TTFT: p50 50.0 ms, p99 99.0 ms" in texts
    heights = [
        float(point.split(",")[1])
        for point in next(root.iter("{http://www.w3.org/2000/svg}polyline")).attrib["points"].split()
    ]
    assert heights == sorted(heights, reverse=True)


def test_a_picture_of_very_many_requests_stays_small() -> None:
    many = BenchResult("many", 1.0, tuple(answered(at / 1e5, at / 1e5 + 1) for at in range(20_000)))
    assert len(as_svg(many)) < 100_000
