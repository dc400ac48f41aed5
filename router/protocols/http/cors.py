"""Pages of other origins may call, where the file names them: CORS as browsers ask for it.

No cookie is ever read, so no credentials are allowed; keys travel in headers. Source: WHATWG Fetch, section 3.3 "CORS
protocol".
"""

from __future__ import annotations

from collections.abc import Collection

from http1.request import Request, Response
from policies.errors import PermissionDenied

ANY = "*"

_METHODS = "GET, HEAD, POST, DELETE"
_MAX_AGE_S = 600
"""How long a browser remembers what it was allowed; it may take less."""


def allow_origin(request: Request, origins: Collection[str]) -> None:
    """Let the page that sent `request` read its answer, errors and streams too, if it is one of `origins`."""
    if ANY not in origins:
        request.answer_headers["Vary"] = "Origin"
    if (allowed := _allowed(request, origins)) is not None:
        request.answer_headers["Access-Control-Allow-Origin"] = allowed
        request.answer_headers["Access-Control-Expose-Headers"] = "*"


def is_preflight(request: Request) -> bool:
    """Does a browser ask with it whether a page may call?"""
    is_asked = "origin" in request.headers and "access-control-request-method" in request.headers
    return request.method == "OPTIONS" and is_asked


def preflight(request: Request, origins: Collection[str]) -> Response:
    """The answer to a browser that asks whether a page may call. Raises PermissionDenied."""
    if _allowed(request, origins) is None:
        origin = request.headers["origin"][:200]
        raise PermissionDenied(f"pages of '{origin}' may not call", hint="server.cors.origins names those that may")
    headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(_MAX_AGE_S)}
    # a wildcard would not let `authorization` through
    if asked := request.headers.get("access-control-request-headers"):
        headers |= {"Access-Control-Allow-Headers": asked, "Vary": "Access-Control-Request-Headers"}
    return Response(204, headers=headers)


def _allowed(request: Request, origins: Collection[str]) -> str | None:
    """What the answer names as allowed; None for calls of no page, and of pages that may not call."""
    origin = request.headers.get("origin")
    if origin is None:
        return None
    if ANY in origins:
        return ANY
    return origin if origin.lower() in origins else None
