"""Azure OpenAI's data plane, built from Microsoft's REST API reference (2024-10-21)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web

from tests.standins.openai import OpenAIAPI
from tests.standins.standin import serve


@dataclass(eq=False)
class AzureServer(OpenAIAPI):
    """Deployments of OpenAI's models; `model` is the only one's name."""

    api_version: str = "2024-10-21"

    def routes(self) -> Iterable[web.RouteDef]:
        deployment = "/openai/deployments/{deployment}"
        return (
            web.get("/openai/models", self.list_base_models),
            web.post(f"{deployment}/chat/completions", self.complete_deployed),
            web.post(f"{deployment}/completions", self.complete_deployed),
            web.post(f"{deployment}/embeddings", self.embed),
        )

    def lets_in(self, request: web.Request) -> bool:
        return request.headers.get("api-key") == self.key

    async def list_base_models(self, request: web.Request) -> web.Response:
        if request.query.get("api-version") != self.api_version or (self.key and not self.lets_in(request)):
            return self.error(401, "Access denied due to invalid subscription key or wrong API endpoint.")
        return web.json_response({"object": "list", "data": [{"id": "gpt-of-the-catalogue"}]})

    async def complete_deployed(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("api-version") != self.api_version:
            return self.error(404, "Resource not found", "404")
        if request.match_info["deployment"] != self.model:
            return self.error(404, "The API deployment for this resource does not exist.", "DeploymentNotFound")
        return await self.complete(request)


if __name__ == "__main__":
    serve(AzureServer, 8000)
