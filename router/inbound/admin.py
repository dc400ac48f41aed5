"""The operators' side: an HTTP server of its own, with keys of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from policies.errors import ConfigError, ExpectedError, InvalidRequest, Unauthenticated
from router.gateway import Gateway
from router.identify import key_in
from router.inbound.status import openai_error, status_of
from router.telemetry import CONTENT_TYPE

Reload = Callable[[], Awaitable[str | None]]
"""Reads the SLA file now; why it was refused, or None if it was taken."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MOST_BODY_BYTES = 64 * 2**10


def admin_app(gateway: Gateway, reload: Reload | None) -> web.Application:
    """The application for `gateway`; `reload` is None where it runs without a file."""
    app = web.Application(middlewares=[_guard(gateway)], client_max_size=_MOST_BODY_BYTES)
    app.router.add_post("/admin/reload", _reloading(gateway, reload))
    app.router.add_get("/admin/config", _telling(gateway))
    app.router.add_get("/metrics", _measuring(gateway))
    return app


def _reloading(gateway: Gateway, reload: Reload | None) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        if reload is None:
            raise InvalidRequest("this router runs without a file", hint="start it with one: pointsman up sla.yaml")
        refusal = await reload()
        if refusal is not None:
            raise ConfigError(refusal, hint=f"version {gateway.config.version} goes on")
        return _json({"version": gateway.config.version})

    return handle


def _telling(gateway: Gateway) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        shadow = gateway.shadow
        return _json({"version": gateway.config.version, "shadow": None if shadow is None else shadow.version})

    return handle


def _measuring(gateway: Gateway) -> Handler:
    """The metrics here too: where several processes share the port of HTTP, each has an admin port of its own."""

    async def handle(_: web.Request) -> web.Response:
        body = await asyncio.to_thread(gateway.telemetry.exposition)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    return handle


def _guard(gateway: Gateway) -> Any:
    """Lets in who has an admin key, and turns every failure into OpenAI's error shape."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _require_key(key_in(request.headers), gateway)
            return await handler(request)
        except web.HTTPException as refusal:
            what = InvalidRequest(f"{refusal.reason}: {request.method} {request.path[:200]}", hint="POST /admin/reload")
            return _json(openai_error(what), status=refusal.status)
        except ExpectedError as error:
            return _json(openai_error(error), status=status_of(error).http)

    return guard


def _require_key(key: str | None, gateway: Gateway) -> None:
    hashes = gateway.config.server.admin_key_hashes
    # without keys the port is on the loopback interface: whoever reaches it may read the file anyhow
    if hashes and hashlib.sha256((key or "").encode()).hexdigest() not in hashes:
        raise Unauthenticated("this needs an admin key", hint="send the header 'Authorization: Bearer ADMIN_KEY'")


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
