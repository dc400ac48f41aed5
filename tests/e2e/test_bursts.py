"""32 requests at once on a new document of 8,192 tokens: four shards compute it once or twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import aiohttp
import torch

from policies.sla.parse import parse
from router.start.app import Router
from shards.engine import Engine, EngineOptions
from shards.model import Model, PagedNetwork
from shards.network.config import NetworkConfig, Rope
from shards.network.decoder import Decoder
from shards.network.loading import random_weights
from shards.server import ServerOptions, ShardServer
from tests.e2e.cluster import KEYS

DOCUMENT_TOKENS, REQUESTS, SHARDS = 8192, 32, 4

NETWORK = NetworkConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=512,
    hidden_size=32,
    intermediate_size=64,
    heads=1,
    kv_heads=1,
    head_dim=32,
    max_positions=16_384,
    rms_norm_eps=1e-6,
    rope=Rope(),
    windows=(None,),
)

SLA = """
tenants:
  acme: {keys: ["sha256:dc81b088d47dee432ace4a498915448892259b74b2c58b812bbdd356badfb103"]}
pools:
  own: {kind: shard, at: ["127.0.0.1:1"], model: random}
server: {http: "127.0.0.1:0", grpc: "127.0.0.1:0"}
"""


def an_engine() -> Engine:
    """An engine with random weights and a context of 16,384 tokens."""
    weights = random_weights(NETWORK, seed=0, dtype=torch.float32)
    network = PagedNetwork(Decoder(NETWORK, weights), kv_dtype=torch.float32)
    return Engine(Model("random", network, weights="random, seed 0"), EngineOptions(kv_blocks=300))


@asynccontextmanager
async def a_fleet() -> AsyncIterator[Router]:
    """A router in front of shards with such engines; checks at the end that nothing is left."""
    async with AsyncExitStack() as stack:
        shards = [
            ShardServer(an_engine(), "127.0.0.1:0", ServerOptions(shard=f"own-{number}")) for number in range(SHARDS)
        ]
        for shard in shards:
            await shard.start()
            stack.push_async_callback(shard.close)
        config = parse(SLA)
        pool = replace(config.pools["own"], at=tuple(shard.address for shard in shards))
        router = await stack.enter_async_context(Router(replace(config, pools={"own": pool})))
        assert await router.wait_until_reached(timeout_s=20)
        yield router
        router.check()
        for shard in shards:
            await shard.check()


async def computed(http: aiohttp.ClientSession, url: str | None, prompt: list[int]) -> int:
    """The tokens of `prompt` that were computed for it."""
    body = {"model": "random", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    headers = {"authorization": f"Bearer {KEYS['acme']}"}
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        usage = (await reply.json())["usage"]
        return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


async def test_a_new_document_that_many_ask_about_at_once_is_computed_at_most_twice() -> None:
    rng = random.Random(5)
    document = [rng.randrange(5, 500) for _ in range(DOCUMENT_TOKENS)]
    questions = [[rng.randrange(5, 500) for _ in range(32)] for _ in range(REQUESTS)]
    async with a_fleet() as router, aiohttp.ClientSession() as http:
        asked = [computed(http, router.http_url, document + question) for question in questions]
        tokens = await asyncio.gather(*asked)
    # each computes its question and the block in which that begins
    own_tokens = REQUESTS * (32 + 64)
    assert sum(tokens) - own_tokens <= 2 * DOCUMENT_TOKENS, sorted(tokens)[-6:]
    assert max(tokens) >= DOCUMENT_TOKENS
