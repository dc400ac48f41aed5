"""OpenTelemetry's own variables say whether anything is exported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shards.wire.otel import CannotExport, exporter_of, is_wanted, tracer_provider

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    ("environment", "traces", "metrics"),
    [
        ({}, False, False),
        (ENDPOINT, True, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/v1/traces"}, True, False),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "none"}, True, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True, False),
        ({"OTEL_TRACES_EXPORTER": "OTLP "}, True, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False, False),
    ],
)
def test_an_endpoint_turns_on_export_unless_switched_off(
    environment: dict[str, str], traces: bool, metrics: bool
) -> None:
    assert (is_wanted("traces", environment), is_wanted("metrics", environment)) == (traces, metrics)


def test_an_unknown_exporter_is_refused() -> None:
    with pytest.raises(CannotExport, match="OTEL_TRACES_EXPORTER is 'zipkin'"):
        is_wanted("traces", {"OTEL_TRACES_EXPORTER": "zipkin"})


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(CannotExport, match="'http/json'; there are http/protobuf and grpc"):
        exporter_of("traces", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_an_exporter_that_is_not_installed_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(CannotExport, match=r"pip install 'pointsman\[otlp\]'"):
        exporter_of("traces", {})
    with pytest.raises(CannotExport, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
        exporter_of("traces", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"})


def test_without_variables_there_are_no_spans() -> None:
    assert tracer_provider("pointsman", "r") is None


def test_a_router_that_exports_nothing_imports_no_opentelemetry() -> None:
    script = (
        "import sys, router.start.app, router.start.commands.up, shards.service; "
        "print([m for m in sys.modules if 'opentelemetry' in m])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
