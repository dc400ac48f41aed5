"""Clients that behave badly, beside the load. What they get is not compared with anything."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from tests.chaos.system import KEYS, STRAYS, System

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def a_message(system: System, question: str, *, streams: bool = True, most: int = 20) -> bytes:
    """A whole request for a chat."""
    body = {
        "model": system.plan.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": most,
        "stream": streams,
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[STRAYS]}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


@asynccontextmanager
async def connected(system: System, *, to_grpc: bool = False) -> AsyncIterator[Streams]:
    """A connection to the first router, aborted in the end."""
    address = system.doors[0].grpc if to_grpc else system.doors[0].http.removeprefix("http://")
    host, _, port = address.rpartition(":")
    # a small buffer: the router notices early that a client does not read
    reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def repeated(act: Callable[[int], Awaitable[None]], at_once: int) -> AsyncIterator[None]:
    """`act` runs again and again with further numbers, `at_once` at a time, until the context is left."""
    numbers = itertools.count()

    async def again() -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                await act(next(numbers))
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(again()) for _ in range(at_once)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def leaving(system: System, seed: int) -> AsyncIterator[None]:
    """Clients disconnect at random moments."""
    rng = random.Random(seed)

    async def act(number: int) -> None:
        message = a_message(system, f"Stray {number}", streams=rng.random() < 0.7)
        async with connected(system) as (reader, writer):
            writer.write(message[: rng.randrange(1, len(message))] if rng.random() < 0.2 else message)
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.expovariate(1 / 0.15)):
                    while await reader.read(1024):
                        pass

    async with repeated(act, 6):
        yield


@asynccontextmanager
async def reading_slowly(system: System, _: int) -> AsyncIterator[None]:
    """Clients read ten bytes a second."""

    async def act(number: int) -> None:
        async with connected(system) as (reader, writer):
            writer.write(a_message(system, f"Stray {number}"))
            while await reader.read(10):  # noqa: ASYNC110
                await asyncio.sleep(1)

    async with repeated(act, 20):
        yield


@asynccontextmanager
async def pipelining(system: System, _: int) -> AsyncIterator[None]:
    """Clients send eight requests at once on one connection and read all the answers."""

    async def act(number: int) -> None:
        async with connected(system) as (reader, writer):
            for part in range(8):
                writer.write(a_message(system, f"Stray {number}.{part}", streams=part % 2 == 0, most=4))
            async with asyncio.timeout(20):
                while await reader.read(1024):
                    pass

    async with repeated(act, 4):
        yield


@asynccontextmanager
async def unfinished_heads(system: System, _: int) -> AsyncIterator[None]:
    """Two hundred connections that never finish the head of their request."""
    async with AsyncExitStack() as stack:
        for number in range(200):
            with suppress(OSError):
                _, writer = await stack.enter_async_context(connected(system))
                writer.write(a_message(system, f"Stray {number}")[: 10 + number % 60])
        yield


@asynccontextmanager
async def sending_garbage(system: System, seed: int) -> AsyncIterator[None]:
    """Clients send random bytes to the ports for HTTP and gRPC."""
    rng = random.Random(seed)

    async def act(number: int) -> None:
        async with connected(system, to_grpc=number % 2 == 0) as (reader, writer):
            writer.write(rng.randbytes(rng.randrange(1, 5000)))
            with suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    while await reader.read(1024):
                        pass

    async with repeated(act, 6):
        yield


@asynccontextmanager
async def sending_too_much(system: System, _: int) -> AsyncIterator[None]:
    """Clients send chats of 8 MB for a model of 4,096 tokens."""

    async def act(number: int) -> None:
        async with connected(system) as (reader, writer):
            writer.write(a_message(system, "x y " * 2_000_000))
            async with asyncio.timeout(20):
                await reader.read(1024)

    async with repeated(act, 2):
        yield
