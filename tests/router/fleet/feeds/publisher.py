"""The sockets of an engine that publishes: PUB, and ROUTER for what was missed, as vLLM's and SGLang's publishers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from tests.router.fleet.feeds.engine import Published

END = (-1).to_bytes(8, "big", signed=True)


@dataclass
class Publisher:
    """Sends what it is given, and repeats what `buffer` has. `with_topic`: replays have the topic (vllm#45177)."""

    pub: zmq.asyncio.Socket
    router: zmq.asyncio.Socket
    events: str
    replay: str
    topic: bytes = b"kv@pod@model"
    with_topic: bool = False
    answers: bool = True
    buffer: list[Published] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    async def send(self, message: Published, *, loses: bool = False) -> None:
        self.buffer.append(message)
        if not loses:
            await self.pub.send_multipart([self.topic, message.seq.to_bytes(8, "big"), message.payload])

    async def serve_replays(self) -> None:
        while True:
            identity, empty, start = await self.router.recv_multipart()
            assert empty == b""
            self.asked.append(int.from_bytes(start, "big"))
            if not self.answers:
                continue
            head = [identity, b"", *([self.topic] if self.with_topic else [])]
            for message in self.buffer:
                if message.seq >= self.asked[-1]:
                    await self.router.send_multipart([*head, message.seq.to_bytes(8, "big"), message.payload])
            await self.router.send_multipart([*head, END, b""])


@asynccontextmanager
async def a_publisher(events: str = "tcp://127.0.0.1:*", replay: str = "tcp://127.0.0.1:*") -> AsyncIterator[Publisher]:
    context = zmq.asyncio.Context()
    # XPUB reports subscriptions, so that tests need not wait for a time
    pub, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    pub.setsockopt(zmq.LINGER, 0)
    pub.bind(events)
    router.bind(replay)
    at = [socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0") for socket in (pub, router)]
    publisher = Publisher(pub, router, at[0], at[1])
    serving = asyncio.create_task(publisher.serve_replays())
    try:
        yield publisher
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        context.destroy(linger=0)


async def subscribed(publisher: Publisher) -> None:
    """Wait for a subscription."""
    async with asyncio.timeout(5):
        while (await publisher.pub.recv())[:1] != b"\x01":
            pass


async def unsubscribed(publisher: Publisher) -> None:
    """Wait until a subscription ends."""
    async with asyncio.timeout(5):
        while (await publisher.pub.recv())[:1] != b"\x00":
            pass
