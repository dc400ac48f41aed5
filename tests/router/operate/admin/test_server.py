"""The operators' port: reload on demand, with an admin key."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from policies.errors import ConfigError
from policies.sla.server import ServerSettings
from router.start.app import Router
from tests.router.parts import ScriptedBackend, a_config
from tests.router.start.test_reload import Paper, a_file

KEY = "operator"
HASHES = frozenset({hashlib.sha256(KEY.encode()).hexdigest()})


@asynccontextmanager
async def an_admin(paper: Paper, **server: Any) -> AsyncIterator[tuple[Router, aiohttp.ClientSession]]:
    from dataclasses import replace

    contents = paper.read()
    settings: ServerSettings = replace(contents.config.server, admin="127.0.0.1:0", **server)
    config = replace(contents.config, server=settings)
    backends = [ScriptedBackend(speaks_tokens=False)]
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        Router(config, backends=lambda _: backends, file=contents) as router,
        aiohttp.ClientSession(f"http://{router.admin}", headers=headers) as http,
    ):
        yield router, http


async def test_a_reload_is_answered_with_the_version_that_decides_now() -> None:
    paper = Paper(a_file(1))
    async with an_admin(paper) as (router, http):
        paper.text = a_file(2)
        async with http.post("/admin/reload") as reply:
            assert (reply.status, await reply.json()) == (200, {"version": router.gateway.config.version})
        assert list(router.gateway.config.classes) == ["class-2"]
        async with http.get("/admin/config") as reply:
            assert await reply.json() == {"version": router.gateway.config.version, "shadow": None, "is_file": False}


async def test_a_bad_file_is_answered_with_every_mistake_and_the_old_one_stays() -> None:
    paper = Paper(a_file(1))
    async with an_admin(paper) as (router, http):
        before, paper.text = router.gateway.config, "classes: [oops]\ntenants: 7\n"
        async with http.post("/admin/reload") as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["code"]) == (400, "invalid_config")
        assert "paper.yaml:1: classes" in error["message"]
        assert "paper.yaml:2: tenants" in error["message"]
        assert router.gateway.config is before


async def test_calls_without_the_key_are_refused() -> None:
    async with an_admin(Paper(a_file(1)), admin_key_hashes=HASHES) as (_, http):
        async with http.post("/admin/reload", headers={"authorization": "Bearer guess"}) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (401, "invalid_api_key")
        async with http.post("/admin/reload") as reply:
            assert reply.status == 200
        async with http.post("/nowhere") as reply:
            assert (reply.status, (await reply.json())["error"]["hint"]) == (
                404,
                "GET /dashboard has the dashboard; docs/operating.md lists the calls",
            )


async def test_a_port_that_others_can_reach_needs_keys() -> None:
    router = Router(a_config(admin="0.0.0.0:0"), backends=lambda _: [ScriptedBackend()])
    with pytest.raises(ConfigError, match=r"is open to other machines and has no keys \(set server.admin_keys"):
        await router.__aenter__()


async def test_a_router_without_a_file_has_nothing_to_reload() -> None:
    async with (
        Router(a_config(admin="127.0.0.1:0"), backends=lambda _: [ScriptedBackend()]) as router,
        aiohttp.ClientSession(f"http://{router.admin}") as http,
        http.post("/admin/reload") as reply,
    ):
        assert (reply.status, (await reply.json())["error"]["message"].partition(" (")[0]) == (
            400,
            "this router runs without an SLA file",
        )


@pytest.mark.parametrize(
    ("coding", "body", "words"),
    [
        ("gzip", b"no gzip at all", "the body cannot be read"),
        ("gzip", gzip.compress(b"{}" * 9000, mtime=0)[:-9], "the body cannot be read"),
        ("br", b"x", "the content encoding 'br' is not supported (send it as identity, gzip, deflate)"),
        ("zstd", b"x", "the content encoding 'zstd' is not supported (send it as identity, gzip, deflate)"),
        ("identity", b"[" * (65 << 10), "the body is larger than 65536 bytes"),
    ],
)
async def test_a_body_that_cannot_be_decoded_is_an_error_of_its_sender_and_logs_nothing(
    coding: str, body: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        an_admin(Paper(a_file(1))) as (_, http),
        http.post("/admin/explain", data=body, headers={"content-encoding": coding}) as reply,
    ):
        assert reply.status in (400, 413)
        assert words in (await reply.json())["error"]["message"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_body_is_not_decoded_before_its_key_is_known() -> None:
    async with (
        an_admin(Paper(a_file(1)), admin_key_hashes=HASHES) as (_, http),
        http.post(
            "/admin/explain", data=b"no gzip", headers={"content-encoding": "gzip", "authorization": "Bearer guess"}
        ) as reply,
    ):
        assert reply.status == 401


@pytest.mark.parametrize("raw", [b"GET /dashboard HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"nonsense\r\n\r\n"])
@pytest.mark.parametrize("port", ["http", "admin"])
async def test_no_answer_names_the_software_behind_it(raw: bytes, port: str) -> None:
    async with an_admin(Paper(a_file(1))) as (router, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", getattr(router, port).port)
        writer.write(raw)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.close()
    assert head.startswith(b"http/1.1 ")
    assert b"server:" not in head
    assert not any(name in head for name in (b"python", b"aiohttp", b"pointsman"))


async def test_a_rank_is_changed_by_the_name_that_has_a_slash() -> None:
    async with an_admin(Paper(a_file(1))) as (_, http):
        async with http.patch("/admin/backends/b0%2F1", json={"weight": 2}) as reply:
            assert "there is no backend 'b0/1'" in (await reply.json())["error"]["message"]
        async with http.put("/admin/config") as reply:
            assert reply.status == 405
