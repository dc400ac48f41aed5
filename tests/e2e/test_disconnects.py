"""Clients that go away leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress

from shards.bundled.documents import document, facts_within, prompt
from shards.engine import EngineOptions
from shards.nouns import Load
from shards.server import ShardServer
from tests.e2e.cluster import KEYS, MODEL, Whole, a_whole

CLIENTS = 1000
AT_ONCE = 100


def a_request(rng: random.Random) -> bytes:
    paper = document(rng, facts_within(rng.choice((100, 400, 1500))))
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt(paper.text, paper.questions[0].question)}],
        "max_tokens": rng.choice((1, 16, 200)),
        "stream": rng.random() < 0.7,
        "n": rng.choice((1, 1, 1, 3)),
        "ignore_eos": True,
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS['acme']}\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def go_away_at_some_moment(whole: Whole, seed: int) -> None:
    rng = random.Random(seed)
    message = a_request(rng)
    reader, writer = await asyncio.open_connection(whole.router.http.host, whole.router.http.port)
    writer.write(message[: rng.randrange(1, len(message))] if rng.random() < 0.1 else message)
    await writer.drain()
    with suppress(TimeoutError):
        async with asyncio.timeout(rng.expovariate(1 / 0.15)):
            while await reader.read(1024):
                pass
    writer.transport.abort()


async def test_a_thousand_clients_that_disconnect_at_random_moments_leave_nothing() -> None:
    async with a_whole(2, options=EngineOptions(kv_blocks=400, max_running=32)) as whole:
        before = len(asyncio.all_tasks())
        slots = asyncio.Semaphore(AT_ONCE)

        async def ask(seed: int) -> None:
            async with slots:
                await go_away_at_some_moment(whole, seed)

        await asyncio.gather(*(ask(seed) for seed in range(CLIENTS)))
        await until_idle(whole)
        await whole.check_idle()
        assert len(asyncio.all_tasks()) <= before + 2, "tasks are left over"
        for shard in whole.shards:
            assert shard.service.open_requests == 0
            load = await load_of(shard)
            assert load.blocks_free == load.blocks_total, f"blocks are still owned: {load}"
            assert (load.running, load.waiting) == (0, 0)


async def load_of(shard: ShardServer) -> Load:
    """The engine's state now, read on its own thread."""
    answered: asyncio.Future[Load] = asyncio.get_running_loop().create_future()
    shard.loop.ask(lambda engine: engine.step().load, answered.set_result)
    return await answered


async def until_idle(whole: Whole, limit_s: float = 20.0) -> None:
    """Wait until the last cancellation has reached the last shard."""
    async with asyncio.timeout(limit_s):  # what happens in shards' threads announces nothing here
        while whole.router.gateway.doors.inside or any(s.service.open_requests for s in whole.shards):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
