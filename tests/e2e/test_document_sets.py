"""Documents that were uploaded are in the cache before the first question, and after a restart of their shard."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp

from shards.bundled.documents import document, facts_within
from shards.engine import Engine, EngineOptions
from shards.server import ServerOptions, ShardServer
from tests.e2e.cluster import KEYS, MODEL, Whole, a_whole, bundled_model

ABOUT = [document(random.Random(number), facts_within(500)) for number in range(3)]
DOCUMENTS = [{"id": f"d{number}", "text": about.text} for number, about in enumerate(ABOUT)]
PATH = "/v1/document_sets/papers"


class Service:
    """A RAG service of one tenant."""

    def __init__(self, whole: Whole, http: aiohttp.ClientSession) -> None:
        self._url, self._http = whole.router.http_url, http
        self.headers: list[dict[str, str]] = []

    async def call(self, method: str, path: str, body: Any = None, *, tenant: str = "acme") -> Any:
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        async with self._http.request(method, f"{self._url}{path}", json=body, headers=headers) as reply:
            content = await reply.json()
            assert reply.status == 200, content
            self.headers.append(dict(reply.headers))
            return content

    async def are_ready(self) -> Any:
        async with asyncio.timeout(30):
            while (found := await self.call("GET", PATH))["progress"] != {"ready": len(DOCUMENTS)}:  # noqa: ASYNC110
                # the other side of a socket announces nothing
                await asyncio.sleep(0.02)
        return found

    async def ask(self, *ids: str, tenant: str = "acme", **fields: Any) -> tuple[str, int, int]:
        """The answer, the tokens of the prompt, and those of it that were cached."""
        documents = [{"id": name} for name in ids]
        question = {"role": "user", "content": f"Question: {ABOUT[1].questions[0].question}"}
        body = {"model": MODEL, "messages": [question], "documents": documents, "document_set": "papers"}
        found = await self.call(
            "POST", "/v1/chat/completions", {**body, "max_tokens": 24, "temperature": 0, **fields}, tenant=tenant
        )
        usage = found["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return found["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


async def test_the_first_question_finds_its_documents_in_the_cache() -> None:
    async with a_whole(2, options=EngineOptions(kv_blocks=256)) as whole, aiohttp.ClientSession() as http:
        service = Service(whole, http)
        await service.call("PUT", PATH, {"documents": DOCUMENTS, "model": MODEL, "shards": 2})
        await service.are_ready()
        answer, tokens, cached = await service.ask("d1")
        assert ABOUT[1].questions[0].answer in answer
        assert tokens - cached < 128
        # of several, the first is cached, and with a free order all that was computed in any order
        _, tokens, cached = await service.ask("d2", "d1", document_order="any")
        assert 300 < cached < tokens - 300
        found = await service.call("GET", PATH)
        uses = {each["id"]: each["usage"] for each in found["documents"]}
        assert [uses[name]["requests"] for name in ("d0", "d1", "d2")] == [0, 2, 1]
        assert found["unused"] == 1
        assert uses["d1"]["cached_tokens"] > 300
        assert uses["d1"]["saved_seconds"] > 0
        await whole.check_idle()


async def test_pinned_documents_outlive_a_restart_of_their_shard_on_disk(tmp_path: Path) -> None:
    options = EngineOptions(kv_blocks=256, kv_dir=tmp_path / "kv", kv_dir_bytes=2**30)
    async with a_whole(1, options=options) as whole, aiohttp.ClientSession() as http:
        service = Service(whole, http)
        await service.call("PUT", PATH, {"documents": DOCUMENTS, "model": MODEL})
        await service.are_ready()
        (shard,) = whole.shards
        await shard.drain()
        await shard.close()
        # as a shard's process does when it stops
        assert shard.loop._engine.preserve(5.0) >= 18  # type: ignore[attr-defined]
        shard.loop._engine.close()  # type: ignore[attr-defined]
        again = ShardServer(Engine(bundled_model(), options), shard.address, ServerOptions(shard="own-0"))
        await again.start()
        whole.shards[:] = [again]
        try:
            async with asyncio.timeout(30):
                while not whole.router.gateway.is_ready():
                    await whole.router.gateway.cluster.health_changed()
            # their blocks are on disk, and are read where that is faster than computing them
            assert again.loop._engine._pool.disk.use.held >= 18  # type: ignore[attr-defined]
            await whole.router.gateway.prefixes.turn()
            await service.are_ready()
            answer, tokens, cached = await service.ask("d1")
            assert tokens - cached < 128
            assert ABOUT[1].questions[0].answer in answer
        finally:
            await again.close()
            again.loop._engine.close()  # type: ignore[attr-defined]


async def test_another_tenant_with_the_same_documents_sees_nothing_of_them() -> None:
    async with a_whole(2, options=EngineOptions(kv_blocks=256)) as whole, aiohttp.ClientSession() as http:
        service = Service(whole, http)
        await service.call("PUT", PATH, {"documents": DOCUMENTS, "model": MODEL, "shards": 2})
        await service.are_ready()
        await service.ask("d1", "d2", document_order="any")
        await service.call("PUT", PATH, {"documents": DOCUMENTS}, tenant="labs")
        first = await service.ask("d2", "d1", tenant="labs", document_order="any")
        assert first[2] == 0
        shared = service.headers[-1]
        # documents that no tenant has asked about
        await service.ask("d0", tenant="labs", document_order="any")
        assert shared.keys() == service.headers[-1].keys()
        found = await service.call("GET", PATH, tenant="labs")
        assert [each["usage"]["cached_tokens"] for each in found["documents"]] == [0, 0, 0]
        await whole.check_idle()
