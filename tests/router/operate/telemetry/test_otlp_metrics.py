"""A collector gets the metrics of `/metrics` too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from opentelemetry.proto.metrics.v1 import metrics_pb2 as wire

from router.call.tracing import Answered, PromptTrace, TraceIds
from router.operate.telemetry.export import begin_metrics
from router.operate.telemetry.telemetry import Telemetry
from tests.standins.collector import Collector, a_collector

CUMULATIVE = wire.AGGREGATION_TEMPORALITY_CUMULATIVE
IDS = TraceIds("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


class Sampled:
    ids = IDS

    def prompt(self) -> PromptTrace:
        raise AssertionError("no prompt of it is answered")

    def end(self, what: Answered) -> None:
        pass


def a_call(telemetry: Telemetry, ttft_s: float, *, sampled: bool = False) -> None:
    with telemetry.account("r") as account:
        account.trace = Sampled() if sampled else account.trace
        account.tenant, account.service_class = "acme", "chat"
        account.heard(account.started_at + ttft_s)


@pytest_asyncio.fixture
async def collected(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    telemetry = Telemetry()
    for ttft_s in (0.004, 0.3, 0.3, 1000.0):
        a_call(telemetry, ttft_s)
    a_call(telemetry, 0.3, sampled=True)
    telemetry.backends.health("b0", True)
    async with a_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{collector.endpoint}/v1/metrics")
        async with AsyncExitStack() as stack:
            begin_metrics(stack, telemetry.registry)
        yield collector


def labels_of(point: wire.NumberDataPoint | wire.HistogramDataPoint) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in point.attributes}


async def test_the_last_numbers_arrive_when_the_process_ends(collected: Collector) -> None:
    (point,) = collected.metrics["pointsman_requests"].sum.data_points
    assert labels_of(point) == {"tenant": "acme", "service_class": "chat", "outcome": "finished"}
    assert point.as_double == 5
    assert collected.metrics["pointsman_requests"].sum.is_monotonic
    assert collected.metrics["pointsman_requests"].sum.aggregation_temporality == CUMULATIVE
    assert 0 < point.start_time_unix_nano <= point.time_unix_nano


async def test_gauges_are_gauges(collected: Collector) -> None:
    (point,) = collected.metrics["pointsman_backend_healthy"].gauge.data_points
    assert (labels_of(point), point.as_double) == ({"backend": "b0"}, 1)


async def test_histograms_have_the_conventions_name_their_buckets_and_their_exemplars(collected: Collector) -> None:
    metric = collected.metrics["gen_ai.server.time_to_first_token"]
    (point,) = metric.histogram.data_points
    assert metric.unit == "s"
    assert labels_of(point) == {"tenant": "acme", "service_class": "chat"}
    assert point.count == 5
    assert point.sum == pytest.approx(1000.904)
    assert point.explicit_bounds[-1] == 120
    counts = dict(zip([*point.explicit_bounds, "beyond"], point.bucket_counts, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {0.005: 1, 0.5: 3, "beyond": 1}
    assert not point.HasField("min")
    (exemplar,) = point.exemplars
    assert (exemplar.trace_id.hex(), exemplar.span_id.hex()) == IDS
    assert exemplar.as_double == pytest.approx(0.3)
    assert exemplar.time_unix_nano > 0


async def test_every_metric_of_the_registry_leaves(collected: Collector) -> None:
    assert {"pointsman_event_loop_lag_max_seconds", "pointsman_event_loop_lag_seconds"} <= collected.metrics.keys()
    assert collected.resources[0]["service.name"] == "pointsman"


async def test_a_collector_that_is_gone_does_not_keep_a_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:9/v1/metrics")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    async with asyncio.timeout(8), AsyncExitStack() as stack:
        begin_metrics(stack, Telemetry().registry)


async def test_nothing_is_exported_by_default() -> None:
    async with AsyncExitStack() as stack:
        begin_metrics(stack, Telemetry().registry)
        assert stack.pop_all()._exit_callbacks == type(stack)()._exit_callbacks  # type: ignore[attr-defined]
