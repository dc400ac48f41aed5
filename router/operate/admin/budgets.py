"""The admin port's call for budgets: what is used of each, by the quota store."""

from __future__ import annotations

from http1.request import Request, Response
from router.call.gateway import Gateway
from router.operate.dashboard.budget_row import budgets_of
from router.operate.dashboard.routes import json_reply, query_of
from router.protocols.http.routes import Routes


def add_budgets(routes: Routes, gateway: Gateway) -> None:
    """Add the call that reads budgets to `routes`. Those of keys are in the reply only if the query has `by=key`."""

    async def show(request: Request) -> Response:
        gateway.later.flush()
        words = query_of(request).get("by", "").split(",")
        with_keys = "key" in [word.strip() for word in words]
        return json_reply(
            await budgets_of(
                gateway.config.tenants, gateway.admission.store, gateway.keys if with_keys else None, gateway.unix_time
            )
        )

    routes.add("GET", "/admin/budgets", show)
