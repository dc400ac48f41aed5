"""An LMDeploy api_server, built from its documentation and its routes as of 0.16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.standins.native_generate import logprobs, steps
from tests.standins.openai_compatible import OpenAIServer
from tests.standins.standin import event, serve


@dataclass(eq=False)
class LMDeployServer(OpenAIServer):
    """LMDeploy: OpenAI's API for text, /generate for token ids, metrics."""

    waiting: int = 0
    usage_share: float = 0.5

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            *super().routes(),
            web.post("/generate", self.generate),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
        )

    async def health(self, request: web.Request) -> web.Response:
        state = "unhealthy" if self.is_ill else "healthy"
        return web.json_response({"status": state, "message": ""}, status=503 if self.is_ill else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        labels = f'{{engine="0",model_name="{self.model}"}}'
        return web.Response(
            text=f"""# TYPE lmdeploy:num_api_requests_waiting gauge
lmdeploy:num_api_requests_waiting{labels} 0.0
lmdeploy:num_requests_running{labels} {float(self.open_requests)}
lmdeploy:num_requests_waiting{labels} {float(self.waiting)}
lmdeploy:gpu_cache_usage_perc{labels} {self.usage_share}
lmdeploy:iteration_tokens_total_bucket{{engine="0",le="1.0",model_name="{self.model}"}} 5.0
"""
        )

    def model_card(self) -> dict[str, Any]:
        card = super().model_card() | {"owned_by": "lmdeploy"}
        del card["max_model_len"]
        return card

    def error(self, status: int, message: str, code: str | None = None, **headers: str) -> web.Response:
        return web.json_response(self._error(status, message), status=status, headers=headers)

    def _error(self, status: int, message: str) -> dict[str, Any]:
        kind = {404: "not_found_error", 503: "server_error"}.get(status, "invalid_request_error")
        return {"message": message, "type": kind, "code": status, "param": None, "object": "error"}

    def busy(self) -> web.Response:
        return self.error(503, "The inference engine is unavailable.")

    def too_long(self, tokens: int) -> web.Response:
        return self.error(400, self._too_long(tokens))

    def _too_long(self, tokens: int) -> str:
        return f"Input length ({tokens}) must be smaller than the model context length ({self.context_tokens})."

    def refusal(self, body: Mapping[str, Any], prompt_tokens: int) -> web.Response | None:
        if isinstance(body.get("prompt"), list):
            return self.error(400, "a prompt is text")
        if "session_id" in body:
            return self.error(400, f"The session_id {body['session_id']} is occupied.")
        return super().refusal(body, prompt_tokens)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.seen(request)
        prompt, sent = len(body["input_ids"]), 0
        if prompt > self.context_tokens:
            return self.too_long(prompt)
        with self.generating():
            reply = await self.begin(request)
            async for step in steps(self, body["max_tokens"]):
                drawn = step.ids[sent:]
                meta = {
                    "prompt_tokens": prompt,
                    "completion_tokens": len(step.ids),
                    "finish_reason": {"type": step.finish} if step.finish else None,
                    # pairs without text
                    "output_token_logprobs": [logprob[:2] for logprob in logprobs(drawn)]
                    if body.get("return_logprob")
                    else None,
                }
                await self.write(reply, event({"text": step.text[sent:], "output_ids": drawn, "meta_info": meta}))
                sent = len(step.ids)
            await self.write(reply, b"data: [DONE]\n\n")
        return reply


if __name__ == "__main__":
    serve(LMDeployServer, 23333)
