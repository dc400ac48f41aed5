"""A client and a backend of one dialect, over real sockets: bytes in are bytes out, and all is counted."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from policies.sla.parse import parse
from router.start.app import Router
from tests.shards.attached import eventually

KEY = "sha256:" + hashlib.sha256(b"k").hexdigest()
CHAT = "/v1/chat/completions"
SLA = """
classes: {{chat: {{}}}}
tenants: {{acme: {{keys: ["{key}"], limits: {{tokens_per_minute: 100k}}}}}}
pools:
{pools}
rules: [{{class: chat}}]
policies: {{default: {{filter: [healthy, serves_model, under_limit], score: {{turn: 1}}, pick: best}}}}
server: {{http: "127.0.0.1:0", grpc: off}}
"""
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2, "details":null}}\n\n'
STREAM = (
    b'data: {"id":"x", "model":"m","choices":[{"delta":{"role":"assistant"},"index":0}]}\n\n: soon\n\n',
    b'data: {"model":"m","choices":[{"delta":{"content":"Gr\\u00fc\xc3\x9fe","odd":[1.0]},"index":0}]}\n\n',
    b'data: {"model":"m","choices":[{"delta":{},"index":0,"finish_reason":"stop"}],"timings":{"a":1e3}}\n\n',
    USAGE,
    b"data: [DONE]\n\n",
)
WHOLE = (
    b'{"id":"x",  "model":"m","choices":[{"index":0,"message":{"content":"H\\u00e9"},"finish_reason":"stop"}],'
    b'\n"usage":{"prompt_tokens":7,"completion_tokens":2},"system_fingerprint":"fp"}'
)


@dataclass
class Engine:
    """Answers `stream`, or `whole` to requests that do not stream, byte for byte; keeps the bytes of requests.

    None in `stream` waits until it `goes_on`. `floods`: after the stream's first two pieces it writes without end.
    `hangs`: it says nothing at all. `written_bytes` could be written so far.
    """

    stream: Sequence[bytes | None] = STREAM
    whole: bytes = WHOLE
    floods: bool = False
    hangs: bool = False
    received: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)
    written_bytes: int = 0
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    is_left: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.received.append((raw, {name.lower(): value for name, value in request.headers.items()}))
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.is_left.set()
        if not json.loads(raw).get("stream"):
            return web.Response(body=self.whole, content_type="application/json")
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        try:
            for piece in self.stream[:2] if self.floods else self.stream:
                await (self.goes_on.wait() if piece is None else reply.write(piece))
            while self.floods:
                await reply.write(STREAM[1])
                self.written_bytes += len(STREAM[1])
        except (asyncio.CancelledError, ConnectionError):
            self.is_left.set()
            raise
        return reply

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})


@dataclass
class House:
    """A router in front of engines, and a client."""

    router: Router
    http: aiohttp.ClientSession
    path: str = CHAT

    def post(self, raw: bytes, **headers: str) -> aiohttp.client._RequestContextManager:
        sent = {"authorization": "Bearer k", "content-type": "application/json", **headers}
        return self.http.post(self.router.http_url + self.path, data=raw, headers=sent)

    async def answer(self, raw: bytes, **headers: str) -> bytes:
        async with self.post(raw, **headers) as reply:
            body = await reply.read()
            assert reply.status == 200, body
            return body

    def counted(self, kind: str) -> float:
        """Tokens of one kind, over all calls so far."""
        labels = {"tenant": "acme", "service_class": "chat", "kind": kind}
        return self.router.telemetry.registry.get_sample_value("pointsman_tokens_total", labels) or 0.0


@asynccontextmanager
async def a_house(
    *engines: Engine, pool: str = "kind: openai_compatible, model: m", path: str = CHAT
) -> AsyncIterator[House]:
    servers = []
    for engine in engines:
        app = web.Application()
        app.add_routes([web.post(path, engine.chat), web.get("/v1/models", engine.models)])
        app.add_routes([web.get("/health", engine.models)])
        servers.append(TestServer(app, handler_cancellation=True))
        await servers[-1].start_server()
    lines = [f'  p{at}: {{{pool}, at: "{server.make_url("")}"}}' for at, server in enumerate(servers)]
    try:
        async with (
            Router(parse(SLA.format(key=KEY, pools="\n".join(lines)))) as router,
            aiohttp.ClientSession() as http,
        ):
            assert await router.wait_until_reached(5)
            yield House(router, http, path)
            assert await router.gateway.doors.emptied(5)
            router.check()
    finally:
        for server in servers:
            await server.close()


BODY = (
    b'\n{ "stream" : true,"model":"m", "messages":[{"role":"user","content":"H\\u00e9 \xf0\x9f\x98\x80","x":{"y":[]}}],'
    b'\t"user":"u","metadata":{"a":"b"}, "vendor":1.50, "stream_options": {"include_usage" : true, "v":0}}  '
)


async def test_a_stream_goes_both_ways_byte_for_byte() -> None:
    engine = Engine()
    async with a_house(engine) as house:
        trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        async with house.post(BODY, traceparent=trace, tracestate="v=1") as reply:
            assert await reply.read() == b"".join(STREAM)
            assert reply.headers["x-pointsman-backend"] == "p0-0"
            assert reply.headers["content-type"] == "text/event-stream"
        (sent, headers), *_ = engine.received
        assert sent == BODY
        assert (headers["traceparent"], headers["tracestate"]) == (trace, "v=1")
        assert (house.counted("prompt"), house.counted("completion")) == (7, 2)


async def test_usage_is_counted_and_shown_only_if_requested() -> None:
    engine = Engine()
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}],"stream":true }'
    async with a_house(engine) as house:
        assert await house.answer(body) == b"".join(STREAM).replace(USAGE, b"")
        assert house.counted("completion") == 2
    assert engine.received[0][0] == body.replace(b" }", b' ,"stream_options":{"include_usage":true}}')


async def test_an_answer_in_one_piece_is_the_engines_own() -> None:
    engine = Engine()
    body = b'{"model":"m", "messages":[{"role":"user","content":"a"}]}'
    async with a_house(engine) as house:
        for _ in range(2):
            assert await house.answer(body) == WHOLE
        assert house.counted("completion") == 4
        account = {"tenant": "acme", "service_class": "chat"}
        registry = house.router.telemetry.registry
        assert registry.get_sample_value("pointsman_requests_total", account | {"outcome": "finished"}) == 2
        # no answer had the time of its first token
        assert not registry.get_sample_value("pointsman_ttft_seconds_count", account)
    assert [raw for raw, _ in engine.received] == [body] * 2


async def test_a_model_of_another_name_is_all_that_changes() -> None:
    engine = Engine()
    async with a_house(engine, pool="kind: openai_compatible, models: {mine: m}") as house:
        mine = BODY.replace(b'"m"', b'"mine"')
        assert await house.answer(mine) == b"".join(STREAM).replace(b'"model":"m"', b'"model":"mine"')
        whole = mine.replace(b'"stream" : true', b'"stream" : false')
        assert await house.answer(whole) == WHOLE.replace(b'"model":"m"', b'"model":"mine"')
    assert [raw for raw, _ in engine.received] == [BODY, BODY.replace(b'"stream" : true', b'"stream" : false')]


async def test_a_cache_domain_is_put_in_and_fields_that_clients_may_not_set_are_taken_out() -> None:
    engine = Engine()
    body = BODY.replace(b'"vendor":1.50', b'"vendor":1.50, "kv_transfer_params":{"from":"afar"}, "cache_salt":"theirs"')
    async with a_house(engine, pool="kind: vllm, model: m") as house:
        await house.answer(body)
        await house.answer(BODY)
    ours = b'"cache_salt":"acme"'
    assert engine.received[0][0] == BODY.replace(b'"vendor":1.50', b'"vendor":1.50, ' + ours)
    assert engine.received[1][0] == BODY.replace(b"}  ", b"," + ours + b"}  ")


async def test_another_backend_is_tried_while_nothing_was_seen_and_none_afterwards() -> None:
    broken = b'data: {"error":{"message":"out of memory"}}\n\n'
    early, late = Engine(stream=(STREAM[0], broken)), Engine()
    async with a_house(early, late) as house:
        for _ in range(2):
            assert await house.answer(BODY) == b"".join(STREAM)
        assert house.counted("completion") == 4
        before = len(early.received) + len(late.received)
        early.stream = late.stream = (*STREAM[:2], None, broken)
        async with house.post(BODY) as reply:
            assert await reply.content.readany() == STREAM[0] + STREAM[1]
            early.goes_on.set()
            late.goes_on.set()
            rest = await reply.read()
    assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "backend_failed"
    assert len(early.received) + len(late.received) == before + 1


async def test_a_client_that_leaves_a_stream_ends_it_at_the_engine() -> None:
    engine = Engine(floods=True)
    async with a_house(engine) as house:
        async with house.post(BODY) as reply:
            await reply.content.readany()
        await asyncio.wait_for(engine.is_left.wait(), 5)


async def test_a_client_that_leaves_before_its_answer_in_one_piece_ends_it_at_the_engine() -> None:
    engine = Engine()
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}]}'
    async with a_house(engine) as house:
        await house.answer(body)
        engine.hangs = True
        asking = asyncio.create_task(house.answer(body))
        await eventually(lambda: len(engine.received) == 2)
        assert json.loads(engine.received[1][0]).get("stream") is None
        asking.cancel()
        await asyncio.wait_for(engine.is_left.wait(), 5)


async def test_a_client_that_does_not_read_stops_the_engine_and_fills_no_memory() -> None:
    engine = Engine(floods=True)
    async with a_house(engine) as house:
        reader, writer = await asyncio.open_connection(*house.router.http_url.removeprefix("http://").split(":"))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Length: {len(BODY)}\r\n\r\n"
        with closing(writer):
            writer.write(head.encode() + BODY)
            await reader.readuntil(b"\r\n\r\n")
            # the reader here buffers a little, then asks its socket for nothing more
            await eventually(lambda: engine.written_bytes > 0)
            before = -1
            while engine.written_bytes != before:
                before = engine.written_bytes
                await asyncio.sleep(0.2)
            assert before < 32 << 20, "two sockets' buffers and two small ones of the router's own"
            # how much has to be read before the sockets ask for more is the system's to say
            while engine.written_bytes == before:
                await asyncio.wait_for(reader.readexactly(1 << 20), 5)
                await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.is_left.wait(), 5)


TEXT = "/v1/completions"


def a_text(text: str, finish: str, **beside: object) -> dict[str, object]:
    return {"index": 0, "text": text, "finish_reason": finish, "stop_reason": " the", **beside}


async def test_several_prompts_keep_every_field_of_their_answers_whole_and_streamed() -> None:
    whole = {"id": "x", "choices": [a_text("a", "stop", token_ids=[1])], "service_tier": "flex", "metrics": None}
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}, "other": None}
    chunk = {"id": "x", "choices": [a_text("a", "stop")], "model": "m"}
    last = {"id": "x", "choices": [], "usage": usage, "model": "m", "system_fingerprint": "fp"}
    stream = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in (chunk, last)]
    engine = Engine(stream=(*stream, b"data: [DONE]\n\n"), whole=json.dumps({**whole, "usage": usage}).encode())
    body = {"model": "m", "prompt": ["Hello", "You"], "stop": " the", "max_tokens": 5}
    twice = {"prompt_tokens": 14, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}, "other": None}
    async with a_house(engine, path=TEXT) as house:
        content = json.loads(await house.answer(json.dumps(body).encode()))
        second = {**a_text("a", "stop", token_ids=[1]), "index": 1}
        assert content == {**whole, "choices": [a_text("a", "stop", token_ids=[1]), second], "usage": twice}
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events = (await house.answer(json.dumps(streamed).encode())).decode().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert sorted(each["choices"][0]["index"] for each in chunks[:-1]) == [0, 1]
    assert all(each == {**chunk, "choices": each["choices"]} for each in chunks[:-1])
    assert chunks[-1] == {**last, "usage": twice}
    assert events[-2:] == ["data: [DONE]", ""]
    assert {json.loads(raw)["prompt"] for raw, _ in engine.received} == {"Hello", "You"}


async def test_transfer_parameters_of_an_answer_pass_and_those_of_a_request_do_not() -> None:
    whole = WHOLE.replace(b'"system_fingerprint"', b'"kv_transfer_params":{"remote_port":5},"system_fingerprint"')
    engine = Engine(whole=whole)
    body = b'{"model":"m","kv_transfer_params":{"from":"afar"},"messages":[{"role":"user","content":"a"}]}'
    async with a_house(engine, pool="kind: vllm, model: m") as house:
        assert await house.answer(body) == whole
    assert "kv_transfer_params" not in json.loads(engine.received[0][0])


async def test_what_a_backend_echoes_by_itself_is_not_echoed_again() -> None:
    whole = {"choices": [a_text("Hello there", "length")], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    engine = Engine(whole=json.dumps(whole).encode())
    body = b'{"model":"m","prompt":"Hello","echo":true,"max_tokens":0}'
    async with a_house(engine, pool="kind: vllm, model: m", path=TEXT) as house:
        assert await house.answer(body) == engine.whole
    assert json.loads(engine.received[0][0]).items() >= {"echo": True, "max_tokens": 0}.items()


async def test_an_echo_alone_of_a_backend_that_knows_none_is_the_prompt() -> None:
    whole = {"choices": [a_text(" there", "stop")], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    engine = Engine(whole=json.dumps(whole).encode())
    body = b'{"model":"m","prompt":"Hello","echo":true,"max_tokens":0}'
    async with a_house(engine, path=TEXT) as house:
        (choice,) = json.loads(await house.answer(body))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    sent = json.loads(engine.received[0][0])
    assert (sent["max_tokens"], "echo" in sent) == (1, False)


async def test_no_tokens_without_an_echo_are_refused() -> None:
    body = b'{"model":"m","prompt":"Hello","max_tokens":0}'
    async with a_house(Engine(), path=TEXT) as house, house.post(body) as reply:
        content = await reply.json()
    assert (reply.status, content["error"]["param"]) == (400, "max_tokens")
    assert "at least 1" in content["error"]["message"]
