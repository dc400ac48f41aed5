"""Alerts reach a real HTTP server: once, signed, and again if it fails."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from policies.nouns import Limits, Organization, Tenant
from policies.quota.budget import Near, descriptors, meters
from policies.sla.alerts import AlertSettings
from router.operate import alerts as module
from router.operate.alerts import Alerts
from router.shared.once import Once
from tests.router.fleet.feeds.waiting import until
from tests.router.parts import CHAT, a_chat, a_client, a_config, a_router, a_tenant
from tests.router.shared.store.parts import RedisServer, a_redis

NOON = 1_795_521_600
DAY = Limits(cost_per_day=20_000_000, currency="USD")
ACME = Tenant("acme", "acme", limits=DAY, user_limits=DAY, organization=Organization("example", DAY))
WHOLE, USER, GROUP = meters(descriptors(ACME, "m", user="ann"))


@dataclass
class Receiver:
    """A server that keeps what is posted, and answers with the statuses given first, then 204."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, Any], web.Request]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.bodies.append(body)
        self.got.append((json.loads(body), request))
        return web.Response(status=self.statuses.pop(0) if self.statuses else 204)

    async def wait_for(self, count: int) -> list[dict[str, Any]]:
        await until(lambda: len(self.got) >= count)
        return [alert for alert, _ in self.got]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver, app = Receiver(), web.Application()
    app.router.add_post("/hook", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    yield receiver
    await runner.cleanup()


@asynccontextmanager
async def sending(
    url: str, secret: str | None = None, once: Once | None = None
) -> AsyncIterator[tuple[Alerts, Counter[str]]]:
    events: Counter[str] = Counter()
    settings = AlertSettings(url, secret)
    alerts = Alerts(
        lambda: settings,
        unix_time=lambda: NOON,
        once=once,
        on_event=lambda name: events.update([name]),
        waits_s=(0.01, 0.01),
    )
    task = asyncio.create_task(alerts.run())
    try:
        yield alerts, events
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await alerts.close()


def near(level: int, meter: Any = WHOLE, *, is_reached: bool = False) -> Near:
    return Near(meter, level, is_reached)


async def test_an_alert_is_sent_once_at_80_percent_and_once_when_the_budget_is_reached(receiver: Receiver) -> None:
    async with sending(receiver.url) as (alerts, events):
        for level in (16_000_000_000, 16_100_000_000):
            alerts.near([near(level)])
        for _ in range(2):
            alerts.near([near(19_900_000_000, is_reached=True)])
        first, second = await receiver.wait_for(2)
        await asyncio.sleep(0.02)
    assert len(receiver.got) == 2
    assert first["text"] == "tenant 'acme' has used 80% of its limit of 20.00 USD a day"
    assert (first["type"], first["percent"], first["used"]) == ("budget.near", 80, "16.00 USD")
    assert (first["tenant"], first["organization"], first["soft"], first["period"]) == ("acme", "example", False, "day")
    assert second["text"] == "tenant 'acme' has reached its limit of 20.00 USD a day"
    assert (second["type"], second["percent"]) == ("budget.reached", 100)
    assert first["id"] != second["id"]
    assert not events


async def test_a_budget_that_is_reached_at_once_raises_one_alert(receiver: Receiver) -> None:
    async with sending(receiver.url) as (alerts, _):
        alerts.near([near(20_000_000_000, is_reached=True)])
        alerts.near([near(19_000_000_000)])
        alerts.near([near(16_000_000_000, GROUP)])
        assert [alert["percent"] for alert in await receiver.wait_for(2)] == [100, 80]
    assert receiver.got[1][0]["text"].startswith("organization 'example' has used")


async def test_end_users_raise_none(receiver: Receiver) -> None:
    async with sending(receiver.url) as (alerts, _):
        alerts.near([near(20_000_000_000, USER)])
        await asyncio.sleep(0.02)
    assert not receiver.got


async def test_an_alert_is_signed_as_standard_webhooks_says(receiver: Receiver) -> None:
    key = b"0123456789abcdef"
    async with sending(receiver.url, f"whsec_{base64.b64encode(key).decode()}") as (alerts, _):
        alerts.near([near(16_000_000_000)])
        await receiver.wait_for(1)
    headers = receiver.got[0][1].headers
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + receiver.bodies[0]
    digest = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"


async def test_a_receiver_that_fails_is_asked_again_with_the_same_id(receiver: Receiver) -> None:
    receiver.statuses = [500, 503]
    async with sending(receiver.url) as (alerts, events):
        alerts.near([near(16_000_000_000)])
        found = await receiver.wait_for(3)
    assert len({alert["id"] for alert in found}) == 1
    assert not events


async def test_an_alert_that_cannot_be_sent_is_given_up_and_counted() -> None:
    async with sending("http://127.0.0.1:9/nowhere") as (alerts, events):
        alerts.near([near(16_000_000_000)])
        await until(lambda: bool(events))
    assert events == {"alert_failed": 1}


async def test_too_many_alerts_are_dropped_and_counted(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    async with sending(receiver.url) as (alerts, events):
        tenants = [Tenant(f"t{number}", "t", limits=DAY) for number in range(5)]
        alerts.near([near(16_000_000_000, meters(descriptors(tenant, "m"))[0]) for tenant in tenants])
        await receiver.wait_for(2)
    assert events == {"alert_dropped": 3}


@pytest.fixture(scope="module")
def server() -> Any:
    with a_redis() as server:
        yield server


async def test_of_several_routers_one_sends_an_alert(receiver: Receiver, server: RedisServer) -> None:
    once = [Once(server.url, prefix="x:once:") for _ in range(2)]
    async with sending(receiver.url, once=once[0]) as (one, _), sending(receiver.url, once=once[1]) as (two, _):
        for alerts in (one, two):
            alerts.near([near(16_000_000_000)])
        await receiver.wait_for(1)
        await asyncio.sleep(0.05)
    assert len(receiver.got) == 1


async def test_while_redis_is_away_every_router_sends(receiver: Receiver, server: RedisServer) -> None:
    async with sending(receiver.url, once=Once(f"{server.url}-nowhere", prefix="x:")) as (alerts, _):
        alerts.near([near(16_000_000_000)])
        await receiver.wait_for(1)


async def test_a_client_hears_of_a_budget_that_is_near_its_end_and_operators_do_too(receiver: Receiver) -> None:
    tenant = a_tenant(limits=Limits(cost_per_month=1000, soft_cost_per_month=100))
    config = replace(a_config(tenant), alerts=AlertSettings(receiver.url))
    async with a_router(config=config) as router, a_client(router) as client:
        used = []
        for _ in range(12):
            async with client.post(CHAT, a_chat(max_tokens=5)) as reply:
                assert reply.status == 200
                used.append(reply.headers.get("x-pointsman-budget-used"))
        found = await receiver.wait_for(2)
    assert used[0] is None
    assert used[-1] is not None
    assert used[-1].endswith("% of 100 units of cost a month (soft), tenant")
    assert {alert["type"] for alert in found} == {"budget.near", "budget.reached"}
    assert all(alert["soft"] for alert in found)
