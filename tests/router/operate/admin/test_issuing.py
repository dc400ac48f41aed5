"""Tenants' keys over the operators' port, and what they open at the clients' port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from policies.errors import ConfigError
from policies.keys import id_of
from policies.nouns import Limits, Team
from router.protocols.grpc.v1 import inference_pb2 as pb
from router.start.app import Router
from tests.router.parts import CHAT, KEY, MODEL, ScriptedBackend, a_chat, a_config, a_router, a_tenant, an_answer

KEYS = "/admin/tenants/acme/keys"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def write(path: Path, text: str) -> None:
    path.write_text(text)


@dataclass(frozen=True)
class Desk:
    """An operator and a client of one router."""

    router: Router
    http: aiohttp.ClientSession

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.request(method, f"http://{self.router.admin}{path}", json=body) as reply:
            return reply.status, await reply.json()

    async def issue(self, **body: Any) -> dict[str, Any]:
        status, made = await self.call("POST", KEYS, body or None)
        assert status == 201, made
        return dict(made)

    async def chat(self, key: str) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}"}
        async with self.http.post(f"{self.router.http_url}{CHAT}", json=a_chat(), headers=headers) as reply:
            return reply.status, await reply.json()


@asynccontextmanager
async def a_desk(keys_file: Path | None, *backends: ScriptedBackend) -> AsyncIterator[Desk]:
    file = None if keys_file is None else str(keys_file)
    config = a_config(a_tenant(), a_tenant("labs", key=None), admin="127.0.0.1:0", grpc="127.0.0.1:0", keys_file=file)
    async with a_router(*backends, config=config) as router, aiohttp.ClientSession() as http:
        yield Desk(router, http)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


async def test_a_key_is_issued_used_rotated_and_revoked_and_holds_over_a_restart(path: Path) -> None:
    async with a_desk(path) as desk:
        first = await desk.issue(name="ci", expires="90d")
        assert first["expires"] - first["created"] == 90 * 86_400
        assert (await desk.chat(first["key"]))[0] == 200
        status, second = await desk.call("POST", f"{KEYS}/{first['id']}/rotate", {"overlap": "1h"})
        assert (status, second["name"], second["replaces"]["replaced_by"]) == (201, "ci", second["id"])
        assert second["replaces"]["expires"] <= second["created"] + 3601
    async with a_desk(path) as desk:
        assert [(await desk.chat(made["key"]))[0] for made in (first, second)] == [200, 200]
        assert await desk.call("DELETE", f"{KEYS}/{first['id']}") == (200, {"id": first["id"], "revoked": True})
        status, body = await desk.chat(first["key"])
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert (await desk.chat(second["key"]))[0] == 200
    async with a_desk(path) as desk:
        assert [(await desk.chat(made["key"]))[0] for made in (first, second)] == [401, 200]


async def test_a_list_shows_everything_but_keys(path: Path) -> None:
    async with a_desk(path) as desk:
        made = await desk.issue(name="ci")
        await desk.chat(made["key"])
        status, reply = await desk.call("GET", KEYS)
        (file_hash,) = desk.router.gateway.config.tenants["acme"].key_hashes
        issued, written = reply["keys"]
    assert (status, written) == (200, {"id": id_of(file_hash), "team": None, "limits": {}, "from": "file"})
    assert issued["last_used"] >= made["created"]
    rest = {"name": "ci", "created": made["created"], "expires": None, "expired": False, "replaced_by": None}
    rest |= {"limits": {}, "team": None}
    assert issued == {"id": made["id"], "last_used": issued["last_used"], "from": "api", **rest}
    assert not {KEY, made["key"], "sha256"} & set(str(reply).split("'"))


async def test_a_request_that_runs_when_its_key_is_revoked_ends_normally(path: Path) -> None:
    release = asyncio.Event()
    backend = ScriptedBackend(scripts=[[release, *an_answer("o", "k")]])
    async with a_desk(path, backend) as desk:
        made = await desk.issue()
        running = asyncio.create_task(desk.chat(made["key"]))
        await backend.began.wait()
        await desk.call("DELETE", f"{KEYS}/{made['id']}")
        assert (await desk.chat(made["key"]))[0] == 401
        release.set()
        status, body = await running
        assert (status, body["choices"][0]["message"]["content"]) == (200, "ok")


async def test_an_issued_key_is_good_over_grpc_and_a_revoked_one_is_not(path: Path) -> None:
    async with a_desk(path) as desk, grpc.aio.insecure_channel(str(desk.router.grpc_address)) as channel:
        made = await desk.issue()
        ask = channel.unary_unary(
            "/pointsman.v1.Inference/ListModels", pb.ListModelsRequest.SerializeToString, pb.ListModelsReply.FromString
        )
        metadata = (("authorization", f"Bearer {made['key']}"),)
        reply = await ask(pb.ListModelsRequest(), metadata=metadata)
        assert [model.id for model in reply.models] == [MODEL]
        await desk.call("DELETE", f"{KEYS}/{made['id']}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(pb.ListModelsRequest(), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("method", "call", "body", "message"),
    [
        ("POST", "/admin/tenants/acne/keys", {}, "there is no tenant 'acne' (did you mean 'acme'?)"),
        ("GET", "/admin/tenants/nobody/keys", None, "there is no tenant 'nobody' (known: acme, labs)"),
        (
            "DELETE",
            f"{KEYS}/x",
            None,
            "'acme' has no issued key 'x' (GET /admin/tenants/",
        ),
        ("POST", f"{KEYS}/x/rotate", {}, "'acme' has no issued key 'x'"),
        ("POST", KEYS, {"expire": "1d"}, "unknown field 'expire' for a key (did you mean 'expires'?)"),
        ("POST", KEYS, {"expires": "soon"}, "expires must be a duration like 800ms, 12s or 15m, not 'soon' (write how"),
        ("POST", KEYS, {"expires": 90}, "expires must be a duration"),
        ("POST", KEYS, {"expires": "4000d"}, "expires must be at most ten years"),
        ("POST", KEYS, {"name": "a\nb"}, "name must be text of at most 64 printable characters"),
        ("POST", KEYS, {"name": 7}, "name must be text"),
        ("POST", KEYS, [], "the body must be a JSON object"),
    ],
)
async def test_a_mistake_is_reported_with_what_was_meant(
    path: Path, method: str, call: str, body: Any, message: str
) -> None:
    async with a_desk(path) as desk:
        status, answer = await desk.call(method, call, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
        assert answer["error"]["message"].startswith(message)
    assert not lines(path)


async def test_a_key_of_the_sla_file_is_revoked_in_the_file(path: Path) -> None:
    async with a_desk(path) as desk:
        (digest,) = desk.router.gateway.config.tenants["acme"].key_hashes
        for method, call in (("DELETE", ""), ("POST", "/rotate")):
            status, answer = await desk.call(method, f"{KEYS}/{id_of(digest)}{call}")
            assert status == 400
            assert "comes from the SLA file (edit tenants.acme.keys there" in answer["error"]["message"]
        assert (await desk.chat(KEY))[0] == 200


async def test_without_a_place_for_keys_none_is_issued() -> None:
    async with a_desk(None) as desk:
        status, answer = await desk.call("POST", KEYS)
        assert (status, answer["error"]["hint"]) == (400, "set server.state to a folder, or store.redis to a Redis")


async def test_a_failing_disk_is_reported_and_the_known_keys_stay(path: Path) -> None:
    async with a_desk(path) as desk:
        made = await desk.issue()
        (path.parent / "keys.jsonl.new").mkdir()
        async with desk.http.post(f"http://{desk.router.admin}{KEYS}") as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "5")
            assert "cannot be written" in (await reply.json())["error"]["message"]
        assert (await desk.chat(made["key"]))[0] == 200


async def test_the_answer_with_a_key_is_kept_by_no_cache(path: Path) -> None:
    async with a_desk(path) as desk, desk.http.post(f"http://{desk.router.admin}{KEYS}") as reply:
        assert reply.headers["Cache-Control"] == "no-store"


async def test_no_key_is_ever_in_a_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with a_desk(path) as desk:
            made = await desk.issue()
            newer = (await desk.call("POST", f"{KEYS}/{made['id']}/rotate"))[1]
            for key in (made["key"], newer["key"], KEY, "pm_somebodys-guess"):
                await desk.chat(key)
            await desk.call("DELETE", f"{KEYS}/{newer['id']}")
    assert "was revoked" in caplog.text
    assert not [key for key in (made["key"], newer["key"], KEY, "pm_") if key in caplog.text]


async def test_a_router_does_not_start_over_a_file_that_is_no_book(path: Path) -> None:
    write(path, "nonsense\n")
    with pytest.raises(ConfigError, match=f"{path}:1: is not a key"):
        async with a_desk(path):
            pass


async def test_a_key_keeps_its_own_limits_through_rotation_and_a_restart_and_others_do_not_feel_them(
    path: Path,
) -> None:
    async with a_desk(path) as desk:
        first = await desk.issue(name="ci", limits={"requests_per_minute": 1, "tokens_per_minute": "6M"})
        assert first["limits"] == {"requests_per_minute": 1, "tokens_per_minute": 6_000_000}
        assert (await desk.chat(first["key"]))[0] == 200
        status, body = await desk.chat(first["key"])
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        message = f"key {first['id']} of tenant 'acme' has reached its limit of 1 requests a minute"
        assert message in body["error"]["message"]
        assert (await desk.chat(KEY))[0] == 200
        _, second = await desk.call("POST", f"{KEYS}/{first['id']}/rotate", {"overlap": "1h"})
        assert second["limits"] == first["limits"]
    async with a_desk(path) as desk:
        assert [(await desk.chat(second["key"]))[0] for _ in range(2)] == [200, 429]


async def test_a_key_of_a_team_has_its_limits_also_after_rotation_until_the_team_is_gone(path: Path) -> None:
    async with a_desk(path) as desk:
        gateway = desk.router.gateway
        teams = {"search": Team("search", Limits(requests_per_minute=2))}
        with_team = replace(gateway.config.tenants["acme"], teams=teams)
        before, gateway.config = gateway.config, replace(gateway.config, tenants={"acme": with_team})
        first = await desk.issue(team="search")
        assert first["team"] == "search"
        assert (await desk.chat(first["key"]))[0] == 200
        _, second = await desk.call("POST", f"{KEYS}/{first['id']}/rotate", {"overlap": "1h"})
        assert (await desk.chat(second["key"]))[0] == 200
        status, body = await desk.chat(first["key"])
        assert status == 429
        assert "team 'search' of tenant 'acme' has reached its limit of 2 requests a minute" in body["error"]["message"]
        status, body = await desk.call("POST", KEYS, {"team": "serch"})
        assert (status, body["error"]["param"]) == (400, "team")
        assert "did you mean 'search'?" in body["error"]["message"]
        gateway.config = before
        status, body = await desk.chat(second["key"])
        assert (status, "the team of the API key" in body["error"]["message"]) == (401, True)


async def test_a_key_may_have_a_budget_for_a_project(path: Path) -> None:
    launch = {"cost": 500, "first_day": "2026-12-01", "last_day": "2027-01-31"}
    async with a_desk(path) as desk:
        made = await desk.issue(limits={"budgets": {"launch": launch, "told": {"cost": "1k", "soft": True}}})
        assert made["limits"] == {"budgets": {"launch": launch, "told": {"cost": 1_000, "soft": True}}}
        _, second = await desk.call("POST", f"{KEYS}/{made['id']}/rotate", {})
    assert second["limits"] == made["limits"]


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        ("many", "limits"),
        ({"requests": 1}, "limits.requests"),
        ({"concurrent": 0}, "limits.concurrent"),
        ({"concurrent": True}, "limits.concurrent"),
        ({"concurrent": "few"}, "limits.concurrent"),
        ({"concurrent": 9}, "limits.concurrent"),
        ({"budgets": 500}, "limits.budgets"),
        ({"budgets": {"a b": {"cost": "5"}}}, "limits.budgets"),
        ({"budgets": {"launch": "5"}}, "limits.budgets.launch"),
        ({"budgets": {"launch": {"cost": "5 USD"}}}, "limits.budgets.launch"),
        ({"budgets": {"launch": {"cost": "5", "until": "2027-01-01"}}}, "limits.budgets.launch"),
        ({"budgets": {"launch": {"cost": "5", "last_day": "tomorrow"}}}, "limits.budgets.launch"),
    ],
)
async def test_limits_that_cannot_be_are_refused_by_name(path: Path, limits: Any, param: str) -> None:
    async with a_desk(path) as desk:
        config = desk.router.gateway.config
        bound = replace(config.tenants["acme"], limits=Limits(concurrent=8))
        desk.router.gateway.config = replace(config, tenants={**config.tenants, "acme": bound})
        status, body = await desk.call("POST", KEYS, {"limits": limits})
    assert (status, body["error"]["param"]) == (400, param)
    assert lines(path) == []
