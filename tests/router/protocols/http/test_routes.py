"""Paths and what answers there."""

from __future__ import annotations

import pytest

from http1.request import Reply, Request, Response
from router.protocols.http.routes import Routes


async def handler(_: Request) -> Reply:
    return Response()


def some_routes() -> Routes:
    routes = Routes()
    routes.add("POST", "/v1/prefixes", handler)
    routes.add("GET", "/v1/prefixes/*", handler)
    routes.add("DELETE", "/v1/prefixes/*", handler)
    routes.add("GET", "/v1/models/**", handler)
    return routes


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/prefixes", ["POST"]),
        ("/v1/prefixes/a", ["DELETE", "GET"]),
        ("/v1/prefixes/", None),
        ("/v1/prefixes/a/b", None),
        ("/v1/models/a/b", ["GET"]),
        ("/v1/models/", None),
        ("/v1/models", None),
        ("", None),
    ],
)
def test_a_path_has_the_methods_that_were_added(path: str, methods: list[str] | None) -> None:
    found = some_routes().at(path)
    assert (None if found is None else sorted(found)) == methods


def test_only_paths_without_a_wildcard_are_listed() -> None:
    assert list(some_routes()) == ["/v1/prefixes"]
