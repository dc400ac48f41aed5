"""The admin port: HTTP at an address and with keys of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from http1.errors import ClientGone, HttpError
from http1.request import Handler, Reply, Request, Response
from policies.errors import (
    ConfigError,
    ExpectedError,
    InvalidRequest,
    PermissionDenied,
    Unassigned,
    Unauthenticated,
    Unavailable,
)
from policies.roles import Operator
from router.call.caller import CallerGone
from router.call.edges import outer_edge
from router.call.identify import key_in
from router.call.operators import THIS_MACHINE, asks_for_keys, operator_of, require_role
from router.operate.admin.auditing import add_auditing
from router.operate.admin.batches import add_batches
from router.operate.admin.budgets import add_budgets
from router.operate.admin.calls import AdminCall, call_of
from router.operate.admin.drafting import Drafting
from router.operate.admin.issuing import add_keys
from router.operate.admin.operating import add_operating
from router.operate.admin.usage import add_usage
from router.operate.config_desk import ConfigDesk
from router.operate.dashboard.routes import PAGE, add_data, add_page, json_reply
from router.operate.operations import Operations
from router.operate.telemetry.telemetry import Telemetry
from router.protocols.http.routes import Routes
from router.protocols.status import challenge, openai_error, retry_after, status_of
from router.protocols.strangers import address_of

Reload = Callable[[], Awaitable[str | None]]
"""Reads the SLA file now. Returns None if it took effect, or the reason why it was rejected."""

ROLE_HEADER = "X-Operator-Role"
"""Names the operator's role in each answer, so that the page offers only what it may do."""

_WRITTEN_S = 2.0
"""How long the reply to a call waits for its record to be on the disk."""

_MOST_PATH, _MOST_ASKED = 500, 4096
"""Characters of a path, and bytes of a body, in a record."""

_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_HINT = f"GET {PAGE} has the dashboard; docs/operating.md lists the calls"

_log = logging.getLogger("pointsman.http")


class AdminEndpoints:
    """Answers the operators of one router: `answer` is the handler of an HttpServer, `refuse` renders the reply to
    bytes that are not a valid request. Other calls may be added to `routes`; `calls.py` has the role that each needs.

    `reload` is None if the router runs without a file, `desk` if that cannot be changed from here.
    """

    def __init__(self, operations: Operations, reload: Reload | None, desk: ConfigDesk | None = None) -> None:
        self._gateway = gateway = operations.gateway
        self._telemetry, self._reload, self._audit = operations.telemetry, reload, operations.audit
        self._is_file = desk is not None
        self.routes = routes = Routes()
        routes.add("POST", "/admin/reload", self._reload_file)
        routes.add("GET", "/admin/config", self._show_versions)
        routes.add("GET", "/", _to_page)
        routes.add("GET", "/metrics", self._show_metrics)
        add_page(routes)
        add_data(routes, operations)
        add_operating(routes, operations)
        Drafting(desk).add_to(routes)
        add_usage(routes, operations)
        add_budgets(routes, gateway)
        add_batches(routes, operations)
        add_keys(routes, gateway.keys, gateway.in_force)
        add_auditing(routes, operations)

    def __repr__(self) -> str:
        return f"<AdminEndpoints {self.routes!r}>"

    async def answer(self, request: Request) -> Reply:
        """Answer `request`; errors have OpenAI's shape. Raises ClientGone."""
        try:
            with outer_edge(self._gateway.observer):
                return await self._answered(request)
        except ExpectedError as error:
            if self._audit is not None and isinstance(error, Unauthenticated | Unassigned):
                self._audit.refused("admin", self._address(request), error.message)
            return _refusal(error)
        except CallerGone as error:
            raise ClientGone("the client has gone") from error

    async def _answered(self, request: Request) -> Reply:
        path, by_method = self.routes.find(request.path) or (request.path, {})
        method = "GET" if request.method == "HEAD" else request.method
        call, handler = call_of(method, path), by_method.get(method)
        if call.role is None and handler is not None and asks_for_keys(self._gateway.config):
            return await handler(request)
        operator = await self._operator(request)
        if handler is None:
            problem = "Method Not Allowed" if by_method else "Not Found"
            what = InvalidRequest(f"{problem}: {request.method} {request.path[:200]}", hint=_HINT)
            return json_reply(openai_error(what), 405 if by_method else 404)
        if not call.changes or self._audit is None:
            require_role(operator, call.role_for(request))
            return await handler(request)
        return await self._recorded(f"{method} {path}", call, operator, request, handler)

    async def _recorded(
        self, name: str, call: AdminCall, operator: Operator, request: Request, handler: Handler
    ) -> Reply:
        """The reply to a call that changes something, when the audit log has its record. Raises as the handler does."""
        assert self._audit is not None
        if self._audit.trouble is not None:
            hint = "the router's log says why; reading and serving go on"
            raise Unavailable("the audit log cannot be written, so nothing may be changed", hint=hint)
        reply: Reply = Response(200)
        failed: ExpectedError | None = None
        status = 0
        try:
            require_role(operator, call.role_for(request))
            reply = await handler(request)
            status = reply.status if isinstance(reply, Response) else 200
        except ExpectedError as error:
            failed, status = error, status_of(error).http
        finally:
            # also of a call that its client has left
            written = self._audit.put("call", **_shown(name, operator, request, self._address(request), status))
        with suppress(TimeoutError):
            async with asyncio.timeout(_WRITTEN_S):
                await asyncio.wrap_future(written)
        if failed is not None:
            raise failed
        return reply

    def _address(self, request: Request) -> str:
        return address_of(request, self._gateway.config.server.trusted_proxies)

    async def _operator(self, request: Request) -> Operator:
        """The operator that sent `request`. Raises Unauthenticated, Unassigned, PermissionDenied."""
        if asks_for_keys(self._gateway.config):
            operator = await operator_of(key_in(request.headers), self._gateway.config, self._gateway.identities)
        else:
            _require_this_machine(request)
            operator = THIS_MACHINE
        request.is_known = True
        request.answer_headers[ROLE_HEADER] = str(operator.role)
        return operator

    def refuse(self, error: HttpError) -> Response:
        """The reply to bytes that are not a valid request."""
        _log.info("a client of the admin port sent invalid HTTP: %s", error.reason)
        return json_reply(openai_error(InvalidRequest(error.reason, hint=_HINT)), error.status)

    async def _reload_file(self, _: Request) -> Response:
        if self._reload is None:
            raise InvalidRequest("this router runs without an SLA file", hint="use: pointsman up sla.yaml")
        refusal = await self._reload()
        if refusal is not None:
            raise ConfigError(refusal, hint=f"version {self._gateway.config.version} stays in effect")
        return json_reply({"version": self._gateway.config.version})

    async def _show_versions(self, _: Request) -> Response:
        shadow = self._gateway.decider.shadow
        version = self._gateway.config.version
        shadow_version = None if shadow is None else shadow.version
        return json_reply({"version": version, "shadow": shadow_version, "is_file": self._is_file})

    async def _show_metrics(self, request: Request) -> Response:
        return await metrics_reply(request, self._telemetry)


async def metrics_reply(request: Request, telemetry: Telemetry) -> Response:
    """All metrics, in the format that `request` accepts."""
    # in a thread: 55 ms for 600 series
    telemetry.flush()
    body, content_type = await asyncio.to_thread(telemetry.exposition, request.headers.get("accept", ""))
    return Response(200, body, {"Content-Type": content_type})


class MetricsEndpoint:
    """Answers GET /metrics without a key, at an address of its own."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def __repr__(self) -> str:
        return "<MetricsEndpoint>"

    async def answer(self, request: Request) -> Reply:
        """Answer `request`."""
        if request.path == "/metrics" and request.method in ("GET", "HEAD"):
            return await metrics_reply(request, self._telemetry)
        return json_reply(openai_error(InvalidRequest("this port has GET /metrics only")), 404)


async def _to_page(_: Request) -> Response:
    return Response(302, headers={"Location": PAGE})


def _shown(name: str, operator: Operator, request: Request, address: str, status: int) -> dict[str, Any]:
    """What the audit log says of a call."""
    path = request.path.encode("utf-8", "replace").decode()[:_MOST_PATH]
    its = {"name": operator.name, "role": str(operator.role), "by": operator.by, "address": address}
    noted = dict(request.noted or {})
    if len(asked := msgspec.json.encode(noted.get("asked"))) > _MOST_ASKED:
        noted["asked"] = {"bytes": len(asked)}
    return {**its, "call": name, "path": path, **noted, "status": status}


def _refusal(error: ExpectedError) -> Response:
    optional = {"Retry-After": retry_after(error), "WWW-Authenticate": challenge(error)}
    headers = {name: value for name, value in optional.items() if value is not None}
    return json_reply(openai_error(error), status_of(error).http, headers)


def _require_this_machine(request: Request) -> None:
    """Raise PermissionDenied unless the request names a loopback host and comes from our own page.

    Without keys the port listens on the loopback interface only: clients there may read the SLA file anyway. But a
    browser on this machine can be made to send requests by any page that it shows. The Origin check rejects pages of
    other hosts; the Host check rejects foreign names that were pointed at this machine (DNS rebinding).
    """
    host = urlsplit(f"//{request.headers.get('host', '')}")
    origin = request.headers.get("origin")
    if host.hostname not in _LOOPBACK or (origin is not None and urlsplit(origin).netloc != host.netloc):
        raise PermissionDenied(
            "without admin keys this port only serves requests to a loopback address",
            hint="set server.admin_keys to use other addresses",
        )
