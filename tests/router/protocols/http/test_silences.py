"""Streams that wait for an event: what their clients get meanwhile."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.openai.responses import PassedResponse
from policies.errors import BackendFailed
from router.protocols.http import endpoints, silences
from router.protocols.http.silences import Silences
from router.start.app import Router
from tests.conformance.scripted_engine import response_events
from tests.router.parts import CHAT, COMPLETIONS, MODEL, ScriptedBackend, a_chat, a_client, a_router, an_answer

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SIGNS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, a_chat(), ": no token yet"),
    (COMPLETIONS, {"model": MODEL, "prompt": "hello"}, ": no token yet"),
    (RESPONSES, {"model": MODEL, "input": "hello"}, '"type":"keepalive"'),
    (MESSAGES, {**a_chat(), "max_tokens": 9}, '"type":"ping"'),
]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silences, "LOOK_S", 0.01)
    monkeypatch.setattr(endpoints, "WAIT_S", 0.0)


@asynccontextmanager
async def a_stream(router: Router, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    async with a_client(router) as client, client.post(path, {**body, "stream": True}) as reply:
        yield reply


async def until(reply: Any, sign: str) -> str:
    """What came up to a line with `sign`."""
    lines = ""
    async for line in reply.content:
        lines += line.decode()
        if sign in lines:
            return lines
    raise AssertionError(lines)


@pytest.mark.parametrize(("path", "body", "sign"), SIGNS)
async def test_a_backend_that_is_silent_for_long_is_no_silence_for_the_client(
    path: str, body: dict[str, Any], sign: str
) -> None:
    gate = asyncio.Event()
    backend = ScriptedBackend(scripts=[[gate, *an_answer("all", " well")]])
    async with a_router(backend) as router, a_stream(router, path, body) as reply:
        assert reply.headers["x-pointsman-backend"] == "b0"
        before = await until(reply, sign)
        gate.set()
        told = before + (await reply.read()).decode()
    assert "well" in told
    # nothing is told that only an answer may tell, or not twice
    assert told.count('"type":"response.created"') == int(path == RESPONSES)
    assert told.count('"type":"message_start"') == int(path == MESSAGES)


@pytest.mark.parametrize(("path", "body", "sign"), SIGNS)
async def test_a_failure_behind_it_is_the_last_event(path: str, body: dict[str, Any], sign: str) -> None:
    gate = asyncio.Event()
    backend = ScriptedBackend(scripts=[[gate, BackendFailed("gone")]] * 9)
    async with a_router(backend) as router, a_stream(router, path, body) as reply:
        await until(reply, sign)
        gate.set()
        rest = (await reply.read()).decode()
    assert "backend_failed" in rest or "api_error" in rest


async def test_an_engines_own_response_follows_it_as_one() -> None:
    gate, passed = asyncio.Event(), PassedResponse("b0")
    own = [delta for event in response_events(None, "all well") for delta in passed.feed(event)]
    backend, body = ScriptedBackend(scripts=[[gate, *own]]), {"model": MODEL, "input": "hello"}
    async with a_router(backend) as router, a_stream(router, RESPONSES, body) as reply:
        told = await until(reply, "keepalive")
        gate.set()
        told += (await reply.read()).decode()
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events].count("response.created") == 1
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize(("path", "body", "sign"), SIGNS)
async def test_an_answer_that_pauses_has_signs_too(path: str, body: dict[str, Any], sign: str) -> None:
    gate = asyncio.Event()
    pieces = an_answer("all", " well")
    backend = ScriptedBackend(scripts=[[pieces[0], gate, *pieces[1:]]])
    async with a_router(backend) as router, a_stream(router, path, body) as reply:
        told = await until(reply, "all")
        told += await until(reply, sign.replace("yet", "now"))
        gate.set()
        told += (await reply.read()).decode()
    assert "well" in told


async def test_events_that_are_passed_on_have_comments_among_them() -> None:
    gate, passed = asyncio.Event(), PassedResponse("b0")
    raw = [*response_events(None, "all well")]
    # a piece is let go when the next one comes
    own = [delta for event in raw for delta in passed.feed(event)]
    backend, body = ScriptedBackend(scripts=[[own[0], gate, *own[1:]]]), {"model": MODEL, "input": "hello"}
    async with a_router(backend) as router, a_stream(router, RESPONSES, body) as reply:
        told = await until(reply, ": no token now")
        gate.set()
        told += (await reply.read()).decode()
    lines = [line for line in told.splitlines() if line and not line.startswith(":")]
    assert lines == [line for line in b"".join(raw).decode().splitlines() if line]


async def test_whole_answers_get_no_sign() -> None:
    gate = asyncio.Event()
    async with a_router(ScriptedBackend(scripts=[[gate, *an_answer("ok")]])) as router, a_client(router) as client:
        asyncio.get_running_loop().call_later(0.1, gate.set)
        assert (await client.answer(CHAT, a_chat()))[0] == 200


async def test_before_a_backend_is_chosen_the_status_stays_open_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "QUEUED_S", math.inf)
    async with a_router(ScriptedBackend(well=False)) as router, a_client(router) as client:
        status, _ = await client.answer(CHAT, a_chat(stream=True))
        assert status == 503


class Counted:
    """A stream that is looked at a number of times."""

    def __init__(self) -> None:
        self.looks, self.thrice = 0, asyncio.Event()

    def tell_wait(self) -> None:
        self.looks += 1
        if self.looks == 3:
            self.thrice.set()


async def test_a_stream_is_looked_at_until_it_is_discarded() -> None:
    silent, gone, stays = Silences(), Counted(), Counted()
    for stream in (gone, stays):
        silent.add(stream)
    silent.discard(gone)
    await stays.thrice.wait()
    assert gone.looks == 0
    silent.discard(stays)
    looks = stays.looks
    silent.discard(stays)
    later = Counted()
    silent.add(later)
    await later.thrice.wait()
    assert stays.looks == looks
