"""Anthropic's messages API, built from its reference: streamed messages, tools, models, errors; version 2023-06-01."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.standins.standin import StandIn, serve, tokens_in


@dataclass(eq=False)
class AnthropicServer(StandIn):
    """Messages and the list of models.

    `thinks` comes before the text, signed. `arguments`: where there are tools and no results yet, the first is called.
    """

    thinks: str = ""
    arguments: str | None = None

    def routes(self) -> Iterable[web.RouteDef]:
        return (web.get("/v1/models", self.list_models), web.post("/v1/messages", self.answer))

    async def list_models(self, request: web.Request) -> web.Response:
        if self.is_ill:
            return self.error(500, "api_error", "Internal server error")
        models = [{"type": "model", "id": self.model, "display_name": "M", "created_at": "2026-01-01T00:00:00Z"}]
        return web.json_response({"data": models, "has_more": False, "first_id": self.model, "last_id": self.model})

    def error(self, status: int, kind: str, message: str, **headers: str) -> web.Response:
        body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
        return web.json_response(body, status=status, headers=headers)

    def refusal(self, request: web.Request, body: Mapping[str, Any], tokens: int) -> web.Response | None:
        if self.key and request.headers.get("x-api-key") != self.key:
            return self.error(401, "authentication_error", "invalid x-api-key")
        if request.headers.get("anthropic-version") not in ("2023-06-01", "2026-10-21"):
            return self.error(400, "invalid_request_error", "anthropic-version: header is required")
        if self.is_busy:
            return self.error(529, "overloaded_error", "Overloaded", **{"Retry-After": "3"})
        if body["model"] != self.model:
            return self.error(404, "not_found_error", f"model: {body['model']}")
        if "max_tokens" not in body:
            return self.error(400, "invalid_request_error", "max_tokens: Field required")
        if tokens > self.context_tokens:
            message = f"prompt is too long: {tokens} tokens > {self.context_tokens} maximum"
            return self.error(400, "invalid_request_error", message)
        return None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        tokens = prompt_tokens(body)
        refusal = self.refusal(request, body, tokens)
        if refusal is not None:
            return refusal
        with self.generating():
            if body.get("stream"):
                return await self._stream(request, body, tokens)
            text = "".join([piece async for piece in self.pieces(int(body["max_tokens"]))])
            return web.json_response(self._whole(body, text, tokens))

    def _whole(self, body: Mapping[str, Any], text: str, tokens: int) -> dict[str, Any]:
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"]}
        reason = {"stop": "end_turn", "length": "max_tokens"}[self.finish(int(body["max_tokens"]))]
        usage = {"input_tokens": tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        content = [{"type": "text", "text": text}]
        ending = {"stop_reason": reason, "stop_sequence": None, "usage": usage | {"output_tokens": len(text)}}
        return {**message, "content": content, **ending}

    async def _stream(self, request: web.Request, body: Mapping[str, Any], tokens: int) -> web.StreamResponse:
        reply, most = await self.begin(request), int(body["max_tokens"])

        async def say(kind: str, **fields: Any) -> None:
            data = json.dumps({"type": kind, **fields}, ensure_ascii=False)
            await self.write(reply, f"event: {kind}\ndata: {data}\n\n".encode())

        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": self.cached_tokens}
        usage = {"input_tokens": tokens - self.cached_tokens, **cached, "output_tokens": 1}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": self.model, "content": []}
        await say("message_start", message={**message, "stop_reason": None, "stop_sequence": None, "usage": usage})
        at = 0
        if self.thinks:
            await say(
                "content_block_start", index=0, content_block={"type": "thinking", "thinking": "", "signature": ""}
            )
            await say("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": self.thinks})
            await say("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "c2ln"})
            await say("content_block_stop", index=0)
            at = 1
        await say("content_block_start", index=at, content_block={"type": "text", "text": ""})
        await say("ping")
        drawn = 0
        async for piece in self.pieces(most):
            drawn += 1
            await say("content_block_delta", index=at, delta={"type": "text_delta", "text": piece})
        await say("content_block_stop", index=at)
        reason = {"stop": "end_turn", "length": "max_tokens"}[self.finish(most)]
        if self.arguments is not None and body.get("tools") and not _has_results(body["messages"]):
            reason, at = "tool_use", at + 1
            block = {"type": "tool_use", "id": "toolu_1", "name": body["tools"][0]["name"], "input": {}}
            await say("content_block_start", index=at, content_block=block)
            for cut in range(0, len(self.arguments), 5):
                delta = {"type": "input_json_delta", "partial_json": self.arguments[cut : cut + 5]}
                await say("content_block_delta", index=at, delta=delta)
            await say("content_block_stop", index=at)
        ending = {"stop_reason": reason, "stop_sequence": None}
        await say("message_delta", delta=ending, usage={"output_tokens": drawn})
        await say("message_stop")
        return reply


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """A byte of text is a token, in every role."""
    texts = [block for turn in body["messages"] for block in _blocks(turn["content"])]
    return tokens_in([block for block in texts if block["type"] == "text"])


def _blocks(content: Any) -> Sequence[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _has_results(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(block["type"] == "tool_result" for block in _blocks(messages[-1]["content"]))


if __name__ == "__main__":
    serve(AnthropicServer, 8000)
