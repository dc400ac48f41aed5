"""MLC LLM's server, built from its openai_entrypoints.py and openai_api_protocol.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import serve


@dataclass(eq=False)
class MLCServer(OpenAIServer):
    """`mlc_llm serve`: errors are JSON text inside of JSON."""

    def model_card(self) -> dict[str, Any]:
        return {"id": self.model, "created": 1, "object": "model", "owned_by": "MLC-LLM"}

    def error(self, status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
        inner = json.dumps({"object": "error", "message": message, "code": status})
        return web.json_response(inner, status=status, headers=headers)

    def refusal(self, body: Mapping[str, Any], prompt_tokens: int) -> web.Response | None:
        if body["model"] != self.model:
            return self.error(400, f'The requested model "{body["model"]}" is not served.')
        if prompt_tokens > self.context_tokens:
            limit = f"larger than the model input length limit {self.context_tokens}."
            return self.error(400, f"Request prompt has {prompt_tokens} tokens in total, {limit}")
        if any(message.get("tool_calls") for message in body.get("messages", ())):
            return self.error(400, "Assistant message having `tool_calls` is not supported yet.")
        return None


if __name__ == "__main__":
    serve(MLCServer, 8000)
