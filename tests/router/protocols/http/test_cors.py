"""A browser's calls for a page of another origin: the preflight, and the headers that the page may read."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from policies.errors import BackendFailed
from policies.nouns import Delta
from policies.sla.parse import parse
from router.start.app import Router
from tests.router.parts import CHAT, Client, ScriptedBackend, a_chat, a_client, a_config, a_router

PAGE, OTHER = "https://app.example.com", "https://evil.example.com"
ALLOW = "Access-Control-Allow-Origin"


@asynccontextmanager
async def a_browser(*backends: ScriptedBackend, origins: frozenset[str]) -> AsyncIterator[tuple[Client, Router]]:
    async with a_router(*backends, config=a_config(cors_origins=origins)) as router, a_client(router) as client:
        yield client, router


def preflight(client: Client, origin: str, path: str = CHAT) -> Any:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-pointsman-explain",
    }
    return client.session.options(client.url + path, headers=headers)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/models", "/v1/prefixes/pfx-1"])
async def test_a_browser_may_ask_without_a_key_whether_a_page_may_call(path: str) -> None:
    async with a_browser(origins=frozenset({PAGE})) as (client, _), preflight(client, PAGE, path) as reply:
        assert (reply.status, await reply.read()) == (204, b"")
        assert reply.headers[ALLOW] == PAGE
        assert reply.headers["Access-Control-Allow-Headers"] == "authorization,content-type,x-pointsman-explain"
        assert {"POST", "DELETE"} <= set(reply.headers["Access-Control-Allow-Methods"].split(", "))
        assert reply.headers["Access-Control-Max-Age"] == "600"
        assert "Origin" in reply.headers.getall("Vary")
        assert "Access-Control-Allow-Credentials" not in reply.headers


async def test_pages_of_other_origins_are_refused_and_may_read_nothing() -> None:
    async with a_browser(origins=frozenset({PAGE})) as (client, _):
        async with preflight(client, OTHER) as reply:
            assert reply.status == 403
            assert OTHER in (await reply.json())["error"]["message"]
            assert ALLOW not in reply.headers
        async with client.post(CHAT, a_chat(), headers={"Origin": OTHER}) as reply:
            assert (reply.status, ALLOW in reply.headers) == (200, False)
            assert reply.headers["Vary"] == "Origin"


@pytest.mark.parametrize(("origins", "allowed"), [({PAGE}, PAGE), ({"*"}, "*"), ({PAGE, "*"}, "*")])
async def test_a_page_reads_answers_and_all_their_headers(origins: set[str], allowed: str) -> None:
    async with (
        a_browser(origins=frozenset(origins)) as (client, _),
        client.post(CHAT, a_chat(), headers={"Origin": PAGE}) as reply,
    ):
        assert reply.status == 200
        assert reply.headers[ALLOW] == allowed
        assert reply.headers["Access-Control-Expose-Headers"] == "*"
        assert reply.headers["x-pointsman-backend"] == "b0"


async def test_a_page_reads_streams_and_errors_too() -> None:
    script: list[Any] = [Delta(text="a", token_ids=(1,)), BackendFailed("gone")]
    async with a_browser(ScriptedBackend(scripts=[script]), origins=frozenset({PAGE})) as (client, _):
        async with client.post(CHAT, a_chat(stream=True), headers={"Origin": PAGE}) as reply:
            assert (reply.status, reply.headers.getall(ALLOW)) == (200, [PAGE])
            assert b"backend_failed" in await reply.read()
        for path, key, status in ((CHAT, "wrong", 401), ("/v1/nothing", "wrong", 404)):
            async with client.post(path, a_chat(), key=key, headers={"Origin": PAGE}) as reply:
                assert (reply.status, reply.headers.getall(ALLOW)) == (status, [PAGE])


async def test_without_it_in_the_file_there_are_no_headers_about_origins() -> None:
    async with a_browser(origins=frozenset()) as (client, _):
        async with preflight(client, PAGE) as reply:
            assert (reply.status, ALLOW in reply.headers) == (405, False)
        async with client.post(CHAT, a_chat(), headers={"Origin": PAGE}) as reply:
            assert (reply.status, ALLOW in reply.headers, "Vary" in reply.headers) == (200, False, False)


async def test_an_options_call_that_is_no_preflight_is_none() -> None:
    async with (
        a_browser(origins=frozenset({PAGE})) as (client, _),
        client.session.options(client.url + CHAT, headers={"Origin": PAGE}) as reply,
    ):
        assert (reply.status, reply.headers["Allow"]) == (405, "POST")


async def test_a_changed_file_takes_effect_at_once() -> None:
    async with a_browser(origins=frozenset()) as (client, router):
        config = router.gateway.config
        router.gateway.config = dataclasses.replace(
            config, server=dataclasses.replace(config.server, cors_origins=frozenset({PAGE}))
        )
        async with preflight(client, PAGE) as reply:
            assert reply.status == 204


def test_the_file_names_origins_as_browsers_send_them() -> None:
    read = parse("server: {cors: {origins: ['HTTPS://App.example.com', 'http://localhost:3000', '*']}}")
    assert read.server.cors_origins == {PAGE, "http://localhost:3000", "*"}
    assert parse("").server.cors_origins == frozenset()
