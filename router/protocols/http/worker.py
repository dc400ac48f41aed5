"""Endpoints by which routers, load tools and platforms take this router for an engine: as vLLM has them.

Source: vLLM, "OpenAI-Compatible Server" (/health, /ping, /version, /load, /openapi.json); OpenAPI Specification 3.1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import msgspec

from http1.request import Request, Response
from policies.nouns import Tenant
from router.fleet.cluster.cluster import Cluster
from router.protocols.anthropic.fields import CountBody, MessagesBody
from router.protocols.http.routes import Routes
from router.protocols.openai.fields import ChatBody, CompletionBody
from router.protocols.pooled.embeddings import EmbeddingsBody
from router.protocols.pooled.rerank import RerankBody, ScoreBody
from router.protocols.responses.fields import ResponsesBody

OPENAPI_PATH = "/openapi.json"
WELL = ("/health", "/ping")
"""Paths that say with their status alone whether the router can answer requests now."""

_JSON = {"Content-Type": "application/json"}
_BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/rerank": RerankBody,
    "/v2/rerank": RerankBody,
    "/rerank": RerankBody,
    "/v1/score": ScoreBody,
    "/score": ScoreBody,
}
"""Path -> the body that is posted there."""


def add_worker(
    routes: Routes, is_ready: Callable[[], bool], cluster: Cluster, tenant_of: Callable[[Request], Awaitable[Tenant]]
) -> None:
    """Add the endpoints to `routes`."""

    async def well(_: Request) -> Response:
        return Response(200 if is_ready() else 503, b"", {})

    async def release(_: Request) -> Response:
        return _reply({"version": version("pointsman")})

    async def load(request: Request) -> Response:
        await tenant_of(request)
        return _reply({"server_load": cluster.in_flight})

    async def document(_: Request) -> Response:
        return Response(200, openapi(tuple(routes.every())), _JSON)

    for path in WELL:
        routes.add("GET", path, well)
    # platforms that host models ask so
    routes.add("POST", "/ping", well)
    routes.add("GET", "/version", release)
    routes.add("GET", "/load", load)
    routes.add("GET", OPENAPI_PATH, document)


def _reply(body: Any) -> Response:
    return Response(200, msgspec.json.encode(body), _JSON)


@lru_cache(maxsize=1)
def openapi(routes: tuple[tuple[str, str], ...]) -> bytes:
    """The OpenAPI document of `routes`, pairs of method and path."""
    bodies = tuple(dict.fromkeys(_BODIES.values()))
    refs, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, added in routes:
        path = added.replace(":path}", "}")
        operation: dict[str, Any] = {"responses": {"200": {"description": "The answer."}}}
        if method == "POST" and path in _BODIES:
            content = {"application/json": {"schema": schema_of[_BODIES[path]]}}
            operation["requestBody"] = {"required": True, "content": content}
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths.setdefault(path, {})[method.lower()] = operation
    about = {"title": "Pointsman", "version": version("pointsman")}
    document = {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": components}}
    return msgspec.json.encode(document)
