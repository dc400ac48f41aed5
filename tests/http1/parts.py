"""Servers and clients on real sockets, and what is sent between them byte by byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from http1.limits import ServerLimits
from http1.message import Lines
from http1.request import ClientConnection, Handler, Reply, Request, Requests, Response, Stream
from http1.server import HttpServer

SOON_S = 20.0
"""A test step that takes longer hangs."""

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(request: Request) -> Reply:
    """The request's body back, and what was asked in a header."""
    body = await request.body()
    return Response(200, body, {"X-Asked": f"{request.method} {request.path}"})


@asynccontextmanager
async def a_server(
    handler: Handler = echo, limits: ServerLimits | None = None
) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server of `handler`, and its port."""
    server = HttpServer(handler, limits)
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        async with asyncio.timeout(SOON_S):
            await server.close()
        assert server.connections == 0


@asynccontextmanager
async def a_connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A plain connection to `port`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(SOON_S):
            yield reader, writer
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def reply_to(port: int, *pieces: bytes, pause_s: float = 0.001) -> bytes:
    """All that comes back until the server closes, for `pieces` that are sent one after the other."""
    async with a_connection(port) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            if len(pieces) > 1:
                # long enough for most to arrive apart
                await asyncio.sleep(pause_s)
        return await read_all(reader)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Everything up to the end, however the connection ends."""
    seen = bytearray()
    try:
        while data := await reader.read(1 << 16):
            seen += data
    except ConnectionError:
        pass
    return bytes(seen)


@asynccontextmanager
async def a_peer(talk: Talk) -> AsyncIterator[int]:
    """A server that says to each connection what `talk` says; its port."""
    tasks: set[asyncio.Task[Any]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        tasks.add(task)
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)


async def eventually(holds: Callable[[], bool]) -> None:
    """Return once `holds()`; fail if that takes too long."""
    async with asyncio.timeout(SOON_S):
        while not holds():  # noqa: ASYNC110 - of the state of other parts
            await asyncio.sleep(0.002)


def a_request(
    *headers: str,
    method: str = "POST",
    path: str = "/",
    version: str = "1.1",
    host: str | None = "a",
    body: bytes = b"",
) -> bytes:
    """The bytes of a request; a body gets its length unless a header frames it."""
    lines = [f"{method} {path} HTTP/{version}", *([] if host is None else [f"Host: {host}"]), *headers]
    is_framed = any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers)
    if body and not is_framed:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def statuses(answer: bytes) -> list[int]:
    """The statuses of all answers in `answer`."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def parsed(*pieces: bytes, limits: ServerLimits | None = None) -> Requests:
    """The requests in `pieces`, parsed without a handler."""
    requests = Requests(limits or ServerLimits(), no_connection())
    for piece in pieces:
        requests.feed(piece)
    return requests


def no_connection() -> ClientConnection:
    """The connection of a client that gets no answer."""
    return cast("ClientConnection", _NoConnection())


class _NoConnection:
    """The connection of a client that gets no answer."""

    address = "192.0.2.1"

    def proceed(self) -> None:
        """Its client may go on."""

    def await_body(self) -> None:
        """All of it comes by itself."""

    def start(self, request: Request, status: int, headers: Lines) -> Stream:
        """Fail."""
        raise AssertionError(f"{request} has no answer here")

    def push(self, data: bytes) -> bool:
        """Fail."""
        raise AssertionError(data)

    async def drained(self) -> None:
        """Fail."""
        raise AssertionError
