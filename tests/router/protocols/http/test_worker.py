"""What other routers, load tools and platforms ask of an engine, and this router answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.openai.endpoints import endpoints_in
from router.protocols.dialects import DIALECTS
from router.protocols.http.worker import openapi
from tests.router.parts import ScriptedBackend, a_client, a_router


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_is_a_status_that_needs_no_key(path: str) -> None:
    async with (
        a_router(ScriptedBackend()) as router,
        a_client(router) as client,
        client.get(path, key=None) as reply,
    ):
        assert reply.status == 200
        assert await reply.read() == b""


async def test_a_worker_tells_its_version_and_its_load() -> None:
    async with a_router(ScriptedBackend()) as router, a_client(router) as client:
        async with client.get("/version", key=None) as reply:
            assert (await reply.json())["version"]
        async with client.get("/load") as reply:
            assert await reply.json() == {"server_load": 0}
        async with client.get("/load", key=None) as reply:
            assert reply.status == 401


async def test_a_second_router_finds_each_dialect_and_its_fields_in_the_openapi_document() -> None:
    async with (
        a_router(ScriptedBackend()) as router,
        a_client(router) as client,
        client.get("/openapi.json", key=None) as reply,
    ):
        document: dict[str, Any] = await reply.json()
    found = endpoints_in(json.dumps(document).encode())
    assert found.keys() >= DIALECTS.keys()
    assert all(found[path] for path in DIALECTS)
    assert found["/v1/messages"] >= {"model", "max_tokens", "messages", "system", "tools"}
    assert found["/v1/responses"] >= {"model", "input", "instructions", "tools"}
    references = [part.split('"')[0] for part in json.dumps(document).split('"$ref": "')[1:]]
    assert references
    assert {each.removeprefix("#/components/schemas/") for each in references} <= document["components"][
        "schemas"
    ].keys()


def test_a_variable_of_a_path_is_a_parameter() -> None:
    document = json.loads(openapi((("GET", "/v1/models/{name:path}"),)))
    (parameter,) = document["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert parameter == {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


@pytest.mark.parametrize(("usual", "others"), [("/v1/rerank", ("/rerank", "/v2/rerank")), ("/v1/score", ("/score",))])
def test_each_name_of_an_endpoint_has_the_same_dialect(usual: str, others: tuple[str, ...]) -> None:
    assert all(DIALECTS[path] is DIALECTS[usual] for path in others)
