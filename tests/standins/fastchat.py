"""A FastChat worker, built from its base worker and model worker as of 0.2.36. As they do, it cuts what is too long."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.standins.standin import StandIn, serve, tokens_in

VICUNA = {
    "name": "vicuna_v1.1",
    "system_template": "{system_message}",
    "system_message": "A chat.",
    "roles": ["USER", "ASSISTANT"],
    "messages": [],
    "offset": 0,
    "sep_style": 2,
    "sep": " ",
    "sep2": "</s>",
    "stop_str": None,
    "stop_token_ids": None,
}


@dataclass(eq=False)
class FastChatWorker(StandIn):
    """A FastChat worker: /worker_generate_stream, /worker_get_status, /count_token, /model_details, ..."""

    conversation: Mapping[str, Any] = field(default_factory=lambda: VICUNA)
    error: tuple[int, str] | None = None
    is_controller: bool = False
    reports_finish: bool = True
    waiting: int = 0

    def routes(self) -> Iterable[web.RouteDef]:
        own = (
            web.post("/count_token", self.count),
            web.post("/model_details", self.details),
            web.post("/worker_get_conv_template", self.template),
        )
        common = (
            web.post("/worker_generate_stream", self.generate),
            web.post("/worker_get_status", self.status),
        )
        return common if self.is_controller else (*common, *own)

    async def status(self, request: web.Request) -> web.Response:
        if self.is_ill:
            return web.Response(status=500, text="Internal Server Error")
        there = self.open_requests + self.waiting
        return web.json_response({"model_names": [self.model], "speed": 1, "queue_length": there})

    async def details(self, request: web.Request) -> web.Response:
        return web.json_response({"context_length": self.context_tokens})

    async def template(self, request: web.Request) -> web.Response:
        return web.json_response({"conv": self.conversation})

    async def count(self, request: web.Request) -> web.Response:
        return web.json_response({"count": tokens_in(await self._prompt(request)), "error_code": 0})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        reply = await self.begin(request, "application/octet-stream")
        error = (42903, "**NETWORK ERROR DUE TO HIGH TRAFFIC.**") if self.is_busy else self.error
        if error:
            await self._frame(reply, {"text": error[1], "error_code": error[0]})
            return reply
        most = body["max_new_tokens"]
        prompt = min(tokens_in(await self._prompt(request)), self.context_tokens - most - 1)
        text = body["prompt"] if body.get("echo", True) else ""
        with self.generating():
            drawn = 0
            async for piece in self.pieces(most):
                drawn += 1
                if len(piece.encode()) > 1:
                    # the first token of a character that takes two
                    await self._frame(reply, self._frame_of(text + "\ufffd", prompt, drawn) | {"finish_reason": None})
                text += piece
                await self._frame(reply, self._frame_of(text, prompt, drawn) | {"finish_reason": None})
            reason = self.finish(most) if self.reports_finish else None
            await self._frame(reply, self._frame_of(text, prompt, drawn) | {"finish_reason": reason})
        return reply

    async def _prompt(self, request: web.Request) -> str:
        """The prompt without what the template put around it: its length is what tests know."""
        prompt = str((await request.json())["prompt"])
        return prompt.removeprefix("A chat. USER: ").removesuffix(" ASSISTANT:")

    async def _frame(self, reply: web.StreamResponse, frame: Mapping[str, Any]) -> None:
        await self.write(reply, json.dumps(frame).encode() + b"\0")

    def _frame_of(self, text: str, prompt: int, drawn: int) -> dict[str, Any]:
        usage = {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
        return {"text": text, "error_code": 0, "usage": usage, "logprobs": None}


if __name__ == "__main__":
    serve(FastChatWorker, 21002)
