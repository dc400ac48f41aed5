"""Exporters in the environment that cannot be had are errors at the start."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

import pytest

from policies.errors import ConfigError
from router.operate.telemetry.export import begin_metrics, begin_tracing
from router.operate.telemetry.telemetry import Telemetry
from tests.router.parts import CHAT, ScriptedBackend, a_chat, a_client, a_router

GONE = "http://127.0.0.1:9"


async def test_tracing_is_off_by_default() -> None:
    async with AsyncExitStack() as stack:
        assert begin_tracing(stack) is None


@pytest.mark.parametrize("signal", ["trace", "metric"])
async def test_an_exporter_that_is_not_installed_stops_the_start(monkeypatch: pytest.MonkeyPatch, signal: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", GONE)
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.http.{signal}_exporter", None)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match="opentelemetry-exporter-otlp-proto-http"):
            begin_tracing(stack) if signal == "trace" else begin_metrics(stack, Telemetry().registry)


@pytest.mark.parametrize("interval", ["soon", "0", "-1"])
async def test_an_interval_that_is_no_time_stops_the_start(monkeypatch: pytest.MonkeyPatch, interval: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", GONE)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", interval)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match="write milliseconds"):
            begin_metrics(stack, Telemetry().registry)


async def test_requests_are_answered_and_the_router_ends_though_the_collector_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", GONE)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    async with asyncio.timeout(8), AsyncExitStack() as stack:
        tracing = begin_tracing(stack)
        async with a_router(ScriptedBackend(), tracing=tracing) as router, a_client(router) as client:
            status, _ = await client.answer(CHAT, a_chat())
    assert status == 200
