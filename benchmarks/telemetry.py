"""Cost of telemetry per request: off, traces not sampled, traces sampled, the decision log.

A whole call through the pipeline (identify, classify, admit, decide, relay 33 pieces, settle, count) to a backend that
answers from a script, without sockets, in turn with each setting. Spans go to an exporter that drops them, lines of the
decision log to a file. Times are those of the process, including its exporting threads, in the quietest round.

    python benchmarks/telemetry.py [--calls 100] [--rounds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from backends.fake import Answer, FakeBackend
from policies.sla.parse import parse
from router.ask import Ask, Chat
from router.call.bodies import Held
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.call.tracing import Tracing
from router.operate.telemetry.spans import Spans
from router.operate.telemetry.telemetry import Telemetry
from router.start.build import build

SLA = """
classes: {interactive: {ttft_p95: 800ms}}
tenants: {acme: {anonymous: true}}
rules: [{class: interactive}]
pools: {fake: {kind: fake, at: ["127.0.0.1:1"]}}
"""
PIECES = 33


class Dropping(SpanExporter):
    """Takes spans and drops them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


class Client:
    """A caller that reads everything."""

    key: str | None = None
    trace: Mapping[str, str] = {}

    def __init__(self, id: str) -> None:  # noqa: A002
        self.id = id

    async def read(self, held: Held) -> Ask:  # noqa: ARG002 - there is no body
        return Ask(
            "fake", (Chat([{"role": "user", "content": "hello"}]),), ({"model": "fake"},), "/v1/chat/completions"
        )

    def limited(self, standing: Any) -> None:
        pass

    def explain(self, index: int, explanation: Any) -> None:
        pass

    def place(self, index: int, placement: Any) -> None:
        pass

    async def write(self, index: int, delta: Any) -> None:
        pass

    def has_seen(self, index: int) -> bool:  # noqa: ARG002
        return False


def tracing(sampler: Sampler) -> Tracing:
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Dropping()))
    return Spans(provider.get_tracer("benchmark"), time.monotonic)


async def a_gateway(stack: AsyncExitStack, *, traces: Tracing | None = None, log: Path | None = None) -> Gateway:
    config = parse(SLA)
    config = replace(config, server=replace(config.server, decision_log=None if log is None else str(log)))
    backend = FakeBackend("b0", script=Answer(texts=("word ",) * PIECES))
    options: dict[str, Any] = {} if traces is None else {"tracing": traces}
    gateway = build(config, backends=lambda _: [backend], **options).gateway
    telemetry = gateway.observer
    assert isinstance(telemetry, Telemetry)
    if telemetry.decisions is not None:
        telemetry.decisions.open()
        stack.callback(telemetry.decisions.close)
    await stack.enter_async_context(gateway.cluster)
    while not gateway.is_ready():
        await gateway.cluster.health_changed()
    return gateway


async def measured(gateway: Gateway, calls: int) -> float:
    """Seconds of the process for one call."""
    began_s = time.process_time()
    for number in range(calls):
        await serve(Client(str(number)), gateway)
    return (time.process_time() - began_s) / calls


async def compare(calls: int, rounds: int) -> dict[str, list[float]]:
    async with AsyncExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "decisions.jsonl"
        gateways = {
            "nothing wanted": await a_gateway(stack),
            "traced, not sampled": await a_gateway(stack, traces=tracing(ALWAYS_OFF)),
            "traced, sampled": await a_gateway(stack, traces=tracing(ALWAYS_ON)),
            "decision log": await a_gateway(stack, log=log),
        }
        times: dict[str, list[float]] = {name: [] for name in gateways}
        for _ in range(rounds):
            for name, gateway in gateways.items():
                times[name].append(await measured(gateway, calls))
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    times = asyncio.run(compare(arguments.calls, arguments.rounds))
    off_s = min(times["nothing wanted"])
    print(f"{'microseconds of a call':24}{'best':>9}{'of nothing wanted':>19}")
    for name, seconds in times.items():
        print(f"{name:24}{1e6 * min(seconds):9.1f}{min(seconds) / off_s:18.2f}x")


if __name__ == "__main__":
    main()
