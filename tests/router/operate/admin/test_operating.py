"""Operating a running router: draining, weights, usage."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from policies.sla.config import Config
from policies.split import Split
from tests.router.operate.dashboard.scene import PacedBackend, a_running_scene, a_scene
from tests.router.operate.dashboard.test_routes import Operator, an_operator
from tests.router.parts import ScriptedBackend


async def test_a_drained_backend_gets_nothing_until_it_is_undrained() -> None:
    async with an_operator() as operator:
        path = "/admin/backends/own-0"
        assert await operator.call("PATCH", path, {"draining": True}) == (
            200,
            {"backend": "own-0", "draining": True, "weight": 1.0},
        )
        for _ in range(3):
            await operator.ask("labs")
        assert {decision.chosen for decision in (await operator.snapshot()).decisions} == {"own-1"}
        await operator.call("PATCH", path, {"draining": False})
        await operator.call("PATCH", "/admin/backends/own-1", {"draining": True})
        await operator.ask("labs")
        assert (await operator.snapshot()).decisions[-1].chosen == "own-0"


async def test_a_weight_takes_effect_with_the_next_decision() -> None:
    async with an_operator() as operator:
        assert await operator.call("PATCH", "/admin/backends/own-1", {"weight": 2.5}) == (
            200,
            {"backend": "own-1", "draining": False, "weight": 2.5},
        )
        assert [backend.weight for backend in operator.router.gateway.cluster.view(0.0).backends] == [1.0, 2.5]


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("own-9", {"draining": True}, "there is no backend 'own-9' (did you mean 'own-"),
        ("own-0", {"drainin": True}, "did you mean 'draining'?"),
        ("own-0", {"draining": "yes"}, "must be true or false"),
        ("own-0", {"weight": 0}, "to stop its traffic, drain the backend"),
        ("own-0", {"weight": True}, "must be a number"),
        ("own-0", {"weight": 1e9}, "at most 1000"),
        ("own-0", [1], "must be a JSON object"),
        ("own-0", {"weight": json.loads("[" * 128 + "]" * 128)}, "nested more than 128 levels"),
    ],
)
async def test_a_change_that_makes_no_sense_changes_nothing(name: str, body: Any, message: str) -> None:
    async with an_operator() as operator:
        status, reply = await operator.call("PATCH", f"/admin/backends/{name}", body)
        assert (status, message in reply["error"]["message"]) == (400, True), reply
        assert all(backend.weight == 1.0 and not backend.draining for backend in (await operator.snapshot()).backends)


async def test_a_body_that_is_not_json_is_refused() -> None:
    async with an_operator() as operator:
        status, reply = await operator.call("PATCH", "/admin/backends/own-0", headers={"x": "y"})
        assert (status, "not JSON" in reply["error"]["message"]) == (400, True)


async def test_usage_is_shown_per_tenant_and_model_as_json_and_as_a_sheet() -> None:
    async with an_operator(PacedBackend("own-0")) as operator:
        await operator.ask("acme", words=100)
        await operator.ask("acme", words=100)
        await operator.ask("nobody", words=10)
        _, reply = await operator.get("/admin/usage")
        _, sheet = await operator.get("/admin/usage.csv")
    acme, everyone = reply["usage"]
    assert (acme["tenant"], acme["model"], acme["requests"], acme["finished"]) == ("acme", "tiny", 2, 2)
    assert (acme["completion_tokens"], acme["cached_tokens"]) == (16, 64)
    assert acme["cost"] == pytest.approx(acme["prompt_tokens"] - 64 + 6.4 + 4 * 16)
    assert everyone["tenant"] == "everyone"
    rows = list(csv.DictReader(io.StringIO(sheet)))
    assert [(row["tenant"], row["requests"], row["cost"]) for row in rows] == [
        ("acme", "2", str(acme["cost"])),
        ("everyone", "1", str(everyone["cost"])),
    ]


async def test_a_cache_that_cannot_be_cleared_is_reported() -> None:
    async with an_operator(ScriptedBackend("own-0")) as operator:
        status, reply = await operator.call("DELETE", "/admin/tenants/acme/cache")
        assert (status, reply["complete"], reply["tenants"]) == (200, False, ["acme"])
        assert reply["backends"][0]["cleared"] is False
        assert await operator.get("/admin/prefixes") == (200, {"prefixes": []})


async def test_the_cache_of_a_tenant_that_is_not_there_is_not_cleared() -> None:
    async with an_operator() as operator:
        status, reply = await operator.call("DELETE", "/admin/tenants/acmee/cache")
        assert (status, reply["error"]["param"], "did you mean 'acme'?" in reply["error"]["message"]) == (
            400,
            "tenant",
            True,
        )


def shared(**shares: int) -> Config:
    """The scene with two pools that share the requests of its last rule."""
    config = a_scene()
    pools = {name: replace(config.pools["own"], name=name) for name in shares}
    split = Split(tuple((name, share / 100) for name, share in shares.items()))
    return replace(config, pools=pools, rules=(replace(config.rules[-1], pools=tuple(shares), split=split),))


async def test_operators_see_shares_and_restore_those_that_were_lost() -> None:
    backends = PacedBackend("own-0"), PacedBackend("new-0", pool="new")
    async with a_running_scene(*backends, config=shared(own=60, new=40)) as router, aiohttp.ClientSession() as http:
        operator = Operator(router, http)
        status, reply = await operator.call("GET", "/admin/splits")
        assert (status, reply["splits"]) == (
            200,
            [
                {"rule": 1, "pool": "own", "share": 0.6, "requests": 0, "failed": 0, "missed": 0},
                {"rule": 1, "pool": "new", "share": 0.4, "requests": 0, "failed": 0, "missed": 0},
            ],
        )
        (rule,) = router.gateway.config.rules
        for _ in range(3):
            router.gateway.splits.ended(rule, "new", "failed", router.gateway.config.classes["interactive"])
        _, reply = await operator.call("GET", "/admin/splits")
        assert reply["splits"][1] == {
            "rule": 1,
            "pool": "new",
            "share": 0.0,
            "requests": 3,
            "failed": 3,
            "missed": 0,
            "lost_because": "3 of 3 requests failed, and 0 of 0 at the stable pool",
        }
        shown = (await operator.snapshot()).splits
        assert [(row.pool, row.share, row.requests, bool(row.lost_because)) for row in shown] == [
            ("own", 1.0, 0, False),
            ("new", 0.0, 3, True),
        ]
        assert await operator.call("POST", "/admin/splits/restore") == (200, {"restored": 1})
        _, reply = await operator.call("GET", "/admin/splits")
        assert reply["splits"][1]["share"] == 0.4
