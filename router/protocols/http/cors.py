"""Pages of other origins may call, where the file names them: CORS as browsers ask for it.

No cookie is ever read, so no credentials are allowed; keys travel in headers. Source: WHATWG Fetch, section 3.3 "CORS
protocol".
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from policies.errors import PermissionDenied

ANY = "*"

_METHODS = "GET, HEAD, POST, DELETE"
_MAX_AGE_S = 600
"""How long a browser remembers what it was allowed; it may take less."""

Origins = Callable[[], Collection[str]]


def add_cors(app: web.Application, origins: Origins) -> None:
    """Let pages of `origins` call `app` and read all that it answers, errors and streams too; none: no pages."""

    async def allow(request: web.Request, response: web.StreamResponse) -> None:
        if not (known := origins()):
            return
        if ANY not in known:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if (allowed := _allowed(request, known)) is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "*"

    app.on_response_prepare.append(allow)


def answering_preflights(origins: Origins) -> Middleware:
    """A middleware that answers what browsers ask before a call. Its handler raises PermissionDenied."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        known = origins()
        if not known or not _is_preflight(request):
            return await handler(request)
        if _allowed(request, known) is None:
            origin = request.headers[hdrs.ORIGIN][:200]
            raise PermissionDenied(f"pages of '{origin}' may not call", hint="server.cors.origins names who may")
        headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS, hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_S)}
        # a wildcard would not let `authorization` through
        if asked := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
            headers |= {hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked, hdrs.VARY: hdrs.ACCESS_CONTROL_REQUEST_HEADERS}
        return web.Response(status=204, headers=headers)

    return answer


def _is_preflight(request: web.Request) -> bool:
    asks = hdrs.ORIGIN in request.headers and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    return request.method == hdrs.METH_OPTIONS and asks


def _allowed(request: web.Request, origins: Collection[str]) -> str | None:
    """What the answer names as allowed; None for calls of no page, and of pages that may not call."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return None
    if ANY in origins:
        return ANY
    return origin if origin.lower() in origins else None
