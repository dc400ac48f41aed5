from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, disable_created_metrics, enable_created_metrics

from router.operate.telemetry.metrics import OTHER, Metrics
from router.operate.telemetry.otlp_metrics import GENAI_NAMES
from router.operate.telemetry.telemetry import Telemetry
from router.shared.store.base import Fault
from tests.router.parts import series

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/metrics.md").read_text()

ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]*)\| ", re.MULTILINE)


def test_the_page_has_every_metric_with_its_type_and_labels_and_no_other() -> None:
    listed = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(PAGE)}
    assert listed == {metric.name: (metric.kind, metric.labels) for metric in Telemetry().metrics}


def test_metrics_are_made_in_one_place_alone() -> None:
    telemetry = Telemetry()
    families = {family.name for family in telemetry.registry.collect()}
    assert families == {metric.name.removesuffix("_total") for metric in telemetry.metrics}
    users = {file.name for file in (ROOT / "router").rglob("*.py") if "from prometheus_client.core" in file.read_text()}
    assert users == {"metrics.py"}


def test_the_page_has_every_event_and_no_other() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "router").rglob("*.py"))
    events = set(re.findall(r'(?:\.|on_)event\(\s*"(\w+)"', sources)) | set(
        re.findall(r'self\._events\["(\w+)"\]', sources)
    )
    events |= {f"{what}_{fault}" for what in ("quota_store", "replicas") for fault in Fault}
    events |= {f"replicas_snapshot_{why}" for why in re.findall(r'raise Unfit\("(\w+)"\)', sources)}
    (paragraph,) = re.findall(r"^- `event`: (.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", paragraph)) == events


def test_the_page_has_the_names_that_differ_outside() -> None:
    assert dict(re.findall(r"^\| `(\w+)` \| `(gen_ai[\w.]+)` \|", PAGE, re.MULTILINE)) == GENAI_NAMES


def test_ttft_buckets_reach_two_minutes() -> None:
    telemetry = Telemetry()
    with telemetry.account("r") as account:
        account.heard(account.started_at + 119.9)
    bounds = [labels[-1] for labels, count in series(telemetry.registry, "ttft_seconds_bucket").items() if count]
    assert bounds == ["120.0", "+Inf"]


def test_no_series_is_exposed_twice_so_that_prometheus_takes_the_page() -> None:
    telemetry = Telemetry()
    with telemetry.account("r") as account:
        account.heard(account.started_at)
    lines = [line for line in telemetry.exposition()[0].decode().splitlines() if not line.startswith("#")]
    counts = Counter(line.rpartition(" ")[0] for line in lines)
    assert len(counts) > 50
    assert counts.most_common(1)[0][1] == 1


def test_a_metric_that_would_get_too_many_series_counts_the_rest_as_other() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, most_series=3)
    counter = metrics.counter("x", "x", ("a", "b"))
    for number in range(10):
        counter[str(number), "b"].inc()
    counter["0", "b"].inc()
    assert series(registry, "x_total") == {("0", "b"): 2, ("1", "b"): 1, ("2", "b"): 1, (OTHER, OTHER): 7}
    assert repr(metrics) == "<Metrics 1 with 3 series>"


@pytest.mark.parametrize("label", ["tenant", "service_class"])
def test_unknown_calls_share_one_series(label: str) -> None:
    telemetry = Telemetry()
    for number in range(5):
        with telemetry.account(f"r{number}"):
            pass
    (labels,) = series(telemetry.registry, "requests_total")
    assert labels == ("unknown", "none", "finished")


BOUNDS = (0.1, 0.5, 1, 2.5, 10)
TRACE = {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "span_id": "00f067aa0ba902b7"}
AMOUNTS = st.sampled_from((0.0, *BOUNDS)) | st.floats(0.0, 20.0)
NAMES = st.sampled_from(('a "b"', "c", "d\\e"))


def collected(registry: CollectorRegistry) -> list[object]:
    """All that is read from `registry`, but the times when something was made or observed."""
    return [
        (
            (family.name, family.type, family.documentation),
            [
                (
                    sample.name,
                    sample.labels,
                    0.0 if sample.name.endswith("_created") else sample.value,
                    sample.exemplar and sample.exemplar[:2],
                )
                for sample in family.samples
            ],
        )
        for family in registry.collect()
    ]


@given(
    st.lists(
        st.tuples(st.just("inc"), NAMES, AMOUNTS)
        | st.tuples(st.just("set"), NAMES, AMOUNTS)
        | st.tuples(st.just("observe"), NAMES, AMOUNTS, st.none() | st.just(TRACE))
        | st.tuples(st.just("lag"), AMOUNTS)
        | st.tuples(st.just("forget"), NAMES)
    ),
    st.booleans(),
)
def test_what_is_read_is_what_prometheus_client_would_have_counted(steps: list[tuple], shows_created: bool) -> None:  # type: ignore[type-arg]
    (enable_created_metrics if shows_created else disable_created_metrics)()
    try:
        ours, theirs = CollectorRegistry(), CollectorRegistry()
        metrics = Metrics(ours)
        sums, levels = metrics.counter("x", "counts x", ("a", "b")), metrics.gauge("y", "level of y", ("a",))
        seen = metrics.histogram("z_seconds", "times of z", ("a",), BOUNDS)
        lag = metrics.histogram("lag", "without labels", (), BOUNDS)
        counter = prometheus_client.Counter("pointsman_x", "counts x", ("a", "b"), registry=theirs)
        gauge = prometheus_client.Gauge("pointsman_y", "level of y", ("a",), registry=theirs)
        named = {"labelnames": ("a",), "buckets": BOUNDS, "registry": theirs}
        histogram = prometheus_client.Histogram("pointsman_z_seconds", "times of z", **named)
        alone = prometheus_client.Histogram("pointsman_lag", "without labels", buckets=BOUNDS, registry=theirs)
        for what, *of in steps:
            if what == "inc":
                sums[of[0], "b"].inc(of[1])
                counter.labels(of[0], "b").inc(of[1])
            elif what == "set":
                levels[of[0]].set(of[1])
                gauge.labels(of[0]).set(of[1])
            elif what == "observe":
                seen[of[0]].observe(*of[1:])
                histogram.labels(of[0]).observe(*of[1:])
            elif what == "lag":
                lag[()].observe(of[0])
                alone.observe(of[0])
            else:
                metrics.forget("a", of[0])
                counter.remove(of[0], "b")
                gauge.remove(of[0])
                histogram.remove(of[0])
        assert collected(ours) == collected(theirs)
    finally:
        enable_created_metrics()


def test_a_series_shows_when_it_was_made_and_its_exemplar_when_it_was_seen() -> None:
    registry, now = CollectorRegistry(), 1000.0
    metrics = Metrics(registry, unix_time=lambda: now)
    metrics.counter("x", "x", ("a",))["1"].inc()
    seen = metrics.histogram("z", "z", ("a",), BOUNDS)["1"]
    now = 2000.0
    seen.observe(0.3, TRACE)
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert {sample.name: sample.value for sample in samples if sample.name.endswith("_created")} == {
        "pointsman_x_created": 1000.0,
        "pointsman_z_created": 1000.0,
    }
    (exemplar,) = (sample.exemplar for sample in samples if sample.exemplar)
    assert exemplar == (TRACE, 0.3, 2000.0)


def test_a_counter_takes_nothing_away() -> None:
    with pytest.raises(ValueError, match="does not take -1"):
        Metrics(CollectorRegistry()).counter("x", "x", ())[()].inc(-1)


def test_a_gauge_with_a_function_is_what_that_returns_when_it_is_read() -> None:
    registry, running = CollectorRegistry(), [1, 2]
    Metrics(registry).gauge("y", "y", ("a",))["1"].set_function(running.__len__)
    running.append(3)
    assert series(registry, "y") == {("1",): 3}


def test_series_can_be_read_from_another_thread_while_calls_make_more() -> None:
    registry = CollectorRegistry()
    counter = Metrics(registry, most_series=10**6).counter("x", "x", ("a",))
    is_over = False

    def read() -> int:
        times = 0
        while not is_over or not times:
            series(registry, "x_total")
            times += 1
        return times

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        for number in range(3000):
            counter[str(number)].inc()
        is_over = True
        assert reading.result() >= 1
    assert len(series(registry, "x_total")) == 3000
