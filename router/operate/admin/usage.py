"""The admin port's calls for usage: that of the database; without one, of this router since its start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from http1.request import Request, Response
from policies.errors import InvalidRequest, Unavailable
from policies.nouns import NO_TENANT, Outcome
from router.operate.dashboard.board import Board
from router.operate.dashboard.routes import json_reply, query_of
from router.operate.operations import Operations
from router.operate.sheet import sheet
from router.operate.usage.recorder import UsageRecorder
from router.operate.usage.report import UsageQuery, as_csv, as_focus, as_json
from router.protocols.http.routes import Routes

_SYNC_S = 2.0
_JSON = {"Content-Type": "application/json"}

T = TypeVar("T")


def add_usage(routes: Routes, operations: Operations) -> None:
    """Add the calls that read usage to `routes`."""
    gateway, board, recorder = operations.gateway, operations.board, operations.usage

    def asked(request: Request) -> UsageQuery:
        return UsageQuery.read(query_of(request), now=gateway.unix_time())

    async def usage(request: Request) -> Response:
        gateway.later.flush()
        if recorder is None:
            up_s = gateway.clock() - board.started_at
            since = gateway.unix_time() - up_s
            return json_reply({"since": since, "seconds": up_s, "usage": list(_since_start(board))})
        query, database = asked(request), recorder.database
        rows = await _answered(recorder, lambda: as_json(query.answer(database)))
        return Response(200, b'{"since":%d,"usage":%s}' % (query.since or 0, rows), _JSON)

    async def usage_csv(request: Request) -> Response:
        gateway.later.flush()
        if recorder is None:
            return _sheet("pointsman-usage", _as_csv(list(_since_start(board))))
        query, database = asked(request), recorder.database
        return _sheet("pointsman-usage", await _answered(recorder, lambda: as_csv(query.answer(database))))

    async def focus(request: Request) -> Response:
        gateway.later.flush()
        if recorder is None:
            raise InvalidRequest("this router keeps no usage by the hour", hint="write usage: {store: usage.sqlite}")
        query, database = asked(request), recorder.database
        return _sheet("pointsman-focus", await _answered(recorder, lambda: as_focus(database, query)))

    routes.add("GET", "/admin/usage", usage)
    routes.add("GET", "/admin/usage.csv", usage_csv)
    routes.add("GET", "/admin/usage.focus.csv", focus)


async def _answered(recorder: UsageRecorder, read: Callable[[], T]) -> T:
    """What `read` finds when the database has all that this router counted until now. Raises Unavailable."""

    def synced() -> T:
        recorder.sync(_SYNC_S)
        return read()

    try:
        return await asyncio.to_thread(synced)
    except ConnectionError as error:
        raise Unavailable(
            "the database of usage is away", hint="usage is kept in the journal until it is back"
        ) from error


def _sheet(name: str, text: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"', "Content-Type": "text/csv; charset=utf-8"}
    return Response(200, text.encode(), headers)


def _since_start(board: Board) -> Iterator[dict[str, Any]]:
    for (tenant, model), totals in sorted(board.totals.items()):
        yield {
            "tenant": "" if tenant == NO_TENANT else tenant,
            "model": model,
            "requests": totals.requests,
            **{outcome.value: totals.outcomes[outcome.value] for outcome in Outcome},
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "completion_tokens": totals.completion_tokens,
            "cost": totals.cost / 1000,
        }


def _as_csv(rows: list[dict[str, Any]]) -> str:
    names = ["tenant", "model", "requests", *(outcome.value for outcome in Outcome)]
    return sheet([*names, "prompt_tokens", "cached_tokens", "completion_tokens", "cost"], rows)
