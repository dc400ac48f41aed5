"""One request's trace, exported by OTLP: router, shard and backend in one tree."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from policies.sla.parse import parse
from router.start.app import Router
from shards.engine import Engine, EngineOptions
from shards.server import ServerOptions, ShardServer
from shards.tracing import ShardTraces
from shards.wire.otel import tracer_provider
from tests.backends.upstream import an_upstream
from tests.e2e.cluster import KEYS, MODEL, TWO_TENANTS, bundled_model
from tests.router.operate.telemetry.traced import CLIENT_SPAN, TRACE, TRACEPARENT, tracing_to_a_collector
from tests.standins.collector import Span


async def ask(router: Router, model: str) -> None:
    headers = {"authorization": f"Bearer {KEYS['acme']}", "traceparent": TRACEPARENT}
    messages = [{"role": "user", "content": "The access code"}]
    body = {"model": model, "messages": messages, "max_tokens": 4, "stream": True}
    url = f"{router.http_url}/v1/chat/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=headers) as reply:
        text = await reply.text()
        assert reply.status == 200, text


async def test_every_span_has_the_right_parent_across_router_shard_and_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tracing_to_a_collector(monkeypatch) as (tracing, collector, stack), an_upstream() as upstream:
        provider = tracer_provider("pointsman-shard", "own-0")
        assert provider is not None
        traces = ShardTraces(provider)
        engine = Engine(bundled_model(), EngineOptions(kv_blocks=64))
        shard = ShardServer(engine, "127.0.0.1:0", ServerOptions(shard="own-0", traces=traces))
        await shard.start()
        sla = TWO_TENANTS.replace(", pools: [own]", "").replace("127.0.0.1:1", shard.address)
        other = f"pools:\n  other: {{kind: openai_compatible, at: {upstream.url}, model: m}}"
        config = parse(sla.replace("pools:", other))
        async with Router(config, tracing=tracing) as router:
            assert await router.wait_until_reached(20)
            await ask(router, MODEL)
            await ask(router, "m")
        await shard.close()
        await asyncio.to_thread(traces.close)
        await stack.aclose()

    def tree(span: Span) -> dict[str, object]:
        return {f"{child.service}: {child.name}": tree(child) for child in collector.children(span)}

    before: dict[str, object] = {"pointsman: queue": {}, "pointsman: decide": {}}
    seen: dict[str, object] = {"pointsman: prefill": {}, "pointsman: decode": {}}
    done: dict[str, object] = {"pointsman-shard: prefill": {}, "pointsman-shard: decode": {}}
    on_shard, on_server = collector.span(f"chat {MODEL}", "server"), collector.span("chat m", "server")
    assert tree(on_shard) == before | {f"pointsman: chat {MODEL}": seen | {"pointsman-shard: generate": done}}
    assert tree(on_server) == before | {"pointsman: chat m": seen}
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert on_shard.parent_id == on_server.parent_id == CLIENT_SPAN
    attempt = collector.span("chat m", "client")
    ((_, _, headers),) = upstream.received
    assert headers["traceparent"] == f"00-{TRACE}-{attempt.id}-01"
    assert attempt.attributes["server.port"] == int(upstream.url.rpartition(":")[2])
    served = {
        resource["service.instance.id"]
        for resource in collector.resources
        if resource["service.name"] == "pointsman-shard"
    }
    assert served == {"own-0"}
