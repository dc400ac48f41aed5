"""A router in front of real engines, and a client of it."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from policies.sla.parse import parse
from router.start.app import Router
from shards.bundled import NAME
from shards.bundled.documents import Document, document, facts_within
from tests.engines.programs import VLLM
from tests.shards.attached import eventually

KEY = "engines-key"
SLA = """
classes: {{chat: {{}}}}
tenants: {{acme: {{keys: ["{key}"]}}}}
pools:
  engines: {pool}
rules: [{{class: chat}}]
server: {{http: "127.0.0.1:0", grpc: off}}
"""


@dataclass(frozen=True)
class Answer:
    """The received part of an answer."""

    text: str
    usage: Mapping[str, Any]
    backend: str
    pieces: int = 1

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the engine had in its cache."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


@dataclass(frozen=True)
class Client:
    """A client of a router, or of an engine itself."""

    http: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        async with self.http.post(self.url + path, json=body, headers={"authorization": f"Bearer {KEY}"}) as reply:
            return reply.status, await reply.json()

    async def chat(self, messages: str | Sequence[Mapping[str, Any]], *, stream: bool = False, **more: Any) -> Answer:
        """Ask greedily, whole or streamed; `messages` may be one user's text."""
        chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        body: dict[str, Any] = {"model": NAME, "messages": chat, "max_tokens": 48, "temperature": 0, **more}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"authorization": f"Bearer {KEY}"}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as reply:
            backend = reply.headers.get("x-pointsman-backend", "")
            if not stream:
                content = await reply.json()
                assert reply.status == 200, content
                return Answer(content["choices"][0]["message"]["content"], content["usage"], backend)
            assert reply.status == 200, await reply.text()
            lines = [line async for line in reply.content if line.startswith(b"data: ")]
        assert lines[-1].strip() == b"data: [DONE]"
        events = [json.loads(line[6:]) for line in lines[:-1]]
        pieces = [piece for event in events for choice in event["choices"] if (piece := choice["delta"].get("content"))]
        (usage,) = [event["usage"] for event in events if event.get("usage")]
        return Answer("".join(pieces), usage, backend, len(pieces))


@asynccontextmanager
async def a_router(pool: Mapping[str, Any], sla: str = SLA) -> AsyncIterator[tuple[Client, Router]]:
    """A router with the one pool `pool`, all its backends in use, and a client of it."""
    key = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
    config = parse(sla.format(key=key, pool=json.dumps(pool)))
    async with Router(config) as router, aiohttp.ClientSession() as http:
        # a router is ready when one backend of a pool is; a vLLM that has just started answers its first probe slowly
        cluster = router.gateway.cluster
        await eventually(lambda: not any(map(cluster.trouble, cluster.names())), within_s=60)
        yield Client(http, router.http_url), router


def pool_of(*engines: VLLM, **options: Any) -> dict[str, Any]:
    """A pool of vLLM; with feeds where the engines publish events."""
    pool: dict[str, Any] = {"kind": "vllm", "at": [each.url for each in engines], "model": NAME}
    if all(each.events for each in engines):
        options = {"events": [each.events for each in engines], "replay": [each.replay for each in engines]} | options
    return {**pool, "options": options} if options else pool


def a_document(seed: int, tokens: int = 700) -> Document:
    """About so many tokens of facts."""
    return document(random.Random(seed), facts_within(tokens))
