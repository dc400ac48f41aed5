"""Explanations and metrics of KV that a shard fetches from another one, and shards that cannot fetch."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import aiohttp

from shards.engine import EngineOptions
from tests.e2e.cluster import KEYS, MODEL, Whole, a_whole
from tests.router.parts import series
from tests.shards.attached import eventually

OPTIONS = EngineOptions(kv_blocks=512, kv_listen=("127.0.0.1", 0), kv_secret=b"of the shards")
BEARER = {"Authorization": f"Bearer {KEYS['acme']}"}
LONG = "The quick brown fox jumps over the lazy dog. " * 240


async def ask(whole: Whole, http: aiohttp.ClientSession, text: str = LONG) -> tuple[str, int, dict[str, Any]]:
    """The answer, its cached tokens, and the explanation of its placement."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0}
    headers = {**BEARER, "X-Pointsman-Explain": "1"}
    async with http.post(f"{whole.router.http_url}/v1/chat/completions", json=body, headers=headers) as reply:
        content = await reply.json()
        assert reply.status == 200, content
        why = json.loads(reply.headers["X-Pointsman-Decision"])
    cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
    return content["choices"][0]["message"]["content"], cached, why


async def holder_of_long(whole: Whole, http: aiohttp.ClientSession) -> tuple[str, str]:
    """The backend that has answered LONG and gets no more requests, and its answer."""
    answer, cached, why = await ask(whole, http)
    assert cached == 0
    assert "fetch" not in why
    whole.router.gateway.cluster.drain(why["chosen"])
    return why["chosen"], answer


def close_engines(whole: Whole) -> None:
    for shard in whole.shards:
        shard._engine.close()


async def test_a_shard_fetches_what_another_one_computed_and_answers_the_same() -> None:
    async with a_whole(2, options=OPTIONS) as whole, aiohttp.ClientSession() as http:
        holder, answer = await holder_of_long(whole, http)
        again, cached, why = await ask(whole, http)
        assert why["chosen"] != holder
        assert (why["fetch"]["backend"], why["fetch"]["tokens"]) == (holder, cached)
        assert why["fetch"]["seconds"] < why["fetch"]["computing_s"]
        assert cached > 0.9 * why["prompt_tokens"]
        assert again == answer
        backend = whole.router.gateway.cluster.backend(why["chosen"])
        await eventually(lambda: backend.load().fetched is not None)
        fetched = backend.load().fetched
        assert fetched is not None
        assert fetched.tokens == cached
        # now it is held in both, and nothing is fetched again
        again, cached, why = await ask(whole, http)
        assert (again, "fetch" in why) == (answer, False)
        registry = whole.router.telemetry.registry
        assert series(registry, "transferred_tokens_total") == {(why["chosen"], "cache"): cached}
        assert series(registry, "backend_fetched_kv")[why["chosen"], "tokens"] == cached
        await whole.check_idle()
        close_engines(whole)


async def test_a_shard_that_cannot_fetch_computes_and_answers_the_same() -> None:
    async with a_whole(2, options=OPTIONS) as whole, aiohttp.ClientSession() as http:
        holder, answer = await holder_of_long(whole, http)
        # its port for KV is gone, and the router does not know that yet
        server = whole.shards[int(holder[-1])]._engine._server
        assert server is not None
        server.close()
        again, cached, why = await ask(whole, http)
        assert why["fetch"]["backend"] == holder
        assert (again, cached) == (answer, 0)
        await whole.check_idle()
        close_engines(whole)


async def test_shards_without_a_port_for_kv_compute() -> None:
    options = replace(OPTIONS, kv_listen=None)
    async with a_whole(2, options=options) as whole, aiohttp.ClientSession() as http:
        _, answer = await holder_of_long(whole, http)
        again, cached, why = await ask(whole, http)
        assert (again, cached, "fetch" in why) == (answer, 0, False)
