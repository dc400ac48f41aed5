"""The dashboard over HTTP: a page without secrets, and its data as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from backends.nesting import decode_json
from http1.request import Handler, Request, Response
from policies.errors import InvalidRequest
from policies.quantities import digits, read_tokens
from router.operate.dashboard.snapshot import detail, snapshot
from router.operate.diagnose.diagnosis import diagnosis_of
from router.operate.diagnose.logged import read_logs
from router.operate.diagnose.nouns import Diagnosis
from router.operate.operations import Operations
from router.operate.telemetry.decision_log import STANDARD_OUTPUT, DecisionLog
from router.operate.what_if import WhatIf, explain_on_paper
from router.protocols.explanations import as_json
from router.protocols.http.body import read_small_body
from router.protocols.http.routes import Routes

PAGE = "/dashboard"

_MOST_DIAGNOSED, _MOST_BYTES = 2000, 4 * 2**20
"""Requests and bytes of the log in one diagnosis: less than a tenth of a second in a thread."""

_JSON = {"Content-Type": "application/json"}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = (
    "index.html",
    "style.css",
    "dashboard.js",
    "panels.js",
    "batches.js",
    "budgets.js",
    "file.js",
    "keys.js",
    "usage.js",
    "draw.js",
    "icon.svg",
)
_HEADERS = {
    # no foreign content, no framing: the page can drain backends
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(routes: Routes) -> None:
    """Serve the page and its static files, which hold no data and need no key."""
    for name in _FILES:
        routes.add("GET", PAGE if name == "index.html" else f"{PAGE}/{name}", _file(name))


def add_data(routes: Routes, operations: Operations) -> None:
    """Serve the page's data."""
    gateway = operations.gateway

    async def tell(request: Request) -> Response:
        return json_reply(await snapshot(operations, _whole(query_of(request).get("since", "0"), "since")))

    async def tell_one(_: Request, number: str) -> Response:
        found = detail(_whole(number, "number"), operations)
        if found is None:
            raise InvalidRequest("this decision is no longer kept", hint="the last 256 are")
        return json_reply(found)

    async def explain(request: Request) -> Response:
        body = await read_json(request)
        described = _described(body)
        live = gateway.cluster.view(gateway.clock()) if body.get("live") else None
        explanation = explain_on_paper(described, gateway.config, live)
        return Response(200, as_json(explanation), _JSON)

    async def diagnose(_: Request) -> Response:
        return json_reply(await asyncio.to_thread(_diagnosis, operations.telemetry.decisions))

    routes.add("GET", "/admin/snapshot", tell)
    routes.add("GET", "/admin/diagnosis", diagnose)
    routes.add("GET", "/admin/decisions/{number}", tell_one)
    routes.add("POST", "/admin/explain", explain)


def _diagnosis(log: DecisionLog | None) -> Diagnosis:
    """The diagnosis of the newest requests in this router's own log. Blocks for a moment."""
    if log is None or log.path == STANDARD_OUTPUT:
        hint = "name a file in server.decision_log"
        raise InvalidRequest("this router writes no decision log to a file", hint=hint)
    return diagnosis_of(read_logs([Path(log.path)], most=_MOST_DIAGNOSED, last_bytes=_MOST_BYTES))


def query_of(request: Request) -> Mapping[str, str]:
    """The last value of each name in the query."""
    return dict(parse_qsl(request.query, keep_blank_values=True))


async def read_json(request: Request, *, may_be_empty: bool = False) -> Mapping[str, Any]:
    """The JSON object in the request's body; {} for an empty one that `may_be_empty`. Raises as
    `read_small_body` does."""
    raw = await read_small_body(request)
    if may_be_empty and not raw:
        return {}
    try:
        body = decode_json(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    note(request, asked=body)
    return body


def note(request: Request, **details: object) -> None:
    """Have these details in the audit log's record of `request`. They must hold no secret."""
    request.noted = {**(request.noted or {}), **details}


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] = _JSON) -> Response:
    """`body` as JSON, with `headers` beside its type."""
    return Response(status, msgspec.json.encode(body), {**_JSON, **headers})


def _file(name: str) -> Handler:
    content = (files("router.operate.dashboard") / "static" / name).read_bytes()
    headers = {"Content-Type": f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8", **_HEADERS}

    async def send(_: Request) -> Response:
        return Response(200, content, headers)

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
    number = digits(text, most=2**53)
    if number is None:
        raise InvalidRequest(f"{param} must be a whole number", param=param)
    return number
