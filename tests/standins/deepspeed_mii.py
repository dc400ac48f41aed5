"""DeepSpeed-MII's OpenAI server, built from its openai_api_server.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import serve


@dataclass(eq=False)
class MIIServer(OpenAIServer):
    """No usage in streams, every refusal a flat 400, and no embeddings."""

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            web.get("/health", self.health),
            web.get("/v1/models", self.list_models),
            web.post("/v1/chat/completions", self.complete),
            web.post("/v1/completions", self.complete),
        )

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"}, status=503 if self.is_ill else 200)

    def model_card(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "root": self.model, "permission": []}

    def error(self, status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
        if status == 401:
            inner = {"message": "", "type": "invalid_request_error", "param": None, "code": code}
            return web.json_response({"detail": {"error": inner}}, status=401)
        return web.json_response({"object": "error", "message": message, "code": 40301}, status=400)

    def refusal(self, body: Mapping[str, Any], prompt_tokens: int) -> web.Response | None:
        if body["model"] != self.model:
            return self.error(400, f'Model "{body["model"]}" not found. Please use "{self.model}".')
        return None


if __name__ == "__main__":
    serve(MIIServer, 8000)
