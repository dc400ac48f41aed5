"""A client of a router, against a real router and against servers that misbehave."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from policies.errors import BackendFailed, InvalidRequest
from policies.sla.parse import parse
from router.client.chats import ChatClient, root_of
from router.start.app import Router
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import TEXT, running
from tests.standins.vllm import VLLMServer

SLA = """
classes: {{quick: {{ttft_p95: 1s}}}}
tenants: {{acme: {{keys: ["${{env:KEY}}"]}}}}
pools: {{v: {{kind: vllm, at: ["{url}"]}}}}
rules: [{{class: quick}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""
HELLO = [{"role": "user", "content": "Hello"}]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def a_router(engine: OpenAIServer) -> AsyncIterator[Router]:
    async with running(engine), Router(parse(SLA.format(url=engine.url), environment={"KEY": "k"})) as router:
        assert await router.wait_until_reached(5)
        yield router


@asynccontextmanager
async def a_server(handler: Handler) -> AsyncIterator[str]:
    """The URL of a server that answers everything with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


def streaming(*events: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for event in events:
            await reply.write(f"data: {event}\n\n".encode())
        return reply

    return handler


async def test_an_answer_comes_in_pieces_with_its_place_and_usage() -> None:
    pieces: list[str] = []
    async with a_router(VLLMServer(model="m")) as router, ChatClient(router.http_url, "k") as client:
        assert await client.models() == ("m",)
        reply = await client.chat(HELLO, "m", on_text=pieces.append)
    assert reply.text == "".join(pieces) == TEXT
    assert len(pieces) > 1
    assert (reply.headers["backend"], reply.headers["class"], reply.headers["tenant"]) == ("v-0", "quick", "acme")
    assert (reply.prompt_tokens, reply.output_tokens, reply.finish) == (5, len(TEXT), "stop")
    assert 0 < reply.first_s <= reply.end_s


async def test_times_are_those_of_the_first_and_of_the_last_piece() -> None:
    clock, heard = itertools.count(), asyncio.Queue[str]()
    chunk = '{{"choices": [{{"index": 0, "delta": {{"content": "{}"}}}}]}}'
    usage = '{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}'

    async def handler(request: web.Request) -> web.StreamResponse:
        reply = await streaming()(request)
        for piece in "abc":
            await reply.write(f"data: {chunk.format(piece)}\n\n".encode())
            await heard.get()
        await reply.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        return reply

    async with a_server(handler) as url, ChatClient(f"{url}/v1", clock=lambda: float(next(clock))) as client:
        reply = await client.chat(HELLO, "m", on_text=heard.put_nowait)
    assert reply.text == "abc"
    # the clock is asked once for each read
    assert (reply.first_s, reply.end_s, reply.tpot_s) == (1.0, 3.0, 1.0)
    assert (reply.cached_tokens, reply.headers) == (None, {})


async def test_an_answer_that_comes_in_one_read_has_no_time_per_token() -> None:
    chunk = '{"choices": [{"index": 0, "delta": {"content": "ab"}}]}'
    usage = '{"choices": [], "usage": {"completion_tokens": 2}}'
    async with a_server(streaming(chunk, usage, "[DONE]")) as url, ChatClient(url) as client:
        assert (await client.chat(HELLO, "m")).tpot_s is None


async def test_a_thought_counts_as_the_first_token() -> None:
    thought = '{"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}'
    usage = '{"choices": [], "usage": {"completion_tokens": 1}}'
    async with a_server(streaming(thought, usage, "[DONE]")) as url, ChatClient(url) as client:
        reply = await client.chat(HELLO, "m")
    assert reply.text == ""
    assert reply.first_s <= reply.end_s
    assert reply.tpot_s is None


async def test_a_refusal_has_the_routers_words_and_a_remedy() -> None:
    async with a_router(VLLMServer(model="m")) as router:
        async with ChatClient(router.http_url) as client:
            with pytest.raises(InvalidRequest, match=r"answered 401: .*\(keys are read from \$POINTSMAN_KEY\)"):
                await client.chat(HELLO, "m")
            with pytest.raises(InvalidRequest, match="/v1/models answered 401"):
                await client.models()
        async with ChatClient(router.http_url, "k") as client:
            with pytest.raises(InvalidRequest, match="answered 404: there is no model 'x'") as caught:
                await client.chat(HELLO, "x")
    assert "is it a router?" not in str(caught.value)


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ((), r"ended without \[DONE\]"),
        (("nonsense",), "no chunk of a chat"),
        (('{"choices": 3}',), "no chunk of a chat"),
        (('{"error": {"message": "the backend died"}}',), "broken off: the backend died"),
        (('{"error": "gone"}',), "broken off: gone"),
    ],
)
async def test_a_stream_that_breaks_off_is_an_error(events: tuple[str, ...], sentence: str) -> None:
    async with a_server(streaming(*events)) as url, ChatClient(url) as client:
        with pytest.raises(BackendFailed, match=sentence):
            await client.chat(HELLO, "m")


async def test_a_server_that_is_no_router_is_named() -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>", status=200 if request.method == "GET" else 502)

    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    async with a_server(nothing) as url, ChatClient(url) as client:
        with pytest.raises(InvalidRequest, match=r"answered 404: .*Not Found.* \(is it a router\? see --at\)"):
            await client.chat(HELLO, "m")
    async with a_server(page) as url, ChatClient(url) as client:
        with pytest.raises(BackendFailed, match=r"/v1/models is no list of models \(is it a router\?\)"):
            await client.models()
        with pytest.raises(InvalidRequest, match="answered 502"):
            await client.chat(HELLO, "m")


async def test_a_list_of_models_without_end_is_not_kept() -> None:
    async def endless(request: web.Request) -> web.Response:
        return web.Response(body=b" " * (5 << 20))

    async with a_server(endless) as url, ChatClient(url) as client:
        with pytest.raises(BackendFailed, match="is too long"):
            await client.models()


async def test_an_address_where_nothing_answers_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    async with ChatClient(address) as client:
        with pytest.raises(
            BackendFailed, match=rf"no answer from http://{address}: Connection refused \(is a router running there\?"
        ):
            await client.models()
        with pytest.raises(BackendFailed, match=f"no answer from http://{address}"):
            await client.chat(HELLO, "m")


@pytest.mark.parametrize("address", ["ftp://a", "http://", "", "http://a:99999", "a:0", "a:b", "http://[::1", "://a"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is not an address \(write one like http://127.0.0.1:8080\)"):
        ChatClient(address)


@pytest.mark.parametrize("address", ["a", "a:1", "https://a/v1", "http://[::1]:8080/", "http://a/prefix"])
def test_addresses_need_no_scheme_and_may_end_with_v1(address: str) -> None:
    assert root_of(address).startswith(("http://", "https://"))
    assert not root_of(address).endswith(("/", "/v1"))


async def test_a_name_that_is_not_known_is_an_error_with_its_reason() -> None:
    async with ChatClient("no.such.host.invalid") as client:
        with pytest.raises(BackendFailed, match=r"no answer from http://no.such.host.invalid: \w+"):
            await client.models()


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        # a router's hint names a header, which is not what its user writes
        (401, {"message": "no key (send it)", "hint": "send it"}, "no key (keys are read from $POINTSMAN_KEY)"),
        (401, {"message": "no key"}, "no key (keys are read from $POINTSMAN_KEY)"),
        (404, {"message": "no files (turn them on)", "hint": "turn them on"}, "no files (turn them on)"),
        (404, {"message": "there is no model", "param": "model"}, "there is no model"),
        (404, {"message": "no"}, "no (is it a router? see --at)"),
        (400, {"message": "bad (mend it)", "hint": "mend it"}, "bad (mend it)"),
    ],
)
async def test_a_refusal_has_one_hint(status: int, error: dict[str, str], told: str) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": error}, status=status)

    async with a_server(refuse) as url, ChatClient(url) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.models()
    assert str(caught.value) == f"/v1/models answered {status}: {told}"


async def test_a_server_that_falls_silent_is_given_up() -> None:
    async with running(OpenAIServer(hangs_after=2)) as server, ChatClient(server.url, silence_s=0.2) as client:
        with pytest.raises(BackendFailed, match="silent for too long"):
            await client.chat(HELLO, "m")
