from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from backends.base import Load
from backends.http.backend import HttpBackend
from backends.http.exchange import Exchange, HttpOptions
from backends.mlc import MLC
from backends.openai.backend import OpenAI
from backends.openai.compatible import OpenAICompatible
from backends.tabby import Tabby
from backends.vllm import VLLM, VLLMOptions
from policies.errors import BackendFailed
from policies.nouns import Prompt, Request
from tests.backends.parts import a_request
from tests.standins.standin import StandIn, running


@dataclass(eq=False)
class Reporter(StandIn):
    """Answers GET /load with a number, or as `status` says."""

    status: int = 200
    report: str = "1"

    def routes(self) -> Iterable[web.RouteDef]:
        return (web.get("/load", self.load), web.get("/health", self.health))

    async def load(self, request: web.Request) -> web.Response:
        return web.Response(text=self.report, status=self.status)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=500 if self.is_ill else 200)


class Counted(HttpBackend):
    """A kind that reports only the number of waiting requests."""

    kind = "counted"

    async def probe(self) -> None:
        await self._check_health()
        await self._take_report("/load", self._read)

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        raise NotImplementedError

    def _read(self, page: bytes, asked_at: float) -> Load:
        if not page.isdigit():
            raise BackendFailed("nonsense")
        return Load(waiting=int(page), reported_at=asked_at)


@asynccontextmanager
async def a_backend(**options: Any) -> AsyncIterator[tuple[Counted, Reporter]]:
    async with running(Reporter()) as server:
        clock = iter(float(second) for second in range(100)).__next__
        backend = Counted("c", server.url + "/v1", pool="p", options=HttpOptions(**options), clock=clock)
        await backend.probe()
        try:
            yield backend, server
        finally:
            await backend.close()


async def test_each_probe_brings_a_report_dated_from_when_it_was_asked_for() -> None:
    async with a_backend() as (backend, server):
        assert backend.load() == Load(waiting=1, reported_at=0.0)
        server.report = "2"
        await backend.probe()
        assert backend.load() == Load(waiting=2, reported_at=1.0)


@pytest.mark.parametrize(("status", "body"), [(500, "3"), (200, "x")])
async def test_a_report_that_does_not_come_leaves_the_last_one_to_grow_old(status: int, body: str) -> None:
    async with a_backend() as (backend, server):
        server.status, server.report = status, body
        await backend.probe()
        assert backend.load() == Load(waiting=1, reported_at=0.0)


async def test_a_server_that_no_longer_reports_is_not_held_to_its_last_report() -> None:
    async with a_backend() as (backend, server):
        server.status = 404
        await backend.probe()
        assert backend.load() == Load()


async def test_an_ill_server_brings_no_report() -> None:
    async with a_backend() as (backend, server):
        server.is_ill, server.report = True, "2"
        with pytest.raises(BackendFailed, match="/health answered 500"):
            await backend.probe()
        assert backend.load().waiting == 1


async def test_configured_values_go_before_reported_ones() -> None:
    async with a_backend(max_requests=7) as (backend, _):
        assert backend.load() == Load(waiting=1, max_requests=7, reported_at=0.0)
        assert backend.load() is backend.load(), "a decision compares it with the one before"


def test_only_what_is_named_is_served_and_that_once_the_server_has_it() -> None:
    def models(**options: Any) -> frozenset[str] | None:
        described = Counted("c", "http://h:1", pool="p", options=HttpOptions(**options)).describe()
        return described.models if described else None

    assert models() is None
    assert models(models={"a": "x"}) == {"a"}
    assert models(models={"a": "x", "b": "y"}, served=frozenset({"x"})) == {"a"}
    assert models(models={"b": "y"}, served=frozenset({"x"})) == frozenset()


def test_it_shows_what_it_is() -> None:
    assert repr(Counted("c", "http://h:1/v1", pool="p")) == "<Counted c of p at http://h:1: 0 requests>"


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000/v1", "10.0.0.1:8000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("http://[fd00::1]:8000", "[fd00::1]:8000"),
        ("http://vllm-0.vllm:8000", None),
        ("https://10.0.0.1:8000", None),
        ("http://10.0.0.1:8000/below", None),
    ],
)
def test_a_proxy_reaches_an_address_over_plain_http_and_nothing_else(url: str, endpoint: str | None) -> None:
    assert OpenAICompatible("b0", url, pool="p").endpoint == endpoint


def test_a_proxy_gets_the_backends_key_its_name_of_the_model_and_the_routers_own_fields() -> None:
    backend = VLLM("b0", "http://10.0.0.1:8000", pool="p", options=VLLMOptions(key="k", models={"m": "theirs"}))
    request = replace(a_request(), model="m", domain="acme")
    forward = backend.forward(request, "/v1/chat/completions")
    assert forward.headers == {"authorization": "Bearer k"}
    assert (forward.fields["model"], forward.fields["cache_salt"]) == ("theirs", "acme")
    assert forward.fields["kv_transfer_params"] is None
    assert backend.forward(request, "/v1/embeddings").fields["cache_salt"] is None


@pytest.mark.parametrize("kind", [MLC, Tabby, OpenAI])
def test_what_depends_on_the_clients_body_is_nothing_for_a_proxy(kind: type[OpenAICompatible]) -> None:
    assert not kind.own_paths
