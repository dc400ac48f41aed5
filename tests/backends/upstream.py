"""A server on loopback that speaks OpenAI's wire format from a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

DONE = b"data: [DONE]\n\n"


def event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def a_chunk(text: str | None = None, finish_reason: str | None = None, index: int = 0, **delta: Any) -> bytes:
    if text is not None:
        delta["content"] = text
    return event(
        {
            "object": "chat.completion.chunk",
            "choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}],
        }
    )


def used(prompt: int, completion: int, cached: int = 0) -> bytes:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return event({"object": "chat.completion.chunk", "choices": [], "usage": usage})


@dataclass
class Upstream:
    """Its next answers, and its requests.

    `pieces` are written one by one; None among them waits until the client is gone, an event until it is set. A `body`
    is answered whole, with `status`; `whole` only if it is not to be streamed. `is_mute`: not even a status line comes.
    """

    pieces: Sequence[bytes | asyncio.Event | None] = (a_chunk("Hello"), a_chunk(None, "stop"), used(5, 1), DONE)
    status: int = 200
    body: bytes | None = None
    whole: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    models: object = field(default_factory=lambda: {"object": "list", "data": [{"id": "m", "max_model_len": 4096}]})
    models_status: int = 200
    received: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    open_requests: int = 0
    is_mute: bool = False
    url: str = ""
    connections: Callable[[], int] = lambda: 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        lowered = {name.lower(): value for name, value in request.headers.items()}
        self.received.append((request.path, await request.json(), lowered))
        if self.whole is not None and not self.received[-1][1].get("stream"):
            return web.Response(body=self.whole, content_type="application/json")
        if self.body is not None:
            return web.Response(status=self.status, body=self.body, headers=self.headers)
        self.open_requests += 1
        try:
            if self.is_mute:
                await asyncio.Event().wait()
            return await self._stream(request)
        finally:
            self.open_requests -= 1

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models, status=self.models_status)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for piece in self.pieces:
            if piece is None or isinstance(piece, asyncio.Event):
                await (piece or asyncio.Event()).wait()
            else:
                await reply.write(piece)
        return reply


@asynccontextmanager
async def an_upstream(**script: Any) -> AsyncIterator[Upstream]:
    upstream, app = Upstream(**script), web.Application()
    app.router.add_post("/v1/chat/completions", upstream.answer)
    app.router.add_post("/v1/completions", upstream.answer)
    app.router.add_get("/v1/models", upstream.list_models)
    server = TestServer(app, handler_cancellation=True)
    await server.start_server()
    upstream.connections = lambda: len(server.handler.connections) if server.handler else 0
    upstream.url = str(server.make_url("")).rstrip("/")
    try:
        yield upstream
    finally:
        await server.close()
