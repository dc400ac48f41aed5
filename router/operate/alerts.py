"""Alerts: operators are told once, by a webhook, when 80% of a budget are used, and when it is reached.

An alert is a POST of JSON, signed as Standard Webhooks 1.0.0 does; `text` is what chats such as Slack show.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from policies.quota.budget import NEAR_PERCENT, Near, rounded_cost, shown_cost
from policies.sla.alerts import AlertSettings
from router.shared.webhook import webhook_headers

if TYPE_CHECKING:
    # a router that shares nothing runs without it, and so without redis-py
    from router.shared.once import Once

MOST_WAITING = 1000
"""Alerts that wait to be sent; further ones are dropped."""

MOST_KNOWN = 100_000
"""Alerts that a router remembers to have sent."""

WAITS_S = (1.0, 4.0, 15.0, 60.0)
"""Times between the attempts to send one alert."""

TIMEOUT_S = 10.0

_log = logging.getLogger("pointsman.alerts")


class Alert(msgspec.Struct, frozen=True):
    """One alert as it is sent. `id` is the same at all routers, `percent` 80 or 100."""

    id: str
    type: str
    text: str
    at: int
    percent: int
    used: str
    limit: str
    soft: bool
    period: str
    tenant: str | None
    organization: str | None
    team: str | None
    key: str | None
    tag: str | None
    model: str | None


class Alerts:
    """Sends alerts in the background: no request waits for them.

    `settings` are those in force; None: nothing is sent. `once` keeps the other routers from sending the same alerts.
    End users' budgets raise none: there may be very many of them. `on_event` gets `alert_failed` for an alert that
    could not be sent, `alert_dropped` for one too many.
    """

    def __init__(
        self,
        settings: Callable[[], AlertSettings | None],
        *,
        unix_time: Callable[[], float],
        once: Once | None = None,
        on_event: Callable[[str], None] = lambda _: None,
        waits_s: Sequence[float] = WAITS_S,
    ) -> None:
        self._settings, self._unix_time, self._once = settings, unix_time, once
        self._on_event, self._waits_s = on_event, waits_s
        self._known: OrderedDict[tuple[str, str, int, int], None] = OrderedDict()
        self._waiting: asyncio.Queue[Alert] = asyncio.Queue(MOST_WAITING)

    def __repr__(self) -> str:
        return f"<Alerts {len(self._known)} known, {self._waiting.qsize()} waiting>"

    def near(self, budgets: Sequence[Near]) -> None:
        """These `budgets` are near their end. Returns at once."""
        settings = self._settings()
        if settings is None:
            return
        now = self._unix_time()
        for budget in budgets:
            meter = budget.meter
            if meter.descriptor.user is not None:
                continue
            percent = 100 if budget.is_reached else NEAR_PERCENT
            stamp = meter.stamp(int(now * 1000))
            if (*meter.id, stamp, percent) in self._known:
                continue
            # a budget that is reached at once has passed the first mark too
            for passed in {NEAR_PERCENT, percent}:
                self._known[(*meter.id, stamp, passed)] = None
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
            try:
                self._waiting.put_nowait(_alert(budget, percent, stamp, int(now)))
            except asyncio.QueueFull:
                self._on_event("alert_dropped")

    async def run(self) -> None:
        """Send what waits, one alert after the other, until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
            while True:
                alert = await self._waiting.get()
                if self._once is None or await self._once.is_first(alert.id):
                    await self._send(session, alert)

    async def close(self) -> None:
        """Close connections."""
        if self._once is not None:
            await self._once.close()

    async def _send(self, session: aiohttp.ClientSession, alert: Alert) -> None:
        body = msgspec.json.encode(alert)
        for wait_s in (*self._waits_s, None):
            settings = self._settings()
            if settings is None:
                return
            try:
                headers = webhook_headers(alert.id, body, settings.secret, int(self._unix_time()))
                async with session.post(settings.webhook, data=body, headers=headers, allow_redirects=False) as reply:
                    if reply.status < 300:
                        return
                    problem = f"status {reply.status}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                problem = type(error).__name__
            if wait_s is None:
                _log.warning("the alert '%s' could not be sent: %s", alert.text, problem)
                self._on_event("alert_failed")
                return
            await asyncio.sleep(wait_s)


def _alert(budget: Near, percent: int, stamp: int, now: int) -> Alert:
    meter = budget.meter
    caller = meter.descriptor
    name = "\n".join((*meter.id, str(stamp), str(percent)))
    is_over = percent == 100
    verb = "has reached" if is_over else f"has used {budget.percent}% of"
    return Alert(
        id=hashlib.sha256(name.encode()).hexdigest()[:32],
        type="budget.reached" if is_over else "budget.near",
        text=f"{caller} {verb} its limit of {meter}",
        at=now,
        percent=percent,
        used=rounded_cost(budget.level, caller.limits.currency),
        limit=shown_cost(meter.capacity, caller.limits.currency),
        soft=meter.is_soft,
        period=str(meter.period),
        tenant=caller.tenant or None,
        organization=caller.organization,
        team=caller.team,
        key=caller.key,
        tag=caller.tag,
        model=caller.model,
    )
