"""An SGLang server, built from its documentation (SGLang Native APIs, PD Disaggregation) as of 0.5."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.standins.native_generate import logprobs, steps
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import event, serve


@dataclass(eq=False)
class Room:
    """Where the prefill of one prompt and its answer meet."""

    awaited: asyncio.Event = field(default_factory=asyncio.Event)
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    has_failed: bool = False


@dataclass(eq=False)
class SGLangServer(OpenAIServer):
    """SGLang: OpenAI's API, /generate, /abort_request, /v1/loads or, before 0.5.8, /get_load.

    In `mode` "prefill" it hands the KV of each prompt over in its room to the server of `mode` "decode" that shares its
    `rooms`. `prefill_s` is the time of a prompt; it `breaks` instead of computing one.
    """

    mode: str = "null"
    bootstrap_port: int = 8998
    rooms: dict[int, Room] = field(default_factory=dict)
    prefill_s: float = 0.0
    breaks: bool = False

    is_incremental: bool = False
    has_loads: bool = True
    ranks: int = 1
    waiting: int = 0
    aborted: list[str] = field(default_factory=list)
    running: dict[str, asyncio.Task[Any]] = field(default_factory=dict)

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            *super().routes(),
            web.post("/generate", self.generate),
            web.post("/abort_request", self.abort),
            web.get("/health", self.health),
            web.get("/server_info", self.server_info),
            web.get("/v1/loads", self.loads),
            web.get("/get_load", self.load),
        )

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_ill else 200)

    async def server_info(self, request: web.Request) -> web.Response:
        parts = {"disaggregation_mode": self.mode, "disaggregation_bootstrap_port": self.bootstrap_port}
        settings = {"model_path": self.model, "incremental_streaming_output": self.is_incremental, **parts}
        return web.json_response(settings)

    async def loads(self, request: web.Request) -> web.Response:
        if not self.has_loads:
            return web.json_response({"detail": "Not Found"}, status=404)
        load = {
            "num_running_reqs": self.open_requests,
            "num_waiting_reqs": self.waiting,
            "num_used_tokens": 1000,
            "num_total_tokens": 1000 + 100 * self.waiting,
            "max_total_num_tokens": 16000,
            "token_usage": 0.0625,
            "max_running_requests": 48,
        }
        loads = [{"dp_rank": rank, **load} for rank in range(self.ranks)]
        return web.json_response({"timestamp": "2026-01-01T00:00:00+00:00", "version": "0.5.8", "loads": loads})

    async def load(self, request: web.Request) -> web.Response:
        requests = self.open_requests + self.waiting
        load = {"num_reqs": requests, "num_waiting_reqs": self.waiting, "num_tokens": 1000}
        return web.json_response([{"dp_rank": rank, **load} for rank in range(self.ranks)])

    async def abort(self, request: web.Request) -> web.Response:
        """Stop all requests with an id that begins with `rid`."""
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        for name, task in self.running.items():
            if name.startswith(rid):
                task.cancel()
        return web.Response()

    def error(self, status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
        error = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": status}
        return web.json_response(error, status=status, headers=headers)

    def busy(self) -> web.Response:
        return self.error(503, "The request queue is full.")

    def too_long(self, tokens: int) -> web.Response:
        return self.error(400, self._too_long(tokens))

    def _too_long(self, tokens: int) -> str:
        return f"The input ({tokens} tokens) is longer than the model's context length ({self.context_tokens} tokens)."

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        with self._known(body):
            refusal = await self._meet(body)
            return await super().complete(request) if refusal is None else refusal

    async def pieces(self, most: int | None) -> AsyncIterator[str]:
        async for piece in super().pieces(1 if self.mode == "prefill" else most):
            yield piece

    async def _meet(self, body: Mapping[str, Any]) -> web.Response | None:
        """Hand the KV of a prompt over, or await it; why that is not done."""
        if self.mode == "null":
            return None
        number = body.get("bootstrap_room")
        if number is None:
            return self.error(400, "Invalid request: Disaggregated request received without bootstrap room id")
        room = self.rooms.setdefault(number, Room())
        if self.mode == "prefill":
            await asyncio.sleep(self.prefill_s)
            room.has_failed = self.breaks
            room.computed.set()
            if self.breaks:
                return self.error(500, "Internal server error")
            await room.awaited.wait()
            return None
        room.awaited.set()
        await room.computed.wait()
        return self.error(500, "KVTransferError: Prefill instance failed") if room.has_failed else None

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        refusal = await self._meet(body)
        if refusal is not None:
            return refusal
        reply = await self.begin(request)
        with self.generating(), self._known(body):
            await self._answer(reply, body)
            await self.write(reply, b"data: [DONE]\n\n")
        return reply

    async def _answer(self, reply: web.StreamResponse, body: Mapping[str, Any]) -> None:
        params, prompt = body["sampling_params"], len(body["input_ids"])
        if params.get("n", 1) > 1 and "rid" in body:
            return await self.write(reply, event({"error": {"message": "The rid should be a list"}}))
        if self.is_busy:
            gone = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
            meta = {"id": body.get("rid"), "finish_reason": gone, "prompt_tokens": prompt, "completion_tokens": 0}
            return await self.write(reply, event({"text": "", "output_ids": [], "meta_info": meta}))
        if prompt > self.context_tokens:
            # the status line is out already when SGLang looks at the request
            return await self.write(reply, event({"error": {"message": self._too_long(prompt)}}))
        sent = 0
        async for step in steps(self, params["max_new_tokens"]):
            for index in range(params.get("n", 1)):
                await self.write(reply, event(self._event(body, step.text, step.ids, step.finish, index, sent)))
            sent = len(step.ids)
        return None

    def _event(
        self, body: Mapping[str, Any], text: str, ids: list[int], finish: str | None, index: int, sent: int
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": body.get("rid"),
            "finish_reason": {"type": finish} if finish else None,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": self.cached_tokens,
            "weight_version": "default",
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = logprobs(ids)
            meta["output_top_logprobs"] = [[[-0.5, token, chr(token)]] for token in ids]
        if self.is_incremental:
            text, ids = text[sent:], ids[sent:]
        return {"text": text, "output_ids": ids, "meta_info": meta, "index": index}

    def _known(self, body: Mapping[str, Any]) -> _Known:
        return _Known(self.running, body.get("rid"))


class _Known:
    """A generation that can be aborted by its id while the body runs."""

    def __init__(self, running: dict[str, asyncio.Task[Any]], rid: str | None) -> None:
        self._running, self._rid = running, rid

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if self._rid and task:
            assert self._rid not in self._running, "duplicate request id"
            self._running[self._rid] = task

    def __exit__(self, *_: object) -> None:
        self._running.pop(self._rid or "", None)


if __name__ == "__main__":
    serve(SGLangServer, 30000)
