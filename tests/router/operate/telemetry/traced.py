"""Routers with a collector's stand-in for their spans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from router.call.tracing import Tracing
from router.operate.telemetry.export import begin_tracing
from tests.standins.collector import Collector, a_collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CLIENT_SPAN}-01"

Finish = Callable[[], "asyncio.Future[None]"]


@asynccontextmanager
async def tracing_to_a_collector(
    monkeypatch: pytest.MonkeyPatch, **environment: str
) -> AsyncIterator[tuple[Tracing, Collector, AsyncExitStack]]:
    """Tracing as the environment asks for it; what is left arrives when the stack is closed."""
    async with a_collector() as collector:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, **environment}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        async with AsyncExitStack() as stack:
            tracing = begin_tracing(stack)
            assert tracing is not None
            yield tracing, collector, stack
