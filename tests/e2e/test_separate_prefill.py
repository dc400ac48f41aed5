"""A pool of shards that only computes prompts, and one that fetches their KV and answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from policies import prefill
from policies.sla.parse import parse
from router.start.app import Router
from shards.engine import Engine, EngineOptions
from shards.server import ServerOptions, ShardServer
from tests.e2e.cluster import MODEL, bundled_model

SLA = """
classes: {chat: {}}
pools:
  answers: {kind: shard, at: ["ANSWERS"], model: bundled, prefill: prompts}
  prompts: {kind: shard, at: ["PROMPTS"], model: bundled}
rules: [{class: chat}]
server: {http: "127.0.0.1:0", grpc: off}
"""
SECRETS = {"answers": b"of these shards", "prompts": b"of these shards"}
LONG = "The meeting about the harbour begins at nine. " * 30


@dataclass
class Apart:
    """A router in front of both pools, with the engine of each."""

    router: Router
    engines: dict[str, Engine]
    http: aiohttp.ClientSession

    async def ask(self, text: str) -> dict[str, Any]:
        """The whole answer, with the log-probability of each token."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 12,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 5,
        }
        async with self.http.post(f"{self.router.http_url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            answer: dict[str, Any] = await reply.json()
            return answer

    def fetched(self) -> int:
        """Blocks that the answering shard has fetched."""
        use = self.engines["answers"]._pool.peers.use
        return 0 if use is None else use.blocks


@asynccontextmanager
async def apart(**secrets: bytes) -> AsyncIterator[Apart]:
    async with AsyncExitStack() as stack:
        engines, sla = {}, SLA
        for pool, secret in (SECRETS | secrets).items():
            options = EngineOptions(
                kv_blocks=128, deterministic=True, kv_listen=("127.0.0.1", 0), kv_secret=secret, host_bytes=2**24
            )
            engines[pool] = Engine(bundled_model(), options)
            stack.callback(engines[pool].close)
            server = ShardServer(engines[pool], "127.0.0.1:0", ServerOptions(shard=pool))
            await server.start()
            stack.push_async_callback(server.close)
            sla = sla.replace(pool.upper(), server.address)
        router = await stack.enter_async_context(Router(parse(sla)))
        assert await router.wait_until_reached(timeout_s=20)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Apart(router, engines, http)
        router.check()


async def test_an_answer_does_not_depend_on_where_its_prompt_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for worth in (1e9, -1e9):
        monkeypatch.setattr(prefill, "WORTH", worth)
        async with apart() as both:
            answer = await both.ask(LONG)
            # whole units of 256 tokens
            blocks = answer["usage"]["prompt_tokens"] // 256 * 4 if worth < 0 else 0
            assert both.fetched() == blocks
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            answers.append(answer["choices"])
    assert answers[0] == answers[1]


async def test_a_shard_that_may_not_fetch_computes_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "WORTH", -1e9)
    async with apart(prompts=b"another secret") as both:
        answer = await both.ask(LONG)
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        assert both.fetched() == 0
