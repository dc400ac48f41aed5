"""A collector on loopback, as far as the wire format of OTLP/HTTP (1.x, protobuf) goes: POST /v1/traces, /v1/metrics.

It has no pipeline: it keeps what it was sent, so that tests can look at it.
"""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service
from opentelemetry.proto.common.v1 import common_pb2 as common
from opentelemetry.proto.metrics.v1 import metrics_pb2 as metrics
from opentelemetry.proto.trace.v1 import trace_pb2 as trace

PROTOBUF = "application/x-protobuf"
KINDS = {trace.Span.SPAN_KIND_SERVER: "server", trace.Span.SPAN_KIND_CLIENT: "client"}


@dataclass(frozen=True)
class Span:
    """One span as it came over the wire; ids are hex, times are nanoseconds since 1970."""

    service: str
    name: str
    kind: str
    trace_id: str
    id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: dict[str, int]
    is_error: bool
    status_message: str = ""


@dataclass
class Collector:
    """Everything received so far."""

    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, metrics.Metric] = field(default_factory=dict)
    resources: list[dict[str, Any]] = field(default_factory=list)
    endpoint: str = ""

    def named(self, name: str) -> list[Span]:
        """All spans of this name, in the order of their start."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    def span(self, name: str, kind: str = "internal") -> Span:
        """The only span of this name and kind."""
        (span,) = (span for span in self.named(name) if span.kind == kind)
        return span

    def children(self, parent: Span) -> list[Span]:
        """Its child spans, in the order of their start."""
        return sorted((span for span in self.spans if span.parent_id == parent.id), key=lambda span: span.start_ns)

    async def take_traces(self, request: web.Request) -> web.Response:
        message = trace_service.ExportTraceServiceRequest.FromString(await _body(request))
        for resource in message.resource_spans:
            labels = _attributes(resource.resource.attributes)
            self.resources.append(labels)
            for scope in resource.scope_spans:
                self.spans += [_span(span, labels["service.name"]) for span in scope.spans]
        return _answer(trace_service.ExportTraceServiceResponse())

    async def take_metrics(self, request: web.Request) -> web.Response:
        message = metrics_service.ExportMetricsServiceRequest.FromString(await _body(request))
        for resource in message.resource_metrics:
            self.resources.append(_attributes(resource.resource.attributes))
            for scope in resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}
        return _answer(metrics_service.ExportMetricsServiceResponse())


def _answer(message: Any) -> web.Response:
    return web.Response(body=message.SerializeToString(), content_type=PROTOBUF)


async def _body(request: web.Request) -> bytes:
    assert request.headers["content-type"] == PROTOBUF
    body = await request.read()
    return gzip.decompress(body) if request.headers.get("content-encoding") == "gzip" else body


def _span(span: trace.Span, service: str) -> Span:
    return Span(
        service,
        span.name,
        KINDS.get(span.kind, "internal"),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        {event.name: event.time_unix_nano for event in span.events},
        span.status.code == trace.Status.STATUS_CODE_ERROR,
        span.status.message,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


@asynccontextmanager
async def a_collector() -> AsyncIterator[Collector]:
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.take_traces)
    app.router.add_post("/v1/metrics", collector.take_metrics)
    server = TestServer(app)
    await server.start_server()
    collector.endpoint = str(server.make_url("")).rstrip("/")
    try:
        yield collector
    finally:
        await server.close()


def environment(collector: Collector, **more: str) -> Iterator[tuple[str, str]]:
    """The variables that make a process send there."""
    yield "OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint
    yield from more.items()
