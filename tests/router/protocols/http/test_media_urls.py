"""URLs of images and the like in requests of each dialect: refused in its words before an engine sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from policies.sla.parse import parse
from router.start.app import Router
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

SLA = """
classes: {{chat: {{}}}}
pools: {{own: {{kind: vllm, model: m, at: ["{url}"]}}}}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off{more}}}
"""
METADATA = "http://169.254.169.254/latest/meta-data/"


@asynccontextmanager
async def a_router(more: str = "") -> AsyncIterator[tuple[str, VLLMServer]]:
    async with running(VLLMServer()) as server, Router(parse(SLA.format(url=server.url, more=more))) as router:
        assert await router.wait_until_reached(10)
        yield router.http_url, server
        router.check()


def chat(url: str, kind: str = "image_url") -> dict[str, Any]:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": url}}]
    return {"model": "m", "messages": [{"role": "user", "content": parts}]}


def message(url: str) -> dict[str, Any]:
    parts = [{"type": "image", "source": {"type": "url", "url": url}}]
    return {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": parts}]}


def response(url: str) -> dict[str, Any]:
    return {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}


async def posted(url: str, path: str, body: object) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"{url}{path}", json=body) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat("file:///etc/passwd")),
        ("/v1/chat/completions", chat(METADATA)),
        ("/v1/chat/completions", chat(METADATA, "video_url")),
        ("/v1/chat/completions", chat("http://127.1:8082/", "audio_url")),
        ("/v1/messages", message(METADATA)),
        ("/v1/responses", response(METADATA)),
    ],
)
async def test_a_url_that_engines_must_not_fetch_is_refused_and_no_engine_sees_it(path: str, body: object) -> None:
    async with a_router() as (url, server):
        status, answer = await posted(url, path, body)
        assert status == 400, answer
        assert "the URL '" in answer["error"]["message"]
        assert not [seen for seen in server.received if seen.path == path]


async def test_a_file_may_name_the_hosts() -> None:
    async with a_router(", media_hosts: [cdn.example.com]") as (url, server):
        status, answer = await posted(url, "/v1/chat/completions", chat("https://example.com/a.png"))
        assert status == 400
        assert "server.media_hosts" in answer["error"]["message"]
        status, answer = await posted(url, "/v1/chat/completions", chat("https://cdn.example.com/a.png"))
        assert status == 200, answer
        assert [seen.path for seen in server.received if seen.path.startswith("/v1/chat")] == ["/v1/chat/completions"]


async def test_no_hosts_leave_bytes_alone() -> None:
    async with a_router(", media_hosts: none") as (url, _):
        assert (await posted(url, "/v1/chat/completions", chat("https://cdn.example.com/a.png")))[0] == 400
        assert (await posted(url, "/v1/chat/completions", chat("data:image/png;base64,AAAA")))[0] == 200
