"""The admin port's call that reads the audit log."""

from __future__ import annotations

import asyncio
from typing import Any

from http1.request import Request, Response
from policies.errors import InvalidRequest, Unavailable
from policies.quantities import digits
from policies.suggest import did_you_mean
from router.operate.audit.reader import AuditPeriod, newest
from router.operate.dashboard.routes import json_reply, query_of
from router.operate.operations import Operations
from router.protocols.http.routes import Routes

MOST = 1000
_USUAL = 100
_PARAMETERS = ("from", "to", "event", "before", "limit")


def add_auditing(routes: Routes, operations: Operations) -> None:
    """Add the call to `routes`."""

    async def show(request: Request) -> Response:
        audit = operations.audit
        if audit is None:
            raise InvalidRequest("this router keeps no audit log", hint="write audit: {file: audit.log}")
        query = query_of(request)
        if unknown := sorted(query.keys() - set(_PARAMETERS)):
            hint = did_you_mean(unknown[0], _PARAMETERS) or f"known: {', '.join(_PARAMETERS)}"
            raise InvalidRequest(f"there is no parameter '{unknown[0][:80]}'", hint=hint, param=unknown[0][:80])
        limit, before = _number(query.get("limit"), "limit") or _USUAL, _number(query.get("before"), "before")
        period, event = AuditPeriod.read(query.get("from"), query.get("to")), query.get("event") or None
        most = min(limit, MOST)

        def read() -> list[dict[str, Any]]:
            return newest(audit.path, most=most, period=period, event=event, before=before)

        try:
            return json_reply({"records": await asyncio.to_thread(read)})
        except OSError as error:
            raise Unavailable(f"the audit log cannot be read: {error}", hint="look at audit.file") from error

    routes.add("GET", "/admin/audit", show)


def _number(text: str | None, param: str) -> int | None:
    if text is None:
        return None
    number = digits(text, most=10**15)
    if not number:
        raise InvalidRequest(f"{param} must be a whole number above zero", param=param)
    return number
