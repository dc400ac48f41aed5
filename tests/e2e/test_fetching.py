"""A prompt goes to a free shard, which fetches the KV from the one that has computed it."""

from __future__ import annotations

import aiohttp

from router.start.app import Router
from shards.bundled.documents import prompt
from shards.engine import EngineOptions
from tests.e2e.cluster import KEYS, MODEL, a_whole
from tests.engines.routed import a_document
from tests.shards.attached import eventually


async def asked(router: Router, text: str) -> tuple[str, str, int]:
    """The answer to `text`, the backend that gave it, and the cached tokens."""
    body = {"model": MODEL, "prompt": text, "max_tokens": 8, "temperature": 0}
    headers = {"Authorization": f"Bearer {KEYS['acme']}", "X-Pointsman-Explain": "1"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{router.http_url}/v1/completions", json=body, headers=headers) as reply,
    ):
        assert reply.status == 200, await reply.text()
        answer = await reply.json()
        backend = reply.headers["X-Pointsman-Backend"]
        return answer["choices"][0]["text"], backend, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_shard_that_leaves_lends_its_kv_to_the_one_that_takes_over() -> None:
    options = EngineOptions(kv_blocks=512, kv_listen=("127.0.0.1", 0), kv_secret=b"a secret of shards")
    text = prompt(a_document(7, tokens=1800).text, "What is the colour of the door?")
    async with a_whole(2, options=options) as whole:
        router, engines = whole.router, [shard.loop._engine for shard in whole.shards]
        first, holder, cached = await asked(router, text)
        assert cached == 0
        await eventually(lambda: router.gateway.cluster.lenders)
        router.gateway.cluster.drain(holder)
        second, other, cached = await asked(router, text)
        assert other != holder
        assert second == first
        assert cached > 1500
        fetched = [engine._pool.peers.use for engine in engines]  # type: ignore[attr-defined]
        assert sum(use.blocks for use in fetched) >= 24
        await eventually(lambda: router.gateway.cluster.backend(other).load().fetched.tokens >= 24 * 64)  # type: ignore[union-attr]
        await whole.check_idle()
        for engine in engines:
            engine.close()  # type: ignore[attr-defined]


async def test_a_shard_that_is_about_to_stop_has_its_kv_fetched_before_it_does() -> None:
    options = EngineOptions(kv_blocks=512, kv_listen=("127.0.0.1", 0), kv_secret=b"a secret of shards")
    text = prompt(a_document(8, tokens=1800).text, "What is the colour of the door?")
    async with a_whole(3, options=options) as whole:
        first, holder, _ = await asked(whole.router, text)
        leaving = next(
            shard for shard in whole.shards if shard.address == whole.router.gateway.cluster.backend(holder).address
        )
        await leaving.drain()
        engines = [shard.loop._engine for shard in whole.shards]
        heirs = [shard.loop._engine for shard in whole.shards if shard is not leaving]
        assert min(heir._pool.peers.use.taken_over for heir in heirs) == 0  # type: ignore[attr-defined]
        assert sum(heir._pool.peers.use.taken_over for heir in heirs) >= 24  # type: ignore[attr-defined]
        await leaving.close()
        second, other, cached = await asked(whole.router, text)
        assert (second, other != holder, cached > 1500) == (first, True, True)
        for engine in engines:
            engine.close()  # type: ignore[attr-defined]
