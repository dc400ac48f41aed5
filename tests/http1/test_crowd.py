"""Too many clients: connections without a request make room for those that have one."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from http1.limits import ServerLimits
from http1.request import ClientConnection, Handler, Reply, Request, Response
from http1.server import HttpServer
from tests.http1.parts import a_connection, a_request, echo, eventually, read_all, reply_to, statuses
from tests.http1.test_deadline import a_client
from tests.virtual_time import run_virtually

CLOSE = "Connection: close"
OTHER = "127.0.0.2"
"""Another address of this machine."""

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Crowd:
    """A server, and connections that its test opens."""

    def __init__(self, server: HttpServer, port: int, limited: Counter[str], stack: AsyncExitStack) -> None:
        self.server, self.port, self.limited, self._stack = server, port, limited, stack
        self.pairs: list[Pair] = []

    async def connected(self, *, address: str = OTHER, sent: bytes = b"") -> Pair:
        """One more connection from `address`, which the server has accepted, and has sent these bytes on."""
        before = self.server.accepted
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        self._stack.callback(writer.transport.abort)
        # a pair that is dropped is closed
        self.pairs.append((reader, writer))
        writer.write(sent)
        await eventually(lambda: self.server.accepted > before)
        return reader, writer

    async def answer(self) -> list[int]:
        """The status that another client gets."""
        return statuses(await reply_to(self.port, a_request(CLOSE, body=b"x")))


@asynccontextmanager
async def a_crowd(handler: Handler = echo, **limits: object) -> AsyncIterator[Crowd]:
    limited = Counter[str]()
    server = HttpServer(handler, ServerLimits(**limits), on_limit=lambda limit: limited.update([limit]))  # type: ignore[arg-type]
    port = await server.listen("127.0.0.1", 0)
    async with AsyncExitStack() as stack:
        yield Crowd(server, port, limited, stack)
    await server.close()
    assert (server.connections, server.waiting) == (0, 0)


async def known(request: Request) -> Reply:
    """Answers, and vouches for clients that have a key."""
    request.is_known = "authorization" in request.headers
    return Response(200, await request.body())


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo", b"\r\n"])
async def test_the_oldest_stranger_of_an_address_makes_room_for_the_next(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_crowd(strangers=3) as crowd:
        pairs = [await crowd.connected(sent=sent) for _ in range(5)]
        assert await read_all(pairs[0][0]) == await read_all(pairs[1][0]) == b""
        assert crowd.server.connections == 3
        pairs[4][1].write(a_request(CLOSE, body=b"y") if sent == b"\r\n" or not sent else b"st: a\r\n\r\n")
        assert statuses(await pairs[4][0].read(100)) == [200]
        assert crowd.limited == {"connections_of_address": 2}
        assert await crowd.answer() == [200]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith(f"closed 1 connections without a known key, the last of {OTHER}")


async def test_connections_of_a_known_client_are_not_counted_as_strangers() -> None:
    async with a_crowd(known, strangers=2) as crowd:
        pairs = [await crowd.connected(sent=a_request("Authorization: x")) for _ in range(6)]
        for reader, _ in pairs:
            await reader.readuntil(b"\r\n\r\n")
        assert (crowd.server.waiting, crowd.limited) == (6, Counter())


async def test_a_client_that_was_answered_but_has_no_key_stays_a_stranger() -> None:
    async with a_crowd(known, strangers=2) as crowd:
        pairs = [await crowd.connected(sent=a_request()) for _ in range(4)]
        assert statuses(await read_all(pairs[0][0])) == [200]
        assert crowd.limited == {"connections_of_address": 2}


async def test_an_exempt_address_may_have_any_number() -> None:
    async with a_crowd(strangers=2, is_exempt=lambda address: address == OTHER) as crowd:
        for _ in range(5):
            await crowd.connected()
        assert (crowd.server.connections, crowd.limited) == (5, Counter())
        crowd.server.limits = replace(crowd.server.limits, is_exempt=lambda _: False)
        await crowd.connected()
        assert crowd.limited == {"connections_of_address": 1}


async def test_idle_connections_make_room_when_there_are_too_many_in_all() -> None:
    async with a_crowd(known, connections=2) as crowd:
        first, _ = await crowd.connected(sent=a_request("Authorization: x"))
        await first.readuntil(b"\r\n\r\n")
        second, _ = await crowd.connected()
        assert await crowd.answer() == [200]
        assert await read_all(second) == b"", "a stranger is missed less than a known client that is idle"
        assert await crowd.answer() == [200]
        assert crowd.limited == {"connections": 1}
        assert not first.at_eof()


async def test_a_client_is_turned_away_while_all_connections_have_requests() -> None:
    go_on = asyncio.Event()

    async def handler(_: Request) -> Reply:
        await go_on.wait()
        return Response(200, b"x")

    async with a_crowd(handler, connections=1) as crowd:
        reader, _ = await crowd.connected(sent=a_request(CLOSE))
        await eventually(lambda: crowd.server.waiting == 0)
        assert await crowd.answer() == [503]
        go_on.set()
        assert statuses(await read_all(reader)) == [200]


async def test_an_address_that_keeps_coming_is_not_looked_at_any_more_in_this_second() -> None:
    now = 1000.0
    limited = Counter[str]()
    limits = ServerLimits(strangers=1)
    server = HttpServer(echo, limits, on_limit=lambda limit: limited.update([limit]), clock=lambda: now)
    port = await server.listen("127.0.0.1", 0)
    async with AsyncExitStack() as stack:
        crowd = Crowd(server, port, limited, stack)
        for _ in range(70):
            await crowd.connected()
        reader, _ = await crowd.connected(sent=a_request())
        assert await read_all(reader) == b""
        assert await crowd.answer() == [200]
        now += 1
        reader, _ = await crowd.connected(sent=a_request())
        assert statuses(await reader.read(100)) == [200]
    await server.close()


def test_a_connection_rests_as_long_as_its_handler_says() -> None:
    async def handler(request: Request) -> Reply:
        request.rest_s = 5.0
        return Response(429)

    async def run() -> None:
        server = HttpServer(handler, ServerLimits(idle_s=75))
        client = a_client(server)
        client.connection.data_received(a_request(method="GET") * 3)
        await asyncio.sleep(1)
        assert statuses(client.received) == [429]
        await asyncio.sleep(5)
        assert statuses(client.received) == [429] * 2
        await asyncio.sleep(100)
        assert statuses(client.received) == [429] * 3
        assert client.closed_at == 10 + 5 + 75

    run_virtually(run())


def test_a_client_that_leaves_while_it_rests_leaves_nothing() -> None:
    async def handler(request: Request) -> Reply:
        request.rest_s = 5.0
        return Response(429)

    async def run() -> None:
        server = HttpServer(handler)
        client = a_client(server)
        client.connection.data_received(a_request(method="GET") * 2)
        await asyncio.sleep(1)
        client.abort()
        await asyncio.sleep(100)
        assert (server.connections, statuses(client.received)) == (0, [429])
        assert isinstance(client.connection, ClientConnection)

    run_virtually(run())


FEW = """
import asyncio, resource, sys, uvloop
from http1.server import HttpServer
from tests.http1.parts import echo

async def main():
    server = HttpServer(echo, on_limit=lambda limit: print(limit, file=sys.stderr))
    print(await server.listen("127.0.0.1", 0), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(server.connections, flush=True)
    await server.close()

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
(uvloop.run if sys.argv[1] == "uvloop" else asyncio.run)(main())
"""


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
async def test_unfinished_heads_that_use_up_the_descriptors_lock_no_client_out(loop: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FEW, loop),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    async with AsyncExitStack() as stack:
        for _ in range(300):
            _, writer = await stack.enter_async_context(a_connection(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n")
        for _ in range(20):
            assert statuses(await reply_to(port, a_request(CLOSE, body=b"x"))) == [200]
    out, errors = await process.communicate(b"")
    assert errors.count(b"descriptors\n") >= 200
    assert b"Error" not in errors
    assert int(out) <= 56


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo", b"nonsense\r\n\r\n", a_request()])
async def test_a_connection_that_ends_is_freed_at_once_and_leaves_nothing_to_the_garbage_collector(sent: bytes) -> None:
    made: list[weakref.ref[ClientConnection]] = []

    class Remembering(HttpServer):
        def connection(self) -> ClientConnection:
            connection = super().connection()
            made.append(weakref.ref(connection))
            return connection

    server = Remembering(echo)
    port = await server.listen("127.0.0.1", 0)
    gc.disable()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await eventually(lambda: bool(made))
        if sent.endswith(b"\r\n\r\n"):
            await reader.read(1)
        writer.close()
        await eventually(lambda: made[0]() is None)
    finally:
        gc.enable()
        await server.close()
