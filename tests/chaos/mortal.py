"""Engines that a word in a prompt makes die, hang or answer nonsense, as few real ones do on purpose."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.raw_engine import MODELS, whole

BACK_S = 0.1
"""Seconds from the death of an engine to its return at the same port, as under a supervisor."""

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    """`data` as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST = b"0\r\n\r\n"
_EVENT = b'data: {"object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{%b}%b}]}\n\n'
CHUNK = _EVENT % (b'"content":"a "', b"")
END = _EVENT % (b"", b',"finish_reason":"stop"') + b"data: [DONE]\n\n"
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a "}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
}


@dataclass(eq=False)
class Mortal:
    """Answers chats in `answer_s`, unless the text begins with the name of a fault; `executed` counts those texts.

    A death closes its port and resets all of its connections, as that of a process does; it is back after BACK_S.
    """

    answer_s: float = 0.01
    executed: Counter[str] = field(default_factory=Counter)
    deaths: int = 0
    port: int = 0
    is_broken: bool = False
    """Does it answer 500 to everything?"""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def die(self) -> None:
        """All connections are lost, and none is taken for a while."""
        if self._server is None:
            return
        self.deaths += 1
        self._server.close()
        self._server = None
        for writer in self._writers:
            writer.transport.abort()
        self._keep(asyncio.create_task(self._come_back()))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _come_back(self) -> None:
        await asyncio.sleep(BACK_S)
        await self.open()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._keep(task)
        self._writers.add(writer)
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
                length = next((line for line in head.split("\r\n") if line.startswith("content-length:")), ":0")
                body = await reader.readexactly(int(length.partition(":")[2]))
                if head.startswith("get /v1/models"):
                    writer.write(whole(MODELS))
                elif head.startswith("get"):
                    writer.write(whole(b"{}", status=200 if head.startswith("get /health") else 404))
                else:
                    await self._answer(json.loads(body), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, body: Any, writer: asyncio.StreamWriter) -> None:
        text = body["messages"][0]["content"]
        fault = FAULTS.get(text.partition(":")[0])
        if self.is_broken:
            writer.write(whole(b'{"error": {"message": "CUDA error"}}', 500))
        elif fault is not None:
            self.executed[text] += 1
            await fault(self, writer)
        elif body.get("stream"):
            writer.write(HEAD + chunked(CHUNK))
            await asyncio.sleep(self.answer_s)
            writer.write(chunked(CHUNK + END) + LAST)
        else:
            await asyncio.sleep(self.answer_s)
            writer.write(whole(json.dumps(ANSWER).encode()))


Fault = Callable[[Mortal, asyncio.StreamWriter], Awaitable[None]]


async def dies_at_once(engine: Mortal, _: asyncio.StreamWriter) -> None:
    engine.die()


async def dies_in_prefill(engine: Mortal, _: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.05)
    engine.die()


async def dies_after_its_first_token(engine: Mortal, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(CHUNK))
    await writer.drain()
    await asyncio.sleep(0.05)
    engine.die()


async def hangs(_: Mortal, __: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def hangs_after_its_first_token(_: Mortal, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(CHUNK))
    await writer.drain()
    await asyncio.Event().wait()


async def says_nonsense(_: Mortal, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b"{broken"))


async def streams_nonsense(_: Mortal, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(CHUNK + b"data: {broken\n\n") + LAST)


async def breaks_off(_: Mortal, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()


async def says_another_type(_: Mortal, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b'{"choices": 5}'))


async def says_more_than_was_asked(_: Mortal, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(3000 * CHUNK) + LAST)


async def says_500(_: Mortal, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b'{"error": {"message": "Internal server error"}}', 500))


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        dies_at_once,
        dies_in_prefill,
        dies_after_its_first_token,
        hangs,
        hangs_after_its_first_token,
        says_nonsense,
        streams_nonsense,
        breaks_off,
        says_another_type,
        says_more_than_was_asked,
        says_500,
    )
}
HARMFUL = ("dies_at_once", "dies_in_prefill", "dies_after_its_first_token", "hangs", "hangs_after_its_first_token")
DEADLY = HARMFUL[:3]


@asynccontextmanager
async def mortals(count: int) -> AsyncIterator[list[Mortal]]:
    """So many engines."""
    engines = [Mortal() for _ in range(count)]
    try:
        for engine in engines:
            await engine.open()
        yield engines
    finally:
        for engine in engines:
            await engine.close()
