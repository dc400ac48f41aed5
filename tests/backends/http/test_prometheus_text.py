from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from backends.http.prometheus_text import Metrics, whole

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0 1395066363000
old:usage 0.25
new:usage{a="}, \\"x\\"\\n", b = "2"} 5e-1
vllm:num_requests_running_total{engine="0"} 99
broken{a="1"} NaN
broken{a="2"} +Inf
broken{a="3"} soon
info{block_size="16",num_gpu_blocks="100"} 1.0
"""
NAMES = ("vllm:num_requests_running", "old:usage", "new:usage", "broken", "info", "absent")


def test_label_sets_are_added_up_averaged_and_chosen() -> None:
    page = Metrics(PAGE, NAMES)
    assert page.total("vllm:num_requests_running") == 7
    assert page.mean("vllm:num_requests_running") == 3.5
    assert page.total("vllm:num_requests_running", engine="1") == 4
    assert page.total("vllm:num_requests_running", engine="2") is None


def test_the_first_spelling_that_is_there_counts() -> None:
    page = Metrics(PAGE, NAMES)
    assert page.mean("absent", "new:usage", "old:usage") == 0.5
    assert page.mean("absent") is None


def test_labels_are_unescaped() -> None:
    page = Metrics(PAGE, NAMES)
    assert page.labels("new:usage") == [{"a": '}, "x"\n', "b": "2"}]
    assert page.labels("info") == [{"block_size": "16", "num_gpu_blocks": "100"}]
    assert page.labels("absent") == []


def test_what_is_no_number_is_passed_over() -> None:
    assert Metrics(PAGE, NAMES).total("broken") is None


def test_only_what_was_asked_for_is_read() -> None:
    assert repr(Metrics(PAGE, ("info",))) == "<Metrics info>"


def test_a_count_is_rounded_and_what_is_not_there_stays_so() -> None:
    assert (whole(2.9999), whole(None)) == (3, None)


@given(st.binary(max_size=200))
def test_no_page_breaks_it(page: bytes) -> None:
    total = Metrics(page, ("a", "b")).total("a", "b")
    assert total is None or not math.isnan(total)


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(st.characters(codec="utf-8"), max_size=20))
def test_what_is_written_is_read_back(value: float, label: str) -> None:
    escaped = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    page = Metrics(f'a{{l="{escaped}"}} {value!r}\n'.encode(), ("a",))
    assert page.total("a", l=label) == value
