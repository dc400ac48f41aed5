"""Budgets at the admin port: what is used of each, for those that may see it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import policies.roles
from policies.keys import id_of
from policies.nouns import FixedBudget, Limits, Organization, Team, Tenant
from policies.quota.budget import rounded_cost
from policies.roles import OperatorRole
from router.operate.dashboard import budget_row
from router.shared.store.base import Fault, StoreFailed
from tests.router.operate.dashboard.scene import KEYS, PacedBackend, a_running_scene, a_scene
from tests.router.operate.dashboard.test_routes import ADMIN, HASHES, Operator

WRITTEN = hashlib.sha256(KEYS["acme"].encode()).hexdigest()


def with_budgets(tenant: Tenant) -> Tenant:
    launch = FixedBudget("launch", 900, 0, None)
    past = FixedBudget("past", 900, 0, 10)
    return replace(
        tenant,
        limits=Limits(tokens_per_minute=10**6, cost_per_day=1_000, soft_cost_per_month=100, fixed=(launch, past)),
        organization=Organization("example", Limits(cost_per_week=4_000)),
        teams={"search": Team("search", Limits(cost_per_hour=50), {"tiny": Limits(cost_per_day=70)})},
        tag_limits={"nightly": Limits(cost_per_day=60), "free": Limits()},
        model_limits={"tiny": Limits(cost_per_month=10_000)},
        key_limits={WRITTEN: Limits(cost_per_day=2_000)},
        user_limits=Limits(cost_per_day=5),
    )


@asynccontextmanager
async def an_operator_of_budgets(**server: Any) -> AsyncIterator[Operator]:
    config = a_scene(**server)
    acme = with_budgets(config.tenants["acme"])
    config = replace(config, tenants={"acme": acme}, tenant_by_key_hash={WRITTEN: acme})
    async with a_running_scene(PacedBackend("own-0"), config=config) as router, aiohttp.ClientSession() as http:
        yield Operator(router, http)


async def budgets(operator: Operator, query: str = "") -> dict[str, Any]:
    status, reply = await operator.get(f"/admin/budgets{query}")
    assert status == 200, reply
    return dict(reply)


def brief(reply: dict[str, Any]) -> set[tuple[str, str, str, bool]]:
    return {(row["kind"], row["name"], row["period"], row["is_soft"]) for row in reply["budgets"]}


SHARED = {
    ("organization", "example", "week", False),
    ("tenant", "acme", "day", False),
    ("tenant", "acme", "month", True),
    ("tenant", "acme", "launch", False),
    ("team", "search", "hour", False),
    ("model", "tiny", "day", False),
    ("model", "tiny", "month", False),
    ("tag", "nightly", "day", False),
}


async def test_every_budget_in_force_is_shown_but_those_of_keys_and_end_users() -> None:
    async with an_operator_of_budgets() as operator:
        reply = await budgets(operator)
    assert brief(reply) == SHARED
    assert (reply["all"], reply["is_whole"]) == (len(SHARED), True)


async def test_budgets_of_keys_are_those_of_the_file_and_of_issued_keys(tmp_path: Path) -> None:
    async with an_operator_of_budgets(keys_file=str(tmp_path / "keys.jsonl")) as operator:
        _, made = await operator.call("POST", "/admin/tenants/acme/keys", {"limits": {"budget_per_day": 20}})
        await operator.call("POST", "/admin/tenants/acme/keys", {"limits": {"requests_per_minute": 20}})
        shown = brief(await budgets(operator, "?by=key"))
    assert shown - SHARED == {("key", made["id"], "day", False), ("key", id_of(WRITTEN), "day", False)}


async def test_what_is_used_is_what_the_requests_were_charged() -> None:
    async with an_operator_of_budgets() as operator:
        await operator.ask("acme", words=40)
        rows = (await budgets(operator, "?by=key"))["budgets"]
        spent = (await operator.snapshot()).tenants[0].cost
    used = {(row["kind"], row["period"]): (row["used"], row["share"]) for row in rows}
    shown = rounded_cost(round(spent * 1000), None)
    assert spent > 0
    assert used["tenant", "day"] == (shown, pytest.approx(spent / 1_000))
    assert used["tenant", "month"] == (shown, pytest.approx(spent / 100))
    assert used["tenant", "launch"] == (shown, pytest.approx(spent / 900))
    assert used["organization", "week"] == (shown, pytest.approx(spent / 4_000))
    assert used["key", "day"] == (shown, pytest.approx(spent / 2_000))
    assert used["tag", "day"] == ("0 units of cost", 0)
    assert [row["share"] for row in rows] == sorted((row["share"] for row in rows), reverse=True)


async def test_a_budget_tells_when_it_begins_anew() -> None:
    async with an_operator_of_budgets() as operator:
        rows = (await budgets(operator))["budgets"]
    left = {(row["kind"], row["period"]): (row["is_renewed"], row["left_s"]) for row in rows}
    assert left["tenant", "launch"] == (False, None)
    renewed, left_s = left["team", "hour"]
    assert renewed
    assert 0 < left_s <= 3600


async def test_a_viewer_sees_no_budgets_of_keys() -> None:
    [digest] = HASHES
    vera = {digest: policies.roles.Operator("vera", OperatorRole.VIEWER)}
    async with an_operator_of_budgets(admin_key_hashes=HASHES, operators=vera) as operator:
        key = {"Authorization": f"Bearer {ADMIN}"}
        status, reply = await operator.get("/admin/budgets", **key)
        assert (status, brief(reply)) == (200, SHARED)
        assert (await operator.get("/admin/budgets?by=key", **key))[0] == 403
        assert (await operator.get("/admin/budgets?by=user,%20key", **key))[0] == 403


async def test_while_the_store_is_away_nothing_is_said_of_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_: object) -> list[int]:
        raise StoreFailed(Fault.GONE, "away")

    async with an_operator_of_budgets() as operator:
        monkeypatch.setattr(operator.router.gateway.admission.store, "levels", fails)
        reply = await budgets(operator)
    assert brief(reply) == SHARED
    assert {(row["used"], row["share"]) for row in reply["budgets"]} == {(None, None)}


async def test_a_reply_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_row, "MOST_SHOWN", 3)
    async with an_operator_of_budgets() as operator:
        reply = await budgets(operator)
        assert (len(reply["budgets"]), reply["all"], reply["is_whole"]) == (3, len(SHARED), True)
        monkeypatch.setattr(budget_row, "MOST_READ", 1)
        assert not (await budgets(operator))["is_whole"]
