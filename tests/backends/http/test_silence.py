"""A server that says nothing in the middle of its answer is given up; a reader that takes its time is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from backends.http.silence import Silence


@asynccontextmanager
async def a_reply(says: asyncio.Queue[bytes]) -> AsyncIterator[aiohttp.ClientResponse]:
    """The reply of a server that sends a first word and then what `says` brings, until it brings nothing."""

    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        # the head goes out with it
        await reply.write(b"first")
        while data := await says.get():
            await reply.write(data)
        return reply

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as reply:
        assert await reply.content.readany() == b"first"
        yield reply
        reply.close()
    await runner.cleanup()


async def test_all_is_read_and_then_nothing() -> None:
    says: asyncio.Queue[bytes] = asyncio.Queue()
    async with a_reply(says) as reply:
        silence = Silence(reply, 30.0)
        for data in (b"one", b"two"):
            says.put_nowait(data)
            assert await silence.read() == data
        says.put_nowait(b"")
        assert await silence.read() == b""
        silence.close()


async def test_who_waits_too_long_is_told_so() -> None:
    says: asyncio.Queue[bytes] = asyncio.Queue()
    async with a_reply(says) as reply:
        silence = Silence(reply, 0.03)
        says.put_nowait(b"one")
        assert await silence.read() == b"one"
        with pytest.raises(aiohttp.SocketTimeoutError, match=r"nothing came for 0\.03 s"):
            await silence.read()
        silence.close()


async def test_time_that_the_reader_takes_is_not_the_servers() -> None:
    says: asyncio.Queue[bytes] = asyncio.Queue()
    async with a_reply(says) as reply:
        silence = Silence(reply, 0.05)
        says.put_nowait(b"one")
        assert await silence.read() == b"one"
        # nobody waits for the server, however often the timer looks
        await asyncio.sleep(0.12)
        says.put_nowait(b"two")
        assert await silence.read() == b"two"
        assert repr(silence) == "<Silence of at most 0.05 s>"
        silence.close()
