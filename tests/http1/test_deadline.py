"""When something is late, on a clock that jumps."""

from __future__ import annotations

import asyncio

import pytest

from http1.client import HttpClient, ServerConnection
from http1.errors import AnswerTimeout
from http1.limits import ClientLimits, ServerLimits
from http1.message import Deadline
from http1.request import ClientConnection, Reply, Request, Response
from http1.server import HttpServer
from tests.http1.parts import a_request, echo, statuses
from tests.virtual_time import run_virtually

LIMITS = ServerLimits(head_s=30, body_s=60, idle_s=75, write_s=20, linger_s=2)


class Wire(asyncio.Transport):
    """A client or a server that is played by the test: what was written to it, and since when it is closed."""

    def __init__(self, connection: ClientConnection | ServerConnection) -> None:
        super().__init__()
        self.connection, self.received = connection, b""
        self.unsent = 0
        self.closed_at: float | None = None
        connection.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.received += data

    def is_closing(self) -> bool:
        return self.closed_at is not None

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self.closed_at is None:
            loop = asyncio.get_running_loop()
            self.closed_at = loop.time()
            loop.call_soon(self.connection.connection_lost, None)


def a_client(server: HttpServer) -> Wire:
    return Wire(ClientConnection(server, asyncio.get_running_loop()))


def test_a_deadline_that_moves_on_is_late_once_and_on_time() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        late: list[float] = []
        deadline = Deadline(lambda: late.append(loop.time()), loop)
        deadline.within(10)
        for _ in range(9):
            await asyncio.sleep(5)
            deadline.within(10)
        await asyncio.sleep(100)
        assert late == [55.0]
        deadline.within(50)
        deadline.within(3)
        await asyncio.sleep(4)
        assert late == [55.0, 148.0]
        deadline.within(5)
        deadline.clear()
        await asyncio.sleep(100)
        deadline.within(5)
        deadline.cancel()
        await asyncio.sleep(100)
        assert late == [55.0, 148.0]

    run_virtually(run())


def test_a_client_that_sends_nothing_is_left_after_the_time_for_a_head() -> None:
    async def run() -> None:
        client = a_client(HttpServer(echo, LIMITS))
        await asyncio.sleep(100)
        assert (client.closed_at, client.received) == (30.0, b"")

    run_virtually(run())


@pytest.mark.parametrize("asked", [b"", a_request(method="GET")])
def test_empty_lines_between_requests_keep_no_connection(asked: bytes) -> None:
    async def run() -> None:
        client = a_client(HttpServer(echo, LIMITS))
        if asked:
            client.connection.data_received(asked)
        for _ in range(10):
            await asyncio.sleep(1)
            client.connection.data_received(b"\r\n")
        await asyncio.sleep(100)
        assert client.closed_at == (LIMITS.idle_s if asked else LIMITS.head_s)

    run_virtually(run())


def test_a_head_that_drips_is_refused_after_its_time_however_often_something_comes() -> None:
    async def run() -> None:
        client = a_client(HttpServer(echo, LIMITS))
        await asyncio.sleep(20)
        for byte in a_request(method="GET", path="/" + "a" * 50)[:40]:
            client.connection.data_received(bytes([byte]))
            await asyncio.sleep(1)
        assert statuses(client.received) == [408]
        await asyncio.sleep(10)
        assert client.closed_at == 20 + 30 + LIMITS.linger_s

    run_virtually(run())


def test_a_body_may_drip_but_not_stop() -> None:
    async def run() -> None:
        client = a_client(HttpServer(echo, LIMITS))
        client.connection.data_received(a_request("Content-Length: 5"))
        for _ in range(4):
            await asyncio.sleep(59)
            client.connection.data_received(b"x")
        assert client.received == b""
        await asyncio.sleep(59)
        assert client.received == b""
        await asyncio.sleep(2)
        assert statuses(client.received) == [408]
        await asyncio.sleep(10)
        assert client.closed_at == 4 * 59 + 60 + LIMITS.linger_s

    run_virtually(run())


def test_a_connection_that_is_not_used_is_closed_and_a_handler_may_take_its_time() -> None:
    async def handler(request: Request) -> Reply:
        await asyncio.sleep(3600)
        return Response(200, b"x")

    async def run() -> None:
        client = a_client(HttpServer(handler, LIMITS))
        for number in (1, 2):
            client.connection.data_received(a_request(method="GET"))
            await asyncio.sleep(3600 + 70)
            assert (statuses(client.received), client.closed_at) == ([200] * number, None)
        await asyncio.sleep(100)
        assert client.closed_at == 3670 + 3600 + 75

    run_virtually(run())


def test_a_body_that_its_handler_leaves_is_not_its_clients_fault() -> None:
    async def handler(request: Request) -> Reply:
        await asyncio.sleep(3600)
        return Response(200, await request.body())

    async def run() -> None:
        client = a_client(HttpServer(handler, ServerLimits(unread_bytes=10)))
        client.connection.data_received(a_request("Content-Length: 20", body=b"x" * 15))
        await asyncio.sleep(3600 + 30)
        client.connection.data_received(b"y" * 5)
        await asyncio.sleep(1)
        assert statuses(client.received) == [200]
        client.abort()
        await asyncio.sleep(0)

    run_virtually(run())


def test_a_client_that_takes_a_little_is_waited_for_and_one_that_takes_nothing_is_not() -> None:
    async def run() -> None:
        client = a_client(HttpServer(echo, LIMITS))
        client.unsent = 1000
        client.connection.pause_writing()
        client.connection.data_received(a_request(method="GET"))
        for _ in range(10):
            await asyncio.sleep(15)
            client.unsent -= 1
        assert client.closed_at is None
        await asyncio.sleep(100)
        assert client.closed_at is not None
        assert 150 < client.closed_at <= 150 + 2 * LIMITS.write_s

    run_virtually(run())


def test_a_client_that_is_refused_may_read_its_answer_slowly() -> None:
    async def run() -> None:
        client = a_client(HttpServer(echo, LIMITS))
        client.unsent = 100
        client.connection.data_received(b"no HTTP at all")
        assert statuses(client.received) == [400]
        for _ in range(5):
            await asyncio.sleep(15)
            client.unsent -= 10
        assert client.closed_at is None
        client.unsent = 0
        await asyncio.sleep(2 * LIMITS.linger_s)
        assert client.closed_at is not None

    run_virtually(run())


def test_an_answer_may_drip_but_not_stop_and_its_reader_may_take_its_time() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        connection = ServerConnection(HttpClient("http://a", ClientLimits()), loop)
        server = Wire(connection)
        asking = connection.ask("GET", b"", None, 10.0)
        await asyncio.sleep(9)
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
        answer = await asking
        # the reader is busy with something else
        await asyncio.sleep(3600)
        for _ in range(5):
            reading = asyncio.create_task(answer.read())
            await asyncio.sleep(9)
            connection.data_received(b"x")
            assert await reading == b"x"
        began_at = loop.time()
        with pytest.raises(AnswerTimeout, match="10 s"):
            await answer.read()
        assert loop.time() == server.closed_at == began_at + 10
        await asyncio.sleep(0)

    run_virtually(run())


def test_a_server_that_sends_half_a_head_is_given_up() -> None:
    async def run() -> None:
        connection = ServerConnection(HttpClient("http://a"), asyncio.get_running_loop())
        server = Wire(connection)
        asking = connection.ask("GET", b"", None, 10.0)
        await asyncio.sleep(9)
        connection.data_received(b"HTTP/1.1 200 OK\r\n")
        with pytest.raises(AnswerTimeout):
            await asking
        assert server.closed_at == 10
        await asyncio.sleep(0)

    run_virtually(run())


def test_a_connection_is_kept_for_a_while_after_its_answer() -> None:
    async def run() -> None:
        client = HttpClient("http://a", ClientLimits(idle_s=15))
        connection = ServerConnection(client, asyncio.get_running_loop())
        server = Wire(connection)
        for began_at in (0, 12):
            asking = connection.ask("GET", b"", None, 600.0)
            await asyncio.sleep(2)
            connection.data_received(b"HTTP/1.1 204 No Content\r\n\r\n")
            await asking
            assert repr(client).endswith("1 connections, 1 idle>")
            client.idle.clear()
            await asyncio.sleep(10)
            assert server.closed_at is None, began_at
        client.idle.append(connection)
        await asyncio.sleep(10)
        assert server.closed_at == 14 + 15
        assert repr(client).endswith("0 connections, 0 idle>")

    run_virtually(run())
