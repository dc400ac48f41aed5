"""The access log: one line for each request over HTTP, whatever became of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from policies.errors import Overloaded
from router.protocols.http.access_log import ACCESS, AccessLog
from shards.logs import JsonLines
from tests.router.parts import CHAT, MODEL, ScriptedBackend, a_chat, a_client, a_router, an_answer


class Lines(logging.Handler):
    """What was logged, as JSON and as text."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def values(self) -> list[dict[str, object]]:
        return [json.loads(JsonLines().format(record)) for record in self.records]


@pytest.fixture
def lines() -> Iterator[Lines]:
    log, handler = logging.getLogger(ACCESS), Lines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


async def until(lines: Lines, count: int) -> list[dict[str, object]]:
    async with asyncio.timeout(20):
        while len(lines.records) < count:  # noqa: ASYNC110 - logging has no events
            await asyncio.sleep(0.01)
    return lines.values()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_names_client_status_time_tenant_class_backend_and_id(lines: Lines, stream: bool) -> None:
    async with a_router(ScriptedBackend(scripts=[an_answer("Hello")])) as router, a_client(router) as client:
        async with client.post(CHAT, {**a_chat(), "stream": stream}) as reply:
            assert b"Hello" in await reply.read()
            given = reply.headers["x-request-id"]
        (line,) = await until(lines, 1)
    assert isinstance(line.pop("ms"), int)
    assert {name: line[name] for name in ("client", "method", "path", "status", "request")} == {
        "client": "127.0.0.1",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "request": given,
    }
    assert {"tenant", "class", "backend"} <= line.keys()
    (record,) = lines.records
    assert record.getMessage().startswith(f'127.0.0.1 "POST {CHAT}" 200 ')
    assert "\n" not in record.getMessage()


async def test_refusals_errors_and_other_paths_have_lines_and_no_line_has_a_query_or_a_body(lines: Lines) -> None:
    backend = ScriptedBackend(scripts=[[Overloaded("busy")]])
    async with a_router(backend) as router, a_client(router) as client:
        for ask in (
            client.post(CHAT, a_chat()),
            client.post(CHAT, {"model": MODEL}),
            client.get("/v1/nothing?key=a-secret"),
            client.get("/healthz"),
        ):
            async with ask as reply:
                await reply.read()
        found = await until(lines, 4)
    statuses = [line["status"] for line in found]
    assert statuses[1:] == [400, 404, 200]
    assert statuses[0] in (429, 503)
    assert "a-secret" not in json.dumps(found)


async def test_a_client_that_leaves_is_a_line_of_its_own_status(lines: Lines) -> None:
    backend = ScriptedBackend(scripts=[[asyncio.Event()]])
    async with a_router(backend) as router, a_client(router) as client:
        asked = asyncio.create_task(anext_of(client))
        async with asyncio.timeout(10):
            await backend.began.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        (line,) = await until(lines, 1)
    assert line["status"] == 499


async def anext_of(client: object) -> None:
    async with client.post(CHAT, a_chat()):  # type: ignore[attr-defined]
        pass


async def test_without_being_asked_for_no_request_passes_it() -> None:
    assert not AccessLog.is_wanted()
