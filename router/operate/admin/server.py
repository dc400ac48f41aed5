"""The admin port: an HTTP server with its own address and keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from policies.errors import ConfigError, ExpectedError, InvalidRequest, PermissionDenied, Unauthenticated
from policies.keys import hash_of
from router.call.gateway import Gateway
from router.call.identify import key_in
from router.operate.admin.issuing import add_keys
from router.operate.admin.operating import add_operating
from router.operate.dashboard.routes import PAGE, add_data, add_page, json_reply
from router.operate.operations import Operations
from router.operate.telemetry.telemetry import Telemetry
from router.protocols.status import openai_error, retry_after, status_of

Reload = Callable[[], Awaitable[str | None]]
"""Reads the SLA file now. Returns None if it took effect, or the reason why it was rejected."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MOST_BODY_BYTES = 64 * 2**10
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_HINT = f"GET {PAGE} has the dashboard; docs/operating.md lists the calls"


def admin_app(operations: Operations, reload: Reload | None) -> web.Application:
    """The admin port's application for one router; `reload` is None if the router runs without a file."""
    gateway = operations.gateway
    app = web.Application(middlewares=[_guard(gateway)], client_max_size=_MOST_BODY_BYTES)
    app.router.add_post("/admin/reload", _reloading(gateway, reload))
    app.router.add_get("/admin/config", _telling(gateway))
    app.router.add_get("/", _to_page)
    add_page(app)
    add_data(app, operations)
    add_operating(app, operations)
    add_keys(app, gateway)
    app.router.add_get("/metrics", _measuring(operations.telemetry))
    return app


async def _to_page(_: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": PAGE})


def _reloading(gateway: Gateway, reload: Reload | None) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        if reload is None:
            raise InvalidRequest("this router runs without an SLA file", hint="use: pointsman up sla.yaml")
        refusal = await reload()
        if refusal is not None:
            raise ConfigError(refusal, hint=f"version {gateway.config.version} stays in effect")
        return json_reply({"version": gateway.config.version})

    return handle


def _telling(gateway: Gateway) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        shadow = gateway.shadow
        return json_reply({"version": gateway.config.version, "shadow": None if shadow is None else shadow.version})

    return handle


def _measuring(telemetry: Telemetry) -> Handler:
    """Serves `/metrics` here too: processes that share the HTTP port each have an admin port of their own."""

    async def handle(request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        body, content_type = await asyncio.to_thread(telemetry.exposition, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    return handle


def _guard(gateway: Gateway) -> Any:
    """Middleware that requires an admin key and turns every failure into OpenAI's error shape."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _require_rights(request, gateway)
            return await handler(request)
        except web.HTTPException as refusal:
            what = InvalidRequest(f"{refusal.reason}: {request.method} {request.path[:200]}", hint=_HINT)
            return json_reply(openai_error(what), status=refusal.status)
        except ExpectedError as error:
            after = retry_after(error)
            headers = None if after is None else {"Retry-After": after}
            return json_reply(openai_error(error), status=status_of(error).http, headers=headers)

    return guard


def _require_rights(request: web.Request, gateway: Gateway) -> None:
    hashes = gateway.config.server.admin_key_hashes
    if not hashes:
        _require_this_machine(request)
    elif not _is_page(request) and hash_of(key_in(request.headers) or "") not in hashes:
        raise Unauthenticated("this needs an admin key", hint="send the header 'Authorization: Bearer ADMIN_KEY'")


def _is_page(request: web.Request) -> bool:
    return request.method == "GET" and (request.path in ("/", PAGE) or request.path.startswith(f"{PAGE}/"))


def _require_this_machine(request: web.Request) -> None:
    """Raise PermissionDenied unless the request names a loopback host and comes from our own page.

    Without keys the port listens on the loopback interface only: clients there may read the SLA file anyway. But a
    browser on this machine can be made to send requests by any page that it shows. The Origin check rejects pages of
    other hosts; the Host check rejects foreign names that were pointed at this machine (DNS rebinding).
    """
    host = urlsplit(f"//{request.host}")
    origin = request.headers.get("Origin")
    if host.hostname not in _LOOPBACK or (origin is not None and urlsplit(origin).netloc != host.netloc):
        raise PermissionDenied(
            "without admin keys this port only serves requests to a loopback address",
            hint="set server.admin_keys to use other addresses",
        )
