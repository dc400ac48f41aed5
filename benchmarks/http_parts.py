"""The cost of HTTP itself in a proxy, by server and client: CPU seconds of its process per 1,000 requests.

One cheap server with OpenAI's answers stands behind every candidate, and each candidate only forwards bytes:

    short     an answer in one piece, 16 at once
    streams   answers of 33 events, one every 10 ms, 64 at once

`ours` is http1/. Candidates that are not installed are left out; uvicorn, granian and pyreqwest are no
dependencies. All are measured in turns, and the medians of the rounds are shown with their spread.

    python benchmarks/http_parts.py [--requests 3000] [--streams 384] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from http1.client import HttpClient
from http1.request import Reply, Request, Response
from http1.server import HttpServer

EVENTS, EVERY_S = 33, 0.01
PATH = "/v1/chat/completions"
CANDIDATES = [
    "aiohttp aiohttp",
    "ours aiohttp",
    "aiohttp ours",
    "ours ours",
    "uvicorn ours",
    "granian ours",
    "ours pyreqwest",
]
WHOLE = b'{"object": "chat.completion", "choices": [{"index": 0, "message": {"content": "%b"}}]}' % (b"word " * EVENTS)
EVENT = b'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "word "}}]}\n\n'
DONE = b"data: [DONE]\n\n"
JSON, SSE = {"Content-Type": "application/json"}, {"Content-Type": "text/event-stream"}

Forward = Callable[[str, bytes], Any]
"""(path, body) -> a context with the pieces of the answer."""


async def backend() -> None:
    """Answer, parsing only whether the answer is to be streamed."""

    async def answer(request: Request) -> Reply:
        if b'"stream": true' not in await request.body():
            return Response(200, WHOLE, JSON)
        stream = request.start(200, SSE)
        for _ in range(EVENTS):
            await stream.write(EVENT)
            await asyncio.sleep(EVERY_S)
        await stream.end(DONE)
        return stream

    await _serve_ours(answer)


async def _serve_ours(handler: Callable[[Request], Awaitable[Reply]]) -> None:
    print(await HttpServer(handler).listen("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def _forwarding(client: str, to: str) -> AsyncIterator[Forward]:
    """A function that sends a request on with `client`."""
    if client == "ours":
        http = HttpClient(to)

        @asynccontextmanager
        async def ours(path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
            async with await http.request("POST", path, JSON, body) as answer:
                yield answer.content()

        yield ours
    elif client == "aiohttp":
        connector, jar = aiohttp.TCPConnector(limit=0), aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(connector=connector, cookie_jar=jar) as session:

            @asynccontextmanager
            async def theirs(path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
                async with session.post(to + path, data=body, headers=JSON) as answer:
                    yield answer.content.iter_any()

            yield theirs
    else:
        from pyreqwest.client import ClientBuilder

        async with ClientBuilder().build() as reqwest:

            async def pieces(reader: Any) -> AsyncIterator[bytes]:
                while (data := await reader.read_chunk()) is not None:
                    yield bytes(data)

            @asynccontextmanager
            async def rust(path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
                asked = reqwest.post(to + path).header("content-type", "application/json").body_bytes(body)
                async with asked.build_streamed() as answer:
                    yield pieces(answer.body_reader)

            yield rust


async def proxy(server: str, client: str, to: str) -> None:
    """Forward every request to `to`."""
    async with _forwarding(client, to) as forward:
        await {"ours": _ours, "aiohttp": _aiohttp, "uvicorn": _uvicorn, "granian": _granian}[server](forward)


def _is_streamed(body: bytes) -> bool:
    return b'"stream": true' in body


async def _ours(forward: Forward) -> None:
    async def handle(request: Request) -> Reply:
        body = await request.body()
        async with forward(request.path, body) as pieces:
            if not _is_streamed(body):
                return Response(200, b"".join([data async for data in pieces]), JSON)
            stream = request.start(200, SSE)
            async for data in pieces:
                await stream.write(data)
            await stream.end()
            return stream

    await _serve_ours(handle)


async def _aiohttp(forward: Forward) -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        async with forward(request.path, body) as pieces:
            if not _is_streamed(body):
                return web.Response(body=b"".join([data async for data in pieces]), content_type="application/json")
            reply = web.StreamResponse(headers=SSE)
            await reply.prepare(request)
            async for data in pieces:
                await reply.write(data)
            await reply.write_eof()
            return reply

    server = web.Server(handle, access_log=None, handler_cancellation=True)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


async def _uvicorn(forward: Forward) -> None:
    import uvicorn

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        kind, is_streamed = (SSE, True) if _is_streamed(body) else (JSON, False)
        headers = [(name.lower().encode(), value.encode()) for name, value in kind.items()]
        async with forward(scope["path"], body) as pieces:
            if not is_streamed:
                whole = b"".join([data async for data in pieces])
                headers.append((b"content-length", str(len(whole)).encode()))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": whole})
                return
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in pieces:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    port = _free_port()
    options = {"http": "httptools", "loop": "none", "lifespan": "off", "log_level": "error", "access_log": False}
    print(port, flush=True)
    await uvicorn.Server(uvicorn.Config(app, port=port, **options)).serve()


async def _granian(forward: Forward) -> None:
    from granian.constants import Interfaces
    from granian.server.embed import Server

    async def app(scope: Any, protocol: Any) -> None:
        body = await protocol()
        async with forward(scope.path, body) as pieces:
            if not _is_streamed(body):
                protocol.response_bytes(200, list(JSON.items()), b"".join([data async for data in pieces]))
                return
            transport = protocol.response_stream(200, list(SSE.items()))
            async for data in pieces:
                await transport.send_bytes(data)

    port = _free_port()
    print(port, flush=True)
    await Server(app, address="127.0.0.1", port=port, interface=Interfaces.RSGI, log_enabled=False).serve()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def start(*what: str) -> tuple[Process, str]:
    """Run one of the above in a process of its own; returns the process and its URL."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path[1:]])}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--run", *what), stdout=PIPE, env=environment
    )
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{(await process.stdout.readline()).decode().strip()}"


def cpu_s(process: Process) -> float:
    """User and system time of all threads of the process."""
    # Linux's clock id of another process
    return time.clock_gettime((~process.pid << 3) | 2)


async def load(url: str, count: int, at_once: int, *, stream: bool) -> None:
    """Send `count` requests, and check that all of each answer arrived."""
    body = b'{"messages": [{"content": "%b"}], "stream": %b}' % (b"What is it? " * 20, b"true" if stream else b"false")
    port, left = int(url.rpartition(":")[2]), iter(range(count))
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\nAuthorization: Bearer sk-1\r\n"
    asked = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    until = b"0\r\n\r\n" if stream else WHOLE[-20:]

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            writer.write(asked)
            answer = await reader.readuntil(until)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert not stream or answer.count(b"data: ") == EVENTS + 1, answer
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client() for _ in range(at_once)))


async def measure(requests: int, streams: int, rounds: int) -> None:
    """All candidates in turns."""
    installed = [
        candidate
        for candidate in CANDIDATES
        if all(name == "ours" or importlib.util.find_spec(name) for name in candidate.split())
    ]
    behind, to = await start("backend")
    running = {candidate: await start(*candidate.split(), to) for candidate in installed}
    await asyncio.sleep(1)
    shapes = {"short": (requests, 16, False), "streams": (streams, 64, True)}
    seen: dict[tuple[str, str], list[float]] = {}
    try:
        for taken in range(rounds + 1):
            for shape, (count, at_once, stream) in shapes.items():
                for name, (process, url) in running.items():
                    before = cpu_s(process)
                    await load(url, count, at_once, stream=stream)
                    if taken:  # the first round is for warming up
                        seen.setdefault((name, shape), []).append((cpu_s(process) - before) / count * 1000)
    finally:
        for process, _ in (*running.values(), (behind, to)):
            process.kill()
            await process.wait()
    print(f"{'server':10}{'client':12}" + "".join(f"{shape:>26}" for shape in shapes))
    for name in installed:
        server, client = name.split()
        cells = (seen[name, shape] for shape in shapes)
        shown = (f"{statistics.median(cell):.4f} ({min(cell):.4f} to {max(cell):.4f})" for cell in cells)
        print(f"{server:10}{client:12}" + "".join(f"{cell:>26}" for cell in shown))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--streams", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        what = asked.run
        uvloop.run(backend() if what[0] == "backend" else proxy(*what))
    else:
        uvloop.run(measure(asked.requests, asked.streams, asked.rounds))


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
