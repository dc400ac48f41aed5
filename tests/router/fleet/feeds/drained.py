"""A server that tells its cache events once, as trtllm-serve does: POST /kv_cache_events drains."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from tests.golden.event_encoders import Change, tensorrt_llm


@dataclass
class Drained:
    """Events that wait to be drained; `drains` counts the calls that took them. `status` is what it answers with."""

    url: str = ""
    waiting: bytes = b"[]"
    next_id: int = 0
    drains: int = 0
    status: int = 200

    def tell(self, events: Sequence[Change], **fields: int) -> None:
        assert self.waiting == b"[]", "the last events were not drained yet"
        self.waiting = tensorrt_llm(events, first_id=self.next_id, **fields)
        self.next_id += len(events)

    async def answer(self, _: web.Request) -> web.Response:
        self.drains += 1
        body, self.waiting = self.waiting, b"[]"
        return web.Response(body=body, status=self.status, content_type="application/json")


@asynccontextmanager
async def a_server(port: int = 0) -> AsyncIterator[Drained]:
    drained = Drained()
    app = web.Application()
    app.router.add_post("/kv_cache_events", drained.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    drained.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield drained
    finally:
        await runner.cleanup()
