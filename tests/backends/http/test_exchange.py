from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web

from backends.http.backend import base_url
from backends.http.client import MOST_ERROR_BYTES, MOST_PAGE_BYTES, HttpClient
from backends.http.exchange import Exchange, HttpOptions, Page, Post, WholeBody, decoded, encoded
from policies.errors import BackendFailed, DeadlineExceeded, IdleLost, InvalidRequest
from policies.nouns import ACCEPTED, Delta
from tests.backends.parts import Taken
from tests.shards.attached import eventually
from tests.standins.standin import StandIn, running


class Letters:
    """An answer that is over at a full stop; each reply's bytes are one Delta."""

    is_over = False

    def feed(self, data: bytes) -> Iterator[Delta]:
        self.is_over = b"." in data
        yield Delta(text=data.decode())

    def end(self) -> Iterator[Delta]:
        if not self.is_over:
            raise BackendFailed("ended too early")
        return iter(())


class Letter(WholeBody):
    """An answer in one piece, of a few bytes."""

    limit_bytes = 100

    def read(self, whole: bytes) -> list[Delta]:
        return [Delta(text=whole[:1].decode()), Delta(text=whole[1:].decode())]


class Echo(StandIn):
    """Answers what it is sent; a `?` hangs, a `!` is an error as long as it can be."""

    aborted = 0

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            web.post("/echo", self.echo),
            web.post("/letter", self.letter),
            web.post("/abort", self.abort),
            web.get("/large", self.large),
            web.get("/slow", self.slow),
            web.get("/moved", self.moved),
        )

    async def echo(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if body == b"!":
            return web.Response(status=400, body=b"x" * (MOST_ERROR_BYTES * 3))
        with self.generating():
            reply = await self.begin(request)
            await self.write(reply, body)
            if b"?" in body:
                await asyncio.Event().wait()
        return reply

    async def letter(self, request: web.Request) -> web.Response:
        body = await request.read()
        reply = web.Response(body=body)
        if b"zip" in body:
            reply.enable_compression(web.ContentCoding.gzip)
        return reply

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted += 1
        return web.Response()

    async def large(self, request: web.Request) -> web.Response:
        return web.Response(body=b"x" * (MOST_PAGE_BYTES + 1))

    async def slow(self, request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async def moved(self, request: web.Request) -> web.Response:
        raise web.HTTPFound("/large")


@asynccontextmanager
async def a_client(**options: float) -> AsyncIterator[tuple[HttpClient, Echo]]:
    async with running(Echo()) as server:
        client = HttpClient("b", server.url, HttpOptions(**options))  # type: ignore[arg-type]
        try:
            yield client, server
            assert client.open_requests == 0
        finally:
            await client.close()


class Sticky(Echo):
    """Answers with a cookie, as servers behind some load balancers do, and keeps the cookies that it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.cookies: list[dict[str, str]] = []

    async def echo(self, request: web.Request) -> web.StreamResponse:
        self.cookies.append(dict(request.cookies))
        return web.Response(body=b"all.", headers={"set-cookie": "replica=3"})


@asynccontextmanager
async def a_closing_server(posts_per_connection: int) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that reads one post more than it answers on each connection, then closes it. Yields what came in."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(posts_per_connection + 1):
            try:
                heads.append(await reader.readuntil(b"hello"))
            except asyncio.IncompleteReadError:
                break
            if at < posts_per_connection:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nall.")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


def an_exchange(content: bytes, abort: Post | None = None) -> Exchange:
    return Exchange(Post("/echo", content), Letters(), abort=abort)


async def everything(client: HttpClient, exchange: Exchange) -> list[Delta]:
    return [delta async for delta in client.stream(exchange, {}, None)]


async def answer_to(client: HttpClient, content: bytes, deadline_s: float | None = None) -> str:
    return "".join([delta.text async for delta in client.stream(an_exchange(content), {}, deadline_s)])


async def test_the_servers_stream_is_read_as_it_comes() -> None:
    async with a_client() as (client, _):
        assert await answer_to(client, b"all of it.") == "all of it."
        assert client.name in repr(client)


async def test_a_body_that_ends_too_early_is_the_answers_to_judge() -> None:
    async with a_client() as (client, _):
        with pytest.raises(BackendFailed, match="ended too early"):
            await answer_to(client, b"half of")


class Gone(Exception):
    """The client of a Taker has left."""


class Leaving(Taken):
    """Leaves at the first piece of the answer."""

    def take(self, delta: Delta) -> bool:
        if delta.text:
            raise Gone
        return super().take(delta)


@pytest.mark.parametrize("is_slow", [False, True])
async def test_an_answer_is_relayed_as_it_comes_and_no_faster_than_it_is_taken(*, is_slow: bool) -> None:
    async with a_client() as (client, _):
        taken = Taken(is_slow=is_slow)
        await client.relay(an_exchange(b"all of it."), {}, None, taken)
        assert "".join(delta.text for delta in taken.deltas) == "all of it."


@pytest.mark.parametrize("path", ["/letter", "/echo"])
@pytest.mark.parametrize("content", [b"all of it", b"zipped"])
async def test_an_answer_in_one_piece_is_read_once_all_of_it_came(path: str, content: bytes) -> None:
    async with a_client() as (client, _):
        exchange = Exchange(Post(path, content), Letter())
        for is_slow in (False, True):
            taken = Taken(is_slow=is_slow)
            await client.relay(exchange, {}, None, taken)
            assert "".join(delta.text for delta in taken.deltas) == content.decode()
        read = await everything(client, exchange)
        assert read[0] is ACCEPTED
        assert "".join(delta.text for delta in read) == content.decode()


class Heard(Taken):
    """Keeps ACCEPTED too."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted = asyncio.Event()

    def take(self, delta: Delta) -> bool:
        if delta is ACCEPTED:
            self.accepted.set()
        return super().take(delta)


@pytest.mark.parametrize("is_apart", [False, True])
async def test_an_answer_in_one_piece_is_announced_only_where_it_comes_after_its_head(*, is_apart: bool) -> None:
    heard = Heard()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"hello")
        head, body = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", b"all."
        writer.write(head if is_apart else head + body)
        if is_apart:
            await heard.accepted.wait()
            writer.write(body)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = HttpClient("b", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", HttpOptions())
        await client.relay(Exchange(Post("/", b"hello"), Letter()), {}, None, heard)
        assert (heard.accepted.is_set(), heard.deltas) == (is_apart, [Delta(text="a"), Delta(text="ll.")])
        await client.close()


@pytest.mark.parametrize("path", ["/letter", "/echo"])
async def test_an_answer_in_one_piece_has_a_bound(path: str) -> None:
    async with a_client() as (client, _):
        exchange = Exchange(Post(path, b"x" * 101), Letter())
        with pytest.raises(BackendFailed, match="b answered more than 100 bytes"):
            await client.relay(exchange, {}, None, Taken())
        with pytest.raises(BackendFailed, match="b answered more than 100 bytes"):
            await everything(client, exchange)
        await client.relay(Exchange(Post(path, b"x" * 100), Letter()), {}, None, Taken())


async def test_an_answer_in_one_piece_that_is_left_is_aborted_and_one_that_came_is_not() -> None:
    async with a_client() as (client, server):
        abort = Post("/abort", b"{}")
        with pytest.raises(Gone):
            await client.relay(Exchange(Post("/letter", b"all"), Letter(), abort=abort), {}, None, Leaving())
        with pytest.raises(DeadlineExceeded):
            await client.relay(Exchange(Post("/echo", b"more?"), Letter(), abort=abort), {}, 0.05, Taken())
        await eventually(lambda: server.aborted == 1)
        await eventually(lambda: server.open_requests == 0)


async def test_a_relay_fails_as_a_stream_does_and_with_what_its_taker_raises() -> None:
    async with a_client() as (client, server):
        with pytest.raises(BackendFailed, match="ended too early"):
            await client.relay(an_exchange(b"half"), {}, None, Taken())
        with pytest.raises(DeadlineExceeded):
            await client.relay(an_exchange(b"more?"), {}, 0.05, Taken())
        with pytest.raises(Gone):
            await client.relay(an_exchange(b"more?"), {}, None, Leaving())
        await eventually(lambda: server.open_requests == 0)


async def test_an_error_is_read_only_so_far() -> None:
    async with a_client() as (client, _):
        with pytest.raises(InvalidRequest) as failure:
            await answer_to(client, b"!")
    assert len(failure.value.message) <= 2000


async def test_the_deadline_is_the_clients_and_silence_the_servers_fault() -> None:
    async with a_client() as (client, _):
        with pytest.raises(DeadlineExceeded):
            await answer_to(client, b"?", deadline_s=0.05)
    async with a_client(idle_s=0.05) as (client, _):
        with pytest.raises(BackendFailed, match="cannot be reached"):
            await answer_to(client, b"?")


def test_an_answer_has_no_more_time_than_the_client_gives_all_unless_its_kind_needs_it() -> None:
    assert an_exchange(b"?").quiet_s == 0.0


async def test_what_is_left_in_the_middle_is_aborted_and_what_finished_is_not() -> None:
    abort = Post("/abort", b"{}")
    async with a_client() as (client, server):
        async for _ in client.stream(an_exchange(b"done.", abort), {}, None):
            pass
        async with aclosing(client.stream(an_exchange(b"more?", abort), {}, None)) as deltas:
            await anext(deltas)
        await eventually(lambda: server.aborted == 1)
        await eventually(lambda: server.open_requests == 0)


async def test_closing_waits_for_aborts_that_are_under_way() -> None:
    async with a_client() as (client, server):
        async with aclosing(client.stream(an_exchange(b"more?", Post("/abort", b"{}")), {}, None)) as deltas:
            await anext(deltas)
        await client.close()
        assert server.aborted == 1


async def test_what_a_close_ends_is_not_aborted_too() -> None:
    async with a_client() as (client, server):
        deltas = client.stream(an_exchange(b"more?", Post("/abort", b"{}")), {}, None)
        assert [(await anext(deltas)) is ACCEPTED for _ in range(2)] == [True, False]
        await client.close()
        with pytest.raises(BackendFailed):
            await anext(deltas)
        assert client._http is None
        await eventually(lambda: server.open_requests == 0)
        assert server.aborted == 0


async def test_a_connection_that_the_server_closes_while_idle_costs_one_try_and_no_post_is_sent_twice() -> None:
    async with a_closing_server(posts_per_connection=1) as (url, heads):
        client = HttpClient("b", url, HttpOptions())
        assert await answer_to(client, b"hello") == "all."
        with pytest.raises(IdleLost):
            await answer_to(client, b"hello")
        assert len(heads) == 2
        assert await answer_to(client, b"hello") == "all."
        await client.close()


async def test_a_new_connection_that_breaks_is_a_failure_and_nothing_is_sent_twice() -> None:
    async with a_closing_server(posts_per_connection=0) as (url, heads):
        client = HttpClient("b", url, HttpOptions())
        with pytest.raises(BackendFailed, match="cannot be reached"):
            await answer_to(client, b"hello")
        assert len(heads) == 1
        await client.close()


@pytest.mark.parametrize(
    ("path", "probe_s", "message"), [("/large", 30.0, "more than"), ("/slow", 0.2, "cannot be reached")]
)
async def test_a_page_is_bounded_in_size_and_time(path: str, probe_s: float, message: str) -> None:
    async with a_client(probe_s=probe_s) as (client, _):
        with pytest.raises(BackendFailed, match=message):
            await client.get(path)


async def test_redirects_are_not_followed() -> None:
    async with a_client() as (client, _):
        assert (await client.get("/moved")).status == 302


def test_a_page_that_is_not_json_is_an_error() -> None:
    assert decoded(Page(200, b'{"a": 1}'), "b", "this") == {"a": 1}
    with pytest.raises(BackendFailed, match="b answered 500 when asked for this"):
        decoded(Page(500, b""), "b", "this")
    with pytest.raises(BackendFailed, match="nonsense"):
        decoded(Page(200, b"{"), "b", "this")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        encoded({"a": object()})


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_url_may_end_as_openais_clients_want_it(url: str) -> None:
    assert base_url(url) == "http://h:1"


async def test_a_cookie_that_came_with_one_answer_goes_with_no_other_request() -> None:
    async with running(Sticky()) as server:
        # no cookie jar keeps cookies of bare addresses
        client = HttpClient("b", server.url.replace("127.0.0.1", "localhost"), HttpOptions())
        try:
            for _ in range(2):
                assert await answer_to(client, b"hello") == "all."
        finally:
            await client.close()
    assert server.cookies == [{}, {}]


class HalfRefusing(Echo):
    """Begins to say why it refuses, and stops in the middle."""

    async def echo(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(status=500, headers={"content-length": "99"})
        await reply.prepare(request)
        await reply.write(b"the memory")
        with self.generating():
            await asyncio.Event().wait()
        return reply


async def test_a_client_that_closes_waits_for_no_refusal_that_never_ends() -> None:
    async with running(HalfRefusing()) as server:
        client = HttpClient("b", server.url, HttpOptions())
        asking = asyncio.create_task(answer_to(client, b"hello"))
        await eventually(lambda: server.open_requests == 1)
        for _ in range(50):
            # the head is on its way
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(BackendFailed):
            async with asyncio.timeout(2):
                await asking
