"""A TabbyAPI server, built from its OpenAPI documentation and wiki as of 2026."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import serve


@dataclass(eq=False)
class TabbyServer(OpenAIServer):
    """TabbyAPI: OpenAI's API, /v1/model, /v1/token/encode and decode. The admin key loads whatever is asked for."""

    admin_key: str | None = None
    is_loaded: bool = True
    loads: int = 0
    loses: str = ""
    """Letters that its tokenizer does not get back."""

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            *super().routes(),
            web.get("/health", self.health),
            web.get("/v1/model", self.current),
            web.post("/v1/token/encode", self.encode),
            web.post("/v1/token/decode", self.decode),
        )

    async def health(self, request: web.Request) -> web.Response:
        status = "unhealthy" if self.is_ill else "healthy"
        return web.json_response({"status": status, "issues": []}, status=503 if self.is_ill else 200)

    async def current(self, request: web.Request) -> web.Response:
        refusal = self._refusal(request)
        return refusal or web.json_response(self.model_card())

    async def encode(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = [ord(letter) for letter in body["text"] if letter not in self.loses]
        tokens = [1, *tokens] if body.get("add_bos_token", True) else tokens
        return self._refusal(request) or web.json_response({"tokens": tokens, "length": len(tokens)})

    async def decode(self, request: web.Request) -> web.Response:
        body = await request.json()
        return self._refusal(request) or web.json_response({"text": "".join(map(chr, body["tokens"]))})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        wanted = (await request.json())["model"]
        if wanted != self.model:
            if self._key(request) != self.admin_key:
                return self.error(401, f"Unable to switch model to {wanted} because an admin key isn't provided")
            self.model, self.loads = wanted, self.loads + 1
        key, self.key = self.key, None
        try:
            return await super().complete(request)
        finally:
            self.key = key

    def model_card(self) -> dict[str, Any]:
        parameters = {"max_seq_len": self.context_tokens, "cache_size": 16384, "max_batch_size": 8}
        card = {"id": self.model, "object": "model", "created": 1, "owned_by": "tabbyAPI"}
        return {**card, "parameters": parameters}

    def error(self, status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
        if code is not None:
            return super().error(status, message, code, **headers)
        return web.json_response({"detail": message}, status=status, headers=headers)

    def refusal(self, body: Mapping[str, Any], prompt_tokens: int) -> web.Response | None:
        if not isinstance(body.get("prompt", ""), str):
            return self.error(422, "prompt: Input should be a valid string")
        return super().refusal(body, prompt_tokens)

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.key and self._key(request) not in {self.key, self.admin_key} - {None}:
            return self.error(401, "Invalid API key")
        return None if self.is_loaded else self.error(400, "No models are currently loaded.")

    def _key(self, request: web.Request) -> str | None:
        key = request.headers.get("x-api-key") or request.headers.get("authorization") or ""
        return key.removeprefix("Bearer ") or None


if __name__ == "__main__":
    serve(TabbyServer, 5000)
