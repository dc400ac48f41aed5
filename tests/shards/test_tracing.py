"""A shard's spans, on a real socket: children of what the router named, from Submit to the last token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shards.nouns import Finished, FinishReason, Load, Report, Submission
from shards.scripted import ScriptedEngine
from shards.tracing import ShardTraces
from tests.shards.attached import HandRouter, a_channel, a_shard, eventually

TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
ROUTERS_SPAN = 0x00F067AA0BA902B7


def a_context(sampled: bool = True) -> str:
    return f"00-{TRACE:032x}-{ROUTERS_SPAN:016x}-{int(sampled):02x}"


def a_provider() -> tuple[TracerProvider, InMemorySpanExporter]:
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


@asynccontextmanager
async def a_traced_router() -> AsyncIterator[tuple[HandRouter, InMemorySpanExporter, ShardTraces]]:
    provider, exporter = a_provider()
    traces = ShardTraces(provider)
    async with a_shard(ScriptedEngine(), traces=traces) as server, a_channel(server) as channel:
        router = HandRouter(channel)
        await router.hello()
        yield router, exporter, traces
        traces.check()
    traces.close()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_request_has_a_span_below_its_routers_with_prefill_and_decode_inside() -> None:
    async with a_traced_router() as (router, exporter, _):
        await router.ask(1, [*range(300)], max_new_tokens=4, trace=a_context())
        await router.until_finished(1)
    spans = by_name(exporter)
    assert spans.keys() == {"generate", "prefill", "decode"}
    generate, prefill, decode = spans["generate"], spans["prefill"], spans["decode"]
    assert generate.parent is not None
    assert (generate.parent.trace_id, generate.parent.span_id) == (TRACE, ROUTERS_SPAN)
    assert prefill.parent == decode.parent == generate.context
    assert prefill.start_time == generate.start_time
    assert prefill.end_time == decode.start_time
    assert decode.end_time == generate.end_time
    assert [event.name for event in prefill.events] == ["computing"]
    assert generate.attributes is not None
    assert generate.attributes["gen_ai.usage.input_tokens"] == 300
    assert generate.attributes["gen_ai.usage.output_tokens"] == 4
    assert generate.attributes["gen_ai.response.finish_reasons"] == ("length",)


async def test_the_choices_of_a_request_share_one_span_that_ends_with_the_last() -> None:
    async with a_traced_router() as (router, exporter, _):
        await router.ask(1, [1, 2, 3], max_new_tokens=2, choices=3, trace=a_context())
        await eventually(lambda: len(exporter.get_finished_spans()) == 3)
        await router.until_finished(1)
    attributes = by_name(exporter)["generate"].attributes
    assert attributes is not None
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) * 3


async def test_a_rejected_request_is_an_error_with_its_reason() -> None:
    async with a_traced_router() as (router, exporter, _):
        await router.ask(1, [1], max_new_tokens=10**6, trace=a_context())
        await router.until_finished(1)
    spans = by_name(exporter)
    assert spans.keys() == {"generate", "prefill"}
    assert not spans["generate"].status.is_ok
    assert (spans["generate"].attributes or {})["error.type"] == "rejected"


async def test_a_request_that_its_router_does_not_sample_leaves_nothing() -> None:
    async with a_traced_router() as (router, exporter, traces):
        await router.ask(1, [1], trace=a_context(sampled=False))
        await router.until_finished(1)
        assert repr(traces) == "<ShardTraces 0 open>"
    assert exporter.get_finished_spans() == ()


async def test_a_router_that_goes_away_ends_the_spans_of_its_requests() -> None:
    provider, exporter = a_provider()
    traces = ShardTraces(provider)
    engine = ScriptedEngine()
    engine.is_held = True
    async with a_shard(engine, traces=traces) as server:
        async with a_channel(server) as channel:
            router = HandRouter(channel)
            await router.hello()
            await router.ask(1, [1], trace=a_context())
            await eventually(lambda: "1 open" in repr(traces))
            router.call.cancel()
        await eventually(lambda: "0 open" in repr(traces))
    assert (by_name(exporter)["generate"].attributes or {})["gen_ai.response.finish_reasons"] == ("cancelled",)
    traces.close()


def test_an_unreadable_context_begins_a_trace_of_its_own() -> None:
    provider, exporter = a_provider()
    traces = ShardTraces(provider)
    traces.begin(Submission("k", 1, 1), "nonsense")
    end = Finished("k", 0, FinishReason.STOP, 1, 0, 1)
    traces.hear(Report(1, (), (), (end,), (), Load(0, 0, 0, 1, 1, 0.0, 0.0)))
    traces.close()
    assert by_name(exporter)["generate"].parent is None
