"""A server that speaks OpenAI's API, built from the OpenAI API reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.standins.standin import StandIn, event, serve, tokens_in


@dataclass(eq=False)
class OpenAIServer(StandIn):
    """Chat and text completions, streamed and whole, embeddings and the list of models, in OpenAI's dialect.

    `arguments`: if a chat has tools and no results of them, the first is called with these, behind the text.
    """

    arguments: str | None = None

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            web.get("/v1/models", self.list_models),
            web.post("/v1/chat/completions", self.complete),
            web.post("/v1/completions", self.complete),
            web.post("/v1/embeddings", self.embed),
            web.post("/v1/rerank", self.rerank),
        )

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self.model_card()]})

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": 1,
            "owned_by": "nobody",
            "max_model_len": self.context_tokens,
        }

    def names(self) -> tuple[str, ...]:
        return (self.model,)

    def error(self, status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
        """A refusal as this server words it."""
        kinds = {429: "rate_limit_error", 401: "authentication_error"}
        kind = kinds.get(status, "invalid_request_error")
        error = {"message": message, "type": kind, "param": None, "code": code}
        return web.json_response({"error": error}, status=status, headers=headers)

    def too_long(self, tokens: int) -> web.Response:
        message = f"This model's maximum context length is {self.context_tokens} tokens, you asked for {tokens}."
        return self.error(400, message, "context_length_exceeded")

    def busy(self) -> web.Response:
        return self.error(429, "Too many requests", **{"Retry-After": "3"})

    def refusal(self, body: Mapping[str, Any], prompt_tokens: int) -> web.Response | None:
        """Why this request is not answered, if it is not."""
        if self.is_busy:
            return self.busy()
        if body["model"] not in self.names():
            return self.error(404, f"The model `{body['model']}` does not exist.", "model_not_found")
        if prompt_tokens + (_most(body) or 0) > self.context_tokens:
            return self.too_long(prompt_tokens + (_most(body) or 0))
        return None

    def lets_in(self, request: web.Request) -> bool:
        return request.headers.get("authorization") == f"Bearer {self.key}"

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        if self.key and not self.lets_in(request):
            return self.error(401, "Incorrect API key provided", "invalid_api_key")
        prompt_tokens = tokens_in(body["messages"] if "messages" in body else body["prompt"])
        refusal = self.refusal(body, prompt_tokens)
        if refusal is not None:
            return refusal
        with self.generating():
            if body.get("stream"):
                return await self._stream(request, body, prompt_tokens)
            text = "".join([piece async for piece in self.pieces(_most(body))])
            choice = self.choice(body, text, self._finish(body), is_whole=True)
            return web.json_response(self.chunk(body, [choice], self.usage(body, prompt_tokens, len(text))))

    async def embed(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        tokens = sum(map(tokens_in, texts))
        refusal = self.refusal(body, tokens)
        if refusal is not None:
            return refusal
        data = [{"object": "embedding", "index": at, "embedding": [float(at), 0.5]} for at in range(len(texts))]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return web.json_response({"object": "list", "data": data, "model": body["model"], "usage": usage})

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        tokens = sum(map(tokens_in, (body["query"], *body["documents"])))
        refusal = self.refusal(body, tokens)
        if refusal is not None:
            return refusal
        results = [{"index": at, "relevance_score": 1 / (1 + at)} for at in range(len(body["documents"]))]
        return web.json_response(
            {"id": "r", "model": body["model"], "usage": {"total_tokens": tokens}, "results": results}
        )

    async def _stream(self, request: web.Request, body: Mapping[str, Any], prompt_tokens: int) -> web.StreamResponse:
        reply, drawn = await self.begin(request), 0
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        beside = {"usage": None} if wants_usage else {}
        if "messages" in body:
            await self.write(reply, event(self.chunk(body, [self.choice(body, "", None)]) | beside))
        async for piece in self.pieces(_most(body)):
            drawn += 1
            await self.write(reply, event(self.chunk(body, [self.choice(body, piece, None)]) | beside))
        for piece in self.calls(body):
            await self.write(reply, event(self.chunk(body, [self._saying({"tool_calls": [piece]})]) | beside))
        last = self.choice(body, "", self._finish(body))
        await self.write(reply, event(self.chunk(body, [last]) | beside))
        if wants_usage:
            await self.write(reply, event(self.chunk(body, [], self.usage(body, prompt_tokens, drawn))))
        await self.write(reply, b"data: [DONE]\n\n")
        return reply

    def calls(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The pieces of the call of a tool, if one is called."""
        if self.arguments is None or not body.get("tools") or body["messages"][-1]["role"] == "tool":
            return
        name = body["tools"][0]["function"]["name"]
        yield {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
        for at in range(0, len(self.arguments), 5):
            yield {"index": 0, "function": {"arguments": self.arguments[at : at + 5]}}

    def _finish(self, body: Mapping[str, Any]) -> str:
        return "tool_calls" if any(self.calls(body)) else self.finish(_most(body))

    def _saying(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, body: Mapping[str, Any], text: str, finish: str | None, is_whole: bool = False) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": text}
        if "messages" in body:
            choice = {"message" if is_whole else "delta": {"role": "assistant", "content": text}}
        return {"index": 0, **choice, "logprobs": None, "finish_reason": finish}

    def chunk(
        self, body: Mapping[str, Any], choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        chat = "chat.completion.chunk" if body.get("stream") else "chat.completion"
        kind = chat if "messages" in body else "text_completion"
        chunk = {"id": "cmpl-1", "object": kind, "created": 1, "model": body["model"], "choices": choices}
        return chunk | ({"usage": usage} if usage else {})

    def usage(self, body: Mapping[str, Any], prompt_tokens: int, drawn: int) -> dict[str, Any]:
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": prompt_tokens + drawn,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _most(body: Mapping[str, Any]) -> int | None:
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    return None if most is None else int(most)


if __name__ == "__main__":
    serve(OpenAIServer, 8000)
