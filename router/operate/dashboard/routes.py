"""The dashboard over HTTP: a page without secrets, and its data as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from backends.nesting import decode_json
from policies.errors import InvalidRequest
from policies.quantities import read_tokens
from router.operate.dashboard.snapshot import detail, snapshot
from router.operate.operations import Operations
from router.operate.what_if import WhatIf, explain_on_paper
from router.protocols.explanations import as_json

PAGE = "/dashboard"

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = ("index.html", "style.css", "dashboard.js", "panels.js", "draw.js", "icon.svg")
_HEADERS = {
    # no foreign content, no framing: the page can drain backends
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: web.Application) -> None:
    """Serve the page and its static files, which hold no data and need no key."""
    for name in _FILES:
        app.router.add_get(PAGE if name == "index.html" else f"{PAGE}/{name}", _file(name))


def add_data(app: web.Application, operations: Operations) -> None:
    """Serve the page's data."""
    gateway = operations.gateway

    async def tell(request: web.Request) -> web.Response:
        return json_reply(await snapshot(operations, _whole(request.query.get("since", "0"), "since")))

    async def tell_one(request: web.Request) -> web.Response:
        found = detail(_whole(request.match_info["number"], "number"), operations)
        if found is None:
            raise InvalidRequest("this decision is no longer kept", hint="the last 256 are")
        return json_reply(found)

    async def explain(request: web.Request) -> web.Response:
        body = await read_json(request)
        described = _described(body)
        live = gateway.cluster.view(gateway.clock()) if body.get("live") else None
        explanation = explain_on_paper(described, gateway.config, live)
        return web.Response(body=as_json(explanation), content_type="application/json")

    app.router.add_get("/admin/snapshot", tell)
    app.router.add_get("/admin/decisions/{number}", tell_one)
    app.router.add_post("/admin/explain", explain)


async def read_json(request: web.Request) -> Mapping[str, Any]:
    """The JSON object in the request's body. Raises InvalidRequest."""
    try:
        body = decode_json(await request.read())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """`body` as JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers)


def _file(name: str) -> Any:
    content = (files("router.operate.dashboard") / "static" / name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]

    async def send(_: web.Request) -> web.Response:
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=_HEADERS)

    return send


def _described(body: Mapping[str, Any]) -> WhatIf:
    return WhatIf(
        prompt_tokens=_tokens(body.get("prompt_tokens"), "prompt_tokens"),
        max_new_tokens=_tokens(body.get("max_new_tokens", 512), "max_new_tokens"),
        tenant=_text(body, "tenant"),
        model=_text(body, "model"),
        priority=_text(body, "priority"),
        session=_text(body, "session"),
        headers={name.lower(): str(value) for name, value in _pairs(body, "headers").items()},
        metadata={name: str(value) for name, value in _pairs(body, "metadata").items()},
        held_tokens={name: _tokens(value, "held_tokens") for name, value in _pairs(body, "held_tokens").items()},
        running={name: _tokens(value, "running") for name, value in _pairs(body, "running").items()},
        facts=_pairs(body, "facts"),
    )


def _tokens(value: object, param: str) -> int:
    try:
        return read_tokens(str(value if value is not None else ""))
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", hint="write a count, such as 900 or 16k", param=param) from error


def _text(body: Mapping[str, Any], param: str) -> str | None:
    value = body.get(param)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{param} must be text", param=param)
    return value or None


def _pairs(body: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    value = body.get(param) or {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object of names and values", param=param)
    return value


def _whole(text: str, param: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(f"{param} must be a whole number", param=param)
    return int(text)
