"""Paths and what answers there."""

from __future__ import annotations

from typing import cast

import pytest

from http1.request import Reply, Request, Response
from router.protocols.http.routes import Routes


async def handler(_: Request, *values: str) -> Reply:
    return Response(200, " ".join(values).encode())


def some_routes() -> Routes:
    routes = Routes()
    routes.add("POST", "/v1/prefixes", handler)
    routes.add("GET", "/v1/prefixes/{id}", handler)
    routes.add("DELETE", "/v1/prefixes/{id}", handler)
    routes.add("GET", "/v1/models/{name:path}", handler)
    routes.add("POST", "/v1/keys/{tenant}/{id}/rotate", handler)
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
        ("/v1/keys/a/b/rotate", ["POST"]),
        ("/v1/keys/a/b/c/rotate", None),
        ("", None),
    ],
)
def test_a_path_has_the_methods_that_were_added(path: str, methods: list[str] | None) -> None:
    found = some_routes().at(path)
    assert (None if found is None else sorted(found)) == methods


@pytest.mark.parametrize(
    ("method", "path", "values"),
    [
        ("POST", "/v1/prefixes", b""),
        ("GET", "/v1/prefixes/a.b", b"a.b"),
        ("GET", "/v1/models/a/b", b"a/b"),
        ("POST", "/v1/keys/a/b/rotate", b"a b"),
    ],
)
async def test_a_handler_gets_the_values_of_the_variables_of_its_path(method: str, path: str, values: bytes) -> None:
    found = some_routes().at(path)
    assert found is not None
    assert await found[method](cast("Request", None)) == Response(200, values)


def test_only_paths_without_a_variable_are_listed() -> None:
    assert list(some_routes()) == ["/v1/prefixes"]
