"""CORS: browsers may call the router from pages of the origins in `server.cors.origins`.

No cookie is ever read, so credentials are not allowed; keys travel in headers. Source: WHATWG Fetch, section 3.3 "CORS
protocol".
"""

from __future__ import annotations

from collections.abc import Collection

from http1.request import Request, Response
from policies.errors import PermissionDenied

ANY = "*"

_METHODS = "GET, HEAD, POST, DELETE"
_MAX_AGE_S = 600
"""How long browsers may cache the answer to a preflight request."""


def allow_origin(request: Request, origins: Collection[str]) -> None:
    """Add headers to the answer of `request` that let a page of `origins` read it, errors and streams too."""
    if ANY not in origins:
        request.answer_headers["Vary"] = "Origin"
    if (allowed := _allowed(request, origins)) is not None:
        request.answer_headers["Access-Control-Allow-Origin"] = allowed
        request.answer_headers["Access-Control-Expose-Headers"] = "*"


def is_preflight(request: Request) -> bool:
    """Whether `request` is a browser's preflight request."""
    is_asked = "origin" in request.headers and "access-control-request-method" in request.headers
    return request.method == "OPTIONS" and is_asked


def preflight(request: Request, origins: Collection[str]) -> Response:
    """The answer to a preflight request. Raises PermissionDenied if the page's origin is not one of `origins`."""
    if _allowed(request, origins) is None:
        origin = request.headers["origin"][:200]
        raise PermissionDenied(f"pages of '{origin}' may not call", hint="add the origin to server.cors.origins")
    headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(_MAX_AGE_S)}
    # a wildcard does not cover `authorization`
    if requested := request.headers.get("access-control-request-headers"):
        headers |= {"Access-Control-Allow-Headers": requested, "Vary": "Access-Control-Request-Headers"}
    return Response(204, headers=headers)


def _allowed(request: Request, origins: Collection[str]) -> str | None:
    """The value of Access-Control-Allow-Origin; None without an `Origin` header, or if the origin is not allowed."""
    origin = request.headers.get("origin")
    if origin is None:
        return None
    if ANY in origins:
        return ANY
    return origin if origin.lower() in origins else None
