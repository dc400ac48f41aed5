"""Export of traces and metrics by OTLP, if OpenTelemetry's standard variables ask for it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from policies.errors import ConfigError
from policies.quantities import digits
from shards.wire.otel import CannotExport, exporter_of, is_wanted, resource_of, shut_down, tracer_provider

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from router.call.tracing import Tracing

SERVICE = "pointsman"

_WITH_PROMPTS = frozenset({"true", "span_only", "span_and_event"})


def begin_tracing(stack: AsyncExitStack, clock: Callable[[], float] = time.monotonic) -> Tracing | None:
    """Makes traces until `stack` is left; None if the variables ask for none. Raises ConfigError."""
    try:
        provider = tracer_provider(SERVICE, _instance())
    except CannotExport as error:
        raise ConfigError(str(error)) from error
    if provider is None:
        return None
    from router.operate.telemetry.spans import Spans

    stack.push_async_callback(asyncio.to_thread, shut_down, provider)
    asked = os.environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").strip().lower()
    return Spans(provider.get_tracer("pointsman.router"), clock, with_prompts=asked in _WITH_PROMPTS)


def begin_metrics(stack: AsyncExitStack, registry: CollectorRegistry) -> None:
    """Export the metrics in `registry` until `stack` is left, if the variables ask for it. Raises ConfigError."""
    try:
        if not is_wanted("metrics"):
            return
        exporter = exporter_of("metrics")
    except CannotExport as error:
        raise ConfigError(str(error)) from error
    from router.operate.telemetry.otlp_metrics import MetricsPush

    push = MetricsPush(registry, resource_of(SERVICE, _instance()), exporter, every_s=_interval_s())
    push.start()
    stack.push_async_callback(asyncio.to_thread, push.close)


def _interval_s() -> float:
    interval = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or "60000"
    interval_ms = digits(interval, most=86_400_000)
    if not interval_ms:
        raise ConfigError(f"OTEL_METRIC_EXPORT_INTERVAL is '{interval}'", hint="write milliseconds, such as 60000")
    return interval_ms / 1000


def _instance() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
