"""The server's rules, on real sockets."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import ssl
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from http1.errors import ClientGone, HttpError
from http1.limits import ServerLimits
from http1.request import ClientConnection, Reply, Request, Response
from http1.server import HttpServer
from tests.http1.parts import (
    SOON_S,
    a_connection,
    a_request,
    a_server,
    echo,
    eventually,
    read_all,
    reply_to,
    statuses,
)
from tests.still import still

CLOSE = "Connection: close"


async def streaming(request: Request) -> Reply:
    """Three events."""
    stream = request.start(200, {"Content-Type": "text/event-stream"})
    for number in range(3):
        await stream.write(b"data: %d\n\n" % number)
    await stream.end()
    return stream


async def test_a_request_reaches_its_handler_with_all_that_it_says() -> None:
    seen: list[Request] = []

    async def handler(request: Request) -> Reply:
        seen.append(request)
        return Response(201, b"[" + await request.body() + b"]", {"X-A": "b"})

    async with a_server(handler) as (_, port):
        headers = ("X-Twice: one", "x-twice:  two ", "Authorization: Bearer k", CLOSE)
        answer = await reply_to(port, a_request(*headers, path="/v1/a%20b?c=d&e", body=b"body"))
    (request,) = seen
    assert (request.method, request.path, request.query) == ("POST", "/v1/a b", "c=d&e")
    assert request.headers["authorization"] == request.headers.get("AUTHORIZATION") == "Bearer k"
    assert (request.headers["X-Twice"], "x-none" in request.headers) == ("one, two", False)
    assert (request.content_length, request.address) == (4, "127.0.0.1")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"[body]"
    first, *lines = head.decode().split("\r\n")
    fields = dict(line.split(": ") for line in lines)
    assert first == "HTTP/1.1 201 Created"
    assert fields.keys() == {"Date", "X-A", "Content-Length", "Connection"}
    age = dt.datetime.now(dt.UTC) - parsedate_to_datetime(fields["Date"])
    assert abs(age.total_seconds()) < 60


async def test_the_date_is_that_of_the_clock() -> None:
    now = [784111777.9]
    server = HttpServer(echo, clock=lambda: now[0])
    port = await server.listen("127.0.0.1", 0)
    for date in (b"Sun, 06 Nov 1994 08:49:37 GMT", b"Sun, 06 Nov 1994 08:49:38 GMT"):
        assert b"\r\nDate: %b\r\n" % date in await reply_to(port, a_request("Connection: close"))
        now[0] += 1
    await server.close()


async def test_a_stream_is_chunked_and_the_connection_serves_on() -> None:
    async with a_server(streaming) as (_, port):
        answer = await reply_to(port, a_request(method="GET") + a_request(CLOSE, method="GET"))
    assert statuses(answer) == [200, 200]
    chunks = b"".join(b"9\r\ndata: %d\n\n\r\n" % number for number in range(3)) + b"0\r\n\r\n"
    assert answer.count(b"Transfer-Encoding: chunked\r\n\r\n" + chunks) == 1
    assert answer.endswith(b"Connection: close\r\n\r\n" + chunks)


async def test_the_head_of_a_stream_may_go_ahead_of_its_first_piece() -> None:
    go_on = asyncio.Event()

    async def handler(request: Request) -> Reply:
        stream = request.start(200, {})
        await stream.write(b"")
        await go_on.wait()
        await stream.end(b"x")
        return stream

    async with a_server(handler) as (_, port), a_connection(port) as (reader, writer):
        writer.write(a_request(method="GET"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        go_on.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"1\r\nx\r\n0\r\n\r\n"


async def test_requests_that_were_sent_ahead_are_answered_in_order_one_at_a_time() -> None:
    running = 0

    async def handler(request: Request) -> Reply:
        nonlocal running
        running += 1
        assert running == 1
        # later ones would be faster
        await asyncio.sleep(0.02 / int(request.path[1:]))
        running -= 1
        return Response(200, request.path.encode() + await request.body())

    asked = b"".join(a_request(path=f"/{number}", body=b"abc") for number in range(1, 9))
    async with a_server(handler) as (_, port):
        reply = await reply_to(port, asked + a_request(CLOSE, path="/9"))
    bodies = [answer.partition(b"\r\n\r\n")[2] for answer in reply.split(b"HTTP/1.1 ")[1:]]
    assert bodies == [*(b"/%dabc" % number for number in range(1, 9)), b"/9"]


async def test_too_many_requests_ahead_are_refused_and_those_before_are_answered() -> None:
    async with a_server(limits=ServerLimits(waiting=4)) as (_, port):
        answer = await reply_to(port, a_request(method="GET") * 10)
    assert statuses(answer) == [200] * 4 + [400]


@pytest.mark.parametrize(
    ("version", "headers", "stays"),
    [("1.1", (), True), ("1.1", (CLOSE,), False), ("1.0", (), False), ("1.0", ("Connection: keep-alive",), True)],
)
async def test_a_connection_stays_as_its_client_asks(version: str, headers: tuple[str, ...], *, stays: bool) -> None:
    async with a_server() as (_, port), a_connection(port) as (reader, writer):
        for _ in range(2 if stays else 1):
            writer.write(a_request(*headers, version=version, body=b"x"))
            answer = await reader.readuntil(b"\r\n\r\nx")
            assert (b"Connection: close" in answer) is not stays
            assert (b"Connection: keep-alive" in answer) is (stays and version == "1.0")
        if not stays:
            assert await reader.read() == b""


async def test_a_stream_to_http_10_ends_with_its_connection() -> None:
    async with a_server(streaming) as (_, port):
        answer = await reply_to(port, a_request("Connection: keep-alive", method="GET", version="1.0"))
    assert b"chunked" not in answer
    assert answer.endswith(b"Connection: close\r\n\r\ndata: 0\n\ndata: 1\n\ndata: 2\n\n")


async def test_the_answer_to_head_has_no_body() -> None:
    async with a_server() as (_, port):
        answer = await reply_to(
            port, a_request(method="HEAD", body=b"abc") + a_request(CLOSE, method="GET", body=b"def")
        )
    assert statuses(answer) == [200, 200]
    assert answer.count(b"Content-Length: 3") == 2
    assert b"abc" not in answer
    async with a_server(streaming) as (_, port):
        answer = await reply_to(port, a_request(CLOSE, method="HEAD"))
    assert answer.endswith(b"\r\n\r\n")
    assert b"data" not in answer


async def test_options_reach_a_handler_and_an_answer_may_have_no_content() -> None:
    async def handler(request: Request) -> Reply:
        return Response(204, b"", {"Allow": "POST", "X-Path": request.path})

    async with a_server(handler) as (_, port):
        answer = await reply_to(port, a_request(method="OPTIONS", path="*") + a_request(CLOSE, method="OPTIONS"))
    assert statuses(answer) == [204, 204]
    assert b"Content-Length" not in answer
    assert b"X-Path: *\r\n" in answer


async def test_headers_may_be_added_to_any_answer_and_the_connection_closed_after_it() -> None:
    async def handler(request: Request) -> Reply:
        request.answer_headers["Access-Control-Allow-Origin"] = "*"
        request.hang_up = request.path != "/"
        return await streaming(request) if request.path == "/stream" else Response(200, b"x")

    async with a_server(handler) as (_, port):
        answer = await reply_to(port, a_request(method="GET") + a_request(method="GET", path="/stream"))
    assert answer.count(b"Access-Control-Allow-Origin: *\r\n") == 2
    assert answer.count(b"Connection: close\r\n") == 1


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (a_request(*(f"X-{number}: a" for number in range(20))), 431),
        (a_request("X-Long: " + "a" * 2000), 431),
        (a_request(path="/" + "a" * 2000), 431),
        (b"GET /" + b"a" * 400_000, 431),
        (a_request(*(f"X-{number}: {'a' * 200}" for number in range(8))), 431),
        (a_request("Transfer-Encoding: chunked", body=b"1\r\nx\r\n0\r\n" + b"X-Trailer: a\r\n" * 100), 431),
        (a_request("Transfer-Encoding: chunked") + b"1;" + b"a" * 400_000, 431),
    ],
    ids=["count", "value", "target", "endless target", "sum", "trailers", "extension"],
)
@pytest.mark.parametrize("size", [1 << 20, 700])
async def test_a_head_has_bounds(raw: bytes, status: int, size: int) -> None:
    async with a_server(limits=ServerLimits(head_bytes=1000, headers=16)) as (_, port):
        answer = await reply_to(port, *(raw[at : at + size] for at in range(0, min(len(raw), 20 * size), size)))
    assert statuses(answer) == [status]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        # 1 for the target, 9 for Host, 19 for Connection, and 5 for the name and its signs
        (["X: " + "a" * (65_536 - 34)], 200),
        (["X: " + "a" * (65_537 - 34)], 431),
        (["X: a"] * 126, 200),
        (["X: a"] * 127, 431),
    ],
    ids=["64 KiB", "a byte more", "128 headers", "a header more"],
)
async def test_a_head_may_have_64_kib_and_128_headers_by_default(headers: list[str], status: int) -> None:
    lines = ("GET / HTTP/1.1", "Host: a", CLOSE, *headers, "", "")
    async with a_server() as (_, port), a_connection(port) as (reader, writer):
        writer.write("\r\n".join(lines).encode())
        assert statuses(await read_all(reader)) == [status]


@pytest.mark.parametrize(
    "raw",
    [
        a_request(body=b"x" * 101),
        a_request("Content-Length: 1000000000"),
        a_request("Transfer-Encoding: chunked", body=b"65\r\n" + b"x" * 101),
        a_request("Expect: 100-continue", "Content-Length: 101"),
    ],
    ids=["whole", "announced", "chunked", "expected"],
)
async def test_a_body_has_a_bound(raw: bytes) -> None:
    async with a_server(limits=ServerLimits(body_bytes=100)) as (_, port):
        assert statuses(await reply_to(port, raw)) == [413]
        assert statuses(await reply_to(port, a_request(CLOSE, body=b"x" * 100))) == [200]


async def test_a_handler_may_set_a_lower_bound_and_answer_itself() -> None:
    async def handler(request: Request) -> Reply:
        try:
            return Response(200, await request.body(most_bytes=10))
        except HttpError as error:
            return Response(422, str(error.status).encode())

    async with a_server(handler) as (_, port):
        assert (await reply_to(port, a_request(CLOSE, body=b"x" * 11))).endswith(b"\r\n\r\n413")


async def test_an_answer_before_the_body_reaches_a_client_that_still_sends() -> None:
    async def handler(request: Request) -> Reply:
        return Response(401, b"no")

    async with a_server(handler) as (_, port), a_connection(port) as (reader, writer):
        writer.write(a_request("Content-Length: 30000000"))
        for _ in range(300):
            writer.write(b"x" * 100_000)
            await asyncio.sleep(0)
        answer = await read_all(reader)
        assert statuses(answer) == [401]
        assert b"Connection: close" in answer


async def test_an_answer_to_a_body_that_was_not_read_keeps_the_connection_if_it_came() -> None:
    async def handler(request: Request) -> Reply:
        return Response(401, request.path.encode())

    async with a_server(handler) as (_, port):
        answer = await reply_to(port, a_request(path="/1", body=b"GET /x HTTP/1.1") + a_request(CLOSE, path="/2"))
    assert statuses(answer) == [401, 401]


async def test_a_client_that_expects_100_continue_gets_it_when_its_body_is_read() -> None:
    async def handler(request: Request) -> Reply:
        return Response(200, await request.body()) if request.path == "/yes" else Response(403)

    async with a_server(handler) as (_, port), a_connection(port) as (reader, writer):
        writer.write(a_request("Expect: 100-continue", "Content-Length: 5", path="/yes"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abcde")
        assert (await reader.readuntil(b"abcde")).startswith(b"HTTP/1.1 200 OK")
        writer.write(a_request("Expect: 100-continue", "Content-Length: 5", path="/no"))
        assert statuses(await read_all(reader)) == [403]


async def test_a_client_that_has_closed_its_side_gets_its_answer_if_that_comes_soon() -> None:
    async def handler(request: Request) -> Reply:
        await asyncio.sleep(0.02)
        return await echo(request)

    limits = ServerLimits(half_closed_s=SOON_S)
    async with a_server(handler, limits) as (_, port), a_connection(port) as (reader, writer):
        writer.write(a_request(body=b"abc") * 2)
        writer.write_eof()
        answer = await read_all(reader)
        assert statuses(answer) == [200, 200]


@pytest.mark.parametrize("leaves", ["closes", "closes its side", "breaks off"])
async def test_a_handler_is_cancelled_when_its_client_leaves(leaves: str) -> None:
    ends: list[str] = []

    async def handler(request: Request) -> Reply:
        try:
            await asyncio.sleep(SOON_S)
        except asyncio.CancelledError:
            ends.append(request.path)
            raise
        raise AssertionError("it was not cancelled")

    limits = ServerLimits(half_closed_s=0.05)
    async with a_server(handler, limits) as (server, port), a_connection(port) as (_, writer):
        writer.write(a_request(path="/1"))
        await eventually(lambda: server.connections == 1)
        await asyncio.sleep(0.02)
        match leaves:
            case "closes":
                writer.close()
            case "closes its side":
                writer.write_eof()
            case _:
                writer.transport.abort()
        await eventually(lambda: ends == ["/1"] and server.connections == 0)


async def test_a_client_that_leaves_in_the_middle_of_its_request_ends_its_handler() -> None:
    ends: list[type[BaseException]] = []

    async def handler(request: Request) -> Reply:
        try:
            return await echo(request)
        except BaseException as error:
            ends.append(type(error))
            raise

    async with a_server(handler) as (server, port):
        async with a_connection(port) as (_, writer):
            writer.write(a_request("Content-Length: 10", body=b"abc"))
            await asyncio.sleep(0.02)
        await eventually(lambda: server.connections == 0)
    assert len(ends) == 1
    assert ends[0] in (asyncio.CancelledError, ClientGone)


async def test_a_client_that_leaves_before_its_handler_begins_leaves_nothing_behind() -> None:
    class Gone(asyncio.Transport):
        def is_closing(self) -> bool:
            return False

    server = HttpServer(echo)
    connection = ClientConnection(server, asyncio.get_running_loop())
    connection.connection_made(Gone())
    connection.data_received(a_request())
    connection.connection_lost(None)
    assert server.connections == 0
    await asyncio.sleep(0)


async def test_a_client_that_does_not_read_holds_its_handler_and_memory_stays_bounded() -> None:
    written = 0

    async def handler(request: Request) -> Reply:
        nonlocal written
        stream = request.start(200, {})
        for _ in range(1000):
            await stream.write(b"x" * 100_000)
            written += 100_000
        await stream.end()
        return stream

    async with a_server(handler) as (_, port), a_connection(port) as (reader, writer):
        writer.write(a_request(CLOSE, method="GET"))
        assert await still(lambda: written) < 30_000_000
        size = 0
        while data := await reader.read(1 << 20):
            size += len(data)
        assert size > written == 100_000_000


async def test_a_client_that_reads_nothing_for_too_long_is_cut_off() -> None:
    ends: list[type[BaseException]] = []

    async def handler(request: Request) -> Reply:
        stream = request.start(200, {})
        try:
            while True:
                await stream.write(b"x" * 100_000)
        except BaseException as error:
            ends.append(type(error))
            raise

    async with a_server(handler, ServerLimits(write_s=0.1)) as (server, port), a_connection(port) as (_, writer):
        writer.write(a_request(method="GET"))
        await eventually(lambda: server.connections == 1)
        await eventually(lambda: server.connections == 0)
    assert ends[0] in (asyncio.CancelledError, ClientGone)


async def test_a_body_that_its_handler_does_not_read_is_not_read_from_the_socket() -> None:
    go_on = asyncio.Event()
    sizes: list[int] = []

    async def handler(request: Request) -> Reply:
        await go_on.wait()
        sizes.extend([len(data) async for data in request.content()])
        return Response(200)

    size = 50_000_000
    async with a_server(handler) as (_, port), a_connection(port) as (reader, writer):
        writer.write(a_request(f"Content-Length: {size}", CLOSE))
        writer.write(b"x" * size)
        assert await still(writer.transport.get_write_buffer_size) > size // 2
        go_on.set()
        assert statuses(await read_all(reader)) == [200]
    assert sum(sizes) == size
    assert max(sizes) < 2_000_000


async def test_a_handler_that_fails_is_a_500_and_the_connection_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: Request) -> Reply:
        if request.path == "/1":
            raise RuntimeError("a secret")
        return Response(200)

    async with a_server(handler) as (_, port):
        answer = await reply_to(port, a_request(path="/1") + a_request(CLOSE, path="/2"))
    assert statuses(answer) == [500, 200]
    assert b"secret" not in answer
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("way", ["fails", "forgets the end", "answers twice"])
async def test_a_stream_that_its_handler_leaves_is_broken_off(way: str) -> None:
    async def handler(request: Request) -> Reply:
        stream = request.start(200, {})
        await stream.write(b"x")
        if way == "fails":
            raise RuntimeError
        return stream if way == "forgets the end" else Response(200, b"y")

    async with a_server(handler) as (_, port):
        answer = await reply_to(port, a_request(method="GET"))
    assert not answer.endswith(b"0\r\n\r\n")
    assert statuses(answer) in ([200], [])


@pytest.mark.parametrize(
    "headers", [{"X-A": "b\r\nX-C: d"}, {"X-A\n": "b"}, {"X-A": "b\0"}, {"Content-Length": "5"}, {"connection": "x"}]
)
async def test_an_answer_cannot_be_split_by_what_a_header_holds(headers: dict[str, str]) -> None:
    async def handler(request: Request) -> Reply:
        return Response(200, b"x", headers)

    async with a_server(handler) as (_, port):
        assert await reply_to(port, a_request(method="GET")) == b""


async def test_a_server_that_closes_lets_requests_end_and_closes_what_is_idle() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Reply:
        begun.set()
        await go_on.wait()
        return await echo(request)

    async with (
        a_server(handler) as (server, port),
        a_connection(port) as (idle, _),
        a_connection(port) as (reader, writer),
    ):
        writer.write(a_request(body=b"abc"))
        await begun.wait()
        closing = asyncio.create_task(server.close(grace_s=SOON_S))
        assert await idle.read() == b""
        assert not closing.done()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        go_on.set()
        answer = await read_all(reader)
        assert statuses(answer) == [200]
        assert b"Connection: close" in answer
        await closing


async def test_a_server_that_closes_cancels_what_takes_too_long() -> None:
    ends: list[str] = []

    async def handler(request: Request) -> Reply:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append(request.path)
        return Response(200)

    async with a_server(handler) as (server, port), a_connection(port) as (reader, writer):
        writer.write(a_request(path="/long"))
        await eventually(lambda: server.connections == 1)
        await asyncio.sleep(0.02)
        await server.close(grace_s=0.05)
        assert ends == ["/long"]
        assert await read_all(reader) == b""


async def test_several_servers_may_share_a_port() -> None:
    async with a_server() as (_, _):
        first, second = HttpServer(echo), HttpServer(echo)
        port = await first.listen("127.0.0.1", 0, shares_port=True)
        assert await second.listen("127.0.0.1", port, shares_port=True) == port
        await first.close()
        assert statuses(await reply_to(port, a_request(CLOSE))) == [200]
        await second.close()


async def test_it_serves_over_tls(certificate: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=certificate)
    server = HttpServer(echo)
    listener = await asyncio.get_running_loop().create_server(server.connection, "127.0.0.1", 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
    async with asyncio.timeout(SOON_S):
        writer.write(a_request(body=b"abc" * 100_000) + a_request(CLOSE, body=b"last"))
        answer = await read_all(reader)
        assert statuses(answer) == [200, 200]
        assert answer.endswith(b"last")
        writer.close()
        await eventually(lambda: server.connections == 0)
        listener.close()
        await server.close()


async def test_limits_may_change_while_it_runs() -> None:
    async with a_server(limits=ServerLimits(body_bytes=10)) as (server, port):
        assert statuses(await reply_to(port, a_request(CLOSE, body=b"x" * 20))) == [413]
        server.limits = replace(server.limits, body_bytes=30)
        assert statuses(await reply_to(port, a_request(CLOSE, body=b"x" * 20))) == [200]
