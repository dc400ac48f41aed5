"""The clients of the load notice what a router must not do to them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.chaos.load import Door, End, Load, Request, Shape
from tests.chaos.server import answer_to

USAGE = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 4}}
ERROR = {"error": {"message": "the backend that had the request failed"}}


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def events(question: str) -> dict[str, tuple[list[Any], End]]:
    text = answer_to(question)[:4]
    whole = [piece(text[:2]), piece(text[2:], "length"), USAGE, "[DONE]"]
    return {
        "a whole answer": (whole, End.WHOLE),
        "an error behind a part of it": ([piece(text[:2]), ERROR], End.CUT),
        "a part that ends like a whole answer": ([piece(text[:2], "length"), USAGE, "[DONE]"], End.WRONG),
        "no end": (whole[:-1], End.WRONG),
        "no finish": ([piece(text), USAGE, "[DONE]"], End.WRONG),
        "no usage": ([piece(text, "length"), "[DONE]"], End.WRONG),
        "a part that is repeated": ([piece(text[:2]), *whole], End.WRONG),
        "the whole answer twice": ([*whole, *whole], End.WRONG),
        "the answer to another question": ([piece(answer_to("another")[:4], "length"), USAGE, "[DONE]"], End.WRONG),
        "more tokens charged than received": (
            [*whole[:2], {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 8}}, "[DONE]"],
            End.WRONG,
        ),
        "no JSON": ([*whole[:1], "{"], End.WRONG),
        "silence": ([*whole[:1], None], End.HUNG),
    }


async def only_request(script: list[Any]) -> Request:
    """The first request of a load at a server that sends `script` as events; None in it is silence."""

    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for event in script:
            if event is None:
                await asyncio.sleep(5)
            data = event if isinstance(event, str) else json.dumps(event)
            await reply.write(f"data: {data}\n\n".encode())
        return reply

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        shape = Shape(per_s=0.1, most=4, timeout_s=0.3, grace_s=0.2, kinds=("chat stream",))
        load = Load(
            [Door(str(server.make_url("")).rstrip("/"), "127.0.0.1:1")], shape, {"acme": "a", "labs": "b"}, lambda: 0
        )
        async with load.running():
            await asyncio.sleep(0.05)
    (request,) = load.requests
    return request


@pytest.mark.parametrize("name", events(""))
async def test_a_client_tells_whole_answers_from_all_others(name: str) -> None:
    script, end = events("Question 0")[name]
    request = await only_request(script)
    assert request.end is end, request
