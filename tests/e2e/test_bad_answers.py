"""One bad answer hurts only its own request, and what is odd but harmless hurts none."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.e2e.raw_engine import RawEngine, begun, routed, saying, served, whole

PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]
USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
OK = json.dumps(ANSWER).encode()


def chunk(choice: bytes) -> bytes:
    return b'data: {"object":"chat.completion.chunk","model":"m2","choices":[' + choice + b"]}\n\n"


END = chunk(b'{"index":0,"delta":{},"finish_reason":"stop"}') + b"data: [DONE]\n\n"
ODD = {
    "-Infinity": chunk(
        b'{"index":0,"delta":{"content":"odd"},"logprobs":{"content":[{"token":"odd","logprob":-Infinity}]}}'
    ),
    "NaN": chunk(b'{"index":0,"delta":{"content":"odd"},"x":[NaN,{"y":Infinity}]}'),
    "null": chunk(b'{"index":0,"delta":{"content":"odd"},"logprobs":{"content":[{"token":"odd","logprob":null}]}}'),
    "half a pair": chunk(rb'{"index":0,"delta":{"content":"odd \ud83d"}}') + chunk(rb'{"delta":{"content":"\ude00"}}'),
    "half elsewhere": chunk(rb'{"index":0,"delta":{"content":"odd"},"token":"\ude00"}'),
    "no UTF-8": chunk(b'{"index":0,"delta":{"content":"odd \xf0\x9f"}}'),
    "no index": chunk(b'{"index":null,"delta":{"content":"odd"}}'),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("renamed", [False, True])
async def test_what_strict_json_lacks_is_no_fault_where_it_is_not_needed(path: str, odd: str, renamed: bool) -> None:
    engine = RawEngine(saying(begun() + ODD[odd] + END, closes=True))
    engine.models = engine.models.replace(b'"m"', b'"m2"') if renamed else engine.models
    pool = "" if not renamed else ", models: {m: m2}"
    async with served(engine), routed(engine, pool=pool) as (router, ask):
        status, body, _ = await ask(path=path, stream=True)
        assert status == 200
        assert b"odd" in body
        assert b"error" not in body.replace(b'"error":null', b"")
        router.check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("odd", [b"-Infinity", b"NaN", rb'"\ud83d"', b'"\xff"', b"null"])
async def test_the_same_of_an_answer_in_one_piece(path: str, odd: bytes) -> None:
    engine = RawEngine(saying(whole(OK[:-1] + b',"odd":' + odd + b"}")))
    async with served(engine), routed(engine) as (router, ask):
        status, body, _ = await ask(path=path)
        assert status == 200
        assert b"hi" in body
        router.check()


@pytest.mark.parametrize("path", [*PATHS, "/v1/completions"])
@pytest.mark.parametrize("half", [rb"a \ud83d", rb"\ude00 b", rb"\ud83d\ud83d\ude00"])
async def test_half_a_character_in_a_request_becomes_the_one_that_is_unknown(path: str, half: bytes) -> None:
    engine = RawEngine(saying(whole(OK)))
    async with served(engine), routed(engine) as (router, ask):
        text = {"/v1/responses": b'"input":', "/v1/completions": b'"prompt":'}.get(path)
        given = (text + b'"%b"' % half) if text else b'"messages":[{"role":"user","content":"%b"}]' % half
        most = b"max_output_tokens" if path == "/v1/responses" else b"max_tokens"
        status, body, _ = await ask.send(b'{"model":"m","%b":4,%b}' % (most, given), path)
        assert status == 200, body
        (got,) = engine.bodies
        assert "\ufffd" in json.dumps(got, ensure_ascii=False)
        assert "\ud83d" not in json.dumps(got, ensure_ascii=False)
        router.check()


async def test_a_post_is_executed_once_for_each_try() -> None:
    executed = 0

    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        nonlocal executed
        if "warm" in json.dumps(body):
            writer.write(whole(OK))
            return
        executed += 1
        # works, and drops the connection
        await asyncio.sleep(0.01)
        writer.close()

    engines = [RawEngine(says) for _ in range(3)]
    async with served(*engines), routed(*engines) as (router, ask):
        while not all(engine.bodies for engine in engines):
            await asyncio.gather(*(ask(f"warm {at}") for at in range(6)))
        assert (await ask("x"))[0] == 502
        assert executed <= 3
        router.check()


async def test_a_connection_that_lay_idle_costs_no_answer() -> None:
    """The only engine closes each connection after one answer, when the next request is on its way."""

    async def says(engine: RawEngine, writer: asyncio.StreamWriter, body: Any) -> None:
        if len(engine.bodies) % 2:
            writer.write(whole(OK))
        elif body["messages"][0]["content"] != "again":
            body["messages"][0]["content"] = "again"
            writer.close()
        else:
            writer.write(whole(OK))

    engine = RawEngine(says)
    async with served(engine), routed(engine) as (router, ask):
        for at in range(8):
            assert (await ask(f"question {at}"))[0] == 200
        assert not router.gateway.cluster.is_ill(next(iter(router.gateway.cluster.names())))
        router.check()


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 422, 429, 500])
@pytest.mark.parametrize("path", PATHS)
async def test_the_pools_key_is_never_shown(path: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-pool-SECRET/0123"
    caplog.set_level(logging.DEBUG)
    error = {"message": f"no: {key}", "type": "invalid_request_error", "param": key, "code": key}
    body = json.dumps({"error": error}).encode()
    reply = whole(body, status) if status != 200 else begun() + b"data: " + body + b"\n\n"
    engine = RawEngine(saying(reply, closes=status == 200))
    environment = {"POOL_KEY": key}
    async with served(engine), routed(engine, pool=', key: "${env:POOL_KEY}"', environment=environment) as (_, ask):
        shown = await ask(path=path, stream=status == 200)
        assert key in engine.keys[0]
        assert key.encode() not in shown[1]
        assert b"SECRET" not in shown[1]
        assert "SECRET" not in str(shown[2])
    assert "SECRET" not in caplog.text
