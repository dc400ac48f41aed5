"""The dashboard's HTTP calls: the page, the snapshot, one decision, an explanation."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from rich.console import Console

from router.operate.dashboard.nouns import Snapshot
from router.operate.dashboard.top import frame
from router.operate.diagnose.causes import HIT_CAUSES
from router.start.app import Router
from tests.router.operate.dashboard.scene import PacedBackend, a_document, a_running_scene, a_scene, ask, keep

ADMIN = "admin-key"
HASHES = frozenset({hashlib.sha256(ADMIN.encode()).hexdigest()})


@dataclass(frozen=True)
class Operator:
    router: Router
    http: aiohttp.ClientSession

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return await self.call("GET", path, headers=headers)

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body)
        async with self.http.request(method, f"http://{self.router.admin}{path}", data=data, **options) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if reply.content_type == "application/json" else text

    async def snapshot(self, since: int = 0) -> Snapshot:
        status, body = await self.get(f"/admin/snapshot?since={since}")
        assert status == 200
        return msgspec.convert(body, Snapshot)

    async def ask(self, tenant: str = "acme", words: int = 200) -> None:
        assert await ask(self.router, self.http, tenant, a_document(1, words)) == 200


@asynccontextmanager
async def an_operator(*backends: PacedBackend, **server: Any) -> AsyncIterator[Operator]:
    async with a_running_scene(*backends, config=a_scene(**server)) as router, aiohttp.ClientSession() as http:
        yield Operator(router, http)


async def test_a_snapshot_has_classes_tenants_backends_and_decisions() -> None:
    async with an_operator(PacedBackend("own-0")) as operator:
        await operator.ask()
        await operator.ask()
        shown = await operator.snapshot()
    assert [service_class.name for service_class in shown.classes] == ["interactive", "long-rag", "batch"]
    first = shown.classes[0]
    assert (first.ttft.count, first.ttft.target_s, first.outcomes) == (2, 0.25, {"finished": 2})
    assert first.ttft.is_kept is True
    assert shown.classes[1].ttft.is_kept is None
    acme = shown.tenants[0]
    assert (acme.name, acme.share, acme.entitled, acme.outcomes) == ("acme", 1.0, 1.0, {"finished": 2})
    assert 0 < acme.cached_tokens < acme.prompt_tokens
    assert acme.budgets["cost"].remaining == 40_000_000 - math.ceil(acme.cost)
    assert {backend.name: backend.state for backend in shown.backends} == {"own-0": "well"}
    assert [decision.outcome for decision in shown.decisions] == ["finished", "finished"]
    assert shown.decisions[1].cached_tokens == 192
    assert shown.decisions[1].why == f"{shown.decisions[1].chosen} is the only candidate."


async def test_a_snapshot_has_kept_prefixes_and_those_with_problems_first() -> None:
    async with an_operator(PacedBackend("own-0"), PacedBackend("own-1")) as operator:
        router, http = operator.router, operator.http
        for number, shards in enumerate((5, 1, 2)):
            await keep(router, http, "labs", a_document(number, 200), shards=shards, ttl="1h")
        shown = await operator.snapshot()
    assert (shown.all_prefixes, [prefix.state for prefix in shown.prefixes]) == (3, ["partial", "ready", "ready"])
    first, second, _ = shown.prefixes
    assert "none of 2 backends" in first.message
    assert [(place.backend, place.pinned_tokens == first.tokens, place.can_pin) for place in first.places] == [
        ("own-0", True, True),
        ("own-1", True, True),
    ]
    assert (second.tenant, second.model, second.shards) == ("labs", "tiny", 2)
    assert 3500 < second.left_s <= 3600


async def test_only_changes_are_sent_again() -> None:
    async with an_operator() as operator:
        await operator.ask()
        before = await operator.snapshot()
        assert (await operator.snapshot(before.revision)).decisions == ()
        await operator.ask()
        after = await operator.snapshot(before.revision)
        assert [decision.number for decision in after.decisions] == [2]
        assert len((await operator.snapshot(10**9)).decisions) == 2


async def test_one_decision_shows_what_was_weighed_and_where_its_prefix_lives() -> None:
    async with an_operator() as operator:
        await operator.ask()
        (decision,) = (await operator.snapshot()).decisions
        status, found = await operator.get(f"/admin/decisions/{decision.number}")
        assert status == 200
        assert {candidate["backend"] for candidate in found["candidates"]} == {"own-0", "own-1"}
        assert found["blocks"] == 3
        assert found["held"] == {decision.chosen: 3}
        assert (await operator.get("/admin/decisions/99"))[0] == 400
        assert (await operator.get("/admin/decisions/x"))[0] == 400


async def test_a_dead_backend_and_a_drained_one_look_different() -> None:
    backends = [PacedBackend("own-0"), PacedBackend("own-1"), PacedBackend("own-2")]
    async with an_operator(*backends) as operator:
        operator.router.gateway.cluster.drain("own-1")
        backends[2].is_well = False
        while operator.router.gateway.cluster.view(0.0).backends[2].healthy:
            await operator.router.gateway.cluster.health_changed()
        shown = await operator.snapshot()
        assert {backend.name: backend.state for backend in shown.backends} == {
            "own-0": "well",
            "own-1": "draining",
            "own-2": "ill",
        }
        await operator.ask()
        (decision,) = (await operator.snapshot()).decisions
        assert (decision.chosen, decision.why) == (
            "own-0",
            "own-0 is the only candidate. Left out: 2 backends not well, or draining.",
        )


async def test_the_reason_why_a_backend_gets_no_requests_is_shown() -> None:
    away = PacedBackend("own-1")
    away.is_well = False
    async with an_operator(PacedBackend("own-0"), away) as operator:
        trouble = operator.router.gateway.cluster.trouble("own-1")
        assert trouble is not None
        well, ill = (await operator.snapshot()).backends
        assert (well.trouble, well.trouble_s) == ("", None)
        assert ill.trouble == trouble.reason
        assert ill.trouble in {"it has not been probed yet", "own-1 does not answer"}
        assert ill.trouble_s is not None
        assert ill.trouble_s >= trouble.since_s
        shown = Console(width=120, record=True, file=io.StringIO())
        shown.print(frame(await operator.snapshot(), [], lines=40, width=120))
    lines = [line for line in shown.export_text().splitlines() if line.startswith("✕ own-")]
    assert len(lines) == 1
    assert lines[0].endswith(f": {trouble.reason}")


async def test_a_request_is_explained_on_paper_and_with_the_load_of_now() -> None:
    async with an_operator() as operator:
        wanted = {"prompt_tokens": "16k", "tenant": "acme", "held_tokens": {"own-1": "12k"}, "model": "tiny"}
        status, reply = await operator.call("POST", "/admin/explain", {**wanted, "live": True})
        assert (status, reply["service_class"], reply["chosen"]) == (200, "long-rag", "own-1")
        assert reply["skipped"][0]["why"] == ["tenant is acme, not archive"]
        status, reply = await operator.call("POST", "/admin/explain", {"prompt_tokens": 10, "tenant": "archive"})
        assert (status, reply["service_class"]) == (200, "batch")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt_tokens": "many"}, "prompt_tokens"),
        ({}, "prompt_tokens"),
        ({"prompt_tokens": 1, "tenant": "acm"}, "did you mean 'acme'?"),
        ({"prompt_tokens": 1, "tenant": 7}, "tenant must be text"),
        ({"prompt_tokens": 1, "live": True, "running": {"own-7": 1}}, "there is no backend 'own-7'"),
        ({"prompt_tokens": 1, "headers": []}, None),
        ({"prompt_tokens": 1, "headers": [1]}, "headers must be an object"),
        ([], "must be a JSON object"),
    ],
)
async def test_a_description_that_cannot_be_read_is_refused(body: Any, message: str | None) -> None:
    async with an_operator() as operator:
        status, reply = await operator.call("POST", "/admin/explain", body)
        assert (status, message is None or message in reply["error"]["message"]) == (
            200 if message is None else 400,
            True,
        )


async def test_the_page_needs_no_key_and_its_data_does() -> None:
    async with an_operator(admin_key_hashes=HASHES) as operator:
        status, page = await operator.get("/dashboard")
        assert (status, "Classes against their targets" in page) == (200, True)
        assert (await operator.get("/dashboard/style.css"))[0] == 200
        assert (await operator.get("/admin/snapshot"))[0] == 401
        assert (await operator.get("/admin/usage", authorization="Bearer guess"))[0] == 401
        assert (await operator.get("/admin/snapshot", authorization=f"Bearer {ADMIN}"))[0] == 200
        assert (await operator.get("/", authorization=f"Bearer {ADMIN}"))[0] == 200


async def test_the_page_loads_nothing_from_elsewhere() -> None:
    async with an_operator() as operator, operator.http.get(f"http://{operator.router.admin}/dashboard") as reply:
        assert "default-src 'self'" in reply.headers["Content-Security-Policy"]
        assert "http" not in (await reply.text()).replace("http-equiv", "")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "127.0.0.1.evil.example"},
    ],
)
async def test_other_pages_in_a_browser_of_this_machine_may_not_operate_a_port_without_keys(headers: Any) -> None:
    async with an_operator() as operator:
        for method, path in (("GET", "/admin/snapshot"), ("PATCH", "/admin/backends/own-0"), ("GET", "/dashboard")):
            status, reply = await operator.call(method, path, {"draining": True}, headers=headers)
            assert (status, reply["error"]["code"]) == (403, "permission_denied")
        assert not any(backend.draining for backend in (await operator.snapshot()).backends)


async def test_the_page_itself_may() -> None:
    async with an_operator() as operator:
        for name in (f"127.0.0.1:{operator.router.admin and operator.router.admin.port}", "localhost:1"):
            assert (await operator.get("/admin/snapshot", Host=name, Origin=f"http://{name}"))[0] == 200


async def test_the_newest_requests_of_the_log_are_diagnosed(tmp_path: Path) -> None:
    async with an_operator(PacedBackend("own-0"), decision_log=str(tmp_path / "log")) as operator:
        for _ in range(3):
            await operator.ask()
        log = operator.router.telemetry.decisions
        assert log is not None
        # its lines are written when it is closed
        await asyncio.to_thread(log.close)
        status, found = await operator.get("/admin/diagnosis")
    assert (status, found["requests"]) == (200, 3)
    assert [loss["cause"] for loss in found["hit_rate"]["losses"]] == list(HIT_CAUSES)


async def test_a_router_without_a_log_says_how_to_have_one() -> None:
    async with an_operator(PacedBackend("own-0")) as operator:
        status, found = await operator.get("/admin/diagnosis")
    assert status == 400
    assert "server.decision_log" in found["error"]["message"]
