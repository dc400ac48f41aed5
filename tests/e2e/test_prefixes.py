"""A document is computed and pinned over HTTP, outlives a flood of other prompts, and goes when it is let go."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shards.bundled.documents import document, facts_within, prompt
from shards.engine import EngineOptions
from shards.kv.options import PoolOptions
from tests.e2e.cluster import KEYS, MODEL, TWO_TENANTS, Whole, a_whole
from tests.shards.attached import eventually

OPTIONS = EngineOptions(kv_blocks=96, pool=PoolOptions(pin_share=0.4))
"""6,144 tokens of KV, 2,432 of which may be pinned."""

WITH_ADMIN = TWO_TENANTS.replace('grpc: "127.0.0.1:0"', 'grpc: "127.0.0.1:0", admin: "127.0.0.1:0"')


class Service:
    """A RAG service of one tenant, and an operator."""

    def __init__(self, whole: Whole, http: aiohttp.ClientSession, tenant: str = "acme") -> None:
        self.whole, self._http, self._tenant = whole, http, tenant

    def of(self, tenant: str) -> Service:
        return Service(self.whole, self._http, tenant)

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {KEYS[self._tenant]}"}
        url = self.whole.router.http_url + path
        async with self._http.request(method, url, json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    async def operate(self, method: str, path: str) -> tuple[int, Any]:
        async with self._http.request(method, f"http://{self.whole.router.admin}{path}") as reply:
            return reply.status, await reply.json()

    async def keep(self, text: str, **more: Any) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}
        status, reply = await self.call("POST", "/v1/prefixes", body)
        assert status == 200, reply
        return reply

    async def ask(self, text: str) -> tuple[str, int]:
        """The backend and the cached tokens of an answer to `text`."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        headers = {"Authorization": f"Bearer {KEYS[self._tenant]}"}
        url = f"{self.whole.router.http_url}/v1/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as reply:
            content = await reply.json()
            assert reply.status == 200, content
            return reply.headers["x-pointsman-backend"], content["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def flood(self, papers: int = 14) -> None:
        """Other documents, more than every shard has room for."""
        seeds = [random.Random(f"{self._tenant} {number}") for number in range(papers)]
        texts = [document(seed, facts_within(1000)).text for seed in seeds]
        for text in texts:
            await asyncio.gather(*(self.ask(f"{text}\n\nQuestion: {number}?") for number in range(2)))


@asynccontextmanager
async def a_service(shards: int = 1) -> AsyncIterator[Service]:
    async with a_whole(shards, sla=WITH_ADMIN, options=OPTIONS) as whole, aiohttp.ClientSession() as http:
        yield Service(whole, http)
        await whole.check_idle()


PAPER = document(random.Random(42), facts_within(1200))
QUESTION = prompt(PAPER.text, PAPER.questions[3].question)


async def test_a_pinned_document_outlives_a_flood_and_goes_once_it_is_deleted() -> None:
    async with a_service() as service:
        prefix = await service.keep(PAPER.text, ttl="5m")
        assert prefix["state"] == "ready"
        (place,) = prefix["backends"]
        assert place["held_tokens"] == place["pinned_tokens"] == prefix["tokens"] > 1000
        await service.flood()
        _, cached = await service.ask(QUESTION)
        assert cached >= prefix["tokens"]
        _, listed = await service.call("GET", "/v1/prefixes")
        assert [entry["id"] for entry in listed["data"]] == [prefix["id"]]
        assert await service.of("labs").call("GET", f"/v1/prefixes/{prefix['id']}") != (200, prefix)
        assert await service.call("DELETE", f"/v1/prefixes/{prefix['id']}") == (
            200,
            {"id": prefix["id"], "object": "prefix", "deleted": True},
        )
        await service.flood()
        _, cached = await service.ask(QUESTION)
        assert cached == 0


async def test_a_document_on_two_shards_is_served_by_both() -> None:
    async with a_service(2) as service:
        prefix = await service.keep(PAPER.text, shards=2)
        assert (prefix["state"], {place["backend"] for place in prefix["backends"]}) == ("ready", {"own-0", "own-1"})
        assert all(place["pinned_tokens"] == prefix["tokens"] for place in prefix["backends"])


async def test_a_document_moves_on_when_its_shard_is_drained() -> None:
    async with a_service(2) as service:
        prefix = await service.keep(PAPER.text)
        (place,) = prefix["backends"]
        gateway = service.whole.router.gateway
        gateway.cluster.drain(place["backend"])
        await gateway.prefixes.turn()
        await eventually(lambda: gateway.prefixes.of("acme")[0].state == "ready")
        _, moved = await service.call("GET", f"/v1/prefixes/{prefix['id']}")
        (other,) = moved["backends"]
        assert {place["backend"], other["backend"]} == {"own-0", "own-1"}
        assert other["pinned_tokens"] == prefix["tokens"]
        backend, cached = await service.ask(QUESTION)
        assert backend == other["backend"]
        assert cached >= prefix["tokens"]


async def test_a_tenants_cache_is_cleared_and_another_keeps_every_hit() -> None:
    async with a_service() as service:
        labs = service.of("labs")
        for tenant in (service, labs):
            await tenant.ask(QUESTION)
            _, cached = await tenant.ask(QUESTION)
            assert cached > 1000
        other = document(random.Random(43), facts_within(600)).text
        kept = await service.keep(other)
        _, reply = await service.operate("GET", "/admin/prefixes")
        assert [(prefix["tenant"], prefix["id"]) for prefix in reply["prefixes"]] == [("acme", kept["id"])]
        status, reply = await service.operate("DELETE", "/admin/tenants/acme/cache")
        assert (status, reply["complete"], reply["domain"], reply["tenants"]) == (200, True, "acme", ["acme"])
        assert reply["prefixes"] == [kept["id"]]
        assert sum(backend["tokens"] for backend in reply["backends"]) >= 1600
        assert (await service.call("GET", "/v1/prefixes"))[1]["data"] == []
        _, cached = await service.ask(QUESTION)
        assert cached == 0
        _, cached = await service.ask(f"{other} Why?")
        assert cached == 0
        _, cached = await labs.ask(QUESTION)
        assert cached > 1000


PAGE = (Path(__file__).parents[2] / "docs/prefixes.md").read_text()
ALONE = """
pools: {own: {kind: shard, at: ["127.0.0.1:1"], model: bundled}}
server: {http: "127.0.0.1:0", grpc: "127.0.0.1:0", admin: "127.0.0.1:0"}
"""


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="the page uses curl and jq")
async def test_what_the_page_shows_is_what_happens(tmp_path: Path) -> None:
    async with a_whole(2, sla=ALONE, options=OPTIONS) as whole:
        addresses = {"127.0.0.1:8080": whole.router.http, "127.0.0.1:8082": whole.router.admin}
        script = "set -eu\n" + "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
        for shown, real in addresses.items():
            script = script.replace(shown, str(real))
        shell = await asyncio.create_subprocess_exec("bash", "-c", script, cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
        output, _ = await shell.communicate()
        assert shell.returncode == 0
        kept, usage, _, state, deleted, cleared = several(output.decode())
        shown = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
        times = {"created": shown["created"], "expires_at": shown["expires_at"]}
        assert {**kept, "backends": len(kept["backends"]), **times} == {**shown, "backends": 2}
        assert usage["prompt_tokens_details"]["cached_tokens"] == kept["tokens"]
        assert (state, deleted["deleted"], cleared["complete"]) == ("ready", True, True)
        await whole.check_idle()


def several(text: str) -> list[Any]:
    """The JSON values in `text`, one after the other."""
    found, decoder = [], json.JSONDecoder()
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found
