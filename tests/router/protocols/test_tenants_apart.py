"""A tenant that knows the names and ids of another one reaches nothing of it: one table over all calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from policies.keys import hash_of
from policies.sla.parse import parse
from router.start.app import Router

ACME, LABS = "key-of-acme", "key-of-labs"

FILE = f"""
tenants:
  acme: {{keys: ["sha256:{hash_of(ACME)}"], MODELS}}
  labs: {{keys: ["sha256:{hash_of(LABS)}"]}}
pools:
  own: {{kind: fake, at: ["a:1"], model: m}}
  far: {{kind: fake, at: ["b:1"], model: s}}
  asleep: {{kind: fake, register: true, models: {{z: z}}, wake: {{within: 2s, command: [touch, FOLDER/woken]}}}}
aliases: {{sly: {{model: s}}, zed: {{model: z}}}}
rules:
  - {{when: {{tenant: labs}}, class: standard, pools: far}}
  - {{class: standard, pools: own}}
queue: {{outage: 100ms}}
batches: {{store: FOLDER/batches}}
server: {{http: "127.0.0.1:0", grpc: off, drain: 1s}}
"""

RESTRICTED, OPEN = "models: [m, sly]", "weight: 1"


@dataclass
class Scene:
    router: Router
    http: aiohttp.ClientSession
    folder: Path

    async def call(self, method: str, path: str, key: str = ACME, **sent: Any) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}"}
        async with self.http.request(method, self.router.http_url + path, headers=headers, **sent) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def upload(self, key: str, *bodies: dict[str, Any]) -> str:
        url = "/v1/completions"
        lines = [{"custom_id": f"r{at}", "method": "POST", "url": url, "body": body} for at, body in enumerate(bodies)]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, lines)).encode(), filename="lines.jsonl")
        status, file = await self.call("POST", "/v1/files", key, data=form)
        assert status == 200, file
        return str(file["id"])

    async def begin(self, key: str, file: str) -> tuple[int, Any]:
        job = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return await self.call("POST", "/v1/batches", key, json=job)


@asynccontextmanager
async def a_scene(folder: Path, models: str = OPEN) -> AsyncIterator[Scene]:
    config = parse(FILE.replace("MODELS", models).replace("FOLDER", str(folder)))
    async with Router(config) as router, aiohttp.ClientSession() as http:
        async with asyncio.timeout(10):
            while len(router.gateway.models.of(config.tenants["labs"], config)) < 2:  # noqa: ASYNC110 - no event says it
                await asyncio.sleep(0.01)
        yield Scene(router, http, folder)


@pytest.mark.parametrize("models", [RESTRICTED, OPEN])
@pytest.mark.parametrize("model", ["s", "sly", "z", "zed", "own", "far", "far-0", "b:1", "../s", "s\u0000", "S"])
async def test_no_name_leads_to_a_pool_that_the_rules_do_not_give(tmp_path: Path, model: str, models: str) -> None:
    async with a_scene(tmp_path, models) as scene:
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
            ("/v1/prefixes", {"prompt": "hello " * 100, "ttl": "1h"}),
        ):
            status, answer = await scene.call("POST", path, json={"model": model, **body})
            assert status in (400, 404, 503), answer
            assert "far@" not in str(answer)
        assert not (tmp_path / "woken").exists(), "a pool was started for a tenant that may not use it"


async def test_ids_of_another_tenant_are_as_unknown_as_any(tmp_path: Path) -> None:
    async with a_scene(tmp_path) as scene:
        file = await scene.upload(LABS, {"model": "s", "prompt": "x"})
        _, job = await scene.begin(LABS, file)
        _, prefix = await scene.call(
            "POST", "/v1/prefixes", LABS, json={"model": "s", "prompt": "a " * 200, "ttl": "1h"}
        )
        documents = {"model": "s", "documents": [{"id": "d", "text": "what only labs knows"}]}
        assert (await scene.call("PUT", "/v1/document_sets/x", LABS, json=documents))[0] == 200
        for method, path, its in (
            *(("GET", f"/v1/files/{file}{more}", file) for more in ("", "/content")),
            ("DELETE", f"/v1/files/{file}", file),
            ("GET", f"/v1/batches/{job['id']}", job["id"]),
            ("POST", f"/v1/batches/{job['id']}/cancel", job["id"]),
            *(("GET", f"/v1/messages/batches/{job['id']}{more}", job["id"]) for more in ("", "/results")),
            ("POST", f"/v1/messages/batches/{job['id']}/cancel", job["id"]),
            ("DELETE", f"/v1/messages/batches/{job['id']}", job["id"]),
            *((method, f"/v1/prefixes/{prefix['id']}", prefix["id"]) for method in ("GET", "DELETE")),
            *((method, "/v1/document_sets/x", "x") for method in ("GET", "DELETE")),
            ("DELETE", "/v1/document_sets/x/documents/d", "x"),
        ):
            theirs = await scene.call(method, path)
            unknown = await scene.call(method, path.replace(its, made_up(its)))
            assert theirs[0] == 404, (method, path, theirs)
            assert str(theirs).replace(f"'{its}'", "ID") == str(unknown).replace(f"'{made_up(its)}'", "ID")
        for path in ("/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/prefixes", "/v1/document_sets"):
            status, listed = await scene.call("GET", path)
            assert (status, listed["data"]) == (200, [])
        assert (await scene.begin(ACME, file))[0] == 404
        messages = [{"role": "user", "content": "{{documents}}"}]
        body = {"model": "m", "messages": messages, "document_set": "x", "documents": [{"id": "d"}]}
        status, answer = await scene.call("POST", "/v1/chat/completions", json=body)
        assert (status, "labs knows" in str(answer)) == (400, False) or status == 404, answer
        # all is still there for its owner
        assert (await scene.call("GET", f"/v1/files/{file}", LABS))[0] == 200
        assert (await scene.call("GET", f"/v1/prefixes/{prefix['id']}", LABS))[0] == 200
        assert (await scene.call("GET", "/v1/document_sets/x", LABS))[0] == 200


def made_up(known: str) -> str:
    """An id of the same form that names nothing."""
    return known[:-1] + ("0" if known[-1] != "0" else "1")
