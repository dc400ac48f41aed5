"""A vLLM server of eight data-parallel ranks with a cache each: how much of one large cache they are worth.

The single cache that they are compared with hears each prompt when it is asked, and so hits one that is still computed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from policies.sla.parse import parse
from router.start.app import Router
from tests.golden.event_encoders import Change, vllm_0_26
from tests.router.fleet.feeds.engine import Published
from tests.router.fleet.feeds.publisher import Publisher, a_publisher, subscribed
from tests.standins.block_cache import BlockCache
from tests.standins.standin import running
from tests.standins.vllm import BLOCK_SIZE, VLLMServer

RANKS, BLOCKS = 8, 512
PORTS = (26300, 26900)
SLA = """
classes: {chat: {}}
pools:
  gpu: {kind: vllm, at: ["URL"], options: {OPTIONS}, health: {probe_every: 100ms}}
rules: [{class: chat}]
server: {http: "127.0.0.1:0", grpc: off, drain: 1s}
"""
WORDS = ("block", "cache", "prefix", "router", "token", "model", "rank", "queue", "batch", "layer", "index", "engine")

Ask = Callable[[str], Awaitable[None]]
Workload = Callable[[Ask, random.Random, int], Awaitable[None]]


def some_text(rng: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += f"{rng.choice(WORDS)}{rng.randrange(1000)} "
    return text[:length]


async def documents(ask: Ask, rng: random.Random, count: int) -> None:
    """So many questions on 24 documents, some of which are asked about more often than others."""
    texts = [some_text(rng, 1200) for _ in range(24)]
    asked = rng.choices(texts, weights=[1 / (1 + at) ** 0.7 for at in range(len(texts))], k=count)
    await in_parallel([lambda text=text: ask(text + some_text(rng, 60)) for text in asked])  # type: ignore[misc]


async def conversations(ask: Ask, rng: random.Random, count: int) -> None:
    """So many turns of chats that share a system prompt and grow by a question and an answer."""
    system = some_text(rng, 400)

    async def chat() -> None:
        messages = system
        for _ in range(12):
            messages += some_text(rng, 100)
            await ask(messages)
            messages += VLLMServer.text[:4] + some_text(rng, 20)

    await in_parallel([chat for _ in range(count // 12)])


async def in_parallel(calls: list[Callable[[], Awaitable[None]]], at_once: int = 8) -> None:
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    await asyncio.gather(*(work() for _ in range(at_once)))


@dataclass
class Publishing:
    """Sends what the cache of one rank tells to a publisher, in order."""

    publisher: Publisher
    sent: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def hear(self, events: list[Change]) -> None:
        message = Published(self.sent, vllm_0_26(1_700_000_000.0 + self.sent, events, 0), 0.0, frozenset())
        self.sent += 1
        self.tasks.append(asyncio.create_task(self.publisher.send(message)))


@dataclass
class Stage:
    """A server of eight ranks behind a router, and a cache as large as all of theirs that sees the same prompts."""

    server: VLLMServer
    router: Router
    http: aiohttp.ClientSession
    single: BlockCache = field(default_factory=lambda: BlockCache(RANKS * BLOCKS, BLOCK_SIZE))
    as_ids: bool = False

    async def ask(self, text: str) -> None:
        """Ask the router, and the single cache."""
        prompt: Any = list(text.encode()) if self.as_ids else text
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "stream": True}
        self.single.query(text.encode())
        async with self.http.post(f"{self.router.http_url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()
        self.single.store(text.encode() + self.server.text[:4].encode())

    def share(self) -> float:
        """The hit rate of the ranks, by that of the single cache."""
        caches = [engine.cache for engine in self.server.engines]
        for cache in caches:
            cache.check()
        rate = sum(cache.hits for cache in caches) / sum(cache.queries for cache in caches)
        return rate / (self.single.hits / self.single.queries)


@asynccontextmanager
async def a_stage(options: str = "", *, with_events: bool = False) -> AsyncIterator[Stage]:
    server = VLLMServer(ranks=RANKS, blocks=BLOCKS, prefill_s_per_token=150e-6, text="done")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(server))
        publishing: list[Publishing] = []
        if with_events:
            publishers, at = await eight_publishers(stack)
            publishing = [Publishing(publisher) for publisher in publishers]
            for engine, each in zip(server.engines, publishing, strict=True):
                engine.cache.tell = each.hear  # type: ignore[assignment]
            options += f"events: 'tcp://127.0.0.1:{at}', events_ranks: '{RANKS}'"
        config = parse(SLA.replace("URL", server.url).replace("OPTIONS", options))
        router = await stack.enter_async_context(Router(config))
        assert await router.wait_until_reached(5)
        for each in publishing:
            await subscribed(each.publisher)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Stage(server, router, http, as_ids=with_events)
        assert await router.gateway.doors.emptied(5)
        router.check()


async def eight_publishers(stack: AsyncExitStack) -> tuple[list[Publisher], int]:
    """Publishers at ports behind one another, as those of one server are, and the first port."""
    for first in range(*PORTS, RANKS):
        async with AsyncExitStack() as tried:
            try:
                publishers = [
                    await tried.enter_async_context(a_publisher(f"tcp://127.0.0.1:{first + rank}"))
                    for rank in range(RANKS)
                ]
            except OSError:
                continue
            stack.push_async_exit(tried.pop_all())
            return publishers, first
    raise AssertionError("no eight ports behind one another are free")


@pytest.mark.parametrize(("workload", "count"), [(documents, 960), (conversations, 288)])
@pytest.mark.parametrize(("with_events", "least"), [(True, 0.97), (False, 0.95)], ids=["events", "learnt"])
async def test_eight_ranks_hit_their_caches_nearly_as_often_as_one_cache_of_their_size(
    workload: Workload, count: int, with_events: bool, least: float
) -> None:
    # a server that chooses its ranks reaches 0.25 to 0.4
    async with a_stage(with_events=with_events) as stage:
        assert len(stage.router.gateway.cluster.names()) == RANKS, "the server reported its number of ranks"
        await workload(stage.ask, random.Random(7), count)
        assert stage.share() >= least


async def test_a_server_that_chooses_the_rank_itself_loses_most_of_that() -> None:
    async with a_stage("ranks: '1'") as stage:
        assert list(stage.router.gateway.cluster.names()) == ["gpu-0"]
        await documents(stage.ask, random.Random(7), 240)
        assert stage.share() < 0.6
