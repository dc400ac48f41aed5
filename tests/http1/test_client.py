"""The client's rules, on real sockets."""

from __future__ import annotations

import asyncio
import gc
import gzip
import ssl
import weakref
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from http1 import client as client_module
from http1.client import HttpClient, ServerConnection
from http1.errors import AnswerError, AnswerTimeout, BadAnswer, Disconnected, IdleDisconnected, Unconnected
from http1.limits import ClientLimits
from http1.request import Reply, Request, Response
from http1.server import HttpServer
from tests.http1.parts import SOON_S, Talk, a_peer, a_server, echo, eventually
from tests.still import still

OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"


@asynccontextmanager
async def a_client(port: int, **limits: object) -> AsyncIterator[HttpClient]:
    """A client of 127.0.0.1, at that port."""
    client = HttpClient(f"http://127.0.0.1:{port}", ClientLimits(**limits))  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(SOON_S):
            yield client
    finally:
        await client.close()
        assert "0 connections, 0 idle" in repr(client)


def saying(*answers: bytes, then: str = "stays") -> Talk:
    """A server that says one of `answers` to each request of a connection, and then stays, or closes."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        if then == "stays":
            await reader.read()

    return talk


async def got(client: HttpClient, method: str = "GET") -> tuple[int, bytes]:
    async with await client.request(method, "/") as answer:
        return answer.status, await answer.body(1 << 20)


async def test_a_request_goes_out_as_it_was_given_and_the_answer_comes_back() -> None:
    heard: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(4))
        writer.write(b"HTTP/1.1 418 Short and stout\r\nX-A: b\r\nx-a: c\r\nContent-Length: 5\r\n\r\nhello")

    async with a_peer(talk) as port, a_client(port) as client:
        answer = await client.request("POST", "/v1/x?y=z", {"Authorization": "Bearer k"}, b"body")
        async with answer:
            assert (answer.status, answer.headers["X-A"], await answer.body(5)) == (418, "b, c", b"hello")
    head = f"POST /v1/x?y=z HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer k\r\nContent-Length: 4\r\n\r\n"
    assert heard == [head.encode() + b"body"]


async def test_a_path_in_the_url_goes_before_all_others() -> None:
    async with a_server() as (_, port):
        client = HttpClient(f"http://127.0.0.1:{port}/proxy/a/")
        async with await client.request("GET", "/v1/models") as answer:
            assert answer.headers["x-asked"] == "GET /proxy/a/v1/models"
        await client.close()


@pytest.mark.parametrize(
    "url", ["ftp://a", "http://", "a:80", "http://u:p@a", "http://a?b=c", "http://a b", "http://ä"]
)
def test_a_url_that_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not http://host:port"):
        HttpClient(url)


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("GET", "/a b", {}),
        ("GET", "/a\r\nX: y", {}),
        ("GET", "a", {}),
        ("GET", "/ä", {}),
        ("get", "/", {}),
        ("GET /", "/", {}),
        ("GET", "/", {"X-A": "b\r\nX-C: d"}),
        ("GET", "/", {"Content-Length": "5"}),
        ("GET", "/", {"Transfer-Encoding": "chunked"}),
    ],
)
async def test_a_request_that_would_become_another_is_refused(
    method: str, target: str, headers: dict[str, str]
) -> None:
    client = HttpClient("http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"method|path|header"):
        await client.request(method, target, headers)


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (HELLO, b"hello"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nX-Trailer: z\r\n\r\n", b"hello"),
        (OK + b"Connection: close\r\n\r\nhello", b"hello"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + HELLO, b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""),
        (b"\r\n\r\n" + HELLO, b"hello"),
        (OK + b"Content-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
    ],
    ids=[
        "length",
        "chunked",
        "close",
        "HTTP/1.0",
        "interim",
        "no content",
        "not modified",
        "empty lines",
        "empty",
        "no reason",
    ],
)
@pytest.mark.parametrize("size", [1 << 20, 3])
async def test_answers_of_every_framing_are_read(raw: bytes, body: bytes, size: int) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(raw), size):
            writer.write(raw[at : at + size])
            await asyncio.sleep(0.0005)

    async with a_peer(talk) as port, a_client(port) as client:
        assert (await got(client))[1] == body


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/3.7 200 OK\r\n\r\n",
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        OK + b"Content-Length: x\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\n\r\n",
        OK + b"X-A : b\r\nContent-Length: 0\r\n\r\n",
        OK + b"X-A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        OK + b"X-A: b\r\n" * 300 + b"\r\n",
        OK + b"X-A: " + b"b" * 100_000 + b"\r\n\r\n",
        OK + b"X-A: " + b"b" * 400_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000 + b"HTTP/1.1 103 Hints\r\nLink: abcdefgh\r\n\r\n" * 10_000,
    ],
    ids=range(15),
)
async def test_what_is_no_http_is_a_bad_answer(raw: bytes) -> None:
    async with a_peer(saying(raw, then="closes")) as port, a_client(port) as client:
        with pytest.raises(BadAnswer):
            await got(client)


@pytest.mark.parametrize(
    "raw",
    [b"", b"HTT", OK, OK + b"Content-Length: 5\r\n\r\nhell", OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"],
)
async def test_an_answer_that_breaks_off_is_no_answer(raw: bytes) -> None:
    async with a_peer(saying(raw, then="closes")) as port, a_client(port) as client:
        with pytest.raises(Disconnected):
            await got(client)


async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with a_server() as (server, port), a_client(port) as client:
        for number in range(20):
            async with await client.request("POST", "/", {}, b"%d" % number) as answer:
                assert await answer.body(10) == b"%d" % number
        assert server.connections == 1


async def test_requests_at_once_have_connections_of_their_own_and_answers_are_not_mixed_up() -> None:
    async with a_server() as (server, port), a_client(port, most_idle=4) as client:

        async def exchange(name: int) -> None:
            for number in range(30):
                body = b"%d-%d " % (name, number) * (number * name)
                async with await client.request("POST", "/", {}, body) as answer:
                    assert await answer.body(1 << 20) == body

        await asyncio.gather(*(exchange(name) for name in range(1, 17)))
        assert "4 idle" in repr(client)
        await eventually(lambda: server.connections == 4)


async def test_connections_have_a_bound_and_no_queue() -> None:
    async with a_peer(saying(b"")) as port, a_client(port, connections=2) as client:
        asking = [asyncio.create_task(got(client)) for _ in range(2)]
        await eventually(lambda: "2 connections" in repr(client))
        with pytest.raises(Unconnected, match="2 connections"):
            await got(client)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await eventually(lambda: "0 connections" in repr(client))


async def test_a_connection_that_the_server_closed_while_it_lay_idle_is_replaced() -> None:
    """The server reads the second request, and closes: the client could not have known."""
    heard = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard += 1
        await saying(HELLO, b"", then="closes")(reader, writer)

    async with a_peer(talk) as port, a_client(port) as client:
        assert await got(client) == (200, b"hello")
        assert await got(client, "PUT") == (200, b"hello")
        assert heard == 2


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_post_is_never_sent_twice_and_the_next_one_has_a_new_connection(method: str) -> None:
    heard: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(2):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            if at == 0:
                await together.wait()
                writer.write(HELLO)

    async with a_peer(talk) as port, a_client(port) as client:
        together = asyncio.Barrier(3)
        assert await asyncio.gather(*(got(client) for _ in range(3))) == [(200, b"hello")] * 3
        with pytest.raises(IdleDisconnected):
            await got(client, method)
        assert len(heard) == 4
        assert "0 idle" in repr(client), "the others lie longer, and may be closed as well"


async def test_a_request_is_sent_twice_at_most() -> None:
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await saying(*([HELLO, b""] if connections == 1 else [b""]), then="closes")(reader, writer)

    async with a_peer(talk) as port, a_client(port) as client:
        await got(client)
        with pytest.raises(Disconnected):
            await got(client)
        assert connections == 2


async def test_a_request_is_not_sent_again_once_something_of_an_answer_came() -> None:
    async with a_peer(saying(HELLO, b"HTTP/1.1 2", then="closes")) as port, a_client(port) as client:
        await got(client)
        with pytest.raises(Disconnected):
            await got(client)


async def test_a_body_in_pieces_is_not_sent_again() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"abc"

    async with a_peer(saying(HELLO, b"", then="closes")) as port, a_client(port) as client:
        await got(client)
        with pytest.raises(Disconnected):
            await client.request("POST", "/", {}, pieces())


async def test_bytes_that_no_request_asked_for_answer_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HELLO)
        await asyncio.sleep(0.02)
        writer.write(OK + b"Content-Length: 4\r\n\r\nevil")
        await reader.read()

    # not closed for being idle
    async with a_peer(talk) as port, a_client(port, idle_s=3600.0) as client:
        assert await got(client) == (200, b"hello")
        await eventually(lambda: "0 connections" in repr(client))
        assert await got(client) == (200, b"hello")
    assert not caplog.records


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (HELLO, b"hello"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (OK + b"Content-Length: 0\r\n\r\n", b""),
    ],
    ids=["length", "chunked", "empty"],
)
@pytest.mark.parametrize("more", [OK + b"Content-Length: 4\r\n\r\nevil", b"HT", b"0"], ids=["whole", "begun", "junk"])
async def test_an_answer_with_more_behind_it_is_read_and_its_connection_closed(
    answer: bytes, body: bytes, more: bytes
) -> None:
    async with a_peer(saying(answer + more)) as port, a_client(port) as client:
        assert await got(client) == (200, body)
        await eventually(lambda: "0 connections" in repr(client))


async def test_an_answer_that_is_left_closes_its_connection() -> None:
    ends: list[str] = []

    async def handler(request: Request) -> Reply:
        stream = request.start(200, {})
        try:
            while True:
                await stream.write(b"x")
                await asyncio.sleep(0.001)
        finally:
            ends.append(request.path)

    async with a_server(handler) as (server, port), a_client(port) as client:
        async with await client.request("GET", "/left") as answer:
            assert await answer.read()
            assert not answer.is_ended
        await eventually(lambda: ends == ["/left"] and server.connections == 0)


@pytest.mark.parametrize("where", ["head", "body"])
async def test_a_request_that_is_cancelled_closes_its_connection(where: str) -> None:
    ends: list[str] = []

    async def handler(request: Request) -> Reply:
        try:
            if where == "body":
                await request.start(200, {}).write(b"")
            await asyncio.sleep(SOON_S)
        finally:
            ends.append(request.path)
        raise AssertionError

    async with a_server(handler) as (server, port), a_client(port) as client:
        asking = asyncio.create_task(got(client))
        await eventually(lambda: server.connections == 1)
        await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: ends == ["/"] and "0 connections" in repr(client))


async def test_a_server_that_is_silent_is_given_up() -> None:
    async with a_peer(saying(b"")) as port, a_client(port) as client:
        with pytest.raises(AnswerTimeout):
            await client.request("GET", "/", silence_s=0.05)
        await eventually(lambda: "0 connections" in repr(client))


async def test_a_body_that_is_poured_is_given_up_after_a_silence_and_not_before() -> None:
    pieces: list[bytes] = []

    async def handler(request: Request) -> Reply:
        stream = request.start(200, {})
        for _ in range(8):
            await stream.write(b"x")
            await asyncio.sleep(0.05)
        await asyncio.sleep(SOON_S)
        return stream

    def into(data: bytes) -> bool:
        pieces.append(data)
        return True

    async with a_server(handler) as (_, port), a_client(port) as client:
        async with await client.request("GET", "/", silence_s=0.2) as answer:
            with pytest.raises(AnswerTimeout):
                await answer.pour(into)
        assert b"".join(pieces) == b"x" * 8
        await eventually(lambda: "0 connections" in repr(client))


async def test_a_body_that_is_poured_and_not_wanted_waits_with_its_server() -> None:
    given = 0

    async def handler(request: Request) -> Reply:
        nonlocal given
        stream = request.start(200, {})
        for _ in range(500):
            await stream.write(b"x" * 100_000)
            given += 100_000
        await stream.end()
        return stream

    async with a_server(handler) as (_, port), a_client(port) as client:
        async with await client.request("GET", "/") as answer:
            assert not await answer.pour(lambda _: False)
            assert await still(lambda: given) < 30_000_000
            sizes: list[int] = []
            assert await answer.pour(lambda data: sizes.append(len(data)) or True)
        assert sum(sizes) < 50_000_000
        assert given == 50_000_000


async def test_a_connection_that_is_not_used_is_closed() -> None:
    async with a_server() as (server, port), a_client(port, idle_s=0.05) as client:
        await got(client)
        await eventually(lambda: server.connections == 0 and "0 connections" in repr(client))
        assert (await got(client))[0] == 200


async def test_a_server_that_cannot_be_reached_is_unconnected(unused_tcp_port: int) -> None:
    async with a_client(unused_tcp_port) as client:
        with pytest.raises(Unconnected):
            await got(client)
    client = HttpClient("http://name.invalid")
    with pytest.raises(Unconnected):
        await client.request("GET", "/")
    await client.close()


async def test_a_connection_that_does_not_come_in_time_is_unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(SOON_S)

    client = HttpClient("http://127.0.0.1:1")

    class Loop:
        create_connection = staticmethod(never)

    monkeypatch.setattr("http1.client.asyncio.get_running_loop", Loop)
    with pytest.raises(Unconnected, match="in time"):
        await client._connect(0.01)


async def test_a_body_is_read_no_faster_than_it_is_taken() -> None:
    written = 0

    async def handler(request: Request) -> Reply:
        nonlocal written
        stream = request.start(200, {})
        for _ in range(500):
            await stream.write(b"x" * 100_000)
            written += 100_000
        await stream.end()
        return stream

    async with a_server(handler) as (_, port), a_client(port) as client:
        async with await client.request("GET", "/") as answer:
            assert await still(lambda: written) < 30_000_000
            size = 0
            async for data in answer.content():
                assert len(data) < 2_000_000
                size += len(data)
        assert size == written == 50_000_000
        assert "1 idle" in repr(client)


async def test_a_body_is_sent_in_pieces_no_faster_than_it_is_read() -> None:
    given = 0
    go_on = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(500):
            yield b"x" * 100_000
            given += 100_000

    async def handler(request: Request) -> Reply:
        await go_on.wait()
        size = 0
        async for data in request.content():
            size += len(data)
        return Response(200, b"%d" % size)

    async with a_server(handler) as (_, port), a_client(port) as client:
        asking = asyncio.create_task(client.request("POST", "/", {}, pieces()))
        assert await still(lambda: given) < 30_000_000
        go_on.set()
        async with await asking as answer:
            assert await answer.body(100) == b"50000000"
        assert "1 idle" in repr(client)


async def test_a_server_that_answers_early_is_sent_no_more_of_a_body() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000
            await asyncio.sleep(0)

    async def handler(request: Request) -> Reply:
        return Response(413, b"too much")

    async with a_server(handler) as (_, port), a_client(port) as client:
        async with await client.request("POST", "/", {}, pieces()) as answer:
            assert (answer.status, await answer.body(100)) == (413, b"too much")
        await eventually(lambda: "0 idle" in repr(client))


async def test_a_server_that_answers_early_and_reads_no_further_holds_nothing_up() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1_000_000

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await eventually(lambda: is_held_up)
        writer.write(HELLO)
        await reader.read()

    is_held_up = False
    async with a_peer(talk) as port, a_client(port) as client:
        asking = asyncio.create_task(client.request("POST", "/", {}, pieces()))
        await asyncio.sleep(0.05)
        is_held_up = not asking.done()
        async with await asking as answer:
            assert await answer.body(100) == b"hello"
        await eventually(lambda: "0 connections, 0 idle" in repr(client))


async def test_the_answer_to_head_has_no_body() -> None:
    async with a_peer(saying(OK + b"Content-Length: 5\r\n\r\n")) as port, a_client(port) as client:
        assert await got(client, "HEAD") == (200, b"")


async def test_an_answer_larger_than_its_reader_allows_is_a_bad_answer() -> None:
    async with a_peer(saying(HELLO)) as port, a_client(port) as client, await client.request("GET", "/") as answer:
        with pytest.raises(BadAnswer, match="larger than 4 bytes"):
            await answer.body(4)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "identity"])
async def test_answers_are_decoded_where_that_is_asked_for(coding: str) -> None:
    asked: list[str | None] = []
    content = b"hello " * 1000

    async def handler(request: Request) -> Reply:
        asked.append(request.headers.get("accept-encoding"))
        body = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[coding](content)
        stream = request.start(200, {"Content-Encoding": coding})
        for at in range(0, len(body), 7):
            await stream.write(body[at : at + 7])
        await stream.end()
        return stream

    async with a_server(handler) as (_, port):
        async with a_client(port, decoded_bytes=10_000) as client:
            assert await got(client) == (200, content)
        async with a_client(port, decoded_bytes=100) as client:
            if coding == "identity":
                assert await got(client) == (200, content)
            else:
                with pytest.raises(BadAnswer, match="larger than 100"):
                    await got(client)
        async with a_client(port) as client, await client.request("GET", "/") as answer:
            raw = await answer.body(10_000)
            assert (answer.headers["content-encoding"], raw == content) == (coding, coding == "identity")
    assert asked == ["gzip, deflate", "gzip, deflate", None]


async def test_a_coding_that_was_not_asked_for_is_a_bad_answer() -> None:
    raw = OK + b"Content-Encoding: br\r\nContent-Length: 5\r\n\r\nhello"
    async with a_peer(saying(raw)) as port, a_client(port, decoded_bytes=100) as client:
        with pytest.raises(BadAnswer, match="encoded as 'br'"):
            await got(client)
    raw = OK + b"Content-Encoding: gzip\r\nContent-Length: 10\r\n\r\n" + gzip.compress(b"hello")[:10]
    async with a_peer(saying(raw)) as port, a_client(port, decoded_bytes=100) as client:
        with pytest.raises(BadAnswer, match="in the middle"):
            await got(client)


async def test_a_client_that_is_closed_fails_what_is_under_way_and_begins_nothing() -> None:
    async with a_peer(saying(OK + b"\r\nhalf of it")) as port, a_client(port) as client:
        answer = await client.request("GET", "/")
        assert await answer.read() == b"half of it"
        reading = asyncio.create_task(answer.read())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Disconnected):
            await reading
        with pytest.raises(Unconnected):
            await got(client)


async def test_it_asks_over_tls_and_believes_no_stranger(certificate: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    server = HttpServer(echo)
    listener = await asyncio.get_running_loop().create_server(server.connection, "127.0.0.1", 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    trusting = HttpClient(f"https://localhost:{port}", ssl_context=ssl.create_default_context(cafile=certificate))
    for size in (5, 3_000_000):
        async with await trusting.request("POST", "/", {}, b"x" * size) as answer:
            assert len(await answer.body(1 << 22)) == size
    assert server.connections == 1
    stranger = HttpClient(f"https://localhost:{port}")
    with pytest.raises(Unconnected, match=r"(?i)certificate"):
        await stranger.request("GET", "/")
    await stranger.close()
    await trusting.close()
    listener.close()
    await server.close()


async def test_errors_that_are_not_looked_at_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with a_peer(saying(b"nonsense\r\n\r\n", then="closes")) as port, a_client(port) as client:
        for _ in range(3):
            asking = asyncio.create_task(got(client))
            await asyncio.sleep(0.01)
            asking.cancel()
            with pytest.raises((AnswerError, asyncio.CancelledError)):
                await asking
    gc.collect()
    assert not caplog.records


async def test_a_body_that_fails_on_its_way_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"
        raise LookupError("no more")

    async with a_peer(saying(b"")) as port, a_client(port) as client:
        with pytest.raises(LookupError, match="no more"):
            await client.request("POST", "/", {}, pieces())
        await eventually(lambda: "0 connections" in repr(client))
    gc.collect()
    assert not caplog.records


async def test_a_connection_that_ends_is_freed_at_once_and_leaves_nothing_to_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[ServerConnection]] = []

    class Remembering(ServerConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(weakref.ref(self))
            super().connection_made(transport)

    monkeypatch.setattr(client_module, "ServerConnection", Remembering)
    gc.disable()
    try:
        async with a_peer(saying(HELLO)) as port, a_client(port) as client:
            assert await got(client) == (200, b"hello")
        await eventually(lambda: made[0]() is None)
    finally:
        gc.enable()
